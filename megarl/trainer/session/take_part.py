"""Does the run on one rank: joins the others, trains, leaves."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from megarl.config.refusal import is_refusal
from megarl.config.secrets import hide
from megarl.data.row_files import RowRefused
from megarl.own_code import OwnCodeError
from megarl.parallel.deterministic import deterministic
from megarl.parallel.meeting import follow_launcher
from megarl.parallel.train_groups import leave_world
from megarl.parallel.world import World, init_distributed
from megarl.plain import plain
from megarl.rewards.results import RewardError
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.report import Report, title_of
from megarl.trainer.records.run_records import Callback
from megarl.trainer.resuming.identity import identity_of
from megarl.trainer.resuming.resume import Start, choose_start, finished
from megarl.trainer.session.agreement import check_same_inputs
from megarl.trainer.session.run import Run
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunInterrupted, RunRefused, RunStopped
from megarl.trainer.surroundings import own_place

Flow = Callable[[Run], None]
"""What a run does, as a function over roles: see `megarl.flows`."""


def run(
    inputs: Inputs, flow: Flow, stop: StopRequest, callbacks: Sequence[Callback] = (), *, ends: bool = False
) -> signal.Signals | None:
    """Join the job's ranks and `take_part`.

    Args:
        ends: the caller ends the process with `end_now` when this returns, which is when all ranks have come so far.
            Leaving NCCL's communicators one by one, the engines' among them, would be dozens of agreements more, each
            of which can hang.
    """
    config = inputs.config
    follow_launcher()
    with deterministic(config.trainer.deterministic):
        init_distributed(config.trainer.timeout_minutes)
        world = World()
        stopped_by = take_part(inputs, flow, world, stop, callbacks, ends=ends)
        if ends:
            world.barrier("the end of the run")
        else:
            leave_world()
    return stopped_by


def take_part(
    inputs: Inputs,
    flow: Flow,
    world: World,
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
    places = world.all_gather(own_place(), "all ranks")
    hosts = [place.host for place in places]
    minutes = config.trainer.timeout_minutes
    watch = partial(world.watch.active, rank=world.rank, hosts=hosts, minutes=minutes)
    with watch(phase=lambda: "the start"):
        start = replace(_agree(inputs, world), places=tuple(places))
        if done := finished(inputs, start):
            _say(world, done)
            return None
        report = Report(inputs, rank=world.rank, first_step=start.state["row"] + 1 if start.folder else None)
        session = Run(inputs, world, report, stop, start, callbacks)
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
            if isinstance(e, RowRefused):  # whose message says how to go on
                _say(world, f"{_saved_before(session)} lacks rows that can be used; {_last_checkpoint(session)}")
            if isinstance(e, RewardError) and e.everywhere:
                _say(world, f"{_saved_before(session)} could not be scored; {_goes_on(session)}")
            if isinstance(e, OwnCodeError) and e.everywhere:
                _saved_before(session)
                _say(world, _goes_on(session))
            _close_after(e, session, ends=ends)
            raise
    session.close(engines=not ends)
    if stopped_by is not None:
        _say(world, _stop_line(session, stopped_by))
    return stopped_by


def _close_after(failure: BaseException, session: Run, *, ends: bool) -> None:
    """Close the run after a failure. Whatever fails now, a person hears of the first failure."""
    try:
        session.close(engines=isinstance(failure, RunStopped) and not ends)  # all ranks have stopped there
    except Exception as e:
        _say(session.world, f"the run's records could not be closed: {type(e).__name__}: {e}")


def _saved_before(session: Run) -> str:
    """Save the last whole step on all ranks, and name the one that failed after it, which has changed nothing."""
    position = session.position
    try:
        session.save_whole_steps()
    except Exception as e:
        _say(session.world, f"the steps before could not be saved: {type(e).__name__}: {e}")
    validated = session.checkpoints.position == position and position.step > 0
    return f"the validation of step {position.step}" if validated else f"step {position.step}"


def _agree(inputs: Inputs, world: World) -> Start:
    """Check that all ranks read the same; returns where they begin."""
    try:
        identity = identity_of(inputs)
        check_same_inputs(inputs, identity, world)
        return choose_start(inputs, identity, world)
    except ValueError as e:
        if not is_refusal(e):
            raise
        raise RunRefused(str(e)) from e


def _say(world: World, text: str) -> None:
    if world.rank == 0:
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


def _last_checkpoint(session: Run) -> str:
    latest = session.checkpoints.latest
    return f"checkpoint {latest}" if latest else "there is no checkpoint to go on from"


def _goes_on(session: Run) -> str:
    if session.checkpoints.latest is None:
        return _last_checkpoint(session)
    again = "the same command" if session.config.trainer.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"{_last_checkpoint(session)}; {again} goes on from it"
