"""Reads TRL's settings from the words of a command and from Python files that make its configurations."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from megarl.migration.entry import Computed
from megarl.migration.trl_trainers import COMMAND_LINE, OTHERS, TRAINER, TRAINERS
from megarl.migration.values import end_of_command, of_yaml, options_of, read_text

NAME = "TRL"
_CLASS = re.compile(r"^(GRPO|RLOO|PPO|DPO|ORPO|CPO|KTO|SFT|Reward)(Config|Trainer)$")
_OTHER_CLASS = re.compile(r"^([A-Z]\w*?)Trainer$")
_ARGUMENTS = ("ModelConfig", "ScriptArguments", "GRPOScriptArguments")
_PARSERS = ("TrlParser", "HfArgumentParser")
_LAUNCHED = {"num_processes": "num_processes", "num_machines": "num_machines", "nnodes": "num_machines"}


def is_command(words: Sequence[str]) -> bool:
    """Say whether the words start one of TRL's trainers, or are its options."""
    start = _start(words)
    if start is None:
        return bool(words) and words[0].startswith("--")
    return words[start] == "trl" or _named(words[start]) is not None or os.path.isfile(words[start])


def other(words: Sequence[str]) -> str:
    """Name the TRL command that the words start, if it trains nothing; else empty."""
    pairs = pairwise(words)
    return next((f"trl {name}" for word, name in pairs if word == "trl" and name in ("vllm-serve", "env")), "")


def of_command(words: Sequence[str]) -> dict[str, Any]:
    """Read `[accelerate launch ...] SCRIPT.py --name value ...`, or `trl NAME --name value ...`.

    It reads the script, too, if the file exists; the options win over it.
    """
    start = _start(words)
    end = end_of_command(words, start or 0)
    values: dict[str, Any] = {}
    if start is None:
        option_words = words[:end]
    elif words[start] == "trl":
        values[TRAINER], option_words = words[start + 1], words[start + 2 : end]
    else:
        values, option_words = _launched(options_of(words[:start])), words[start + 1 : end]
        if (trainer := _named(words[start])) is not None:
            values[TRAINER] = trainer
        if os.path.isfile(words[start]):
            values |= of_python(words[start])
    options = options_of(option_words)
    values |= _launched(options)
    if options:
        values.pop(COMMAND_LINE, None)
    options = {name: value for name, value in options.items() if name not in ("config_file", *_LAUNCHED)}
    file = options.pop("config", None)
    if isinstance(file, str):
        values |= of_yaml(file)
    return values | options


def of_python(path: str) -> dict[str, Any]:
    """Read a Python file's calls of TRL's configurations, trainers and `load_dataset`, and its assignments to a
    configuration's fields.

    Raises:
        ValueError: the file cannot be read, or has several trainers.
    """
    text = read_text(path)
    try:
        return _of_tree(ast.parse(text), path)
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ValueError(f"'{path}' is not valid Python: {e}") from e


def _of_tree(tree: ast.Module, path: str) -> dict[str, Any]:
    constants, classes = _constants(tree), _classes(tree)
    values: dict[str, Any] = {}
    trainers: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values |= {name: _value(node.value, constants) for target in node.targets for name in _field(target)}
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        name = classes.get(name, name)
        match = _CLASS.match(name)
        if match:
            trainers.add(match[1].lower())
        elif name in classes:
            trainers.add(name.removesuffix("Trainer"))
        if name in _ARGUMENTS or (match and match[2] == "Config"):
            values |= {_name(keyword): _value(keyword.value, constants) for keyword in node.keywords}
        elif match:
            values |= _of_trainer(node, constants)
        elif name in _PARSERS:
            values[COMMAND_LINE] = name
        elif name == "load_dataset" and node.args:
            dataset = _value(node.args[0], constants)
            values["dataset_name" if values.get("dataset_name", dataset) == dataset else "datasets"] = dataset
    if len(trainers) > 1:
        raise ValueError(f"'{path}' has several trainers: {', '.join(sorted(trainers))}; leave one in it")
    return values | ({TRAINER: trainers.pop()} if trainers else {})


def _classes(tree: ast.Module) -> dict[str, str]:
    """Map names of classes in the file to the TRL class that they are, or inherit from."""
    classes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
            pairs = [(alias.asname or alias.name, alias.name) for alias in node.names]
            classes |= {local: name for local, name in pairs if _CLASS.match(name) or _OTHER_CLASS.match(name)}
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            base = next((base for base in bases if base in classes or _CLASS.match(base)), None)
            classes |= {} if base is None else {node.name: classes.get(base, base)}
    return classes


def _of_trainer(call: ast.Call, known: Mapping[str, Any]) -> dict[str, Any]:
    """Read a trainer's arguments other than its configuration; functions are given by name."""
    nodes = {"model": call.args[0]} if call.args else {}
    nodes |= {_name(keyword): keyword.value for keyword in call.keywords if keyword.arg not in ("args", "config")}
    values = {name: _value(node, known) for name, node in nodes.items()}
    for name in ("reward_funcs", "tools"):
        if name in nodes:
            values[name] = [ast.unparse(element) for element in getattr(nodes[name], "elts", [nodes[name]])]
    for name in ("model", "policy"):
        if name in values:
            values["model_name_or_path"] = values.pop(name)
    return values


def _field(target: ast.expr) -> list[str]:
    """Name the configuration's field that an assignment sets: `training_args.seed = 1`."""
    if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
        return []
    return [target.attr] if re.search(r"(args|config)$", target.value.id) else []


def _start(words: Sequence[str]) -> int | None:
    for i, word in enumerate(words):
        if word == "trl" and i + 1 < len(words) and words[i + 1] in {*TRAINERS, *OTHERS}:
            return i
        if word.endswith(".py") and "=" not in word:
            return i
    return None


def _named(script: str) -> str | None:
    """Name the trainer of a script: `examples/scripts/dpo_vlm.py` is DPO's, and `dpo_online.py` is not."""
    names = re.split(r"[_.]", os.path.basename(script))
    other = next((name for name in names if name in OTHERS), None)
    return other or (names[0] if names[0] in TRAINERS else None)


def _launched(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the numbers of processes and machines from accelerate's or torchrun's options."""
    values = {_LAUNCHED[name]: value for name, value in options.items() if name in _LAUNCHED}
    if isinstance(per_node := options.get("nproc_per_node"), int):
        machines = values.get("num_machines", 1)
        values["num_processes"] = per_node * machines if isinstance(machines, int) else per_node
    file = options.get("config_file")
    if isinstance(file, str):
        if not os.path.isfile(file):
            return {**values, "accelerate_config": file}
        values = {name: value for name, value in of_yaml(file).items() if name in _LAUNCHED.values()} | values
    return values


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Map the file's names to the literals assigned to them; a name with several is `Computed`."""
    constants: dict[str, Any] = {}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            value = _value(node.value, {})  # type: ignore[attr-defined]
            constants[name] = value if name not in constants else Computed("several values")
    return constants


def _name(keyword: ast.keyword) -> str:
    return keyword.arg or f"**{ast.unparse(keyword.value)}"


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Computed(ast.unparse(node))
