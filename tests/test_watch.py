"""A wait that takes too long names the ranks that are late and shows where they are."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Ranks

from megarl.parallel.watch import Stalled, Watch, is_peer_loss

LIMIT = 2.0


def _verify_slowly(seconds: float) -> None:
    time.sleep(seconds)


def _agree_with_a_slow_rank(store: str, seconds: float) -> str:
    """Two agreements, to the second of which rank 1 comes late; what went wrong on this rank."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT))
    watch, rank = Watch(), dist.get_rank()
    shared = dist.FileStore(store)
    try:
        with watch.active(
            rank=rank, hosts=["near", "far"], minutes=LIMIT / 60, phase=lambda: "reward", join=lambda: shared
        ):
            with watch.waiting("all completions"):
                dist.barrier(group)
            _verify_slowly(seconds * rank)
            with watch.waiting("all scores"):
                dist.all_gather_object([None, None], rank, group=group)
    except Stalled as e:
        return str(e)
    except RuntimeError as e:
        return "lost" if is_peer_loss(e) else repr(e)
    finally:
        dist.destroy_process_group(group)
    return "done"


def test_a_late_rank_is_named_and_shown(ranks: Ranks, tmp_path: Path) -> None:
    waited, late = ranks.run(2, _agree_with_a_slow_rank, os.path.join(tmp_path, "store"), 2.5 * LIMIT)
    line, *stack = waited.splitlines()
    assert line == (
        "rank 0 (host near) waited 2 s for all scores (trainer.timeout_minutes = 0.0333333); "
        "late: rank 1 (host far, in phase reward)"
    )
    assert stack[0] == "rank 1 is at"
    assert stack[-2].endswith("in _verify_slowly") and stack[-1].strip() == "time.sleep(seconds)"
    assert late == "lost"


def test_a_rank_that_comes_in_time_is_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _agree_with_a_slow_rank, os.path.join(tmp_path, "store"), 0.4 * LIMIT) == ["done", "done"]


def _fall_silent(store: str) -> str:
    """Rank 1 is there but its watch is not: as a process that is stopped, or a host that is lost."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT))
    if dist.get_rank() == 1:
        time.sleep(2 * LIMIT)
        return "silent"
    watch = Watch()
    try:
        with (
            watch.active(
                rank=0,
                hosts=["near", "far"],
                minutes=LIMIT / 60,
                phase=lambda: "update",
                join=lambda: dist.FileStore(store),
            ),
            watch.waiting("all scores"),
        ):
            dist.barrier(group)
    except Stalled as e:
        return str(e)
    return "done"


@pytest.mark.slow
def test_a_silent_rank_is_named(ranks: Ranks, tmp_path: Path) -> None:
    said, _ = ranks.run(2, _fall_silent, os.path.join(tmp_path, "store"))
    assert said.endswith("late: rank 1 (host far, gives no sign of life)")
