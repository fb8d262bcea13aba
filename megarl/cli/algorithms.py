"""List the methods, algorithms and rewards that a configuration can name, as the code declares them."""

from __future__ import annotations

import argparse
import difflib
import inspect
from typing import Any

from rich.table import Table

from megarl.algorithms.declaration import About, about_of
from megarl.algorithms.methods import METHODS
from megarl.algorithms.registry import ESTIMATORS, LOSSES, PREFERENCES
from megarl.registry import Registry
from megarl.rewards import registry as rewards
from megarl.rewards.registry import RewardFunction
from megarl.telemetry.console import plain_console
from megarl.telemetry.progress import print_table

EXAMPLE = "megarl algorithms grpo"
REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "actor.policy_loss.loss_mode": LOSSES,
    "algorithm.preference.loss_mode": PREFERENCES,
}
"""Configuration key -> the algorithms that it can name."""

_OF_THE_RESPONSE = ("tokens", "finish_reason")  # a reward gets these in addition to reward.args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl algorithms`."""
    parser.add_argument("name", nargs="?", help="an algorithm, method or reward; default all")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print all algorithms, one line each, or all about one name; returns the exit code.

    Raises:
        ValueError: no algorithm has the name.
    """
    del rest
    name: str | None = args.name
    if name is None:
        for table in (_methods(), *(_table(key, registry) for key, registry in REGISTRIES.items()), _rewards()):
            print_table(table)
        return 0
    if name in rewards.names():
        reward = rewards.load_reward(name).function
        plain_console().print(f"reward.name={name}\n\n{inspect.getdoc(reward)}")
        plain_console().print(f"\nreward.args: {arguments_of(reward) or 'none'}")
        return 0
    matches = [
        (f"{key}={name}", inspect.getdoc(registry.load(name)), about_of(registry.load(name)))
        for key, registry in REGISTRIES.items()
        if name in registry.names()
    ]
    if name in METHODS:
        matches.append((" ".join(METHODS[name].settings), METHODS[name].what, METHODS[name].about))
    if not matches:
        registered = (known for registry in REGISTRIES.values() for known in registry.names())
        names = sorted({*METHODS, *rewards.names(), *registered})
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        advice = f"did you mean {near[0]!r}?" if near else "`megarl algorithms` lists them"
        raise ValueError(f"no algorithm is called {name!r}; {advice}")
    console = plain_console()
    for selected_by, text, about in matches:
        console.print(f"{selected_by}\n\n{text}\n")
        console.print("\n".join(f"{label}: {text}" for label, text in _declared(about).items() if text))
    return 0


def first_line(algorithm: Any) -> str:
    """Return the first line of an algorithm's docstring."""
    return (inspect.getdoc(algorithm) or "").partition("\n")[0]


def _methods() -> Table:
    table = _empty("methods: flows, and sets of keys", "what it does", "chosen by")
    for name, method in METHODS.items():
        table.add_row(name, method.what, " ".join(method.settings))
    return table


def _empty(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=False)
    table.add_column("name", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _table(key: str, registry: Registry[Any]) -> Table:
    table = _empty(key, "what it is", *_declared(About()))
    for name in registry.names():
        algorithm = registry.load(name)
        table.add_row(name, first_line(algorithm), *_declared(about_of(algorithm)).values())
    return table


def arguments_of(reward: RewardFunction) -> str:
    """List the keyword arguments that `reward.args` can hold: "target, width, shorter_is_fine=True"."""
    arguments = []
    for parameter in inspect.signature(reward).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _OF_THE_RESPONSE:
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            arguments.append(f"{parameter.name}{default if len(default) < 20 else '=...'}")
    return ", ".join(arguments)


def _rewards() -> Table:
    table = _empty("reward.name", "what it is", "reward.args")
    for name in rewards.names():
        reward = rewards.load_reward(name).function
        table.add_row(name, first_line(reward), arguments_of(reward))
    return table


def _declared(about: About) -> dict[str, str]:
    return {"paper": about.paper, "keys": ", ".join(about.keys), "needs": ", ".join(about.needs.words())}
