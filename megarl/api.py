"""Training from Python: in a script under torchrun or `megarl train`, or, with one rank, in a notebook."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megarl.config import Config, load_config
from megarl.config.load import with_launched_ranks, with_values
from megarl.flows.registry import FLOWS
from megarl.parallel.cpu import enable_cpu_ranks
from megarl.rewards import Reward, RewardFunction
from megarl.trainer.checks import check_run
from megarl.trainer.resuming.run_lock import RunLock
from megarl.trainer.stop import StopRequest

if TYPE_CHECKING:
    from megarl.trainer.run import Flow
    from megarl.trainer.session import Callback


def train(
    config: Config | str,
    overrides: Sequence[str] = (),
    *,
    reward: RewardFunction | None = None,
    flow: Flow | str | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """Take part in a run from its first step, or from its last checkpoint, to its end.

    Every rank of the job calls it. Without a launcher (RANK is not in the environment) this process is the only rank.

    Args:
        config: a configuration, or the path of a YAML file.
        overrides: `section.key=value`, for a file.
        reward: scores a response, instead of `reward.name`. It may be a closure, which no other process can find: so
            it is called in the ranks themselves, one response after another, and not in `reward.workers`.
        flow: what the run does, instead of `trainer.flow`: a function of a `Run`, a name, or path/to/file.py:function.
        callbacks: called after each step, on every rank, with the loop, its step and the row of the metric files.

    Returns:
        the last row that this process wrote; empty if there was nothing left to do.

    Raises:
        ValueError: the run cannot work as it is configured; the message is one line that says what to change.
        SystemExit: with 128 + signal, after a signal that a launcher sent; what was trained is saved.
        RunStopped: something went wrong that more steps would not mend; the message says what, and what is saved.
    """
    chosen = _with_ranks(load_config(config, overrides) if isinstance(config, str) else config)
    if flow is not None:
        chosen = with_values(chosen, "trainer", flow=flow if isinstance(flow, str) else _name(flow))
    given = None
    if reward is not None:
        given = Reward(name=_name(reward), function=reward)
        chosen = with_values(chosen, "reward", name=given.name)
    launched, rank = "RANK" in os.environ, int(os.environ.get("RANK", "0"))
    stop = StopRequest(rank)
    if launched:  # in a notebook an interrupt is the notebook's
        stop.install()
    inputs = check_run(chosen, reward=given)
    enable_cpu_ranks()  # before Megatron-Core is imported
    from megarl.trainer.run import run

    chosen_flow = flow if callable(flow) else FLOWS.load(chosen.trainer.flow)
    lock = RunLock(chosen.trainer.run_dir, steps=inputs.total_steps or None) if rank == 0 else None
    ended = "failed"
    last: deque[Mapping[str, float]] = deque(maxlen=1)
    try:
        stopped_by = run(inputs, chosen_flow, stop, [*callbacks, lambda loop, step, row: last.append(row)])
        ended = "finished" if stopped_by is None else f"stopped by {stopped_by.name}"
    finally:
        if lock is not None:
            lock.note_end(ended)
            lock.release()
        if not launched and dist.is_initialized():  # the run failed: the next one makes a world of its own
            from megarl.parallel.groups import leave_world

            leave_world()
    if stopped_by is not None:
        raise SystemExit(128 + stopped_by)
    return dict(last[0]) if last else {}


def _with_ranks(config: Config) -> Config:
    """The configuration with the number of ranks that there are."""
    config = with_launched_ranks(config)
    if "RANK" not in os.environ and config.trainer.world_size > 1:
        raise ValueError(
            f"the configuration asks for {config.trainer.world_size} ranks, and this process is the only one: start "
            f"it with torchrun --nproc_per_node {config.trainer.n_gpus_per_node}, or set trainer.n_gpus_per_node=1"
        )
    return config


def _name(function: Callable[..., Any]) -> str:
    """What the records call a function that was given as such."""
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
