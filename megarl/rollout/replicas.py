"""Generation over all replicas: who generates which prompts, with which seeds, and everybody gets everything."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain

from megarl.parallel.groups import Groups
from megarl.rollout.engine import Engine
from megarl.types import Completion, Prompt, Rollouts, SamplingParams


def generate_rollouts(
    engine: Engine,
    groups: Groups,
    prompts: Sequence[Prompt],
    n: int,
    params: SamplingParams,
    *,
    seed: int,
    round_: int,
    draw: int = 0,
) -> Rollouts:
    """`n` completions of each prompt, the same on every rank and for every generation layout.

    A replica takes every `replicas`-th prompt with all its samples, so that they share the prompt's prefill.

    Args:
        seed, round_, draw: with the prompt's index and the sample's number they make each completion's seed.
    """
    replicas = groups.generation.replicas
    at = groups.generation.coords(groups.rank)
    mine = [p for i, p in enumerate(prompts) if i % replicas == at.replica]
    completions = engine.generate(
        [p.token_ids for p in mine for _ in range(n)],
        params,
        [sample_seed(seed, round_, p.index, j, draw) for p in mine for j in range(n)],
    )
    gathered = groups.all_gather(completions if at.tp == 0 else None, "all completions")
    by_replica: list[list[Completion]] = [part for part in gathered if part is not None]
    in_order = (by_replica[i % replicas][i // replicas * n :][:n] for i in range(len(prompts)))
    return Rollouts(
        prompts=tuple(prompts),
        n=n,
        completions=tuple(chain.from_iterable(in_order)),
        temperature=params.temperature or 1.0,
    )


def sample_seed(seed: int, round_: int, prompt: int, sample: int, draw: int = 0) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    which = f"{seed}/{round_}/{prompt}/{sample}" + (f"/{draw}" if draw else "")
    digest = hashlib.blake2b(which.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
