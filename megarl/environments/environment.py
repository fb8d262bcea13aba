"""Defines environments, which answer the responses of the policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from megarl.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Holds an environment's answer to a response.

    Attributes:
        observation: the policy reads it next: text, or token ids that are taken as they are.
        done: whether the episode is over; the policy then reads no observation.
        reward: a number, numpy's too, added up over the episode; None: none. The reward function scores episodes
            without rewards.
    """

    observation: str | Sequence[int] = ""
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """Plays one episode. The rank makes, calls and closes it in threads, one call at a time, unless one takes too long.

    `reset`, not the constructor, takes memory and starts processes. Code that nobody trusts, or that could hang in C,
    belongs in a process of its own: a thread cannot be ended, only left behind.
    """

    def reset(self, row: Mapping[str, Any]) -> str | Sequence[int] | None:
        """Begin the episode of a row of the data; returns what the policy reads at first, after the row's prompt."""

    def step(self, response: str) -> Turn:
        """Answer a response of the policy, which a limit may have cut off."""

    def close(self) -> None:
        """Give back what the episode took. Called once, also after a `reset` that raised or hangs."""


def blocks(response: str, tag: str) -> list[str]:
    """Find the texts between <tag> and </tag>."""
    end = f"</{tag}>"
    # for every <tag> behind the last end, a search would go through the rest of the text: quadratic, in a rank's thread
    closed = response[: response.rfind(end) + len(end)] if end in response else ""
    return re.findall(f"<{tag}>(.*?){end}", closed, re.DOTALL)


MakeEnvironment = Callable[[], Environment]

ENVIRONMENTS: Registry[Callable[..., Environment]] = Registry(
    "environment.name",
    "class",
    lazy={
        "calculator": "megarl.environments.calculator:Calculator",
        "python": "megarl.environments.python_tool:PythonTool",
    },
)


def environment_of(name: str, args: Mapping[str, Any]) -> MakeEnvironment:
    """Return a function that makes the environments of a configuration; makes and closes one as a check.

    Raises:
        ValueError: the name is unknown, or the environment cannot be made with these arguments.
    """
    make = partial(ENVIRONMENTS.load(name), **args)
    what = "made"
    try:
        environment = make()
        missing = [name for name in ("reset", "step", "close") if not callable(getattr(environment, name, None))]
        if missing:
            raise TypeError(f"it has no method {', '.join(missing)}")
        what = "closed before an episode has begun"
        environment.close()
    except (Exception, SystemExit) as e:  # a user's class can fail in any way
        error = " ".join(f"{type(e).__name__}: {e}".split())
        raise ValueError(
            f"environment.name = {name!r} cannot be {what} with environment.args = {dict(args)}: {error}"
        ) from e
    return make
