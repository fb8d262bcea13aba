"""The reference of configuration keys, from the schema."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.config import Config
from megarl.config.describe import default_of
from megarl.config.load import all_keys
from megarl_docs.tables import code, plain

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
_NAMED = {2**31 - 1: "2³¹ − 1", 2**20: "2²⁰", 2**40: "2⁴⁰"}


def reference() -> str:
    """Every section with its keys, each below a heading of its own: so the search finds it by its full name."""
    return "\n".join(_section(name, section) for name, section in sections())


def sections(section: type[BaseModel] = Config, name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, section) of every section that has keys of its own, outer ones first."""
    if _own(section):
        yield name, section
    for field_name, field in section.model_fields.items():
        if is_section(field.annotation):
            assert isinstance(field.annotation, type)
            yield from sections(field.annotation, f"{name}.{field_name}".strip("."))


def is_section(annotation: Any) -> bool:
    """Whether it is a group of keys."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def anchor(key: str) -> str:
    """Markdown link to a key, written as `megarl algorithms` does, without "actor_rollout_ref.", or in full."""
    known = set(all_keys())
    full = key if key in known else f"actor_rollout_ref.{key}"
    return f"[{code(key)}](../../reference/keys.md#{full})" if full in known else code(key)


def kind(annotation: Any) -> str:
    """A type for people: "number", "one of …", "list of text"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(kind(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(code(str(value)) for value in arguments)
    if origin is list:
        return f"list of {kind(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping to {kind(arguments[1])}"
    if hasattr(annotation, "__metadata__"):
        return " ".join(filter(None, (kind(annotation.__origin__), limits(annotation.__metadata__))))
    if is_section(annotation):
        return "{" + ", ".join(f"{name}: {kind(field.annotation)}" for name, field in _own(annotation).items()) + "}"
    names = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
    return names[annotation]


def limits(metadata: Any) -> str:
    """Of a field: "≥ 1, ≤ 2²⁰"."""
    found = {}
    for item in metadata:
        for part in getattr(item, "metadata", None) or [item]:
            found |= {sign: getattr(part, name) for name, sign in _BOUNDS.items() if hasattr(part, name)}
    return ", ".join(f"{sign} {_NAMED.get(value, f'{value:g}')}" for sign, value in found.items())


def default(field: FieldInfo) -> str:
    """As YAML; empty for a key that must be given."""
    value = default_of(field)
    if value is PydanticUndefined:
        return ""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _own(section: type[BaseModel]) -> dict[str, FieldInfo]:
    return {name: field for name, field in section.model_fields.items() if not is_section(field.annotation)}


def _section(name: str, section: type[BaseModel]) -> str:
    doc = " ".join((section.__doc__ or "").split())
    entries = (_entry(f"{name}.{field_name}", field) for field_name, field in _own(section).items())
    return "\n".join([f"## {name}\n\n{doc}\n", *entries])


def _entry(key: str, field: FieldInfo) -> str:
    link = f'<a class="headerlink" href="#{key}" title="Permanent link">¶</a>'
    holds = [kind(field.annotation), limits(field.metadata), f"default {code(default(field))}" * bool(default(field))]
    facts, meaning = ", ".join(filter(None, holds)), plain(field.description or "")
    return f'<h3 class="key" id="{key}">{code(key)}{link}</h3>\n\n{facts}\n\n{meaning}\n'
