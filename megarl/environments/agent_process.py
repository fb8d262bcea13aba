"""Runs agents in a process, many at a time on one event loop. Imports nothing of MegaRL that needs torch.

The process reads path/to/file.py:function and then `AgentTask`s from its connection. It writes an `AgentResult` whose
number is `READY` once it has imported the file, and then one for each task, as JSON.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megarl.environments.calls import described
from megarl.processes import end_with_descendants
from megarl.registry import Registry
from megarl.rewards.results import NoScore, number
from megarl.workers.channel import read_message, write_message

Agent = Callable[[str, dict[str, Any]], Awaitable[float | None]]
"""(base_url, row) -> the episode's reward; None: the reward function scores the episode."""

AGENTS: Registry[Agent] = Registry("environment.agent", "function", awaits=True)

NO_AGENT, READY = -1, -2
"""Numbers of the first result of a process: it could not import the agent, or it could."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """Describes an episode: the row of its prompt, and the address at which the policy answers.

    Attributes:
        timeout: seconds that the episode may take.
    """

    number: int
    base_url: str
    row: Mapping[str, Any]
    timeout: float


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Holds the agent's reward, or the reason why there is none: a line, then the frames.

    Attributes:
        number: of the task; `NO_AGENT` or `READY` where there is no task.
        raised: whether the agent raised an exception.
    """

    number: int
    reward: float | None = None
    error: str | None = None
    raised: bool = False


def check_agent(value: str) -> None:
    """Raise ValueError, in one line, if a file does not define the function. The file is read and not executed: it may
    need modules that only the processes of agents have."""
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


def main(connection: socket.socket) -> None:
    """Play episodes until the other end hangs up."""
    _set_environment()
    with suppress(OSError):
        path = (read_message(connection.fileno()) or b"").decode()
        try:
            agent = AGENTS.load(path)
        except ValueError as e:
            _send(connection, AgentResult(number=NO_AGENT, error=str(e)))
            return
        _send(connection, AgentResult(number=READY))
        asyncio.run(_serve(connection, agent))


def _set_environment() -> None:
    """Set a key, which OpenAI's clients demand, and keep them from asking a proxy for this machine's address."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.setdefault("OPENAI_API_KEY", "megarl")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(
        filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"))
    )


def _send(connection: socket.socket, result: AgentResult) -> None:
    write_message(connection.fileno(), json.dumps(asdict(result)).encode())


async def _serve(connection: socket.socket, agent: Agent) -> None:
    """Play the tasks that arrive, until the other end hangs up."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    episodes: set[asyncio.Task[None]] = set()

    def read() -> None:
        message = read_message(connection.fileno())
        if message is None:
            loop.remove_reader(connection)
            ended.set()
            return
        episode = loop.create_task(_play(agent, pickle.loads(message), connection))
        episodes.add(episode)
        episode.add_done_callback(episodes.discard)

    loop.add_reader(connection, read)
    await ended.wait()
    end_with_descendants()  # unfinished agents have threads and sockets of any kind


async def _play(agent: Agent, task: AgentTask, connection: socket.socket) -> None:
    call = asyncio.ensure_future(_call(agent, task))
    done, _ = await asyncio.wait({call}, timeout=task.timeout)
    if not done:
        call.cancel()
    late = AgentResult(number=task.number, error=f"took longer than environment.timeout = {task.timeout:g} s")
    _send(connection, call.result() if done else late)


async def _call(agent: Agent, task: AgentTask) -> AgentResult:
    try:
        reward = await agent(task.base_url, dict(task.row))
        return AgentResult(number=task.number, reward=None if reward is None else number(reward))
    except NoScore as e:
        return AgentResult(number=task.number, error=str(e))
    except BaseException as e:  # an agent may let its own CancelledError out, and its episode would never end
        return AgentResult(number=task.number, error=described(e, __file__), raised=True)
