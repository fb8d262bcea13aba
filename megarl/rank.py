"""Runs a rank that a launcher started: from its arguments to its exit code."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.config import ConfigError, load_run_config
from megarl.config.refusal import is_refusal
from megarl.config.secrets import hide
from megarl.debugging import debugging, follow_environment, hush_dependencies
from megarl.endings import ExitCode, note_phase
from megarl.own_code import OwnCodeError
from megarl.plain import plain
from megarl.processes import die_with_parent, end_now
from megarl.telemetry.console import go_on_without
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunRefused, RunStopped

if TYPE_CHECKING:  # a rank takes signals before it has imported torch
    from megarl.trainer.records.run_records import Callback

# What a rank waits before it repeats what another one may be saying: the launcher ends it meanwhile.
SECOND_VOICE_SECONDS = 2.5


def main(argv: list[str], callbacks: Sequence[Callback] = ()) -> int:
    """Take part in a run; returns an `ExitCode`, or 128 + s for signal s.

    Args:
        callbacks: called after each step, as those of `megarl.train`.
    """
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:  # else nobody launched it, and it may outlive the shell
        launcher = os.environ.get("MEGARL_LAUNCHER")
        die_with_parent(int(launcher) if launcher else None)
    go_on_without()
    follow_environment()
    stop = StopRequest(rank)
    stop.install()
    if not argv or argv[0].startswith("-"):
        return _refuse("usage: torchrun --nproc_per_node N -m megarl.train CONFIG [key=value ...]", rank)
    gc.disable()  # loading modules sets off hundreds of collections that find nothing: a seventh of a rank's start
    try:
        config = load_run_config(argv[0], argv[1:])
        from megarl.flow_kinds import FLOWS
        from megarl.parallel.cpu import enable_cpu_ranks
        from megarl.trainer.admission.checks import check_run
        from megarl.trainer.run_lock import RunLock

        hush_dependencies()  # checks of overrides import Megatron-Core
        inputs = check_run(config)
        enable_cpu_ranks()  # before Megatron-Core is imported, which a flow does
        flow = FLOWS.load(config.trainer.flow)
        lock = RunLock(config.trainer.run_dir, steps=inputs.total_steps or None) if rank == 0 else None
    except ValueError as e:
        if not isinstance(e, ConfigError) and not is_refusal(e):
            print(f"megarl: rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            return ExitCode.FAILED
        if debugging():
            traceback.print_exc()
        return _refuse(f"error: {e}", rank)

    from megarl.trainer.session.take_part import run

    gc.freeze()  # modules stay: no later collection need look at them
    gc.enable()
    try:
        stopped_by = run(inputs, flow, stop, callbacks, ends=True)
    except BaseException as e:
        # Leave at once: waiting for ranks that wait for this one would hang the job.
        code = _failed(e, rank, stop)
        if lock is not None and stop.ending is None:
            lock.note_end(f"failed: {plain(hide(' '.join(str(e).split())))[:200] or type(e).__name__}")
        sys.stdout.flush()
        end_now(code)
    if lock is not None:
        lock.note_end("finished" if stopped_by is None else f"stopped by {stopped_by.name}")
        lock.release()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    end_now(ExitCode.FINISHED if stopped_by is None else 128 + stopped_by)


def _failed(error: BaseException, rank: int, stop: StopRequest) -> int:
    """Say what ended the run, the rank that knows most first; returns the exit code."""
    from megarl.data.row_files import RowRefused, RowsChanged
    from megarl.parallel.watch import Stalled, is_peer_loss
    from megarl.rewards.results import RewardError
    from megarl.telemetry.profiler import OutOfMemory

    if debugging():
        traceback.print_exc()
    if stop.ending is not None:  # a signal is ending this process, what scores before it: the main thread misses that
        return 128 + stop.ending
    if isinstance(error, RunRefused):
        return _refuse(f"error: {error}", rank)
    if isinstance(error, RunStopped):
        _say_in_turn(f"stopped: {error}", rank)
        return ExitCode.STOPPED
    if is_peer_loss(error):
        time.sleep(SECOND_VOICE_SECONDS)
        if stop.ending is not None:  # so were the peers, and a person knows why
            return 128 + stop.ending
    code = _code_of(error)
    if isinstance(error, OutOfMemory):
        note_phase(rank, error.phase)
    text = f"rank {rank} failed:\n{traceback.format_exc()}"
    if is_peer_loss(error):  # our frames say nothing of the rank that is gone; --debug shows them
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = f"rank {rank} lost its connection to another rank, which has failed or is gone ({reason[:200]})"
    elif isinstance(error, Stalled):
        text = str(error)
    elif isinstance(error, RowRefused | OwnCodeError):  # one rank need say it
        time.sleep(SECOND_VOICE_SECONDS if rank else 0.0)
        text = f"rank {rank} failed: {error}"
    elif isinstance(error, RowsChanged | RewardError | OutOfMemory):  # its text says all, and our frames nothing
        if isinstance(error, RewardError) and error.everywhere:  # one rank need say it
            time.sleep(SECOND_VOICE_SECONDS if rank else 0.0)
            rank = error.rank
        text = f"rank {rank} failed: {error}"
    print(f"megarl: {plain(hide(text))}", file=sys.stderr, flush=True)
    return code


def _code_of(error: BaseException) -> ExitCode:
    """Return the exit code that tells a launcher what kind of failure it was."""
    from torch import AcceleratorError, OutOfMemoryError

    from megarl.data.row_files import RowRefused, RowsChanged
    from megarl.parallel.watch import Stalled, is_communication_failure
    from megarl.rewards.results import RewardError
    from megarl.telemetry.profiler import OutOfMemory

    if isinstance(error, RewardError | RowsChanged | RowRefused | OwnCodeError):
        return ExitCode.INPUT
    if isinstance(error, Stalled):
        return ExitCode.STALLED
    if isinstance(error, OutOfMemory | OutOfMemoryError):
        return ExitCode.OUT_OF_MEMORY
    if is_communication_failure(error):
        return ExitCode.LOST
    if isinstance(error, AcceleratorError) or (isinstance(error, RuntimeError) and "CUDA error" in str(error)):
        return ExitCode.DEVICE
    return ExitCode.FAILED


def _refuse(message: str, rank: int) -> int:
    """Print a refusal on every rank, since it may concern this host alone; rank 0 prints first."""
    _say_in_turn(message, rank)
    return ExitCode.REFUSED


def _say_in_turn(message: str, rank: int) -> None:
    if rank:
        time.sleep(SECOND_VOICE_SECONDS)
    who = f"rank {rank} on {socket.gethostname()}: " if rank else ""
    print(f"megarl: {who}{plain(hide(message))}", file=sys.stderr, flush=True)
