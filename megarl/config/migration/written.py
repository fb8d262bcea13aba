"""Settings as people write them: a YAML file, `key=value` words, a command, or a shell script that starts a run."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from megarl.config.migration import hydra, openrlhf_written, trl_written
from megarl.config.migration.entry import Computed
from megarl.config.migration.values import flat, of_yaml, options_of, read_text, value_of
from megarl.config.migration.verl import MODULE

_KEY = re.compile(r"^(?:~[A-Za-z_]\w*(?:\.[\w@/\-]+)*(?:=|$)|\+{0,2}[A-Za-z_]\w*(?:\.[\w@/\-]+)+=)")
_BARE = re.compile(r"^[~+]*(?=\w*[a-z])[A-Za-z_]\w*(?:@[\w.]+)?=")
"""A key without a section; NAME=value is an environment's."""
_MODULE = re.compile(r"\bverl[./]trainer[./](\w+?)(?:\.py)?$")
_RANKS = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
"""torchrun's options."""
_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(?!\()(.*)$")
_ARRAY = re.compile(
    r"(?:^|;|&&|\b(?:then|else|do)\b)[ \t]*([A-Za-z_]\w*)\+?=\(((?:[^()'\"]|'[^']*'|\"[^\"]*\"|\$\(\([^)]*\)\))*)\)",
    re.MULTILINE,
)
_COMMAND = re.compile(r"\$\((?!\()[^()]*\)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_ALL_OF = re.compile(r"^\$\{(\w+)\[@\]\}$")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_QUOTED = re.compile(r"\s-m\s+\S+\s+--\w")
"""A command in one word, as `bash -c` has it."""
_MOST = 2**63

_COMMANDS = {"trl": trl_written, "openrlhf": openrlhf_written}
"""What reads the commands of a program whose settings are its options."""


class Written(dict[str, Any]):
    """Settings by dotted key.

    Attributes:
        remarks: what a reader should know of how they were read, a line each.
    """

    def __init__(self, values: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.remarks = list(remarks)


def read_written(words: Sequence[str], source: str = "verl") -> Written:
    """Settings by dotted key; what is written later counts.

    Args:
        words: files (.yaml, .yml, .sh) and overrides: `key=value`, `+key=value`, `++key=value`, `~key`; other words of
            a command line, such as `python3`, are passed over. TRL's and OpenRLHF's may also be a command with
            `--name value`, and TRL's a Python file.
        source: whose they are: "verl", "trl" or "openrlhf".

    Raises:
        ValueError: a file that cannot be read, or nothing that sets a key.
    """
    values, options = Written({}), dict[str, Any]()
    if source == "verl":
        values |= _started(words, "")
    elif (reader := _COMMANDS[source]).is_command(words):
        values |= reader.of_command(words)
        words = [word for word in words if "=" in word and not word.startswith("-")]
    else:
        first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        words, options = words[:first], options_of(words[first:])
    for before, word in zip(["", *words], words, strict=False):
        if re.search(r"\.(ya?ml|sh|bash)$", word) and "=" not in word and before not in hydra.OPTIONS:
            read = _of_file(word, source)
            values |= read
            values.remarks += read.remarks
        elif _KEY.match(word) or ("=" in word and not word.startswith("-")):
            _override(values, word)
    values |= options
    if not values:
        raise ValueError(
            "no configuration: name a YAML file, a shell script, or key=value settings (--from says whose they are)"
        )
    return values


def _of_file(path: str, source: str) -> Written:
    if not path.endswith(("yaml", "yml")):
        return _of_script(read_text(path), path, source)
    return Written(hydra.of_file(path) if source == "verl" else of_yaml(path))


def _started(words: Sequence[str], script: str) -> dict[str, Any]:
    """What a command of verl's says before its keys: which trainer it is, if not PPO's, on how many ranks, and what is
    in the file that it names."""
    start = next((i for i, word in enumerate(words) if _MODULE.search(word)), None)
    if start is None:
        return hydra.of_command(words, script) if any(map(_KEY.match, words)) else {}
    module = _MODULE.search(words[start])[1]  # type: ignore[index]
    launched = options_of(words[:start])
    values = {} if module.startswith("main_ppo") else {MODULE: module}
    values |= {key: launched[option] for option, key in _RANKS.items() if option in launched}
    return values | hydra.of_command(words, script)


def _override(values: dict[str, Any], word: str) -> None:
    if word.startswith("~"):
        gone = word[1:].partition("=")[0]
        for key in [key for key in values if key == gone or key.startswith(f"{gone}.")]:
            del values[key]
        return
    key, _, text = word.lstrip("+").partition("=")
    value = Computed(text) if "$(" in text or _VARIABLE.search(text) else value_of(text)
    if isinstance(value, dict) and value:
        values |= flat(OmegaConf.create({key: value})) if "." not in key else _under(key, value)
    else:
        values[key] = value


def _under(key: str, value: dict[str, Any]) -> dict[str, Any]:
    return {f"{key}.{name}": one for name, one in flat(OmegaConf.create(value)).items()}


def _of_script(text: str, path: str, source: str) -> Written:
    commands, variables, again = _commands(text, path)
    remarks = [
        f"{path} sets {name} more than once, in branches of an if, say: its last value, {variables[name]!r}, is taken"
        for name in again
    ]
    if reader := _COMMANDS.get(source):
        split = (_split(words, variables) for words in commands)
        started = [words for words in split if words and words[0][0:1] != "-" and reader.is_command(words)]
        if len(started) != 1:
            raise ValueError(f"'{path}' starts {len(started)} of {reader.NAME}'s trainers: leave one command in it")
        return Written(reader.of_command(started[0]), remarks)
    values = Written({}, remarks)
    for command in commands:
        words = _split(command, variables)
        own = _started(words, path)
        starts = bool(own) or any(map(_KEY.match, words)) or any(map(_MODULE.search, words))
        for word in words:
            if _KEY.match(word) or (starts and _BARE.match(word)):
                _override(own, word)
        for key in [key for key in own if key in values and own[key] != values[key]]:
            values.remarks.append(
                f"{path} sets {key} in several commands: the last one's value, {own[key]!r}, is taken"
            )
        values |= own
    if not values:
        raise ValueError(f"'{path}' sets no key: no word of it is of the form section.key=value")
    return values


def _split(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """With the values of variables; one that stands alone may be several words."""
    found: list[str] = []
    for word in words:
        value = _expanded(word, variables)
        found += _words(value, "") if _VARIABLE.fullmatch(word) or _QUOTED.search(word) else [value]
    return found


def _commands(text: str, path: str) -> tuple[list[list[str]], Mapping[str, str], list[str]]:
    """The words of each of its commands; its variables and those of the environment; names that got several values."""
    text = re.sub(r"\\\r?\n", " ", re.sub(r"(?m)^\s*#.*$", "", text))
    for one_word in (_ARITHMETIC, _COMMAND):
        text = one_word.sub(lambda found: "".join(found[0].split()), text)
    variables: dict[str, str] = dict(os.environ)
    arrays: dict[str, list[str]] = {}

    def keep(found: re.Match[str]) -> str:
        arrays.setdefault(found[1], []).extend(_words(found[2], path))
        return ""

    rest = _ARRAY.sub(keep, text)
    commands: list[list[str]] = []
    own: dict[str, set[str]] = {}
    for line in rest.splitlines():
        if (found := _ASSIGNED.match(line)) and len(assigned := _words(found[3], path)) <= 1:
            name, value = found[1], assigned[0] if assigned else ""
            if found[2]:
                variables[name] = variables.get(name, "") + _expanded(value, variables)
                continue
            if name not in (used[1] or used[3] for used in _VARIABLE.finditer(value)):  # else it is added to
                own.setdefault(name, set()).add(value)
            variables[name] = _expanded(value, variables)
            continue
        words: list[str] = []
        for word in _words(line, path):
            all_of = _ALL_OF.match(word)
            words += arrays.get(all_of[1], []) if all_of else [word]
        commands.append(words)
    used_names = {found[1] or found[3] for found in _VARIABLE.finditer(text)}
    return commands, variables, [name for name, values in own.items() if len(values) > 1 and name in used_names]


def _words(text: str, path: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quotation over several lines, which no command that starts a run has
        return []


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """With the values of variables that are known, and sums worked out; others stay as they are."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name) or (found[2] if found[2] is not None else variables.get(name, found[0]))

    for _ in range(4):  # defaults name further variables
        text = _VARIABLE.sub(value, text)
    return _ARITHMETIC.sub(lambda found: _sum(found[1], variables) or found[0], text)


def _sum(text: str, variables: Mapping[str, str]) -> str | None:
    named = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found[0], found[0]), text)
    try:
        return str(_number(ast.parse(named.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < _MOST:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < _MOST:
            return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("no sum of whole numbers")
