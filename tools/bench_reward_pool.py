#!/usr/bin/env python3
"""What scoring beside decoding costs: the time of many slow scores, and what a rank that computes meanwhile loses.

    python tools/bench_reward_pool.py [--scores 1024] [--seconds 0.5] [--workers 32] [--in-rank 16] [--json FILE]

The verifier sleeps. `ideal` is scores x seconds / workers; `in the rank` is what the same function takes for a smaller
number of scores when the rank calls it itself, per score. `a busy rank loses` is the share of its processor time that
the pool's threads take from a loop of Python in it, while the workers sleep, and while they answer a thousand a second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace

from megarl.config.reward import RewardConfig
from megarl.rewards.in_rank import InRank
from megarl.rewards.parts import parts_of
from megarl.rewards.pool import RewardPool
from megarl.rewards.results import Response
from megarl.types import Prompt

VERIFIERS = """
import time

def sleeps(response, row, *, seconds):
    time.sleep(seconds)
    return 1.0

def at_once(response, row):
    return 1.0
"""
PROMPT = Prompt(index=0, token_ids=(), row={"answer": "4"}, source="bench:1")
_SPAN = 0.2  # seconds that the busy loop is measured over
_SPANS = 21


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured.

    Attributes:
        start_s: until the first score, from nothing.
        pool_s, ideal_s: seconds of all scores.
        of_ideal: the first over the second.
        in_rank_s_per_score, pool_s_per_score: seconds.
        scores_per_s: of a function that takes no time.
        lost_while_waiting, lost_while_collecting: share of a busy rank's processor time.
    """

    scores: int
    workers: int
    start_s: float
    pool_s: float
    ideal_s: float
    of_ideal: float
    pool_s_per_score: float
    in_rank_s_per_score: float
    scores_per_s: float
    lost_while_waiting: float
    lost_while_collecting: float


def measure(file: str, scores: int, seconds: float, workers: int, in_rank: int) -> Figures:
    """Everything, one after another."""
    slow = RewardConfig(name=f"{file}:sleeps", args={"seconds": seconds})
    begun = time.monotonic()
    pool = RewardPool(parts_of(slow), slow, workers)
    try:
        _score(pool, 1)
        start_s = time.monotonic() - begun - seconds
        pool_s = _score(pool, scores)
        lost_while_waiting = _lost(pool, workers)
    finally:
        pool.close()
    (part,) = parts_of(slow)
    here = InRank(replace(part, reward=replace(part.reward, named=False)), slow)
    in_rank_s = _score(here, in_rank) / in_rank
    scores_per_s, lost_while_collecting = _at_once(file, min(workers, len(os.sched_getaffinity(0))))
    ideal_s = scores * seconds / workers
    return Figures(
        scores=scores,
        workers=workers,
        start_s=start_s,
        pool_s=pool_s,
        ideal_s=ideal_s,
        of_ideal=pool_s / ideal_s,
        pool_s_per_score=pool_s / scores,
        in_rank_s_per_score=in_rank_s,
        scores_per_s=scores_per_s,
        lost_while_waiting=lost_while_waiting,
        lost_while_collecting=lost_while_collecting,
    )


def _at_once(file: str, workers: int) -> tuple[float, float]:
    """Scores per second of a function that takes no time, and what a rank loses while a thousand a second come."""
    fast = RewardConfig(name=f"{file}:at_once")
    pool = RewardPool(parts_of(fast), fast, workers)
    try:
        _score(pool, 1)
        return 5000 / _score(pool, 5000), _lost(pool, int(1000 * _SPAN))
    finally:
        pool.close()


def _lost(pool: RewardPool, submitted: int) -> float:
    """Share of the rank's processor time that the pool's threads take from a busy loop of Python.

    Processor time, not rounds per second, so that what else runs on the machine does not count.
    """
    everything = own = 0.0
    for _ in range(_SPANS):
        _submit(pool, submitted)
        all_before, own_before, end = time.process_time(), time.thread_time(), time.monotonic() + _SPAN
        while time.monotonic() < end:
            pass
        everything += time.process_time() - all_before
        own += time.thread_time() - own_before
        pool.collect()
    return 1 - own / everything


def _submit(pool: RewardPool | InRank, number: int) -> None:
    for i in range(number):
        pool.submit(i, Response(text="x" * 2000, tokens=500), PROMPT)


def _score(pool: RewardPool | InRank, number: int) -> float:
    begun = time.monotonic()
    _submit(pool, number)
    assert len(pool.collect()) == number
    return time.monotonic() - begun


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scores", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.5, help="that the verifier sleeps")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--in-rank", type=int, default=16, help="scores that the rank computes itself")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(argv)
    if min(args.scores, args.seconds, args.workers, args.in_rank) <= 0:
        print("bench_reward_pool.py: every number must be more than 0", file=sys.stderr)
        return 2
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(VERIFIERS)
        file.flush()
        found = measure(file.name, args.scores, args.seconds, args.workers, args.in_rank)
    lines = {
        "start, until the first score": f"{found.start_s:.2f} s",
        "pool": f"{found.pool_s:.2f} s",
        "ideal": f"{found.ideal_s:.2f} s, pool / ideal {found.of_ideal:.3f}",
        "per score": f"{found.pool_s_per_score:.4f} s, in the rank {found.in_rank_s_per_score:.4f} s",
        "scores that take no time": f"{found.scores_per_s:.0f} /s",
        "a busy rank loses": f"{found.lost_while_waiting:.1%}, at 1,000 scores/s {found.lost_while_collecting:.1%}",
    }
    print(f"{found.scores} scores of {args.seconds:g} s, {found.workers} workers")
    for what, figure in lines.items():
        print(f"  {what:<30} {figure}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(asdict(found), out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
