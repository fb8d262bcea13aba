"""Compares mathematical answers in a process of its own, which is killed when a comparison takes too long or too much.

What a policy writes can hang a computer algebra system inside C code, where no signal stops it: 9^{9^{9}} has 370
million digits.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from megarl.processes import die_with_parent

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megarl.rewards.math_process import serve
serve()
"""
_STARTING = 120.0  # seconds that importing the library may take where files are slow
_MEMORY = 4 << 30  # bytes of address space
_OF_EACH_KIND = (
    ("1", "x = 1"),
    ("1", "1/2"),
    ("\\frac{1}{2}", "$50\\%$"),
    ("[1,2)", "$(1,\\sqrt{2})$"),
    ("\\{1\\}", "two"),
    ("x^2+2x+1", "$(x+1)^2$"),
)
"""What the library builds when it first reads a kind of answer, up to 0.4 s each, it builds before anyone waits."""

_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None
_owner = 0


def same_value(answer: str, response: str, *, timeout: float) -> bool | None:
    """Whether math-verify finds both equal; None: not within `timeout` seconds or 4 GiB.

    Args:
        answer: the reference, LaTeX or plain.
        response: what it is compared with; a whole text with its answer somewhere, or `\\boxed{...}`.

    Raises:
        ValueError: the answer holds nothing that the library can read.
        RuntimeError: the process cannot be started.
    """
    with _lock:
        process = _running()
        asked = json.dumps({"answer": answer, "response": response}).encode() + b"\n"
        try:
            assert process.stdin is not None
            process.stdin.write(asked)
            line = _line(process, timeout)
        except BrokenPipeError:
            line = None
        except BaseException:  # the caller's deadline: the next answer would be taken for another's
            _stop()
            raise
        if line is None:
            _stop()
            return None
    said: dict[str, Any] = json.loads(line)
    if "wrong" in said:
        raise ValueError(said["wrong"])
    return bool(said["same"])


def _running() -> subprocess.Popen[bytes]:
    global _process, _owner
    if _process is not None and _owner == os.getpid() and _process.poll() is None:
        return _process
    if _process is not None and _owner == os.getpid():
        _stop()
    process = subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    _process, _owner = process, os.getpid()
    try:
        if _line(process, _STARTING) is None:
            raise RuntimeError("the process of reward.name = math_verify did not start; its standard error says why")
    except BaseException:
        _stop()
        raise
    return process


def _stop() -> None:
    global _process
    if _process is not None:
        process, _process = _process, None
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.wait()


def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes | None:
    """What it says next; None: nothing in time, or it has ended."""
    assert process.stdout is not None
    deadline, data = time.monotonic() + timeout, b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return None
        read = process.stdout.read(1 << 16)
        if not read:
            return None
        data += read
    return data


def serve() -> None:
    """The process: answers one line of JSON with another, until its input ends."""
    import logging
    import resource

    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    logging.disable(logging.CRITICAL)  # a line for each expression that it cannot read
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for answer, response in _OF_EACH_KIND:
        _compare(answer, response)
    answers.write(b"{}\n")
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            said: dict[str, Any] = {"same": _compare(asked["answer"], asked["response"])}
        except ValueError as e:
            said = {"wrong": str(e)}
        answers.write(json.dumps(said).encode() + b"\n")


def _compare(answer: str, response: str) -> bool:
    from math_verify import parse, verify

    marked = answer if "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer else f"${answer}$"
    gold = parse(marked, parsing_timeout=None)  # SIGALRM would not stop what hangs; this process's end does
    if not gold:
        raise ValueError(f"finds nothing mathematical in the row's answer {answer!r:.80}")
    try:
        return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    except (RecursionError, MemoryError, OverflowError):
        return False
