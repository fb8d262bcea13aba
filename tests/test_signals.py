"""What a signal does to one rank, seen while its main thread sits in C, where Python runs no handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from tiny_run import ROOT

PRELUDE = """
import ctypes, os, signal, sys, time
from megarl.trainer import stop
stop.RELAYED_SECONDS = 0.5
request = stop.StopRequest(int(os.environ.get("RANK", "0")))
request.install()
def wait_in_c():
    inner, outer = os.pipe()
    print("ready", flush=True)
    ctypes.CDLL(None).read(inner, ctypes.create_string_buffer(1), 1)
"""
ALL = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


def signalled(code: str, numbers: Sequence[int], *, apart: float = 1.0, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a process that gets these signals when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in numbers:
        process.send_signal(number)
        time.sleep(apart)
    _, err = process.communicate(timeout=300)
    return process.returncode, err


@pytest.mark.parametrize("number", ALL, ids=lambda number: number.name)
def test_before_the_loop_a_signal_ends_the_rank(number: signal.Signals) -> None:
    code, err = signalled("wait_in_c()", [number], apart=0)
    assert (code, err) == (128 + number, f"megarl: {number.name}: stopped before the first step\n")


def test_only_the_first_rank_speaks() -> None:
    assert signalled("wait_in_c()", [signal.SIGTERM], apart=0, RANK="1") == (143, "")


def test_in_the_loop_the_second_signal_ends_the_rank() -> None:
    """The first is only noted, at once; a copy of it that a launcher sends on is no second one."""
    code, err = signalled("request.defer(9999, saves=True); wait_in_c()", [signal.SIGINT, signal.SIGTERM])
    assert code == 128 + signal.SIGTERM
    assert err.splitlines() == [
        "megarl: SIGINT: saving after this step; a second signal ends the run at once",
        "megarl: SIGTERM: ended at once by a second signal",
    ]


def test_a_step_that_takes_too_long_is_not_waited_for() -> None:
    relayed = [signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1]
    code, err = signalled("request.defer(1.5, saves=False); wait_in_c()", relayed, apart=0.02)
    assert code == 128 + signal.SIGUSR1
    assert err.splitlines() == [
        "megarl: SIGUSR1: stopping after this step; a second signal ends the run at once",
        "megarl: SIGUSR1: the step was not done within trainer.stop_timeout = 1.5 s",
    ]


def test_a_forked_helper_s_signals_are_its_own() -> None:
    """A helper that is ended by SIGTERM has its parent's handlers and wake-up socket, unless it forgets them."""
    code = """
import warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
request.defer(100, saves=True)
print("ready", flush=True)
helper = os.fork()
if helper == 0:
    while True:
        time.sleep(1)
time.sleep(0.5)
os.kill(helper, signal.SIGTERM)
_, status = os.waitpid(helper, 0)
assert os.WTERMSIG(status) == signal.SIGTERM
time.sleep(0.5)
"""
    assert signalled(code, []) == (0, "")


def test_helpers_end_with_a_rank() -> None:
    code = """
import subprocess
helper = subprocess.Popen(["sleep", "100"], start_new_session=True)
print(helper.pid, file=sys.stderr, flush=True)
wait_in_c()
"""
    ended, err = signalled(code, [signal.SIGTERM], apart=0)
    assert ended == 143
    assert not os.path.exists(f"/proc/{err.split()[0]}")


def test_what_fails_because_a_signal_ends_the_rank_is_not_told() -> None:
    """Helpers end before their rank, whose main thread may notice: it waits for one here."""
    code = """
import subprocess
from megarl import processes, rank
killed = processes.kill_descendants
processes.kill_descendants = lambda: (killed(), time.sleep(2))
helper = subprocess.Popen(["sleep", "100"])
print("ready", flush=True)
helper.wait()
os._exit(rank._failed(RuntimeError("the process that leads the reward workers has ended"), 0, request))
"""
    assert signalled(code, [signal.SIGINT], apart=0) == (130, "megarl: SIGINT: stopped before the first step\n")
