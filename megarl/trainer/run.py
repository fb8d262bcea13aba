"""A run on one rank: join the others, train, leave."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megarl.config.refusal import is_refusal
from megarl.config.secrets import hide
from megarl.parallel.deterministic import deterministic
from megarl.parallel.from_config import generation_layout, train_layout
from megarl.parallel.groups import Groups, build_groups, init_distributed, leave_world
from megarl.parallel.meeting import follow_launcher, job_store
from megarl.plain import plain
from megarl.rewards.judge import RewardError
from megarl.trainer.agreement import check_same_inputs
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.report import Report, title_of
from megarl.trainer.resuming.resume import Start, choose_start, finished, last_row
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
    follow_launcher()
    with deterministic(config.trainer.deterministic):
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
    minutes = config.trainer.timeout_minutes
    watch = partial(groups.watch.active, rank=groups.rank, hosts=hosts, minutes=minutes, join=job_store)
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
            if start.folder is None:
                session.begin()
            flow(session)
            session.finish()
        except RunInterrupted as e:
            stopped_by = e.signal
        except torch.OutOfMemoryError as e:
            failure = session.profiler.out_of_memory(e)
            _close_after(failure, session, ends=ends)
            raise failure from e
        except BaseException as e:
            if isinstance(e, RewardError) and e.everywhere:
                _save_before(session)
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


def _save_before(session: Run) -> None:
    """A step that could not be scored has changed nothing: keep the ones before."""
    step = session.position.step
    try:
        session.save_whole_steps()
    except Exception as e:
        _say(session.groups, f"the steps before could not be saved: {type(e).__name__}: {e}")
    _say(session.groups, f"step {step} could not be scored; {_goes_on(session)}")


def _agree(inputs: Inputs, groups: Groups) -> Start:
    """Whether all ranks read the same, and where they begin."""
    try:
        check_same_inputs(inputs, groups)
        return choose_start(inputs, groups, lambda text: _say(groups, text))
    except ValueError as e:
        if not is_refusal(e):
            raise
        raise RunRefused(str(e)) from e


def _say(groups: Groups, text: str) -> None:
    if groups.rank == 0:
        print(f"megarl: {plain(hide(text))}", file=sys.stderr, flush=True)


def _stop_line(session: Run, stopped_by: signal.Signals) -> str:
    position, settings = session.position, session.config.trainer
    loop = "" if position.loop in ("rl", "") else f"{title_of(position.loop)} "
    stopped = f"stopped by {stopped_by.name} after {loop}step {position.step}"
    again = "the same command" if settings.resume_mode == "auto" else "trainer.resume_mode=auto"
    if session.checkpoints.failure is not None:
        latest = session.checkpoints.latest
        further = f"goes on from {latest}" if latest else "begins again"
        return f"{stopped}, and not saved: {session.checkpoints.failure}; make room, and {again} {further}"
    if session.checkpoints.position != position:
        return f"{stopped}; no checkpoint of it (trainer.save_freq = {settings.save_freq})"
    return f"{stopped}; {_goes_on(session)}"


def _goes_on(session: Run) -> str:
    latest = session.checkpoints.latest
    again = "the same command" if session.config.trainer.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"checkpoint {latest}; {again} goes on from it" if latest else "there is no checkpoint to go on from"
