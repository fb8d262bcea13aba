"""What an environment is: it hears what the policy says, and answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from megarl.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An environment's answer.

    Attributes:
        observation: what the policy is told next: text, or token ids that are taken as they are.
        done: whether the episode is over; the observation is then told to nobody.
        reward: a number, numpy's too, added up over the episode; None: none. An episode without any is scored by the
            reward function.
    """

    observation: str | Sequence[int] = ""
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """One episode. It is made, used and closed in threads of the rank, one call at a time, unless one takes too long.

    What takes memory or processes is taken in `reset`, not when it is made. Code that nobody trusts, or that could hang
    in C, belongs in a process of its own: a thread cannot be ended, only left behind.
    """

    def reset(self, row: Mapping[str, Any]) -> str | Sequence[int] | None:
        """Begin the episode of a row of the data; what the policy is told at first, after the row's prompt."""

    def step(self, response: str) -> Turn:
        """The answer to what the policy said. Also asked about a response that a limit has cut off."""

    def close(self) -> None:
        """Give back what the episode took; called once, however it ended: also after a `reset` that raised or hangs."""


def blocks(response: str, tag: str) -> list[str]:
    """What stands between <tag> and </tag>, each time."""
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
    """Makes environments as a configuration names them.

    Raises:
        ValueError: unknown, or it cannot be made with these arguments; one is made and closed to see.
    """
    make = partial(ENVIRONMENTS.load(name), **args)
    what = "made"
    try:
        made = make()
        missing = [call for call in ("reset", "step", "close") if not callable(getattr(made, call, None))]
        if missing:
            raise TypeError(f"it has no method {', '.join(missing)}")
        what = "closed before an episode has begun"
        made.close()
    except (Exception, SystemExit) as e:  # a user's class can fail in any way
        said = " ".join(f"{type(e).__name__}: {e}".split())
        raise ValueError(
            f"environment.name = {name!r} cannot be {what} with environment.args = {dict(args)}: {said}"
        ) from e
    return make
