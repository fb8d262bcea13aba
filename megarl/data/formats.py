"""What a row of the data is, by what the run does. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megarl.config import Config

Format = Literal["prompts", "demonstrations", "preferences", "judged"]

OF_FLOWS: Mapping[str, Format] = {
    "sft": "demonstrations",
    "preference": "preferences",
    "reward_model": "preferences",
    "kto": "judged",
}
"""What the flows read that learn from answers which the data holds. Every other flow reads prompts."""

SEQUENCES: Mapping[Format, int] = {"demonstrations": 1, "preferences": 2, "judged": 1}
"""Sequences of a row that comes with its answers."""

EVAL = "eval"
"""The flow that trains nothing: it answers held-out prompts."""


def trains(config: Config) -> bool:
    """Whether the run trains anything."""
    return config.trainer.flow != EVAL


def format_of(config: Config) -> Format:
    """`data.format`, or what `trainer.flow` reads."""
    chosen = config.data.format
    return OF_FLOWS.get(config.trainer.flow, "prompts") if chosen == "auto" else chosen


def check_format(config: Config) -> None:
    """Raises ValueError if `data.format` is not what the flow reads; a user's flow may read anything."""
    flow, chosen = config.trainer.flow, config.data.format
    read = "prompts" if flow in ("ppo", EVAL) else OF_FLOWS.get(flow)
    if read is not None and chosen not in ("auto", read):
        raise ValueError(f"data.format = {chosen}: trainer.flow = {flow} reads {read}; leave the key out")


def generates(config: Config) -> bool:
    """Whether responses are generated and scored: rows that are no prompts come with their answers."""
    return format_of(config) == "prompts"
