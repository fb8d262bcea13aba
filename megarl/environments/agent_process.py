"""A process that runs agents, many at a time on one event loop. It imports nothing of MegaRL that needs torch.

    python -m megarl.environments.agent_process FILE_DESCRIPTOR path/to/file.py:function

Reads `Job`s from the connection with that file descriptor, and writes an `Outcome` of each; before, once the file is
imported, one whose number is `READY`.
"""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megarl.environments.calls import described
from megarl.processes import die_with_parent
from megarl.registry import Registry
from megarl.rewards.results import NoScore, number

Agent = Callable[[str, dict[str, Any]], Awaitable[float | None]]
"""(base_url, row) -> the episode's reward; None: the reward function scores it."""

AGENTS: Registry[Agent] = Registry("environment.agent", "function")

NO_AGENT, READY = -1, -2
"""Numbers of the outcome of a process that found no agent, and of one that did."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """An episode: the row of its prompt, and where the policy answers.

    Attributes:
        timeout: seconds.
    """

    number: int
    base_url: str
    row: Mapping[str, Any]
    timeout: float


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """What the agent returned, or why it returned nothing: a line, then where.

    Attributes:
        number: of the job; `NO_AGENT` or `READY` where there is none.
        raised: whether the error is an exception of the agent's.
    """

    number: int
    reward: float | None = None
    error: str | None = None
    raised: bool = False


def check_agent(value: str) -> None:
    """Raises ValueError, in one line, where a file does not define the function. It is read, and not executed: it may
    need what only the processes of agents have."""
    path, _, name = value.rpartition(":")
    if not path.endswith(".py") or not os.path.isfile(path):
        raise ValueError(f"environment.agent = {value!r} must be path/to/file.py:function, of a file that is there")
    try:
        with open(path, "rb") as f:
            tree = ast.parse(f.read(), path)
    except (SyntaxError, ValueError) as e:
        raise ValueError(f"environment.agent: {path!r} is no Python: {' '.join(str(e).split())}") from e
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if isinstance(functions.get(name), ast.FunctionDef):
        raise ValueError(f"environment.agent = {value!r} must be an async function: `async def {name}(base_url, row)`")
    words = {getattr(node, "id", getattr(node, "asname", None) or getattr(node, "name", "")) for node in ast.walk(tree)}
    if name not in words:
        there = ", ".join(functions) or "none"
        raise ValueError(f"environment.agent: {path!r} has no function {name!r}; it has {there}")


def main(argv: list[str]) -> int:
    die_with_parent()
    os.dup2(2, 1)  # what agents print must not get between the lines of the run's progress
    connection = Connection(int(argv[1]))
    try:
        agent = AGENTS.load(argv[2])
    except ValueError as e:
        connection.send(AgentResult(number=NO_AGENT, error=str(e)))
        return 1
    try:
        connection.send(AgentResult(number=READY))
        asyncio.run(_serve(connection, agent))
    except (EOFError, OSError):
        return 0
    return 0


async def _serve(connection: Connection, agent: Agent) -> None:
    """Until the other end says so, or is gone."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    playing: set[asyncio.Task[None]] = set()

    def read() -> None:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            job = None
        if job is None:
            loop.remove_reader(connection.fileno())
            ended.set()
            return
        task = loop.create_task(_play(agent, job, connection))
        playing.add(task)
        task.add_done_callback(playing.discard)

    loop.add_reader(connection.fileno(), read)
    await ended.wait()
    os._exit(0)  # agents that are left have threads and sockets of any kind


async def _play(agent: Agent, job: AgentTask, connection: Connection) -> None:
    task = asyncio.ensure_future(_guarded(agent, job))
    done, _ = await asyncio.wait({task}, timeout=job.timeout)
    if not done:
        task.cancel()
    late = AgentResult(number=job.number, error=f"took longer than environment.timeout = {job.timeout:g} s")
    outcome = task.result() if done else late
    connection.send(outcome)


async def _guarded(agent: Agent, job: AgentTask) -> AgentResult:
    try:
        reward = await agent(job.base_url, dict(job.row))
        return AgentResult(number=job.number, reward=None if reward is None else number(reward))
    except NoScore as e:
        return AgentResult(number=job.number, error=str(e))
    except BaseException as e:  # an agent may let its own CancelledError out, and its episode would never end
        return AgentResult(number=job.number, error=described(e), raised=True)


if __name__ == "__main__":
    # as the module that the other end knows, so that both have the same classes
    from megarl.environments.agent_process import main as main_of_the_module

    sys.exit(main_of_the_module(sys.argv))
