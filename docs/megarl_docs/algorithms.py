"""What an algorithm declares of itself: source, keys, needs, and its code; the methods that are several of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from megarl.algorithms.bradley_terry import BradleyTerry
from megarl.algorithms.declaration import about_of
from megarl.algorithms.kto import kto
from megarl.algorithms.methods import METHODS
from megarl.cli.algorithms import REGISTRIES, first_line
from megarl_docs.keys import anchor
from megarl_docs.tables import code, plain, table

ROOT = Path(__file__).parents[2]
OF_FLOWS = {"kto": kto, "reward_model": BradleyTerry}
"""Losses that a flow has by itself: the value of `trainer.flow` -> the loss."""

FOLDERS = {
    "algorithm.adv_estimator": "estimators",
    "actor.policy_loss.loss_mode": "losses",
    "algorithm.preference.loss_mode": "preferences",
    "trainer.flow": "flows",
}
"""Configuration key -> the folder of docs/algorithms with a page for each of its values."""

PAGES = {
    "ppo": "../concepts/step.md",
    "dapo": "corrections.md#dapo",
    "distillation": "estimators/on_policy_distillation.md",
    "tis": "corrections.md#rollout-correction",
    "warmup": "../howto/offline.md#warmup",
    "sft": "../howto/offline.md",
    "preference": "../howto/offline.md",
    "kto": "flows/kto.md",
    "reward_model": "flows/reward_model.md",
    "eval": "../howto/evaluation.md",
}
"""Method -> where docs/algorithms/index.md sends its readers."""


def known() -> list[tuple[str, str]]:
    """(key, value) of every algorithm."""
    named = [(key, name) for key, registry in REGISTRIES.items() for name in registry.names()]
    return [*named, *(("trainer.flow", name) for name in OF_FLOWS)]


def load(key: str, name: str) -> Any:
    """The function or class."""
    return OF_FLOWS[name] if key == "trainer.flow" else REGISTRIES[key].load(name)


def declared(key: str, name: str) -> str:
    """The head of an algorithm's page, and its code."""
    algorithm = load(key, name)
    about = about_of(algorithm)
    rows = [
        ["chosen by", code(f"{key}={name}")],
        ["source", with_links(about.paper)],
        ["reads", ", ".join(anchor(one) for one in about.keys)],
        ["needs", ", ".join(about.needs.words())],
    ]
    file = Path(inspect.getsourcefile(algorithm) or "")
    source = "\n".join(f"    {line}".rstrip() for line in file.read_text(encoding="utf-8").splitlines())
    facts = table(["", ""], [row for row in rows if row[1]])
    place = file.resolve().relative_to(ROOT)
    text = plain(_prose(inspect.getdoc(algorithm) or ""))
    return f'{text}\n\n{facts}\n??? quote "{place}"\n    ```python\n{source}\n    ```\n'


def listed(key: str) -> str:
    """All that a key can name, with links to their pages."""
    rows = [
        [f"[{code(name)}]({FOLDERS[key]}/{name}.md)", plain(first_line(load(key, name))), with_links(_paper(key, name))]
        for of, name in known()
        if of == key
    ]
    return table(["name", "what it is", "source"], rows)


def methods() -> str:
    """Flows and sets of keys, with links to their pages."""
    rows = [
        [
            f"[{code(name)}]({PAGES[name]})",
            plain(method.what),
            " ".join(code(setting) for setting in method.settings),
            with_links(method.about.paper),
        ]
        for name, method in METHODS.items()
    ]
    return table(["name", "what it does", "chosen by", "source"], rows)


def with_links(paper: str) -> str:
    """arXiv numbers as links."""
    return re.sub(r"(?<![\w./])(?:arXiv )?(\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def _paper(key: str, name: str) -> str:
    return about_of(load(key, name)).paper


def _prose(docstring: str) -> str:
    """A docstring without the parts that speak to programmers."""
    ends = ("Args:", "Returns:", "Raises:", "Attributes:")
    return "\n\n".join(text for text in docstring.split("\n\n") if not text.startswith(ends))
