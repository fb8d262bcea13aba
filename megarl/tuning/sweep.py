"""Describes a search: its run, its metric, and the values that its keys may have. Imports neither torch nor Optuna."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import Field, ValidationError, field_validator

from megarl.config.fields import NonEmpty, Section, Size
from megarl.config.load import ConfigError, read_yaml

SET_FOR_TRIALS = ("trainer.default_local_dir", "trainer.resume_mode")
"""Keys that the search sets for each trial."""
Choice = bool | int | float | str | None
"""A value that Optuna can choose: no list and no mapping."""


class Range(Section):
    """Holds the numbers from `low` to `high`, both included; whole numbers if those and `step` are."""

    low: int | float = Field(description="the smallest value")
    high: int | float = Field(description="the largest value")
    log: bool = Field(False, description="draw the logarithm evenly, such as for a learning rate")
    step: int | float | None = Field(None, gt=0, description="distance between two values; default 1, or none")


class Choices(Section):
    """Names a class of Optuna's, with its arguments."""

    name: NonEmpty = Field(description="the class")
    args: dict[str, Any] = Field(default_factory=dict, description="its keyword arguments")


class Sweep(Section):
    """Describes a search for settings of a run."""

    config: NonEmpty = Field(description="YAML file of the run")
    folder: NonEmpty = Field(description="folder of the study and of its runs")
    metric: NonEmpty = Field(description="a metric of the run, such as val/accuracy; its last value counts")
    mode: Literal["max", "min"] = Field("max", description="whether the highest or the lowest value is best")
    trials: Size = Field(20, ge=1, description="runs in all")
    keys: dict[NonEmpty, Range | list[Choice]] = Field(min_length=1, description="key -> its range, or its values")
    sampler: Choices = Field(Choices(name="TPESampler"), description="a class of optuna.samplers")
    pruner: Choices = Field(Choices(name="MedianPruner"), description="a class of optuna.pruners")

    @field_validator("keys")
    @classmethod
    def _has_values(cls, keys: dict[str, Any]) -> dict[str, Any]:
        for key, values in keys.items():
            if values == [] or (isinstance(values, Range) and values.low > values.high):
                raise ValueError(f"{key} has no value: give a list of values, or low and a higher high")
        return keys

    def extremes(self) -> Iterator[tuple[str, Choice]]:
        """Yield each key with values that are admitted if all are: the ends of a range, or every choice."""
        for key, values in self.keys.items():
            for value in (values.low, values.high) if isinstance(values, Range) else values:
                yield key, value


def read_sweep(path: str) -> Sweep:
    """Read a search's YAML file. Raises ConfigError, in one line, for what is wrong in it."""
    try:
        tree: Any = OmegaConf.to_container(read_yaml(path), resolve=True)
        if not isinstance(tree, dict):
            raise ValueError("it must hold the keys config, folder, metric and keys")
        return Sweep.model_validate(tree)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("Range", "list[nullable[union[bool,...]]]"))
        raise ConfigError(f"'{path}': {where}: {first['msg'].removeprefix('Value error, ').lower()}") from e
    except Exception as e:  # the parsers raise anything
        raise ConfigError(f"'{path}' is no search: {' '.join(str(e).split())[:200]}") from e


def overrides(values: Mapping[str, Choice]) -> list[str]:
    """Write values of keys as `key=value`."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
