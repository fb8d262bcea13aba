"""A run on one rank: join the others, train, leave."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megarl.config import dump_config
from megarl.config.load import CONFIG_FILE
from megarl.parallel.from_config import generation_layout, train_layout
from megarl.parallel.groups import Groups, build_groups, init_distributed, leave_world
from megarl.trainer.agreement import check_same_inputs
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.report import Report, title_of
from megarl.trainer.resuming.resume import Start, check_seen, choose_start, finished, last_row
from megarl.trainer.session import Callback, Run
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunInterrupted, RunRefused, RunStopped

Flow = Callable[[Run], None]
"""What a run does, as a function over roles: see `megarl.flows`."""


def run(
    inputs: Inputs, flow: Flow, stop: StopRequest, callbacks: Sequence[Callback] = (), *, ends: bool = False
) -> signal.Signals | None:
    """Join the job's ranks and `take_part`.

    Args:
        ends: the process does when this returns, which is when all ranks have come so far, with `end_now`. Leaving
            NCCL's communicators one by one, the engines' among them, would be dozens of agreements more, each of which
            can hang.
    """
    config = inputs.config
    init_distributed(config.trainer.timeout_minutes)
    groups = build_groups(train_layout(config), generation_layout(config), config.data.seed)
    stopped_by = take_part(inputs, flow, groups, stop, callbacks, ends=ends)
    if ends:
        groups.barrier("the end of the run")
    else:
        leave_world()
    return stopped_by


def take_part(
    inputs: Inputs,
    flow: Flow,
    groups: Groups,
    stop: StopRequest,
    callbacks: Sequence[Callback] = (),
    *,
    ends: bool = False,
) -> signal.Signals | None:
    """Train with inputs that `checks.check_run` has passed; returns the signal that stopped the run, if one did.

    Args:
        ends: see `run`; the engines are left as they are then.

    Raises:
        RunRefused: on every rank, if the ranks differ in what they read, or no checkpoint is fit to go on from.
        RunStopped: on every rank, if something went wrong that more steps would not mend.
        OutOfMemory: on a rank whose GPU has not enough memory.
    """
    config = inputs.config
    torch.manual_seed(config.data.seed)
    hosts = groups.all_gather(socket.gethostname(), "all ranks")
    watch = partial(groups.watch.active, rank=groups.rank, hosts=hosts, minutes=config.trainer.timeout_minutes)
    with watch(phase=lambda: "the start"):
        start = _agree(inputs, groups)
    if done := finished(inputs, start):
        _say(groups, done)
        return None
    report = Report(inputs, rank=groups.rank, first_step=last_row(start, config) + 1 if start.folder else None)
    session = Run(inputs, groups, report, stop, start, callbacks)
    stopped_by = None
    with watch(phase=lambda: session.timers.phase):
        try:
            flow(session)
            session.finish()
        except RunInterrupted as e:
            stopped_by = e.signal
        except torch.OutOfMemoryError as e:
            failure = session.profiler.out_of_memory(e)
            _close_after(failure, session, ends=ends)
            raise failure from e
        except BaseException as e:
            _close_after(e, session, ends=ends)
            raise
    session.close(engines=not ends)
    if stopped_by is not None:
        _say(groups, _stop_line(session, stopped_by))
    return stopped_by


def _close_after(failure: BaseException, session: Run, *, ends: bool) -> None:
    """What ended the run is what a person hears of, whatever fails now; its records tell of the steps before."""
    try:
        session.close(engines=isinstance(failure, RunStopped) and not ends)  # all ranks have stopped there
    except Exception as e:
        _say(session.groups, f"the run's records could not be closed: {type(e).__name__}: {e}")


def _agree(inputs: Inputs, groups: Groups) -> Start:
    """Whether all ranks read the same, where they begin, and whether all see the run's folder."""
    run_dir = inputs.config.trainer.run_dir
    try:
        check_same_inputs(inputs, groups)
        start = choose_start(inputs, groups, lambda text: _say(groups, text))
        if finished(inputs, start) is None:
            if groups.rank == 0:
                _write_config(inputs)
            groups.barrier("the run's folder")
            check_seen(os.path.join(run_dir, CONFIG_FILE), groups)
    except ValueError as e:
        raise RunRefused(str(e)) from e
    return start


def _write_config(inputs: Inputs) -> None:
    run_dir = inputs.config.trainer.run_dir
    os.makedirs(run_dir, exist_ok=True)
    with open(os.path.join(run_dir, CONFIG_FILE), "w", encoding="utf-8") as f:
        f.write(dump_config(inputs.config))


def _say(groups: Groups, text: str) -> None:
    if groups.rank == 0:
        print(f"megarl: {text}", file=sys.stderr, flush=True)


def _stop_line(session: Run, stopped_by: signal.Signals) -> str:
    position, settings = session.position, session.config.trainer
    loop = "" if position.loop in ("rl", "") else f"{title_of(position.loop)} "
    stopped = f"stopped by {stopped_by.name} after {loop}step {position.step}"
    if session.checkpoints.position != position:
        return f"{stopped}; no checkpoint of it (trainer.save_freq = {settings.save_freq})"
    again = "the same command" if settings.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"{stopped}; checkpoint {session.checkpoints.latest}; {again} goes on from it"
