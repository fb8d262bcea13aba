"""Starts the processes that agents run in, and talks to them."""

from __future__ import annotations

import math
import pickle
import subprocess
import time
from collections.abc import Callable
from typing import Any

from megarl.environments.agent_process import READY, AgentResult, AgentTask
from megarl.processes import how_it_ended
from megarl.workers.threaded import ThreadedInterpreter

Tell = Callable[["AgentWorker", AgentResult | None], None]
"""(worker, a result, or None where the process is gone); called in a thread."""

GRACE = 5.0
"""Seconds that a process has to end by itself."""


class AgentWorker(ThreadedInterpreter):
    """Plays episodes of an agent in a process.

    Attributes:
        numbers: of the tasks that the process works on.
        ready: when the process had imported the agent, by `time.monotonic`; inf: it has not.
    """

    def __init__(self, agent: str, tell: Tell) -> None:
        self.numbers: set[int] = set()
        self.ready, self._tell = math.inf, tell
        super().__init__("megarl.environments.agent_process:main", self._hear)
        self.post(agent.encode())

    def play(self, task: AgentTask) -> None:
        """Begin an episode."""
        self.numbers.add(task.number)
        self.post(pickle.dumps(task))

    def ending(self) -> str:
        """Wait until the process has ended, and say in words how."""
        try:
            self.process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return how_it_ended(self.process.wait())

    def _hear(self, message: Any) -> None:
        result = None if message is None else AgentResult(**message)
        if result is not None and result.number == READY:
            self.ready = time.monotonic()
        else:
            self._tell(self, result)
