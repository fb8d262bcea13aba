"""Any value for any key, and any two of them: a configuration that works, or one line that says why not."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from selection import quick
from tiny_run import write_run

from megarl.config import Config, load_config
from megarl.trainer.admission.checks import check_run
from megarl.trainer.inputs import Inputs

HOSTILE = st.sampled_from(
    [
        *("[", "{", "'x", "${", "${x}", "${data}", "${data.seed}", "???", "inf", ".nan", "-inf", "1e400", "null", "~"),
        *("[1", "[[]]", "{a: 1}", "!!binary /w==", "2020-01-01", "a\nb", "\x00", "\ud800", "&a [*a]", "0x1F", "1_000"),
        *("true", "no", "-1", "0", "-0.0", "1e-320", "1e10", "1e18", str(2**31), str(2**63), "9" * 400, "9" * 5000),
        *("é", "/", "/dev/null", "..", "*", "[a-", "x" * 5000, "no/such.py:f", "{", "- 1", "[null]", '"', "' '"),
    ]
)


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


FIELDS = dict(_fields(Config))


def _of_type(annotation: Any, bounds: list[Any]) -> st.SearchStrategy[Any]:
    """Values of a type, at its bounds, one beyond them, and anywhere between."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return st.one_of(_of_type(argument, bounds) for argument in arguments)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(_of_type(arguments[0], bounds), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2)
    if hasattr(annotation, "__metadata__"):
        return _of_type(annotation.__origin__, [*bounds, *_bounds(annotation.__metadata__)])
    if annotation is bool:
        return st.booleans()
    if annotation in (int, float):
        edges = [value + step for value in bounds for step in (-1, 0, 1)]
        near = st.sampled_from(edges) if edges else st.nothing()
        usual = st.integers(-2, 40) if annotation is int else st.floats(0, 3) | st.floats()
        return near | usual | (st.integers() if annotation is int else st.floats(1e-9, 1))
    return st.none() if annotation is type(None) else st.text(max_size=8)


def _bounds(metadata: Any) -> list[Any]:
    found = []
    for item in metadata:
        for part in getattr(item, "metadata", None) or [item]:
            found += [getattr(part, name) for name in ("ge", "gt", "le", "lt") if hasattr(part, name)]
    return found


def _override(key: str) -> st.SearchStrategy[str]:
    field = FIELDS[key]
    right = _of_type(field.annotation, _bounds(field.metadata))
    written = right.map(lambda value: yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True))
    # yaml ends a scalar's document with "...", which is no part of a value
    return st.one_of(written.map(lambda text: text.removesuffix("...\n").rstrip("\n")), HOSTILE).map(
        lambda text: f"{key}={text}"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_run(tmp_path_factory.mktemp("run")))


def _outcome(run: str, overrides: list[str]) -> Inputs | str:
    try:
        return check_run(load_config(run, overrides))
    except ValueError as e:
        assert str(e) and "\n" not in str(e) and len(str(e)) < 2000, (overrides, e)
        return str(e)


@pytest.mark.timeout(60)  # one value that hangs, not all keys together
@pytest.mark.parametrize("key", quick(sorted(FIELDS), *range(0, len(FIELDS), 8)))
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_value_of_a_key(run: str, key: str, data: st.DataObject) -> None:
    _outcome(run, [data.draw(_override(key))])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(sorted(FIELDS)).flatmap(_override), min_size=2, max_size=4))
def test_any_values_together(run: str, overrides: list[str]) -> None:
    _outcome(run, overrides)


def test_every_key_takes_its_own_default(run: str) -> None:
    defaults = {key: field.get_default(call_default_factory=True) for key, field in FIELDS.items()}
    kept = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in defaults.items()]
    config = load_config(run, [item.removesuffix("...\n").rstrip("\n") for item in kept if "_dir=" not in item])
    assert config.model_dump(exclude={"trainer"}) == Config().model_dump(exclude={"trainer"})


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30) | HOSTILE | st.sampled_from(sorted(FIELDS)).flatmap(_override))
def test_any_text_as_an_override(text: str) -> None:
    path = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    try:
        load_config(str(path), [text])
    except ValueError as e:
        assert str(e) and "\n" not in str(e)
