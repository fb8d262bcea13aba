"""Defines the interface of a generation engine: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megarl.config.policy import RolloutConfig
from megarl.models.architecture import Architecture
from megarl.parallel.generation_groups import GenerationGroups
from megarl.rollout.stop_strings import Decode
from megarl.types import Completion, SamplingParams, Tokens

Share = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Tensor]]
"""Given the shapes of an engine's parameters by name, the tensors that some of them are to be.

The engine takes no memory for these. Whoever gave them keeps them where they are and up to date; the engine neither
writes to them nor releases them.
"""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Holds the arguments that an engine is built from.

    Attributes:
        groups: this rank's replica.
        rollout: the configuration's section.
        path: the model's Hugging Face folder.
        dtype: of weights, activations and KV cache.
        max_model_len: tokens of the longest prompt and response together.
        decode: token ids to text, for stop strings.
        share: gives the weights that are not to be the engine's own.
    """

    arch: Architecture
    groups: GenerationGroups
    rollout: RolloutConfig
    path: str
    dtype: torch.dtype
    max_model_len: int
    decode: Decode
    share: Share


def share_nothing(shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Tensor]:
    """Share no tensors: a `Share` with which all weights are the engine's own."""
    del shapes
    return {}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Describes a response to sample, or to continue.

    Attributes:
        key: tells apart the requests that an engine holds at a time.
        prompt: token ids.
        seed: int64. The same seed, prompt, response so far and weights give the same tokens.
        response: so far. Seed and place in the whole response make a token's random number, so that a response that
            was interrupted goes on as if it had not been.
        turn_start: place in the response from which on stop strings count: they do not end a turn that was said before.
        keep: hold what the KV cache has of the response when it ends: a request with the same key whose response begins
            with it goes on without computing it again. Until then, or until `Engine.forget`.
    """

    key: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    response: Tokens = field(default_factory=Tokens)
    turn_start: int = 0
    keep: bool = False


class Engine(Protocol):
    """Runs the part that one rank has of a generation replica: a tensor-parallel group that holds one whole model.

    All ranks of a replica make the same calls with the same arguments, in the same order: an engine decides what runs
    from its requests and the tokens drawn so far alone, so that the ranks stay in step without talking. Where a call
    depends on anything else (an answer of a tool, a clock), the replica's first rank decides, and the others are told.

    Which memory is held after which call:

        after                        weights                    KV cache
        construction, sleep()        held                       given back
        sleep(release_weights=True)  given back                 given back
        wake(weights_only=True)      held                       as before
        wake()                       held                       held: ready to generate

    The values of released weights are lost: write them anew after waking. "Given back" is to the allocator of this
    process, so training can use it at once. Shared weights (`Share`) are always held. No request outlives a sleep.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests to serve, in this order, after those that are there.

        Raises:
            ValueError: a request that the engine cannot serve, with the reason in one line; it takes none of them.
        """
        ...

    def step(self) -> Mapping[int, Completion]:
        """Decode one token of each running request; returns the requests that this finished, by key."""
        ...

    @property
    def busy(self) -> bool:
        """Tell whether requests are not finished."""
        ...

    def under_way(self) -> Mapping[int, Sequence[int]]:
        """Return the response tokens so far of unfinished requests, by key, for a person who watches. An engine need
        not show them."""
        return {}

    def interrupt(self) -> Mapping[int, Completion]:
        """Take back all requests that are not finished; returns what there is of their responses, by key."""
        ...

    def forget(self, keys: Iterable[int]) -> None:
        """Release the parts of the KV cache that are kept of these requests (`Request.keep`)."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Complete some prompts; every rank of the replica returns the same.

        Args:
            prompts: token ids, one sequence per request; repeat a prompt to sample it several times.
            seeds: int64, one per request.

        Raises:
            ValueError: as `submit`.
        """
        assert not self.busy
        pairs = zip(prompts, seeds, strict=True)
        self.submit([Request(key=i, prompt=p, params=params, seed=seed) for i, (p, seed) in enumerate(pairs)])
        completions: dict[int, Completion] = {}
        while self.busy:
            completions.update(self.step())
        return [completions[i] for i in range(len(prompts))]

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights of this rank by name, as in `megarl.models.placements.engine_placements`.

        Resharding writes into those that are the engine's own, in place, each step; the tensor objects stay the same
        for the engine's life.
        """
        ...

    def wake(self, *, weights_only: bool = False) -> None:
        """Take memory: the weights, and unless `weights_only` the KV cache."""
        ...

    def sleep(self, *, release_weights: bool = False) -> None:
        """Give back the KV cache, and with `release_weights` the weights."""
        ...

    def close(self) -> None:
        """Give everything back, process groups included. No other call may follow."""
        ...
