"""Trains from Python: in a script under torchrun or `megarl train`, or, with one rank, in a notebook."""

from __future__ import annotations

import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megarl.config import Config, ConfigError, load_config
from megarl.config.load import with_launched_ranks, with_values
from megarl.debugging import hush_dependencies
from megarl.flow_kinds import FLOWS
from megarl.own_code import check_runs, name_of
from megarl.parallel.cpu import enable_cpu_ranks
from megarl.rewards import Reward, RewardFunction
from megarl.trainer.admission.checks import check_run
from megarl.trainer.run_lock import RunLock
from megarl.trainer.stop import StopRequest, interruption

if TYPE_CHECKING:
    from megarl.trainer.records.run_records import Callback
    from megarl.trainer.session.take_part import Flow


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    reward: RewardFunction | None = None,
    flow: Flow | str | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """Take part in a run from its first step, or from its last checkpoint, to its end.

    Every rank of the job calls it. Without a launcher (RANK is not in the environment) this process is the only rank.

    Args:
        config: a configuration, the path of a YAML file, or a dictionary of what such a file would hold.
        overrides: `section.key=value`.
        reward: scores a response, instead of `reward.name`. It may be a closure, which no other process can find: so
            it is called in the ranks themselves, one response after another, and not in `reward.workers`.
        flow: what the run does, instead of `trainer.flow`: a function of a `Run`, a name, or path/to/file.py:function.
        callbacks: called after each step, on every rank, with the loop, its step and the row of the metric files.

    Returns:
        the last row that this process wrote; empty if there was nothing left to do.

    Raises:
        ValueError: the run cannot work as it is configured, or a function that it was given failed or returned what it
            must not; the message is one line that says what to change. Before a callback's failure, whose cause it is,
            leaves, its step is saved.
        KeyboardInterrupt: after SIGINT, in a process that nobody launched; what was trained is saved.
        SystemExit: with 128 + signal, after any other; what was trained is saved.
        RunStopped: something went wrong that more steps would not mend; the message says what, and what is saved.
    """
    chosen = _with_ranks(_configuration(config, overrides))
    if flow is not None:
        name = flow if isinstance(flow, str) else _name(flow)
        chosen = with_values(chosen, "trainer", flow=name)
        if callable(flow):
            FLOWS.add(name, flow)
    given = None
    if reward is not None:
        given = Reward(name=_name(reward), function=reward)
        chosen = with_values(chosen, "reward", name=given.name)
    last: deque[Mapping[str, float]] = deque(maxlen=1)
    for callback in callbacks:
        check_runs(callback, f"the callback {name_of(callback)}")
    listeners = [*callbacks, lambda loop, step, row: last.append(row)]
    launched, stop = "RANK" in os.environ, StopRequest(int(os.environ.get("RANK", "0")))
    if launched:
        stop.install()
    with nullcontext() if launched else stop.borrow(), warnings.catch_warnings():
        hush_dependencies()
        stopped_by = _run(chosen, given, stop, listeners)
    if stopped_by is not None:
        raise SystemExit(128 + stopped_by) if launched else interruption(stopped_by)
    return dict(last[0]) if last else {}


def _run(
    config: Config, reward: Reward | None, stop: StopRequest, callbacks: Sequence[Callback]
) -> signal.Signals | None:
    """Train, and note in the run's folder how the run ended; returns the signal that stopped it, if one did."""
    inputs = check_run(config, reward=reward)
    enable_cpu_ranks()  # before Megatron-Core is imported
    from megarl.trainer.session.take_part import run

    lock = RunLock(config.trainer.run_dir, steps=inputs.total_steps or None) if stop.rank == 0 else None
    ended = "failed"
    try:
        stopped_by = run(inputs, FLOWS.load(config.trainer.flow), stop, callbacks)
        ended = "finished" if stopped_by is None else f"stopped by {stopped_by.name}"
    except (KeyboardInterrupt, SystemExit):
        ended = "interrupted"
        raise
    finally:
        if lock is not None:
            lock.note_end(ended)
            lock.release()
        if "RANK" not in os.environ and dist.is_initialized():  # it failed: the next one makes a world of its own
            from megarl.parallel.train_groups import leave_world

            leave_world()
    return stopped_by


def _configuration(config: Config | Mapping[str, Any] | str | os.PathLike[str], overrides: Sequence[str]) -> Config:
    if isinstance(config, Config):
        return load_config(config.model_dump(), overrides) if overrides else config
    if isinstance(config, Mapping):
        return load_config(config, overrides)
    if isinstance(config, str | os.PathLike):
        return load_config(os.fspath(config), overrides)
    raise ConfigError(f"a configuration is a Config, a dictionary or a path, not {type(config).__name__}")


def _with_ranks(config: Config) -> Config:
    """Return the configuration with the number of ranks that the job has."""
    config = with_launched_ranks(config)
    if "RANK" not in os.environ and config.trainer.world_size > 1:
        raise ValueError(
            f"the configuration asks for {config.trainer.world_size} ranks, and this process is the only one: start "
            f"it with torchrun --nproc_per_node {config.trainer.n_gpus_per_node}, or set trainer.n_gpus_per_node=1"
        )
    return config


def _name(function: Callable[..., Any]) -> str:
    """Return the name by which the records call a function that a program gave."""
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
