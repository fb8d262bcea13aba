"""Runs Python programs that nobody trusts: what a policy writes, to see whether it is right.

A program gets mount, pid, network, ipc and uts namespaces (and a user namespace, or a user that nobody else is), limits
of everything that it could use up, a filter of system calls, no privileges, an environment without this process's
variables, and a view of this machine that holds Python and nothing of anybody's.
It ends with all its processes before `run_python` returns.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import IO, Literal

from megarl.isolation.memory_group import MemoryGroup, memory_group

Ended = Literal["exit", "signal", "time", "memory", "output", "killed"]
Isolation = Literal["namespaces", "process"]

_MIB = 1 << 20
_GRACE = 10.0  # seconds over the wall clock's limit that starting and ending may take on a busy machine
_FILES = 4096  # in /tmp
_SEALS, _ALL_SEALS = 1033, 0xF  # F_ADD_SEALS: linux/fcntl.h
_SIGXCPU, _SIGKILL = 24, 9
# The face of the package is left out: what it imports takes half as long as Python's start.
_START = f"""
import sys
sys.modules["megarl"] = package = type(sys)("megarl")
package.__path__ = [{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))!r}]
from megarl.isolation.start import main
main(sys.argv[1:])
"""


class SandboxError(RuntimeError):
    """A program could not be run in isolation; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use up.

    Attributes:
        wall: seconds by the clock.
        cpu: seconds of a processor, for each of its processes; rounded up to whole ones.
        memory: MiB of address space of each process, and of all together where control groups can be made.
        disk: MiB that its files hold together, in memory.
        processes: with their threads; counts only with isolation="namespaces".
        open_files: of each process.
        output: bytes of stdout, and of stderr.
    """

    wall: float = 10.0
    cpu: float = 10.0
    memory: int = 1024
    disk: int = 64
    processes: int = 32
    open_files: int = 64
    output: int = 1 << 20

    def __post_init__(self) -> None:
        for name, least in (("wall", 0), ("cpu", 0), ("output", 0)):
            value = getattr(self, name)
            if not least < value < math.inf:
                raise ValueError(f"limit {name} = {value} must be finite and more than {least}")
        for name, least in (("memory", 64), ("disk", 1), ("processes", 1), ("open_files", 8)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= 1 << 30:
                raise ValueError(f"limit {name} = {value!r} must be a whole number from {least} on")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended.

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
    source: str, *, stdin: str = "", limits: Limits | None = None, isolation: Isolation = "namespaces"
) -> Outcome:
    """Run a program and wait for its end; it sees Python's own library and no other package.

    Args:
        source: the program's text.
        stdin: what it reads.
        isolation: "process" gives the limits and the filter of system calls alone. The program then is the same user as
            this process, with its files and its network: unsafe, for machines where namespaces are forbidden.

    Raises:
        SandboxError: namespaces cannot be made here, or memory or processes for the sandbox itself ran out.
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        group = memory_group(limits.memory * _MIB + len(source)) if isolation == "namespaces" else None
        if group is not None:
            stack.callback(group.close)
        folder = "/"
        if isolation == "process":
            folder = tempfile.mkdtemp(prefix="megarl-program-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        program = stack.enter_context(_file_in_memory(source))
        text_in = stack.enter_context(_file_in_memory(stdin))
        start = time.monotonic()
        streams, overflow = _run(_words(limits, isolation, folder, group), program, text_in, limits)
        stdout, stderr, report = (bytes(stream).decode(errors="replace") for stream in streams)
        seconds = time.monotonic() - start
        return _outcome(stdout, stderr, report, overflow, seconds, limits, group)


@cache
def check_isolation() -> None:
    """Raises ValueError, in one line that says what to change, where namespaces cannot be made."""
    try:
        outcome = run_python("print(6 * 7)")
    except SandboxError as e:
        raise ValueError(str(e)) from e
    if outcome.stdout != "42\n":
        said = " ".join((outcome.stderr or outcome.ended).split())[-300:]
        raise ValueError(f"no program runs in the sandbox: {said}; isolation=process has limits alone (unsafe)")


def _words(limits: Limits, isolation: Isolation, folder: str, group: MemoryGroup | None) -> list[str]:
    """For `megarl.isolation.start.Job`, but for the file descriptors."""
    python = os.path.realpath(sys.executable)
    said = {
        "isolated": int(isolation == "namespaces"),
        "python": python,
        "prefix": os.path.realpath(sys.base_prefix),
        "folder": folder,
        "group": group.processes if group else "",
        "wall": limits.wall,
        "cpu": math.ceil(limits.cpu),
        "memory": limits.memory * _MIB,
        "disk": limits.disk * _MIB,
        "files": _FILES,
        "processes": limits.processes,
        "open_files": limits.open_files,
    }
    return [f"{key}={value}" for key, value in said.items()]


@contextmanager
def _file_in_memory(text: str) -> Iterator[int]:
    """A file that nobody can change, at its beginning."""
    import fcntl

    descriptor = os.memfd_create("megarl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as f:
            f.write(text.encode(errors="replace"))
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, _SEALS, _ALL_SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def _run(words: list[str], program: int, stdin: int, limits: Limits) -> tuple[list[bytearray], bool]:
    """Stdout, stderr and the report of `start`, and whether it was stopped for writing too much."""
    report, report_in = os.pipe()
    descriptors = [f"program={program}", f"stdin={stdin}", f"report={report_in}"]
    with open(report, "rb", buffering=0) as said:
        try:
            process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", _START, *words, *descriptors],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(program, stdin, report_in),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as e:
            raise SandboxError(f"no process can be started for a program: {e}") from e
        finally:
            os.close(report_in)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with process.stdout, process.stderr:
            try:
                return _read([process.stdout, process.stderr, said], limits)
            finally:
                with suppress(OSError):
                    process.stdin.close()  # tells it to end
                try:
                    process.wait(timeout=_GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _read(streams: list[IO[bytes]], limits: Limits) -> tuple[list[bytearray], bool]:
    """All that the streams give until their ends, or until one gives too much or the time is over."""
    contents = [bytearray() for _ in streams]
    deadline = time.monotonic() + limits.wall + _GRACE
    with selectors.DefaultSelector() as selector:
        for stream, content in zip(streams, contents, strict=True):
            selector.register(stream, selectors.EVENT_READ, content)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
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
    """From what was written, and from the line of `megarl.isolation.start.main`."""
    line = report.partition("\n")[0]
    word, _, rest = line.partition(" ")
    if word == "failed":
        raise SandboxError(_refusal(rest))
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
    elif out_of_memory:
        ended = "memory"
    elif seconds > limits.wall:
        ended = "time"
    return Outcome(stdout=stdout, stderr=stderr, ended=ended, exit_code=exit_code, seconds=seconds, cpu_seconds=cpu)


def _refusal(reason: str) -> str:
    return (
        f"no namespaces can be made here ({reason}): allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container "
        "--cap-add SYS_ADMIN or --security-opt seccomp=unconfined), or set reward.args.isolation=process, which limits "
        "programs but protects neither files nor network (unsafe)"
    )
