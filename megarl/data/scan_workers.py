"""Starts processes that look at the rows of a large file.

A fresh interpreter imports what they need, and forks them: pages that stay as they are count once.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import cycle
from typing import Any, Literal, NamedTuple, NoReturn

from megarl.data.files import stem_of
from megarl.data.scan import Scan, Scanned, arrow_rows, lines_of
from megarl.processes import STOP_SIGNALS, die_with_parent, how_it_ended, kill_descendants
from megarl.workers.channel import read_message, write_message
from megarl.workers.interpreter import Interpreter

_MOST_PASSED = 253  # connections in a message: SCM_MAX_FD of Linux
ENDS_SECONDS = 10.0
"""Time in which the interpreter ends whose process has ended."""


class Stretch(NamedTuple):
    """Describes a part of a file.

    Attributes:
        source: path, or the bytes of a small file.
        name: what people call the file.
        start, end: bytes of a jsonl file, from the beginning of a line; batches of an Arrow file.
        line: number of the first line, or row.
    """

    kind: Literal["jsonl", "arrow"]
    source: Any
    name: str
    start: int
    end: int
    line: int = 1


def look_at(stretch: Stretch, scan: Scan) -> Scanned:
    """Look at the rows in a part of a file; raises ValueError for a file that cannot be read."""
    stem = stem_of(stretch.name)
    try:
        if stretch.kind == "arrow":
            rows = arrow_rows(stretch.source, stretch.name, stretch.start, stretch.end, stretch.line)
            return scan.look_at(rows, stem)
        lines = lines_of(stretch.source, stretch.name, stretch.start, stretch.end, stretch.line, scan.what)
        return scan.look_at(lines, stem)
    except OSError as e:
        raise ValueError(f"{scan.what}: '{stretch.name}' cannot be read: {e.strerror or e}") from e


class ScanWorkers(AbstractContextManager["ScanWorkers"]):
    """Runs processes that look at stretches, and ends them with the context."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        environment = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        target = f"{__name__}:{'serve_without_torch' if scan.answers else 'serve'}"
        self._process = Interpreter(target, environment=environment)
        pairs = [socket.socketpair() for _ in range(min(scan.most_processes, len(os.sched_getaffinity(0))))]
        self._connections = [own for own, _ in pairs]
        try:
            self._process.pass_on([other for _, other in pairs])
            self._process.send(pickle.dumps(scan))
        except OSError:
            raise self._lost() from None
        finally:
            for _, other in pairs:
                other.close()

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        self._process.close()

    def look_at(self, stretches: Iterable[Stretch]) -> Iterator[Scanned]:
        """Scan each stretch, in order, once; raises ValueError if a process is lost or a file cannot be read."""
        under_way: deque[int] = deque()
        for connection, stretch in zip(cycle(self._connections), stretches, strict=False):
            if len(under_way) == 2 * len(self._connections):  # a small message each, for which there is always room
                yield self._receive(under_way.popleft())
            try:
                write_message(connection.fileno(), pickle.dumps(stretch))
            except OSError:
                raise self._lost() from None
            under_way.append(connection.fileno())
        while under_way:
            yield self._receive(under_way.popleft())

    def _receive(self, descriptor: int) -> Scanned:
        message = read_message(descriptor)
        if message is None:
            raise self._lost()
        answer = pickle.loads(message)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Scanned)
        return answer

    def _lost(self) -> ValueError:
        self._process.close(ENDS_SECONDS)
        how = how_it_ended(self._process.process.returncode)
        return ValueError(f"{self._scan.what}: a process that read the rows {how}; start again, with more memory")


def serve_without_torch(connection: socket.socket) -> None:
    """Call `serve` without torch, where tokenizers are opened and no user's code runs: it takes 130 MB less."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    serve(connection)


def serve(connection: socket.socket) -> None:
    """Fork a process for each connection that is passed on, and wait for them. It ends as the first of them that fails.

    Args:
        connection: on which the `Scan` follows.
    """
    _, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_PASSED)
    message = read_message(connection.fileno())
    if message is None:
        return
    scan = pickle.loads(message)
    scan.prepare()
    gc.freeze()  # a collection would write to the pages that are shared
    parent, workers = os.getpid(), set()
    for descriptor in descriptors:
        if not (pid := os.fork()):
            _work(descriptor, scan, parent)
        workers.add(pid)
    while workers:
        pid, status = os.wait()
        if pid in workers and status:
            kill_descendants()
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                os.kill(parent, -code)
            os._exit(abs(code))
        workers.discard(pid)


def _work(descriptor: int, scan: Scan, parent: int) -> NoReturn:
    """Scan the stretches that come over a connection, until nothing more comes."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(parent)
    while (message := read_message(descriptor)) is not None:
        answer: Scanned | ValueError
        try:
            answer = look_at(pickle.loads(message), scan)
        except ValueError as e:  # a user's file that cannot be imported, a file that is gone
            answer = ValueError(str(e))
        with suppress(OSError):  # nobody waits for it
            write_message(descriptor, pickle.dumps(answer))
    os._exit(0)
