"""A wait that takes too long names the ranks that are late and shows where they are."""

from __future__ import annotations

import ast
import gc
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import tiny_run
import torch.distributed as dist
from ranks import Ranks
from run_cases import run_here
from selection import quick
from small_state import STATE, rl_step
from tiny_run import metrics_of, write_run
from torch.distributed import distributed_c10d
from training_cases import Case, actor_in, beside, fixed_batch, save_checkpoint, update

from megarl.parallel.watch import Stalled, Watch, is_peer_loss

LIMIT = 5.0


def _verify_slowly(until: Path) -> None:
    while not until.exists():
        time.sleep(0.05)


def _agree_with_a_slow_rank(store: str, limit: float, ends: str) -> str:
    """Two agreements, to the second of which rank 1 comes when the file is there; what went wrong on this rank."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
    watch, rank = Watch(), dist.get_rank()
    shared = dist.FileStore(store)
    try:
        with watch.active(
            rank=rank, hosts=["near", "far"], minutes=limit / 60, phase=lambda: "reward", join=lambda: shared
        ):
            with watch.waiting("all completions"):
                dist.barrier(group)
            if rank == 1:
                _verify_slowly(Path(ends))
            with watch.waiting("all scores"):
                dist.all_gather_object([None, None], rank, group=group)
    except Stalled as e:
        Path(ends).touch()
        return str(e)
    except RuntimeError as e:
        return "lost" if is_peer_loss(e) else repr(e)
    finally:
        dist.destroy_process_group(group)
    return "done"


def test_a_late_rank_is_named_and_shown(ranks: Ranks, tmp_path: Path) -> None:
    waited, late = ranks.run(2, _agree_with_a_slow_rank, str(tmp_path / "store"), LIMIT, str(tmp_path / "ends"))
    line, *stack = waited.splitlines()
    assert re.fullmatch(
        r"rank 0 \(host near\) waited \d+ s for all scores \(trainer\.timeout_minutes = 0\.0833333\); "
        r"late: rank 1 \(host far, in phase reward\)",
        line,
    )
    assert stack[0] == "rank 1 is at"
    assert stack[-2].endswith("in _verify_slowly") and stack[-1].strip() == "time.sleep(0.05)"
    assert late == "lost"


def test_a_rank_that_comes_in_time_is_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    late = Timer(1.0, (tmp_path / "ends").touch)
    late.start()
    agreed = ranks.run(2, _agree_with_a_slow_rank, str(tmp_path / "store"), 240.0, str(tmp_path / "ends"))
    assert agreed == ["done", "done"]
    late.join()


def _fall_silent(store: str, ends: str) -> str:
    """Rank 1 is there but its watch is not: as a process that is stopped, or a host that is lost."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT))
    if dist.get_rank() == 1:
        _verify_slowly(Path(ends))
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
        Path(ends).touch()
        return str(e)
    return "done"


@pytest.mark.slow
def test_a_silent_rank_is_named(ranks: Ranks, tmp_path: Path) -> None:
    said, _ = ranks.run(2, _fall_silent, str(tmp_path / "store"), str(tmp_path / "ends"))
    assert said.endswith("late: rank 1 (host far, gives no sign of life)")


# ------------------------------------------------------------------- waits inside a model's pass, and inside a save


@contextmanager
def _groups_wait(seconds: float) -> Iterator[None]:
    """Groups that are made meanwhile wait so long."""
    before = distributed_c10d.default_pg_timeout
    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    try:
        yield
    finally:
        distributed_c10d.default_pg_timeout = before


def _oversleep(told: str, seconds: float) -> None:
    """Until somebody was told of it, however busy the machine is; or for some seconds."""
    end = time.monotonic() + seconds
    while not os.path.exists(told) and time.monotonic() < end:
        time.sleep(0.1)


def _log_probs(actor: Any, other: Any, folder: str) -> None:
    actor.log_probs(fixed_batch(), actor.plan(fixed_batch()))


def _save(actor: Any, other: Any, folder: str) -> None:
    state = actor.sharded_state(loading=False)
    world = actor.groups.world
    save_checkpoint(folder, rl_step(1), state, STATE, model_files=lambda folder: None, world=world)


def _copy(actor: Any, other: Any, folder: str) -> None:
    other.copy_from(actor)


def _update(actor: Any, other: Any, folder: str) -> None:
    update(actor, fixed_batch())


WORK = {"log_probs": _log_probs, "update": _update, "save": _save, "copy": _copy}


def _one_oversleeps(store: str, phase: str, folder: str) -> str:
    """Rank 3 of TP2 x DP2 comes late to a pass or a save: what each of the others says."""
    rank = dist.get_rank()
    with _groups_wait(LIMIT), actor_in(Case(tp=2, dp=2)) as actor:
        other = beside(actor, Case(dp=4), role="Actor")
        WORK[phase](actor, other, f"{folder}/before")  # makes connections, and what is made once
        try:
            with actor.groups.world.watch.active(
                rank=rank,
                hosts=["a", "b", "c", "d"],
                minutes=LIMIT / 60,
                phase=lambda: phase,
                join=lambda: dist.FileStore(store),
            ):
                if rank == 3:
                    _oversleep("", 2.5 * LIMIT)
                WORK[phase](actor, other, f"{folder}/after")
        except Stalled as e:
            return str(e)
        except (RuntimeError, OSError) as e:
            return "lost" if is_peer_loss(e) else repr(e)
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize("phase", WORK)
def test_a_rank_that_is_late_for_a_pass_or_a_save_is_named(ranks: Ranks, tmp_path: Path, phase: str) -> None:
    """Not those that wait for it, wherever they do: in a tensor-parallel group, or in that of all ranks."""
    said = ranks.run(4, _one_oversleeps, os.path.join(tmp_path, "store"), phase, str(tmp_path))
    explained = [text for text in said[:3] if "late:" in text]
    assert len(explained) == 1, said
    _check_names_rank_3(explained[0], phase)


def _check_names_rank_3(text: str, phase: str) -> None:
    line, *stack = text.splitlines()
    assert line.endswith(f"late: rank 3 (host d, in phase {phase})")
    assert stack[0] == "rank 3 is at"
    assert any(frame.endswith("in _oversleep") for frame in stack[-4:])
    assert sum("is at" in text for text in stack) == 1


def test_a_rank_that_comes_late_has_not_waited(tmp_path: Path) -> None:
    ended: list[str] = []
    watch, store = Watch(), str(tmp_path / "store")
    with watch.active(
        rank=0, hosts=["a", "b"], minutes=2 / 60, phase=str, join=lambda: dist.FileStore(store), end=ended.append
    ):
        time.sleep(3.0)
        with watch.waiting("all scores"):
            time.sleep(0.7)
    assert ended == []


# ----------------------------------------------------------------------- a wait that no exception ends, as NCCL's are


def _hang(store: str, phase: str, folder: str) -> list[str]:
    """Rank 3 of TP2 x DP2 comes late to groups that wait for minutes, as NCCL's kernels do: what each rank's watch
    would have said as it ended the process."""
    rank, said = dist.get_rank(), list[str]()

    def end(text: str) -> None:
        said.append(text)
        if "late:" in text:
            Path(folder, "told").touch()

    with _groups_wait(300), actor_in(Case(tp=2, dp=2)) as actor:
        other = beside(actor, Case(dp=4), role="Actor")
        WORK[phase](actor, other, f"{folder}/before")
        with actor.groups.world.watch.active(
            rank=rank,
            hosts=["a", "b", "c", "d"],
            minutes=LIMIT / 60,
            phase=lambda: phase,
            join=lambda: dist.FileStore(store),
            end=end,
        ):
            if rank == 3:
                _oversleep(f"{folder}/told", 200)
            WORK[phase](actor, other, f"{folder}/after")
    return said


@pytest.mark.parametrize("phase", quick(["log_probs", "update"], 0))
def test_a_hang_without_an_exception_names_the_late_rank(ranks: Ranks, tmp_path: Path, phase: str) -> None:
    said = ranks.run(4, _hang, os.path.join(tmp_path, "store"), phase, str(tmp_path))
    assert said[3] == []
    (explained,) = [text for texts in said for text in texts if "late:" in text]
    _check_names_rank_3(explained, phase)


# --------------------------------------------------------------------------------------------------------- one door

MEGARL = Path(__file__).parents[1] / "megarl"
COLLECTIVES = re.compile(
    r"dist\.(all_\w+|broadcast\w*|barrier|gather\w*|reduce\w*|scatter\w*|monitored_barrier|P2POp|i?send|i?recv)$"
)


ELSEWHERE = {
    "models/logprobs.py": "over the vocabulary's shards",
    "rollout/native/model.py": "over the ranks of a replica",
    "rollout/native/parts/part.py": "over the ranks of a replica",
    "rollout/native/cache_size.py": "over the ranks of a replica",
    "environments/broadcast.py": "from the first rank of a replica",
    "reshard/transport/direct_reads.py": "over the ranks that hold one model",
    "reshard/transport/collective.py": "over the ranks that hold one model",
    "reshard/transport/peer.py": "over the ranks that hold one model",
    "diagnosis/all_reduce.py": "measured",
    "diagnosis/preflight.py": "of a job of its own, with a limit of its own",
    "roles/model.py": "over the ranks that have the same tokens",
    "models/exchange.py": "within a layer's pass, as Megatron-Core's own",
    "models/microbatch.py": "within a pass, of ranks that share a sequence",
    "models/router_losses.py": "within a layer's pass",
    "parallel/cpu.py": "in the place of one that its caller watches",
}
"""Where collectives of fewer ranks stand."""


def _collectives(tree: ast.Module) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if COLLECTIVES.match(ast.unparse(call.func))]


SLOW_LOSS = """
import time
import torch.distributed as dist
from megarl.algorithms.losses.vanilla import vanilla


def slow(settings):
    loss = vanilla(settings)

    def mine(x):
        time.sleep(2 * dist.get_rank())
        return loss(x)

    mine.columns = loss.columns
    return mine
"""


def test_a_rank_that_computes_longer_is_the_straggler_of_an_update(ranks: Ranks, tmp_path: Path) -> None:
    """The other one waits for its gradients meanwhile, in two mini-batches; the median is half-way between both."""
    (tmp_path / "slow.py").write_text(SLOW_LOSS)
    keys = {"trainer__val_before_train": False, "trainer__total_training_steps": 1, "trainer__logger": ["jsonl"]}
    words = [f"actor_rollout_ref.actor.policy_loss.loss_mode={tmp_path}/slow.py:slow"]
    for ended, said in ranks.run(2, run_here, str(write_run(tmp_path, **keys)), words):
        assert ended == "", said
    row = metrics_of(tmp_path)[-1]
    assert row["straggler/update_rank"] == 1 and row["straggler/update_excess_s"] > 1.0


def _threads_after_runs(configs: list[str]) -> list[int]:
    threads = []
    for config in configs:
        tiny_run.train(config, [])
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    return threads


def test_a_run_leaves_no_group_behind(ranks: Ranks, tmp_path: Path) -> None:
    """A process may run several; each group that it kept would hold threads and sockets."""
    keys = {"trainer__val_before_train": False, "trainer__total_training_steps": 1}
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    configs = [str(write_run(folder, **keys)) for folder in folders]
    for first, *later in ranks.launch(1, _threads_after_runs, configs):
        assert max(later) <= first


def test_all_that_ranks_agree_on_is_watched() -> None:
    """A collective of all ranks elsewhere would neither say what it waits for nor count as a wait."""
    files = {path.relative_to(MEGARL).as_posix(): path for path in MEGARL.rglob("*.py")}
    calling = {name for name, path in files.items() if _collectives(ast.parse(path.read_text()))}
    assert calling == {"parallel/world.py", *ELSEWHERE}
