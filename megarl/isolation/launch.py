"""Starts `megarl.isolation.start`, and processes that last behind it."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Literal

from megarl.isolation.memory_group import MemoryGroup, memory_group
from megarl.private_folder import private_folder

Isolation = Literal["namespaces", "process"]

MIB = 1 << 20
GRACE = 10.0
"""Seconds over a limit of time that starting and ending may take on a busy machine."""
_FILES = 4096  # in /tmp
_SEALS, _ALL_SEALS = 1033, 0xF  # F_ADD_SEALS: linux/fcntl.h
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
    """Limits of what a program may use up.

    Attributes:
        wall: seconds by the clock.
        cpu: seconds of a processor, for each of its processes; rounded up to whole ones.
        memory: MiB of address space of each process, and of what all hold together: a control group sees to that
            where one can be made; elsewhere they are looked at every 20 ms, and have no memory that they share but
            files.
        disk: MiB that its files hold together, in memory; without a control group these come on top.
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


class IsolatedProcess(AbstractContextManager["IsolatedProcess"]):
    """Holds a process of `start_isolated`; as a context manager it closes the process at the end.

    Attributes:
        pid: of the process that holds all others: when that one ends, all of them end.
    """

    def __init__(self, process: subprocess.Popen[bytes], report: IO[bytes], resources: ExitStack) -> None:
        self._process, self._report, self._resources = process, report, resources
        self.pid = process.pid

    def poll(self) -> bool:
        """Tell whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process with all that it started, and wait for that; also after it has ended by itself."""
        end(self._process)

    def close(self) -> None:
        """Kill the process, and release the resources that held it."""
        self.kill()
        self._report.close()
        self._resources.close()

    def how_it_ended(self) -> str:
        """Say how an ended process ended: "memory" (too much), "exit N", "signal N", or "killed" (from outside)."""
        word, _, rest = self._report.read().decode(errors="replace").strip().rpartition("\n")[2].partition(" ")
        if word == "done":
            code = os.waitstatus_to_exitcode(int(rest.split()[0]))
            return f"exit {code}" if code >= 0 else f"signal {-code}"
        return word or "killed"

    def __exit__(self, *_: object) -> None:
        self.close()


def start_isolated(
    program: str,
    *,
    channel: socket.socket,
    folders: Sequence[str] = (),
    imports_from: Sequence[str] | None = None,
    limits: Limits | None = None,
    isolation: Isolation = "namespaces",
    stderr: int = subprocess.DEVNULL,
) -> IsolatedProcess:
    """Start a Python program that lasts: in namespaces, without network, files or variables of this process.

    It ends when it wants to, when it is closed, or when this process ends; its channel then reads as at its end.

    Args:
        program: the program's text. It finds the channel as descriptor 3: `socket.socket(fileno=3)`.
        channel: one end of a `socket.socketpair()`; the caller closes its copy afterwards.
        folders: or files, shown to it, read-only, at the same paths; root's processes need such as every user may
            read. No other installed package can be seen.
        imports_from: folders in front of its `sys.path`; default `folders`.
        limits: `wall`, `cpu` and `output` do not count.
        isolation: see `megarl.rewards.sandbox.run_python`.
        stderr: descriptor for what it writes to stderr; its standard output goes nowhere.

    Raises:
        SandboxError: namespaces cannot be made here, or memory or processes ran out.
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        words, _ = begin(stack, limits, isolation, len(program), folders, imports_from)
        words = [word for word in words if not word.startswith(("wall=", "cpu="))] + ["wall=0", "cpu=0"]
        files: dict[str, str | bytes | int] = {"program": program, "stdin": "", "channel": channel.fileno()}
        process, report = popen(stack, words, files, subprocess.DEVNULL, stderr)
        stack.callback(end, process)
        line = b""
        while not line.endswith(b"\n") and (byte := report.read(1)):
            line += byte
        word, _, reason = line.decode().strip().partition(" ")
        if word != "started":
            raise SandboxError(refusal(reason) if word == "failed" else "an isolated process was killed as it started")
        return IsolatedProcess(process, report, stack.pop_all())


def begin(
    stack: ExitStack,
    limits: Limits,
    isolation: Isolation,
    size: int,
    folders: Sequence[str] = (),
    imports_from: Sequence[str] | None = None,
) -> tuple[list[str], MemoryGroup | None]:
    """Return the words of `start.Arguments`, but for the file descriptors; the stack gives back what they need."""
    imports_from = folders if imports_from is None else imports_from
    group = memory_group(limits.memory * MIB + size) if isolation == "namespaces" else None
    if group is not None:
        stack.callback(group.close)
    folder = "/"
    if isolation == "process":
        folder = stack.enter_context(private_folder("megarl-program-"))
    values = {
        "isolated": int(isolation == "namespaces"),
        "python": os.path.realpath(sys.executable),
        "prefix": os.path.realpath(sys.base_prefix),
        "folder": folder,
        "group": group.processes if group else "",
        "channel": -1,
        "tests": -1,
        "wall": limits.wall,
        "cpu": math.ceil(limits.cpu),
        "memory": limits.memory * MIB,
        "disk": limits.disk * MIB,
        "files": _FILES,
        "processes": limits.processes,
        "open_files": limits.open_files,
    }
    words = [f"{key}={value}" for key, value in values.items()]
    words += [f"shown={path}" for path in folders] + [f"path={path}" for path in imports_from]
    return words, group


@contextmanager
def _file_in_memory(content: str | bytes) -> Iterator[int]:
    """Make a file that nobody can change; its descriptor is at its beginning."""
    descriptor = os.memfd_create("megarl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as f:
            f.write(content.encode(errors="replace") if isinstance(content, str) else content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, _SEALS, _ALL_SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def popen(
    stack: ExitStack, words: Sequence[str], files: Mapping[str, str | bytes | int], stdout: int, stderr: int
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a process of `megarl.isolation.start`; the end of its standard input tells it to end.

    Args:
        words, files: what `start.Arguments` is told; each file is its content, or a descriptor. The stack closes them.

    Returns:
        the process, and the lines that it writes to its report.

    Raises:
        SandboxError: it cannot be started.
    """
    report, report_in = os.pipe()
    lines = stack.enter_context(open(report, "rb", buffering=0))  # noqa: SIM115
    try:
        descriptors = {"report": report_in}
        for name, file in files.items():
            descriptors[name] = file if isinstance(file, int) else stack.enter_context(_file_in_memory(file))
        words = [*words, *(f"{name}={descriptor}" for name, descriptor in descriptors.items())]
        process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-c", _START, *words],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            pass_fds=tuple(descriptors.values()),
            env={},
            cwd="/",
            start_new_session=True,
        )
    except OSError as e:
        raise SandboxError(f"no process can be started for a program: {e}") from e
    finally:
        os.close(report_in)
    return process, lines


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process of `popen` to end, and wait for that."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def refusal(reason: str) -> str:
    """Say what to change where namespaces cannot be made."""
    return (
        f"no namespaces can be made here ({reason}): allow user namespaces (sysctl user.max_*_namespaces of each kind, "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container "
        "--cap-add SYS_ADMIN or --security-opt seccomp=unconfined), or set reward.args.isolation=process, which limits "
        "programs but protects neither files nor network (unsafe)"
    )
