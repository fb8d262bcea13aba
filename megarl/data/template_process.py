"""Renders a tokenizer's chat template in a process: started when it is first needed, ended with this one."""

from __future__ import annotations

import json
import signal
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megarl.workers.interpreter import Interpreter

SECONDS = 10.0
"""Of the processor's time that one text may take: a hundred times what a long conversation needs."""


class TemplateProcess:
    """Renders templates, one after another; any thread may ask."""

    def __init__(self) -> None:
        self._process: Interpreter | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Return the text that the template writes.

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
        """Send a request; return its answer, or None and how the process ended."""
        process, answer, code = self._process or self._start(), None, None
        assert self._end is not None
        try:
            with suppress(BrokenPipeError):
                process.send(request)
                answer = process.receive()
            if answer is None:
                code = process.process.wait()
        finally:
            if answer is None:  # after Ctrl-C, say: its answer would be taken for the next one
                self._process = None
                self._end()
        return None if answer is None else json.loads(answer), code

    def _start(self) -> Interpreter:
        self._process = Interpreter("megarl.data.chat_template:serve")
        self._process.send(str(SECONDS).encode())
        self._end = weakref.finalize(self, self._process.close)
        return self._process
