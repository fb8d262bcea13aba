"""Reads OpenRLHF's settings from the words of a command that starts one of its trainers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarl.migration.openrlhf_names import TRAINER, canonical
from megarl.migration.values import end_of_command, options_of

NAME = "OpenRLHF"
_MODULE = re.compile(r"(?:^|[./])train_([a-z]+)(?:_ray)?(?:\.py)?$")
_OTHER = re.compile(r"(?:^|[./])(batch_inference|serve_rm|interactive_chat|lora_combiner)(?:\.py)?$")


def is_command(words: Sequence[str]) -> bool:
    """Say whether the words start one of OpenRLHF's trainers, or are its options."""
    return _start(words) is not None or (bool(words) and words[0].startswith("--"))


def of_command(words: Sequence[str]) -> dict[str, Any]:
    """Read `[deepspeed --module] openrlhf.cli.train_sft --name value ...`, but no account's key."""
    start = _start(words)
    values: dict[str, Any] = {}
    if start is not None:
        values[TRAINER] = _MODULE.search(words[start])[1]  # type: ignore[index]
        launch_options = options_of(words[:start])
        ranks = launch_options.get("nproc_per_node", launch_options.get("num_gpus"))
        values |= {} if ranks is None else {"num_gpus": ranks}
    end = end_of_command(words, start or 0)
    options = options_of(words[0 if start is None else start + 1 : end])
    return values | {name: True if canonical(name) == "logger.wandb.key" else value for name, value in options.items()}


def other(words: Sequence[str]) -> str:
    """Name the OpenRLHF program that the words start, if it trains nothing; else empty."""
    return next((match[1] for word in words if (match := _OTHER.search(word))), "")


def _start(words: Sequence[str]) -> int | None:
    return next((i for i, word in enumerate(words) if _MODULE.search(word) and not word.startswith("-")), None)
