"""What is known of every key: type, default, unit and meaning, and of the section that it is in. Torch-free."""

from __future__ import annotations

import types
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Described:
    """A key.

    Attributes:
        key: dotted.
        kind: its type and bounds in words: "whole number, at least 1".
        default: as YAML writes it.
        text: what it does, with its unit; empty where the name says all.
        section: what the section is about.
        choices: the values that it can have, where these are few.
    """

    key: str
    kind: str
    default: Any
    text: str
    section: str
    choices: tuple[str, ...]


def describe_all(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Described]:
    """Every key, in the order of the sections."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from describe_all(field.annotation, f"{prefix}{name}.")
            continue
        yield Described(
            key=prefix + name,
            kind=_kind(field.annotation, field.metadata),
            default=default_of(field),
            text=field.description or "",
            section=_first_paragraph(section),
            choices=_choices(field.annotation),
        )


def sections() -> dict[str, str]:
    """What each section is about, by its dotted name."""
    return dict(_sections(Config, ""))


def default_of(field: FieldInfo) -> Any:
    """The value that a key has if nobody sets it."""
    return field.get_default(call_default_factory=True)


def flat(tree: Mapping[str, Any], keys: Container[str], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name, of a tree with sections.

    Args:
        keys: those of the schema: one that holds a mapping keeps it.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in keys:
            found |= flat(value, keys, f"{key}.")
        else:
            found[key] = value
    return found


def _sections(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield prefix + name, _first_paragraph(field.annotation)
            yield from _sections(field.annotation, f"{prefix}{name}.")


def _first_paragraph(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").partition("\n\n")[0].split())


_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__, [*metadata, *annotation.__metadata__])
    if origin in (Union, types.UnionType):
        text = " or ".join(_kind(argument) for argument in arguments)
    elif origin is Literal:
        text = ", ".join(map(str, arguments))
    elif origin is list:
        text = f"list of: {_kind(arguments[0])}"
    elif origin is dict:
        named = _kind(arguments[1])
        text = f"mapping of: {named}" if named.startswith("mapping") else "mapping"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):  # an item of a mapping or a list
        text = f"mapping with {', '.join(annotation.model_fields)}"
    else:
        text = _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)))
    bounds = list(_bounds(metadata))
    return ", ".join([text, *bounds])


_BOUNDS = {
    "ge": "at least",
    "gt": "more than",
    "le": "at most",
    "lt": "less than",
    "min_length": "characters, at least",
}


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for item in metadata:
        for part in getattr(item, "metadata", None) or [item]:
            for name, words in _BOUNDS.items():
                value = getattr(part, name, None)
                if value is not None and value < 2**20:  # what is more only keeps out what has no meaning
                    yield f"{words} {value:g}"


def _choices(annotation: Any) -> tuple[str, ...]:
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return ()
