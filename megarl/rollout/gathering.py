"""Gathers the responses of all replicas on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from megarl.parallel.generation_groups import GenerationGroups
from megarl.parallel.world import World
from megarl.types import Tokens

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Responded = TypeVar("Responded", bound=Any)
"""A frozen dataclass with a `response`, which is `Tokens`."""


def gathered(world: World, mine: Mapping[Key, Value], what: str) -> dict[Key, Value]:
    """Gather small things that each rank has, by keys that no other rank has, in rank order."""
    return {key: value for part in world.all_gather(mine, what) for key, value in part.items()}


def tell_responses(
    groups: GenerationGroups, mine: Mapping[Key, Responded], what: str, *, everywhere: bool
) -> dict[Key, Responded]:
    """Tell every rank of the responses that this rank's replica has; its first rank tells of all.

    Args:
        everywhere: with all tokens; else other replicas' are outlines.
    """
    told = mine if groups.tp_rank == 0 else {}
    if everywhere:
        return gather_responses(groups.world, told, what)
    outlines = {key: replace(value, response=value.response.outline(groups.replica)) for key, value in told.items()}
    return {**gathered(groups.world, outlines, what), **mine}


def gather_responses(world: World, mine: Mapping[Key, Responded], what: str) -> dict[Key, Responded]:
    """Gather what each rank has, by keys that no other rank has, in rank order.

    Recorded experts are nearly all of the bytes. They are added up in one buffer, in which each rank fills in its own:
    to gather objects every rank would take as much memory for each rank as for the one that has most.

    Args:
        what: names the wait for other ranks.
    """
    recorded = {key: _data(value.response) for key, value in mine.items() if value.response.routed is not None}
    light = {key: replace(value, response=_with_data(value.response, b"")) for key, value in mine.items()}
    sizes_of_mine = {key: len(data) for key, data in recorded.items()}
    parts = world.all_gather((light, sizes_of_mine), what)
    everyone = {key: value for part, _ in parts for key, value in part.items()}
    sizes = {key: size for _, of_rank in parts for key, size in of_rank.items()}
    if not any(sizes.values()):
        return everyone
    places = {key: slice(end - sizes[key], end) for key, end in zip(sizes, accumulate(sizes.values()), strict=True)}
    buffer = np.zeros(sum(sizes.values()), np.uint8)
    for key, data in recorded.items():
        buffer[places[key]] = np.frombuffer(data, np.uint8)
    world.sum_(torch.from_numpy(buffer), what)
    for key, place in places.items():
        value = everyone[key]
        everyone[key] = replace(value, response=_with_data(value.response, buffer[place].tobytes()))
    return everyone


def _data(response: Tokens) -> bytes:
    assert response.routed is not None
    return response.routed.data


def _with_data(response: Tokens, data: bytes) -> Tokens:
    return response if response.routed is None else replace(response, routed=replace(response.routed, data=data))
