"""One rank of a run that a launcher started: from its arguments to its exit code."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
import traceback
import warnings

from megarl.config import ConfigError, load_run_config
from megarl.processes import die_with_parent, end_now
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunRefused, RunStopped

# What a rank waits before it repeats what another one may be saying: the launcher ends it meanwhile.
SECOND_VOICE_SECONDS = 2.5


def main(argv: list[str]) -> int:
    """Exit code 0 after the last step, 2 for a run that is refused, 1 for one that failed, 128 + s for signal s."""
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:  # else nobody launched it, and it may outlive the shell
        launcher = os.environ.get("MEGARL_LAUNCHER")
        die_with_parent(int(launcher) if launcher else None)
    stop = StopRequest(rank)
    stop.install()
    if not argv or argv[0].startswith("-"):
        return _refuse("usage: torchrun --nproc_per_node N -m megarl.train CONFIG [key=value ...]", rank)
    gc.disable()  # loading modules sets off hundreds of collections that find nothing: a seventh of a rank's start
    try:
        config = load_run_config(argv[0], argv[1:])
        from megarl.flows.registry import FLOWS
        from megarl.parallel.cpu import enable_cpu_ranks
        from megarl.trainer.checks import check_run
        from megarl.trainer.run_lock import RunLock

        inputs = check_run(config)
        _hush_dependencies()
        enable_cpu_ranks()  # before Megatron-Core is imported, which a flow does
        flow = FLOWS.load(config.trainer.flow)
        lock = RunLock(config.trainer.run_dir) if rank == 0 else None
    except (ConfigError, ValueError) as e:
        return _refuse(f"error: {e}", rank)

    from megarl.trainer.run import run

    gc.freeze()  # modules stay: no later collection need look at them
    gc.enable()
    try:
        stopped_by = run(inputs, flow, stop)
    except BaseException as e:
        # Leave at once: waiting for ranks that wait for this one would hang the job.
        code = _failed(e, rank)
        sys.stdout.flush()
        end_now(code)
    if lock is not None:
        lock.release()
    return 0 if stopped_by is None else 128 + stopped_by


def _failed(error: BaseException, rank: int) -> int:
    """Say what ended the run, the rank that knows most first; returns the exit code."""
    from megarl.data.row_files import RowsChanged
    from megarl.parallel.watch import Stalled, is_peer_loss
    from megarl.rewards.judge import RewardError

    if isinstance(error, RunRefused):
        return _refuse(f"error: {error}", rank)
    if isinstance(error, RunStopped):
        _say_in_turn(f"stopped: {error}", rank)
        return 1
    if is_peer_loss(error):
        time.sleep(SECOND_VOICE_SECONDS)
    text = f"rank {rank} failed:\n{traceback.format_exc()}"
    if isinstance(error, Stalled):
        text = str(error)
    elif isinstance(error, RowsChanged | RewardError):  # its text has the user's frames, and ours say nothing
        text = f"rank {rank} failed: {error}"
    print(f"megarl: {text}", file=sys.stderr, flush=True)
    return 1


def _hush_dependencies() -> None:
    """Megatron-Core, torch and vLLM warn of their own deprecations and absent options, per rank and call site."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for module in ("megatron", "torch", "vllm"):
        warnings.filterwarnings("ignore", module=module)


def _refuse(message: str, rank: int) -> int:
    """Say why on every rank: the reason may be this host's alone. Most are every rank's, and rank 0 says them first."""
    _say_in_turn(message, rank)
    return 2


def _say_in_turn(message: str, rank: int) -> None:
    if rank:
        time.sleep(SECOND_VOICE_SECONDS)
    who = f"rank {rank} on {socket.gethostname()}: " if rank else ""
    print(f"megarl: {who}{message}", file=sys.stderr, flush=True)
