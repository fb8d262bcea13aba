"""Settings as people write them: a YAML file, `key=value` words, a command, or a shell script that starts a run."""

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
"""A key without a section; NAME=value is an environment's."""
_MODULE = re.compile(r"\bverl[./]trainer[./](\w+?)(?:\.py)?$")
_RANKS = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
"""torchrun's options."""
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
        words: files (.yaml, .yml, .sh, .slurm) and overrides: `key=value`, `+key=value`, `++key=value`, `~key`; other
            words of a command line, such as `python3`, are passed over. TRL's and OpenRLHF's may also be a command with
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
        words = [word for word in words if _KEY.match(word) or _BARE.match(word)]
    else:
        first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        words, options = words[:first], options_of(words[first:])
    for before, word in zip(["", *words], words, strict=False):
        if re.search(r"\.(ya?ml|sh|bash|slurm|sbatch)$", word) and "=" not in word and before not in hydra.OPTIONS:
            read = _of_file(word, source)
            values |= read
            values.remarks += read.remarks
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
    """What a command of verl's says before its keys: which trainer it is, if not PPO's, on how many ranks, and what is
    in the file that it names."""
    start = next((i for i, word in enumerate(words) if _MODULE.search(word)), None)
    if start is None:
        return hydra.of_command(words, script) if any(map(_KEY.match, words)) else {}
    module = _MODULE.search(words[start])[1]  # type: ignore[index]
    launched = options_of(words[:start])
    values = {} if module.startswith("main_ppo") else {MODULE: module}
    values |= {key: launched[option] for option, key in _RANKS.items() if option in launched}
    settings = words[start + 1 : end_of_command(words, start)]
    options = options_of([word for word in settings if not _KEY.match(word)])
    values |= {
        f"--{name}": value for name, value in options.items() if f"--{name.replace('_', '-')}" not in hydra.OPTIONS
    }
    return values | hydra.of_command(words, script)


def _override(values: dict[str, Any], word: str) -> None:
    if word.startswith("~"):
        gone = word[1:].partition("=")[0]
        for key in [key for key in values if key == gone or key.startswith(f"{gone}.")]:
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
    commands, variables, again = shell.commands_of(text)
    remarks = [
        f"{path} sets {name} more than once, in branches of an if, say: its last value, {variables[name]!r}, is taken"
        for name in again
    ]
    if exported := shell.exported(text):
        remarks.append(f"{path} exports {', '.join(exported)}: set them for the run where they still matter")
    if reader := _COMMANDS.get(source):
        split = [shell.split(words, variables) for words in commands]
        started = [words for words in split if words and words[0][0:1] != "-" and reader.is_command(words)]
        others = dict.fromkeys(name for words in split if (name := reader.other(words)))
        remarks += [f"{path} also runs {name}, which trains nothing: its options are left out" for name in others]
        if not started:
            also = f"; it runs {', '.join(others)}, which trains nothing" if others else ""
            raise ValueError(f"'{path}' names none of {reader.NAME}'s trainers in a command that it runs{also}")
        if len(started) > 1:
            raise ValueError(f"'{path}' starts {len(started)} of {reader.NAME}'s trainers: leave one command in it")
        apart = [word.partition("=")[0] for words in split if words and words[0][:2] == "--" for word in words]
        if options := [word for word in apart if word.startswith("--")]:
            remarks.append(f"{path} leaves {', '.join(options)} out: end the line before these with \\")
        return Written(reader.of_command(started[0]), remarks)
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
