"""Reads settings from a YAML file, `key=value` words, a command, or a shell script that starts a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from megarl.migration import hydra, openrlhf_written, shell, trl_written
from megarl.migration.entry import Computed
from megarl.migration.values import end_of_command, flat, of_yaml, options_of, read_text, value_of
from megarl.migration.verl import MODULE

_KEY = re.compile(r"^(?:~[A-Za-z_]\w*(?:\.[\w@/\-]+)*(?:=|$)|\+{0,2}[A-Za-z_]\w*(?:\.[\w@/\-]+)+=)")
_BARE = re.compile(r"^[~+]*(?=\w*[a-z])[A-Za-z_]\w*(?:@[\w.]+)?=")
"""Matches a key without a section; NAME=value sets an environment variable."""
_MODULE = re.compile(r"\bverl[./]trainer[./](\w+?)(?:\.py)?$")
_RANKS = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
"""Options of torchrun, with verl's keys for them."""
_COMMANDS = {"trl": trl_written, "openrlhf": openrlhf_written}
"""The modules that read the commands of programs whose settings are options."""


class Written(dict[str, Any]):
    """Holds settings by dotted key.

    Attributes:
        remarks: lines that tell the user how ambiguous settings were read.
    """

    def __init__(self, values: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.remarks = list(remarks)


def read_written(words: Sequence[str], source: str = "verl") -> Written:
    """Read settings by dotted key; of several values of a key the last one counts.

    Args:
        words: files (.yaml, .yml, .sh, .slurm) and overrides: `key=value`, `+key=value`, `++key=value`, `~key`; other
            words of a command line, such as `python3`, are ignored. For TRL and OpenRLHF, they may also be a command
            with `--name value`; for TRL, a Python file.
        source: the program whose settings they are: "verl", "trl" or "openrlhf".

    Raises:
        ValueError: a file cannot be read, or no word sets a key.
    """
    values, options = Written({}), dict[str, Any]()
    if source == "verl":
        values |= _started(words, "")
    elif (reader := _COMMANDS[source]).is_command(words):
        values |= reader.of_command(words)
        words = [word for word in words if _KEY.match(word) or _BARE.match(word)]
    else:
        first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        words, options = words[:first], options_of(words[first:])
    for previous, word in zip(["", *words], words, strict=False):
        if re.search(r"\.(ya?ml|sh|bash|slurm|sbatch)$", word) and "=" not in word and previous not in hydra.OPTIONS:
            part = _of_file(word, source)
            values |= part
            values.remarks += part.remarks
        elif _KEY.match(word) or _BARE.match(word):
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
    """Read what a command of verl's says besides its keys: the trainer, if not PPO's, the number of ranks, options, and
    the file that `--config-name` names."""
    start = next((i for i, word in enumerate(words) if _MODULE.search(word)), None)
    if start is None:
        return hydra.of_command(words, script) if any(map(_KEY.match, words)) else {}
    module = _MODULE.search(words[start])[1]  # type: ignore[index]
    launch_options = options_of(words[:start])
    values = {} if module.startswith("main_ppo") else {MODULE: module}
    values |= {key: launch_options[option] for option, key in _RANKS.items() if option in launch_options}
    settings = words[start + 1 : end_of_command(words, start)]
    options = options_of([word for word in settings if not _KEY.match(word)])
    values |= {
        f"--{name}": value for name, value in options.items() if f"--{name.replace('_', '-')}" not in hydra.OPTIONS
    }
    return values | hydra.of_command(words, script)


def _override(values: dict[str, Any], word: str) -> None:
    if word.startswith("~"):
        target = word[1:].partition("=")[0]
        for key in [key for key in values if key == target or key.startswith(f"{target}.")]:
            del values[key]
        return
    key, _, text = word.lstrip("+").partition("=")
    value = Computed(text) if "$(" in text or shell.VARIABLE.search(text) else value_of(text)
    if isinstance(value, dict) and value:
        values |= flat(OmegaConf.create({key: value})) if "." not in key else _under(key, value)
    else:
        values[key] = value


def _under(key: str, value: dict[str, Any]) -> dict[str, Any]:
    return {f"{key}.{name}": value for name, value in flat(OmegaConf.create(value)).items()}


def _of_script(text: str, path: str, source: str) -> Written:
    commands, variables, doubtful_names = shell.commands_of(text)
    remarks = [
        f"{path} sets {name} more than once, in branches of an if, say: its last value, {variables[name]!r}, is taken"
        for name in doubtful_names
    ]
    if exported := shell.exported(text):
        remarks.append(f"{path} exports {', '.join(exported)}: set them for the run where they still matter")
    if reader := _COMMANDS.get(source):
        lists = [shell.split(words, variables) for words in commands]
        runs = [words for words in lists if words and words[0][0:1] != "-" and reader.is_command(words)]
        others = dict.fromkeys(name for words in lists if (name := reader.other(words)))
        remarks += [f"{path} also runs {name}, which trains nothing: its options are left out" for name in others]
        if not runs:
            hint = f"; it runs {', '.join(others)}, which trains nothing" if others else ""
            raise ValueError(f"'{path}' names none of {reader.NAME}'s trainers in a command that it runs{hint}")
        if len(runs) > 1:
            raise ValueError(f"'{path}' starts {len(runs)} of {reader.NAME}'s trainers: leave one command in it")
        strays = [word.partition("=")[0] for words in lists if words and words[0][:2] == "--" for word in words]
        if options := [word for word in strays if word.startswith("--")]:
            remarks.append(f"{path} leaves {', '.join(options)} out: end the line before these with \\")
        return Written(reader.of_command(runs[0]), remarks)
    values = Written({}, remarks)
    for command in commands:
        words = shell.split(command, variables)
        settings = _started(words, path)
        starts = bool(settings) or any(map(_KEY.match, words)) or any(map(_MODULE.search, words))
        for word in words:
            if _KEY.match(word) or (starts and _BARE.match(word)):
                _override(settings, word)
        for key in [key for key in settings if key in values and settings[key] != values[key]]:
            values.remarks.append(
                f"{path} sets {key} in several commands: the last one's value, {settings[key]!r}, is taken"
            )
        values |= settings
    if not values:
        raise ValueError(f"'{path}' sets no key: no word of it is of the form section.key=value")
    return values
