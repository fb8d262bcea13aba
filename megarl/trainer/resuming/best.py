"""Finds and marks the checkpoint with the best validation, by `trainer.best_metric`.

Each checkpoint records the validation of its own step. The best one is searched among the checkpoints on the disk, so
that it is right after a death between a checkpoint and the marker, with a damaged checkpoint, and in a run that went
back. A better validation than all of theirs is followed by a checkpoint, whatever `trainer.save_freq` says; the
validation before the first step belongs to no checkpoint.

RUN/checkpoints/best.json   {"checkpoint": "global_step_12", "step": 12, "metric": "val/accuracy", "value": 0.75}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from megarl.checkpoint.folder import Position, checkpoints, loop_and_step
from megarl.config import Config
from megarl.evaluation.folder import write_json
from megarl.flow_kinds import flow_kind
from megarl.telemetry.lines import only_file

if TYPE_CHECKING:  # a command that only reads the marker does without Megatron-Core
    from megarl.parallel.world import World

BEST_FILE = "best.json"


class BestCheckpoint:
    """Knows the best checkpoint, and keeps the marker; does nothing without `trainer.best_metric`.

    Attributes:
        folder: folder of the best checkpoint; None without one.
        value: its value of the metric.
    """

    def __init__(self, config: Config, world: World, position: Position) -> None:
        """Find the best checkpoint of the run so far; every rank calls it.

        Args:
            position: beginning of the run; later checkpoints are no part of it.
        """
        trainer = config.trainer
        self._trainer, self._world, self._always_alike = trainer, world, flow_kind(config).validates
        self._marker = os.path.join(trainer.run_dir, "checkpoints", BEST_FILE)
        self.folder: str | None = None
        self.value = math.nan
        if trainer.best_metric:
            best = self._search(position) if world.rank == 0 else None
            self.folder, self.value = world.broadcast(best or (None, math.nan), "the best checkpoint")

    def problem_with(self, validation: Mapping[str, float]) -> str | None:
        """Say that a validation lacks the metric; a flow of the user's may have validations of several kinds."""
        metric = self._trainer.best_metric
        if not self._always_alike or not metric or metric in validation:
            return None
        return f"trainer.best_metric = {metric} is no metric of the validation, which gives {', '.join(validation)}"

    def improved_by(self, validation: Mapping[str, float]) -> bool:
        """Tell whether a validation is better than that of the best checkpoint, the same on every rank."""
        if not self._trainer.best_metric or not validation:
            return False
        better = self._better(validation.get(self._trainer.best_metric, math.nan))
        return bool(self._world.maximum(int(better), "the best checkpoint"))

    def saved(self, folder: str, validation: Mapping[str, float]) -> None:
        """Take note of a new checkpoint; every rank calls it."""
        if self.improved_by(validation):
            self.folder, self.value = folder, validation[self._trainer.best_metric]
            self.mark()

    def _better(self, value: float) -> bool:
        if not math.isfinite(value) or self.folder is None:
            return math.isfinite(value)
        return value > self.value if self._trainer.best_mode == "max" else value < self.value

    def _search(self, position: Position) -> tuple[str, float] | None:
        """Find the best whole checkpoint of the run's folder, the earliest of equal ones."""
        best = None
        for checkpoint in reversed(checkpoints(self._trainer.run_dir)):
            if checkpoint.problem is None and checkpoint.position <= position:
                value = checkpoint.state.get("validation", {}).get(self._trainer.best_metric)
                if isinstance(value, float) and self._better(value):
                    self.folder, self.value = best = checkpoint.folder, value
        return best

    def mark(self) -> None:
        """Write the marker on rank 0, or remove an outdated one."""
        if self._world.rank or not self._trainer.best_metric:
            return
        if self.folder is None:
            with suppress(FileNotFoundError):
                os.unlink(self._marker)
            return
        name = os.path.basename(self.folder)
        loop, step = loop_and_step(name)
        chosen_by = {"loop": loop, "metric": self._trainer.best_metric, "mode": self._trainer.best_mode}
        with suppress(OSError):  # a full disk: the checkpoints say the same, and the next start writes it
            write_json(self._marker, {"checkpoint": name, "step": step, **chosen_by, "value": self.value})


def best_checkpoint(run_dir: str) -> str:
    """Read the folder of the best checkpoint from the run's marker. Raises ValueError if there is none."""
    marker = os.path.join(run_dir, "checkpoints", BEST_FILE)
    try:
        with open(marker, encoding="utf-8", opener=only_file) as f:
            name = json.load(f)["checkpoint"]
        folder = os.path.join(run_dir, "checkpoints", os.path.basename(name))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"'{run_dir}' names no best checkpoint: it has no checkpoints/{BEST_FILE}") from e
    if not os.path.isdir(folder):
        raise ValueError(f"'{marker}' names {name}, which is not there")
    return folder


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Keep the finite values, which are those that JSON has."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
