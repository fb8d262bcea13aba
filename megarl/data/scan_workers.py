"""Processes that look at the rows of a large file, and end with the one that started them.

Each is a fresh interpreter without torch, 40 MB: nothing is forked from a process that may hold a GPU.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, NamedTuple

from megarl.data.files import stem_of
from megarl.data.scan import Scan, Scanned, arrow_rows, lines_of, scan
from megarl.processes import die_with_parent

AT_MOST = 8
"""Processes of a node: 300 MB together."""


class Stretch(NamedTuple):
    """Part of a file.

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


def look_at(stretch: Stretch, asked: Scan) -> Scanned:
    """`scan` of a part of a file; a file that cannot be read is its refusal."""
    stem = stem_of(stretch.name)
    try:
        if stretch.kind == "arrow":
            rows = arrow_rows(stretch.source, stretch.name, stretch.start, stretch.end, stretch.line)
            return scan(rows, asked, stem)
        lines = lines_of(stretch.source, stretch.name, stretch.start, stretch.end, stretch.line, asked.what)
        return scan(lines, asked, stem)
    except OSError as e:
        raise ValueError(f"{asked.what}: '{stretch.name}' cannot be read: {e.strerror or e}") from e


class ScanWorkers:
    """A context: some processes that look at stretches."""

    def __init__(self, asked: Scan, processes: int) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._asked = asked
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(os.getpid())],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
            )
            for _ in range(processes)
        ]

    def __enter__(self) -> ScanWorkers:
        try:
            for process in self._processes:
                self._send(process, self._asked)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def look_at(self, stretches: Iterable[Stretch]) -> Iterator[Scanned]:
        """What is found in each, in order; raises ValueError if a process is lost or a file cannot be read."""
        under_way: deque[subprocess.Popen[bytes]] = deque()
        for process, stretch in zip(cycle(self._processes), stretches, strict=False):
            if len(under_way) == 2 * len(self._processes):  # a small message each, which no pipe is too full for
                yield self._receive(under_way.popleft())
            self._send(process, stretch)
            under_way.append(process)
        while under_way:
            yield self._receive(under_way.popleft())

    def _send(self, process: subprocess.Popen[bytes], message: object) -> None:
        assert process.stdin is not None
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
        except OSError:
            raise self._lost(process) from None

    def _receive(self, process: subprocess.Popen[bytes]) -> Scanned:
        assert process.stdout is not None
        try:
            found = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._lost(process) from None
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Scanned)
        return found

    def _lost(self, process: subprocess.Popen[bytes]) -> ValueError:
        process.kill()
        code = process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ValueError(f"{self._asked.what}: a process that read the rows {how}; start again, with more memory")


_PROGRAM = "import sys; from megarl.data.scan_workers import serve; serve(int(sys.argv[1]))"


def serve(parent: int) -> None:
    """What a worker runs: a `Scan`, then stretches, until nothing more comes."""
    die_with_parent(parent)
    requests: BinaryIO = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a user's function prints is no answer
    asked: Scan = pickle.load(requests)
    while True:
        try:
            stretch = pickle.load(requests)
        except EOFError:
            return
        answer: Scanned | ValueError
        try:
            answer = look_at(stretch, asked)
        except ValueError as e:  # a user's file that cannot be imported, a file that is gone
            answer = ValueError(str(e))
        pickle.dump(answer, answers)
        answers.flush()
