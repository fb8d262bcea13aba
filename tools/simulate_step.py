"""Simulates what one rank of many holds and does with a step's tokens, without the other ranks.

    python tools/simulate_step.py --sequences 100000 --tokens 32768 --ranks 1024 --tp 8

The other ranks' parts of sums read 0, and what they send is made up: bytes and seconds of this rank's own work are
real, those of the network are not in them. Every response has the same length unless --spread says otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.rollout_correction import correct_rollouts, gap_metrics
from megarl.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from megarl.config.policy import BatchingConfig
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.roles.passes import plan_passes
from megarl.types import Outline, Prompt, Rollout, Rollouts, Tokens
from megarl.types.owners import Holders

GIB = 2**30


class AloneOfMany:
    """Stands for the world of rank 0."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.sent = 0, size, 0

    def sum_(self, values: Tensor, what: str) -> Tensor:
        del what
        return values

    def exchange(self, parts: list[Tensor], sizes: list[int], what: str) -> list[Tensor]:
        del what
        self.sent += sum(len(part) for part in parts[1:])
        received = torch.ones(sum(sizes), dtype=parts[0].dtype)
        own = received[: sizes[0]]
        own.copy_(parts[0])
        return list(received.split(sizes))


class Stages:
    """Prints seconds and memory of each stage."""

    def __init__(self) -> None:
        self._before = _resident()
        print(f"{'stage':44} {'seconds':>8} {'held GiB':>9} {'peak GiB':>9}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        began = time.perf_counter()
        yield
        seconds, held, peak = time.perf_counter() - began, _resident() - self._before, _peak() - self._before
        print(f"{name:44} {seconds:8.2f} {held / GIB:9.3f} {peak / GIB:9.3f}", flush=True)


def _resident() -> int:
    nbytes: int = psutil.Process().memory_info().rss
    return nbytes


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def responses(args: argparse.Namespace, world: AloneOfMany) -> Rollouts:
    """Make the rollouts of a step as this rank knows them once all replicas have generated."""
    rng = random.Random(0)
    layout = GenerationLayout(ranks=range(args.ranks), tp=args.generation_tp)
    items, prompt = [], Prompt(index=0, token_ids=(1,) * args.prompt, row={})
    for i in range(args.sequences):
        length = round(args.tokens * (1 - args.spread * rng.random())) - args.prompt
        replica = i // args.n % layout.replicas
        tokens = Tokens(versions=((1, length),))
        response: Tokens | Outline = Outline(
            holder=replica, length=length, digest=i, digest_of_last_turn=i, observed_count=0, versions=tokens.versions
        )
        if replica == 0:
            response = Tokens(ids=array("i", [7]) * length, logp=array("f", [-1.0]) * length, versions=tokens.versions)
        reward = float(rng.random() < 0.5)
        items.append(Rollout(prompt=prompt, group=i // args.n, response=response, finish_reason="stop", reward=reward))
    first = tuple(layout.replica_ranks(replica)[0] for replica in range(layout.replicas))
    return Rollouts(items=tuple(items), version=1, holders=Holders(own=0, first=first, ranks=world))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the longest sequence, prompt and response")
    parser.add_argument("--spread", type=float, default=0.0, help="the shortest is by this share shorter")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--n", type=int, default=16, help="responses to a prompt")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--generation-tp", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world: Any = AloneOfMany(args.ranks)
    layout = TrainLayout(ranks=range(args.ranks), tp=args.tp, pp=args.pp, cp=args.cp)
    print(f"{args.sequences:,} sequences of up to {args.tokens:,} tokens; rank 0 of {args.ranks}, {layout}")
    stages = Stages()
    with stages.stage("responses: own tokens, others' outlines"):
        rollouts = responses(args, world)
    with stages.stage("batch of the responses"):
        batch = rollouts.to_batch()
    batching = BatchingConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=2 * args.tokens)
    with stages.stage("plan"):
        size = -(-args.sequences // args.mini_batches)
        plan = plan_passes(batch, layout, world, batching=batching, balance=True, sequences=size)
    with stages.stage("tokens to those that train on them"):
        del rollouts
        batch = batch.held_by(plan.owners)
    with stages.stage("log-probabilities of policy and reference"):
        batch = batch.with_(old_logp=batch.rollout_logp.clone(), ref_logp=batch.rollout_logp.clone())
    with stages.stage("importance weights"):
        batch = correct_rollouts(batch, RolloutCorrectionConfig(rollout_is="token"))
    with stages.stage("advantages"):
        batch = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo"), 0.0)
    with stages.stage("weights of the loss, of each mini-batch"):
        for mini_batch in plan.mini_batches:
            weights = token_weights(batch, mini_batch.sequences)
        del weights
    with stages.stage("metrics"):
        gap_metrics(batch)
    print(
        f"this rank sent {world.sent / GIB:.3f} GiB, has {len(batch.tokens):,} tokens of {len(batch.own):,} sequences"
    )


if __name__ == "__main__":
    main()
