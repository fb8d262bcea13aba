"""Starts processes that look at the rows of a large file.

Each is a fresh interpreter without torch: 40 MB, or 65 MB with a tokenizer of transformers.
"""

from __future__ import annotations

import pickle
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import cycle
from typing import Any, Literal, NamedTuple

from megarl.data.files import stem_of
from megarl.data.scan import Scan, Scanned, arrow_rows, lines_of
from megarl.processes import how_it_ended
from megarl.workers.channel import read_message, write_message
from megarl.workers.interpreter import Interpreter

AT_MOST = 8
"""Processes of a node: 300 to 500 MB together."""


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


def look_at(stretch: Stretch, rules: Scan) -> Scanned:
    """Look at the rows in a part of a file; raises ValueError for a file that cannot be read."""
    stem = stem_of(stretch.name)
    try:
        if stretch.kind == "arrow":
            rows = arrow_rows(stretch.source, stretch.name, stretch.start, stretch.end, stretch.line)
            return rules.look_at(rows, stem)
        lines = lines_of(stretch.source, stretch.name, stretch.start, stretch.end, stretch.line, rules.what)
        return rules.look_at(lines, stem)
    except OSError as e:
        raise ValueError(f"{rules.what}: '{stretch.name}' cannot be read: {e.strerror or e}") from e


class ScanWorkers(AbstractContextManager["ScanWorkers"]):
    """Runs processes that look at stretches, and ends them with the context."""

    def __init__(self, rules: Scan, processes: int) -> None:
        self._rules = rules
        environment = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        target = f"{__name__}:{'serve_without_torch' if rules.answers else 'serve'}"
        self._processes = [Interpreter(target, environment=environment) for _ in range(processes)]

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def look_at(self, stretches: Iterable[Stretch]) -> Iterator[Scanned]:
        """Scan each stretch, in order, once; raises ValueError if a process is lost or a file cannot be read."""
        under_way: deque[Interpreter] = deque()
        for process in self._processes:
            self._send(process, self._rules)
        for process, stretch in zip(cycle(self._processes), stretches, strict=False):
            if len(under_way) == 2 * len(self._processes):  # a small message each, which no connection is too full for
                yield self._receive(under_way.popleft())
            self._send(process, stretch)
            under_way.append(process)
        while under_way:
            yield self._receive(under_way.popleft())

    def _send(self, process: Interpreter, message: object) -> None:
        try:
            process.send(pickle.dumps(message))
        except OSError:
            raise self._lost(process) from None

    def _receive(self, process: Interpreter) -> Scanned:
        message = process.receive()
        if message is None:
            raise self._lost(process)
        answer = pickle.loads(message)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Scanned)
        return answer

    def _lost(self, process: Interpreter) -> ValueError:
        process.close()
        how = how_it_ended(process.process.returncode)
        return ValueError(f"{self._rules.what}: a process that read the rows {how}; start again, with more memory")


def serve_without_torch(connection: socket.socket) -> None:
    """Call `serve` without torch, where tokenizers are opened and no user's code runs: it takes 130 MB less."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    serve(connection)


def serve(connection: socket.socket) -> None:
    """Scan the stretches that follow upon a `Scan`, until nothing more comes: the process of a worker."""
    descriptor = connection.fileno()
    rules: Scan | None = None
    while (message := read_message(descriptor)) is not None:
        if rules is None:
            rules = pickle.loads(message)
            continue
        answer: Scanned | ValueError
        try:
            answer = look_at(pickle.loads(message), rules)
        except ValueError as e:  # a user's file that cannot be imported, a file that is gone
            answer = ValueError(str(e))
        with suppress(OSError):  # nobody waits for it
            write_message(descriptor, pickle.dumps(answer))
