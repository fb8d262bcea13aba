"""Weights & Biases: rows, configuration, tables of sample rollouts, references to what the run exports."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import psutil

from megarl.config import Config
from megarl.config.secrets import for_records
from megarl.telemetry.lines import Say, rewrite
from megarl.telemetry.samples import Sample
from megarl.telemetry.sinks.background import Background, Row
from megarl.telemetry.sinks.tables import COLUMNS, cells

RUN_FILE = "wandb_run.txt"
"""In the run's folder: the run's id at W&B, with which a resumed run goes on."""

_INIT_SECONDS = 30.0


class WandbSink(Background):
    """`trainer.logger=wandb`.

    Rows have a column `step`, which all charts have as their axis: W&B's own counter cannot go back. A step that is
    made again, after a resume or a rollback, is a second point at the same place.
    """

    configured: ClassVar = True

    def __init__(self, run_dir: str, first_step: int, say: Say, config: Config) -> None:
        del first_step
        super().__init__("wandb", _Wandb(run_dir, config), config.telemetry, say)


class _Wandb:
    def __init__(self, run_dir: str, config: Config) -> None:
        self._run_dir, self._config = run_dir, config
        self._run: Any = None

    def open(self) -> None:
        import wandb

        settings, trainer = self._config.telemetry.wandb, self._config.trainer
        # no capture of the console, no sampler of its own, nothing on the terminal, no command line with its secrets
        quiet = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, init_timeout=_INIT_SECONDS
        )
        wandb.setup(quiet)
        os.makedirs(self._run_dir, exist_ok=True)
        self._run = wandb.init(
            dir=self._run_dir,
            project=trainer.project_name,
            name=trainer.experiment_name,
            entity=settings.entity or None,
            group=settings.group or None,
            tags=settings.tags or None,
            mode=settings.mode,
            id=_id_of(self._run_dir),
            resume="allow",
            config=for_records(self._config.model_dump(mode="json")),
            allow_val_change=True,
            settings=quiet,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, rows: Sequence[Row]) -> None:
        for step, metrics in rows:
            self._run.log({"step": step, **metrics})

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        if self._config.telemetry.wandb.rollouts:
            table = wandb.Table(columns=list(COLUMNS), data=[cells(step, sample) for sample in samples])
            self._run.log({"step": step, "rollouts": table})

    def artifact(self, path: str) -> None:
        """config.yaml as a file; a folder as a reference to where it is, because weights are large."""
        import wandb

        kind = "model" if os.path.isdir(path) else "config"
        artifact = wandb.Artifact(f"{self._run.id}-{kind}", type=kind, metadata={"path": os.path.abspath(path)})
        if kind == "model":
            artifact.add_reference(f"file://{os.path.abspath(path)}", checksum=False)
        else:
            artifact.add_file(path)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()

    def abandon(self) -> None:
        """End W&B's own process, for which its exit handler would wait as long as the server is away. What it was given
        is in RUN/wandb, and `wandb sync` sends it."""
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                child.kill()
        with suppress(Exception, SystemExit):  # it misses its process; else its exit handler would say so
            sys.modules["wandb"].teardown()


def _id_of(run_dir: str) -> str:
    """The one that an earlier process of the run has noted, or a new one, noted."""
    path = os.path.join(run_dir, RUN_FILE)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            if noted := f.read().strip():
                return noted
    made = uuid.uuid4().hex[:12]
    rewrite(path, made.encode())
    return made
