"""Describes configuration keys and sections: type, default, unit and meaning. Torch-free."""

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
    """Describes a key.

    Attributes:
        key: dotted name.
        kind: type and bounds in words: "whole number, at least 1".
        default: the default value.
        text: the key's meaning and unit; empty if the name says all.
        section: the section's subject.
        choices: the allowed values of a choice; else empty.
    """

    key: str
    kind: str
    default: Any
    text: str
    section: str
    choices: tuple[str, ...]


def describe_all(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Described]:
    """Describe every key, in the order of the sections."""
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
    """Map each section's dotted name to its subject."""
    return dict(_sections(Config, ""))


def default_of(field: FieldInfo) -> Any:
    """Return a key's default value."""
    return field.get_default(call_default_factory=True)


def yaml_value(value: Any) -> str:
    """Write a value as YAML does, texts without quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def flat(tree: Mapping[str, Any], keys: Container[str], prefix: str = "") -> dict[str, Any]:
    """Map dotted names to the values of a tree with sections.

    Args:
        keys: dotted names whose values stay whole even if they are mappings.
    """
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in keys:
            values |= flat(value, keys, f"{key}.")
        else:
            values[key] = value
    return values


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
        item = _kind(arguments[1])
        text = f"mapping of: {item}" if item.startswith("mapping") else "mapping"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):  # the type of a mapping's or list's items
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
                if value is not None and value < 2**20:  # a larger bound only refuses absurd values
                    yield f"{words} {value:g}"


def _choices(annotation: Any) -> tuple[str, ...]:
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return ()
