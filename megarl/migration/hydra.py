"""Reads the YAML file that a Hydra command names, and the files that its `defaults` include."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from megarl.config.load import check_interpolations
from megarl.migration.values import flat, tree_of

NAME, INCLUDED = "--config-name", "defaults"
"""Settings that stand for a missing file; their value is its name."""

OPTIONS = {"--config-name": NAME, "-cn": NAME, "--config-path": "path", "-cp": "path", "--config-dir": "path",
            "-cd": "path"}  # fmt: skip
_PROGRAMS = "verl/trainer"
"""Where verl's own files are; a relative `--config-path` begins there."""
_OWN = re.compile(r"^(ppo|sft)\w*_trainer(_engine)?$")
"""Names of verl's own files, whose settings are its defaults."""
_MOST_FILES, _HIGHEST, _LONGEST_COMMENT = 32, 12, 200


def of_command(words: Sequence[str], script: str) -> dict[str, Any]:
    """Read the settings of the file that `--config-name` names, by dotted key; none of verl's own files.

    Args:
        words: of the command.
        script: path of the script with the command; files are sought in its folder and those above.

    Raises:
        ValueError: a file is no YAML.
    """
    options = _named(words)
    name = options.get(NAME, "").removesuffix(".yaml")
    if not name:
        return {}
    for folder in _folders(options.get("path", "config"), script):
        path = os.path.join(folder, f"{name}.yaml")
        if os.path.isfile(path) and not (_OWN.match(name) and _is_verls(folder)):
            return of_file(path)
    return {} if _OWN.match(name) else {NAME: name}


def of_file(path: str) -> dict[str, Any]:
    """Read a file's settings by dotted key, with those that it includes.

    Raises:
        ValueError: the file cannot be read, holds no settings, or includes too many files.
    """
    left_out: dict[str, Any] = {}
    tree = _composed(path, left_out, [])
    try:
        check_interpolations(tree, dangling=True)
    except Exception as e:  # the parsers raise what they like
        raise ValueError(f"'{path}' with what it includes: {' '.join(str(e).split())[:200]}") from e
    return flat(tree) | left_out


def _composed(path: str, left_out: dict[str, Any], paths_read: list[str]) -> Any:
    """Merge a file's tree with those that its list of `defaults` includes, in the list's order.

    Args:
        left_out: takes the names of missing files, and the list's `override` entries.
        paths_read: takes the paths of the files read so far.
    """
    paths_read.append(path)
    if len(paths_read) > _MOST_FILES:
        raise ValueError(f"'{paths_read[0]}' includes more than {_MOST_FILES} files, or itself")
    tree = tree_of(path)
    includes: Any = OmegaConf.to_container(tree, resolve=False).get("defaults")  # type: ignore[union-attr]
    tree.pop("defaults", None)
    parts, self_is_listed, choices = [], False, dict[str, str]()
    for item in includes if isinstance(includes, list) else []:
        if item == "_self_":
            parts.append(tree)
            self_is_listed = True
            continue
        for key, name in item.items() if isinstance(item, dict) else [("", item)]:
            group = str(key).removeprefix("optional ")
            name = re.sub(r"\$\{(\w+)\}", lambda match: choices.get(match[1], match[0]), str(name))
            choices[group.removeprefix("override ")] = name
            if name in ("None", "null"):
                continue
            if group.startswith("override "):
                left_out[group.removeprefix("override ")] = name
                continue
            folder, _, package = group.partition("@")
            file = os.path.join(os.path.dirname(path), folder, f"{name.removesuffix('.yaml')}.yaml")
            part = _included(file, left_out, paths_read)
            parts.append({} if part is None else _within(package or _package(file, folder), part))
    return OmegaConf.merge(*parts) if self_is_listed else OmegaConf.merge(tree, *parts)


def _included(path: str, left_out: dict[str, Any], paths_read: list[str]) -> Any:
    name = os.path.basename(path).removesuffix(".yaml")
    if os.path.isfile(path) and not (_OWN.match(name) and _is_verls(os.path.dirname(path))):
        return _composed(path, left_out, paths_read)
    if not _OWN.match(name):
        left_out[INCLUDED] = [*left_out.get(INCLUDED, []), name]
    return None


def _package(path: str, folder: str) -> str:
    """Find the section of a file's settings: its first comment names it, else its folder does."""
    if os.path.isfile(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            if match := re.match(r"# *@package +(\w+)", f.readline(_LONGEST_COMMENT)):
                return match[1]
    return folder.replace("/", ".")


def _within(package: str, part: Any) -> Any:
    for name in reversed(package.split(".")) if package not in ("", "_global_") else []:
        part = OmegaConf.create({name: part})
    return part


def _named(words: Sequence[str]) -> Mapping[str, str]:
    """Read the values of Hydra's own options."""
    options: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, sign, value = word.partition("=")
        if option in OPTIONS:
            options[OPTIONS[option]] = value if sign else following
    return options


def _folders(name: str, script: str) -> Iterator[str]:
    """List where a folder may be: below the current folder, the script's, those above, and verl's in each."""
    relative = re.sub(r"^(\$\([^)]*\)|\$\{?\w+\}?)/*", "", name.removeprefix("file://"))  # no shell expands $(pwd)
    if os.path.isabs(relative):
        yield relative
        return
    script_folder = os.path.dirname(os.path.abspath(script))
    for folder in (os.getcwd(), *(os.path.normpath(os.path.join(script_folder, "../" * n)) for n in range(_HIGHEST))):
        yield os.path.join(folder, relative)
        yield os.path.join(folder, _PROGRAMS, relative)


def _is_verls(folder: str) -> bool:
    return os.path.normpath(folder).endswith(os.path.join(_PROGRAMS, "config"))
