"""The processes that agents run in, from the side of the rank that started them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue

from megarl.environments.agent_process import READY, AgentResult, AgentTask
from megarl.processes import module_command

Tell = Callable[["AgentWorker", AgentResult | None], None]
"""(who, an outcome, or None where the process is gone); called in a thread."""

GRACE = 5.0
"""Seconds that a process has to end by itself."""


class AgentWorker:
    """A fresh interpreter that plays episodes; it ends with this process. To be made in the main thread.

    Attributes:
        numbers: of the jobs that it has.
        ready: when it had imported the agent, by `time.monotonic`; inf: it has not.
    """

    def __init__(self, agent: str, tell: Tell) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*module_command("megarl.environments.agent_process"), str(theirs.fileno()), agent],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is the run's to act on
            )
        self._connection: Connection = ours
        self._jobs: SimpleQueue[AgentTask | None] = SimpleQueue()
        self.numbers: set[int] = set()
        self.ready = math.inf
        threading.Thread(target=self._read, args=(tell,), daemon=True, name="megarl-agents-in").start()
        threading.Thread(target=self._write, daemon=True, name="megarl-agents-out").start()

    def play(self, job: AgentTask) -> None:
        """Begin an episode."""
        self.numbers.add(job.number)
        self._jobs.put(job)

    def how_it_ended(self) -> str:
        """In words, once it is gone."""
        try:
            code = self._process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._process.kill()
        self._process.wait()

    def dismiss(self) -> None:
        """It may end: nobody waits for its episodes any more."""
        self._jobs.put(None)

    def close(self, by: float) -> None:
        """Wait for its end, and from `by` on, of `time.monotonic`, no longer."""
        try:
            self._process.wait(timeout=max(0.0, by - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()

    def _read(self, tell: Tell) -> None:
        with suppress(EOFError, OSError):
            while True:
                outcome: AgentResult = self._connection.recv()
                if outcome.number == READY:
                    self.ready = time.monotonic()
                else:
                    tell(self, outcome)
        tell(self, None)

    def _write(self) -> None:
        """In a thread: a process that hangs does not read, and a pipe is full at some time."""
        with suppress(OSError):
            while (job := self._jobs.get()) is not None:
                self._connection.send(job)
            self._connection.send(None)


def _environment() -> dict[str, str]:
    """Clients of OpenAI's want a key, and would ask a proxy for this machine's own address."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    spared = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1", "localhost")))
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NO_PROXY": spared, "no_proxy": spared}
    return {"OPENAI_API_KEY": "megarl", **own}
