"""The process that renders a tokenizer's chat template: started when it is first needed, ended with this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.data.chat_template import LENGTH, read_framed

SECONDS = 10.0
"""Of the processor's time that one text may take: a hundred times what a long conversation needs."""

_PROGRAM = "import sys; from megarl.data.chat_template import serve; serve(float(sys.argv[1]))"


class TemplateProcess:
    """Renders templates, one after another; any thread may ask."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._end: weakref.finalize[..., Any] | None = None

    def render(self, template: str, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The text that the template writes.

        Raises:
            ValueError: the template refuses the messages, fails, or takes too much time or memory.
        """
        request = json.dumps({"template": template, "messages": list(messages), "variables": variables}).encode()
        with self._lock:
            answer, code = self._ask(request)
            if code == -signal.SIGKILL:  # from outside, such as by a kernel that was out of memory: once more
                answer, code = self._ask(request)
        if answer is None:
            what = "takes more than" if code == -signal.SIGPROF else f"ends its process with code {code} within"
            raise ValueError(f"the chat template {what} {SECONDS:g} seconds of the processor's time")
        if "error" in answer:
            raise ValueError(f"the chat template refuses the messages: {answer['error']}")
        return str(answer["text"])

    def _ask(self, request: bytes) -> tuple[dict[str, str] | None, int | None]:
        """The answer; or None, and how the process ended."""
        process, body, code = self._process or self._start(), None, None
        assert process.stdin is not None and process.stdout is not None and self._end is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(LENGTH.pack(len(request)) + request)
                process.stdin.flush()
                body = read_framed(process.stdout)  # type: ignore[arg-type]
            if body is None:
                code = process.wait()
        finally:
            if body is None:  # after Ctrl-C, say: its answer would be taken for the next one
                self._process = None
                self._end()
        return None if body is None else json.loads(body), code

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(SECONDS)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
        )
        self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()
