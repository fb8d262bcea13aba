"""Ends processes together: a rank with its launcher, and what a rank started with the rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import psutil

# What asks a run to stop. SIGUSR1 is what Slurm sends some minutes before a job's time is over, SIGHUP what a terminal
# leaves behind, which `nohup` ignores.
_HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *_HANGUP)
_KILLED_SECONDS = 10.0  # that a killed process may take to be gone
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def module_command(module: str) -> list[str]:
    """Begin a command that runs a module as `python -m` does, but without the working directory, where files of a
    stranger's may lie that have the names of packages."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = f"import sys; sys.path[:] = [path for path in sys.path if path] + [{here!r}]"
    run = f"from runpy import run_module; run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"{paths}; {run}"]


@contextmanager
def signals_handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle some signals otherwise inside; what handled them before does so again afterwards. Main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends. A fork does not inherit this.

    Without it, ranks whose launcher was killed would go on training, and a second start would train beside them.

    Args:
        parent: who should be there still; default whoever is the parent now.
    """
    parent = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def tell_of_parents_end(signum: int) -> None:
    """Have the kernel send this process a signal when its parent ends, or the parent's thread that started it."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that `kill_descendants` still finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ending(code: int) -> str:
    """Name the exit code of a process; a signal's number is negative."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}")


def how_it_ended(code: int) -> str:
    """Put the exit code of a process into words, a predicate."""
    return f"{'ended with' if code >= 0 else 'was killed by'} {ending(code)}"


def children() -> list[psutil.Process]:
    """Return the processes that this one started, or adopted, and has not waited for."""
    return psutil.Process().children()


def kill_descendants(spared: Collection[psutil.Process] = ()) -> None:
    """End the processes that this one started, but for some children, and those that they started in turn."""
    started = [child for child in children() if child not in spared]
    below = []
    for child in started:
        with suppress(psutil.NoSuchProcess):
            below += child.children(recursive=True)
    for process in [*started, *below]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    by = time.monotonic() + _KILLED_SECONDS
    psutil.wait_procs(started, timeout=_KILLED_SECONDS)
    while any(_lives(process) for process in below) and time.monotonic() < by:
        time.sleep(0.01)


def _lives(process: psutil.Process) -> bool:
    """Tell whether a process runs; a zombie does not: whoever adopted it has not waited for it, and may never do so."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_tree(pid: int) -> None:
    """End a process and all that it and its children started; does not wait for them."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def end_with_descendants() -> NoReturn:
    """Leave with code 0 once all descendants are gone; for a process that adopts orphans, and so finds them all."""
    while left := children():
        for child in left:
            kill_tree(child.pid)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    os._exit(0)


def end_now(code: int) -> NoReturn:
    """Leave this process without waiting for anybody, from any thread: its descendants first, then itself."""
    kill_descendants()
    os._exit(code)  # flushes nothing: another thread may hold a stream's lock, blocked on a pipe that nobody reads


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
