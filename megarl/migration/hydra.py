"""The YAML files of a Hydra program: the one that a command names, and those that its `defaults` include."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from megarl.config.load import check_interpolations
from megarl.migration.values import flat, tree_of

NAME, INCLUDED = "--config-name", "defaults"
"""Settings that stand for a file that is not there: which one is their value."""

OPTIONS = {"--config-name": NAME, "-cn": NAME, "--config-path": "path", "-cp": "path", "--config-dir": "path",
            "-cd": "path"}  # fmt: skip
_PROGRAMS = "verl/trainer"
"""Where verl's own files are; a relative `--config-path` begins there."""
_OWN = re.compile(r"^(ppo|sft)\w*_trainer(_engine)?$")
"""Names of verl's own files, whose settings are its defaults."""
_MOST_FILES, _HIGHEST, _LONGEST_COMMENT = 32, 12, 200


def of_command(words: Sequence[str], script: str) -> dict[str, Any]:
    """What the file holds that `--config-name` names, by dotted key; nothing for one of verl's own.

    Args:
        words: of the command.
        script: the file that the command is in: others are looked for from its folder and those above.

    Raises:
        ValueError: a file that is no YAML.
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
    """A file's settings by dotted key, on top of those that it includes.

    Raises:
        ValueError: it cannot be read, holds no settings, or includes too many files.
    """
    left_out: dict[str, Any] = {}
    tree = _composed(path, left_out, [])
    try:
        check_interpolations(tree, dangling=True)
    except Exception as e:  # the parsers raise what they like
        raise ValueError(f"'{path}' with what it includes: {' '.join(str(e).split())[:200]}") from e
    return flat(tree) | left_out


def _composed(path: str, left_out: dict[str, Any], paths_read: list[str]) -> Any:
    """A file's tree with those that its list of `defaults` includes, in the list's order.

    Args:
        left_out: is told which files are not there, and what else the list sets.
        read: files so far.
    """
    paths_read.append(path)
    if len(paths_read) > _MOST_FILES:
        raise ValueError(f"'{paths_read[0]}' includes more than {_MOST_FILES} files, or itself")
    tree = tree_of(path)
    listed: Any = OmegaConf.to_container(tree, resolve=False).get("defaults")  # type: ignore[union-attr]
    tree.pop("defaults", None)
    parts, self_is_listed, chosen = [], False, dict[str, str]()
    for item in listed if isinstance(listed, list) else []:
        if item == "_self_":
            parts.append(tree)
            self_is_listed = True
            continue
        for key, name in item.items() if isinstance(item, dict) else [("", item)]:
            group = str(key).removeprefix("optional ")
            name = re.sub(r"\$\{(\w+)\}", lambda match: chosen.get(match[1], match[0]), str(name))
            chosen[group.removeprefix("override ")] = name
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
    """The section that a file's settings are of: what its first comment says, or its folder's name."""
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
    """The values of Hydra's own options."""
    options: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, given, value = word.partition("=")
        if option in OPTIONS:
            options[OPTIONS[option]] = value if given else following
    return options


def _folders(named: str, script: str) -> Iterator[str]:
    """Where a folder may be: as it is named, or from the script's folder, one above it, or verl's beside these."""
    relative = re.sub(r"^(\$\([^)]*\)|\$\{?\w+\}?)/*", "", named.removeprefix("file://"))  # of $(pwd), which is not run
    if os.path.isabs(relative):
        yield relative
        return
    above = os.path.dirname(os.path.abspath(script))
    for folder in (os.getcwd(), *(os.path.normpath(os.path.join(above, "../" * n)) for n in range(_HIGHEST))):
        yield os.path.join(folder, relative)
        yield os.path.join(folder, _PROGRAMS, relative)


def _is_verls(folder: str) -> bool:
    return os.path.normpath(folder).endswith(os.path.join(_PROGRAMS, "config"))
