"""Runs Python programs that nobody trusts: what a policy writes, to see whether it is right.

A program gets mount, pid, network, ipc and uts namespaces (and a user namespace, or a user that nobody else is), limits
of everything that it could use up, a filter of system calls, no privileges, an environment without this process's
variables, and a view of this machine that holds Python and nothing of anybody's.
It ends with all its processes before `run_python` returns.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from importlib.abc import InspectLoader
from typing import IO, Literal

from megarl.isolation.launch import GRACE, Isolation, Limits, SandboxError, begin, end, popen, refusal
from megarl.isolation.memory_group import MemoryGroup
from megarl.isolation.start import CHANNEL

__all__ = ["Examination", "Isolation", "Limits", "Outcome", "SandboxError"]
__all__ += ["check_isolation", "run_python", "run_tests"]

Ended = Literal["exit", "signal", "time", "memory", "output", "killed"]

_SIGXCPU, _SIGKILL = 24, 9


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Describes the end of a program.

    Attributes:
        stdout, stderr: what it wrote, up to the limit; what is not UTF-8 as U+FFFD.
        ended: "exit" or "signal" by itself; "time" and "output" for what it used up; "memory" where a MemoryError
            ended it or the kernel killed it for memory; "killed" by somebody outside.
        exit_code: of "exit" or "memory"; a signal's number is negative; None where it was killed.
        seconds: by the clock. cpu_seconds: of it and its children; None where it was killed.
    """

    stdout: str
    stderr: str
    ended: Ended
    exit_code: int | None
    seconds: float
    cpu_seconds: float | None


def run_python(
    source: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    isolation: Isolation = "namespaces",
    folders: Sequence[str] = (),
) -> Outcome:
    """Run a program and wait for its end; it sees Python's own library, and no other package but in `folders`.

    Args:
        source: the program's text.
        stdin: what it reads.
        folders: that it sees and imports from, beside Python's own library.
        isolation: "process" gives the limits and the filter of system calls alone. The program then is the same user as
            this process, with its files and its network: unsafe, for machines where namespaces are forbidden.

    Raises:
        SandboxError: namespaces cannot be made here, or memory or processes for the sandbox itself ran out.
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        words, group = begin(stack, limits, isolation, len(source), folders)
        start = time.monotonic()
        (stdout, stderr, report), overflow = _run(stack, words, {"program": source, "stdin": stdin}, limits)
        return _outcome(stdout, stderr, report, overflow, time.monotonic() - start, limits, group)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Holds tests, as they ask a program.

    Attributes:
        tests: texts of Python, run one after another in one namespace.
        subjects: names that lead to the program though Python has them too.
        functions: functions and classes of the tests that are called as pytest calls them.
        entry_point: with it each test's `check(...)` is called with the program's function of that name.
        whole: stop at the first test that fails.
    """

    tests: list[str]
    subjects: list[str]
    functions: Sequence[str] = ()
    entry_point: str | None = None
    whole: bool = True


def run_tests(
    source: str,
    examination: Examination,
    *,
    limits: Limits | None = None,
    isolation: Isolation = "namespaces",
    folders: Sequence[str] = (),
) -> tuple[Outcome, list[bool]]:
    """Run a program that answers what tests ask of it, in two processes (`megarl.isolation.examine`).

    Returns:
        how the program ended, "exit" if all its tests were run; which tests passed, up to where they were run.

    Raises:
        SandboxError: as `run_python`.
    """
    limits = limits or Limits()
    text = json.dumps({"source": source, **asdict(examination)})
    with ExitStack() as stack:
        program = _answering()
        words, group = begin(stack, limits, isolation, len(program), folders)
        start = time.monotonic()
        files: dict[str, str | bytes | int] = {"program": program, "stdin": "", "tests": text}
        (stdout, stderr, report), overflow = _run(stack, words, files, limits)
        lines = report.splitlines()
        digits = [line.partition(" ")[2] for line in lines if line.startswith("tests ")]
        ends = [line for line in lines if line.startswith(("done ", "time ", "memory", "failed "))]
        ended = ends[-1] if ends else "done 0 0 0" if digits else ""
        outcome = _outcome(stdout, stderr, ended, overflow, time.monotonic() - start, limits, group)
        return outcome, [digit == "1" for digit in digits[0]] if digits and not overflow else []


@cache
def _answering() -> bytes:
    """Compile `megarl.isolation.answer` and what it imports into the file that the program's process runs."""
    names = [f"megarl.isolation.{name}" for name in ("plain_values", "far", "remote", "answer")]
    codes = []
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None and isinstance(spec.loader, InspectLoader)
        codes.append((name, marshal.dumps(spec.loader.get_code(name))))
    text = f"""
import marshal, sys
for name in ("megarl", "megarl.isolation"):
    sys.modules[name] = type(sys)(name)
    sys.modules[name].__path__ = []
for name, code in {codes!r}:
    sys.modules[name] = type(sys)(name)
    exec(marshal.loads(code), vars(sys.modules[name]))
sys.modules["megarl.isolation.answer"].main({CHANNEL})
"""
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(compile(text, "answer", "exec"))


@cache
def check_isolation() -> None:
    """Raise ValueError, in one line that says what to change, where namespaces cannot be made."""
    try:
        outcome = run_python("print(6 * 7)")
    except SandboxError as e:
        raise ValueError(str(e)) from e
    if outcome.stdout != "42\n":
        reason = " ".join((outcome.stderr or outcome.ended).split())[-300:]
        raise ValueError(f"no program runs in the sandbox: {reason}; isolation=process has limits alone (unsafe)")


def _run(
    stack: ExitStack, words: Sequence[str], files: Mapping[str, str | bytes | int], limits: Limits
) -> tuple[list[str], bool]:
    """Return stdout, stderr and the report of `start`, and whether it was stopped for writing too much."""
    process, report = popen(stack, words, files, subprocess.PIPE, subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        try:
            streams, overflow = _read([process.stdout, process.stderr, report], limits)
        finally:
            end(process)
    return [bytes(stream).decode(errors="replace") for stream in streams], overflow


def _read(streams: list[IO[bytes]], limits: Limits) -> tuple[list[bytearray], bool]:
    """Read the streams until their ends, or until one gives too much or the time is over.

    At the end of the last one, the report, all processes have ended; a descriptor may be on its way to nobody.
    """
    contents = [bytearray() for _ in streams]
    deadline = time.monotonic() + limits.wall + GRACE
    with selectors.DefaultSelector() as selector:
        for stream, content in zip(streams, contents, strict=True):
            selector.register(stream, selectors.EVENT_READ, content)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            over = streams[-1] not in [key.fileobj for key in selector.get_map().values()]
            ready = selector.select(0 if over else left)
            if over and not ready:  # who holds a stream open is no process any more
                break
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
                if len(key.data) > limits.output and key.data is not contents[-1]:
                    del key.data[limits.output :]
                    return contents, True
    return contents, False


def _outcome(
    stdout: str, stderr: str, report: str, overflow: bool, seconds: float, limits: Limits, group: MemoryGroup | None
) -> Outcome:
    """Tell the outcome by what was written, and by the line of `megarl.isolation.start.main`."""
    line = report.partition("\n")[0]
    word, _, rest = line.partition(" ")
    if word == "failed":
        raise SandboxError(refusal(rest))
    exit_code: int | None = None
    cpu: float | None = None
    ended: Ended = "killed"
    out_of_memory = group is not None and group.killed()
    if overflow:
        ended = "output"
    elif word == "done":
        status, cpu_us, wall_us = (int(number) for number in rest.split())
        exit_code, cpu, seconds = os.waitstatus_to_exitcode(status), cpu_us / 1e6, wall_us / 1e6
        ended = "exit" if exit_code >= 0 else "signal"
        if exit_code == -_SIGXCPU or (exit_code == -_SIGKILL and cpu >= limits.cpu):
            ended = "time"
        elif exit_code and (out_of_memory or stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")):
            ended = "memory"
    elif word == "time":
        ended, seconds = "time", float(rest) / 1e6
    elif word == "memory" or out_of_memory:
        ended = "memory"
    elif seconds > limits.wall:
        ended = "time"
    return Outcome(stdout=stdout, stderr=stderr, ended=ended, exit_code=exit_code, seconds=seconds, cpu_seconds=cpu)
