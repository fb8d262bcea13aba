"""Makes entries of the settings that a program's YAML file lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from types import ModuleType
from typing import Any

import yaml

from megarl.migration.entry import (
    Entry,
    carried,
    derived,
    met,
    met_by,
    part_of,
    refused,
    renamed,
    ruled,
    switch,
    worded,
)

SAME = "as it is"
"""The reason of settings that are carried without a remark."""


def listed(source: str, rules: ModuleType) -> list[Entry]:
    """Read a program's entries: exact keys first, then patterns, the longest first.

    Args:
        source: "verl", for `verl.yaml`, whose comments say how its blocks are written, and its part of `adapters.yaml`.
        rules: holds the functions that the file names.
    """
    tree = read(source)
    entries = [
        entry for blocks in (tree, read("adapters")[source]) for entry in _entries(blocks, tree["sections"], rules)
    ]
    return sorted(entries, key=lambda entry: ("*" in entry.key, -len(entry.key) if "*" in entry.key else 0))


def read(name: str) -> dict[str, Any]:
    """Read a YAML file of this folder."""
    return yaml.safe_load(files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def _entries(tree: Mapping[str, Any], sections: Mapping[str, Sequence[str]], rules: ModuleType) -> Iterator[Entry]:
    def rows(block: str) -> Iterator[tuple[str, list[Any]]]:
        for keys, texts in tree.get(block, {}).items():
            yield from _placed(keys.split(", "), texts, sections)

    for why, keys in tree.get("carried", {}).items():
        yield from carried(*(key for key, _ in _placed(keys, (), sections)), why="" if why == SAME else why)
    for why, keys in tree.get("met", {}).items():
        yield from (met(key, why) for key, _ in _placed(keys, (), sections))
    for why, keys in tree.get("refused", {}).items():
        for item in keys:
            ((name, nothing),) = item.items() if isinstance(item, dict) else ((item, None),)
            options = {} if nothing is None else {"nothing": nothing}
            yield from (refused(key, why, **options) for key, _ in _placed([name], (), sections))
    for row in tree.get("met_by", ()):
        yield from (
            met_by(key, row["values"], row["why"], row["otherwise"]) for key, _ in _placed(row["keys"], (), sections)
        )
    for row in tree.get("part_of", ()):
        yield from (part_of(key, of, row["why"]) for key, of in _placed(row["keys"], row["of"], sections))
    for key, (to, why, *convert) in rows("renamed"):
        yield renamed(key, to, why, *(getattr(rules, name) for name in convert))
    for key, (to, why, words, *known) in rows("worded"):
        yield worded(key, to, words, why, *(getattr(rules, name) for name in known))
    for key, (to, why) in rows("switch"):
        yield switch(key, to, why)
    for key, (to, why, name) in rows("rules"):
        yield ruled(key, to, why, getattr(rules, name))
    for key, (to, why, name) in rows("together"):
        yield derived(key, to, why, getattr(rules, name))


def _placed(
    keys: Sequence[str], texts: Sequence[Any], sections: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, list[Any]]]:
    """Repeat each key and its texts for every section that the word before the key's first dot stands for.

    `TRAINED.grad_clip` with `TRAINED.optim.clip_grad` yields both for the actor, then both for the critic.
    """
    words = re.compile(rf"\b({'|'.join(sections)})\.")
    for key in keys:
        head = key.partition(".")[0]
        for section in sections.get(head, [head]):
            replacements = {word: places[0] for word, places in sections.items()} | {head: section}

            def placed(text: Any, replacements: Mapping[str, str] = replacements) -> Any:
                return words.sub(lambda match: f"{replacements[match[1]]}.", text) if isinstance(text, str) else text

            yield placed(key), [placed(text) for text in texts]
