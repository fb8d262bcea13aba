"""Sends metrics, configuration, tables of sample rollouts, references to exported folders to Weights & Biases."""

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
from megarl.telemetry.sinks.background import ROLLOUT_COLUMNS, Background, Row, rollout_cells

RUN_FILE = "wandb_run.txt"
"""Name of the file in the run's folder that holds the run's id at W&B. A resumed run continues under this id."""

_INIT_SECONDS = 30.0


class WandbSink(Background):
    """Logs rows with a column `step`, which is the axis of all charts, because W&B's own counter cannot go back.

    A step that is repeated after a resume or a rollback is a second point at the same place.
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
        # no capture of the console, no sampling of the machine, no output, and no command line, which may hold secrets
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
            table = wandb.Table(columns=list(ROLLOUT_COLUMNS), data=[rollout_cells(step, sample) for sample in samples])
            self._run.log({"step": step, "rollouts": table})

    def artifact(self, path: str) -> None:
        """Log config.yaml as a file, and a folder of weights, which are large, as a reference to its path."""
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
        """End W&B's process: its exit handler would wait for it as long as the server is away.

        RUN/wandb keeps the records, and `wandb sync` sends them.
        """
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                child.kill()
        with suppress(Exception, SystemExit):  # fails without the process; else the exit handler would fail visibly
            sys.modules["wandb"].teardown()


def _id_of(run_dir: str) -> str:
    """Read the run's id from its file, or make one and write it there."""
    path = os.path.join(run_dir, RUN_FILE)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            if run_id := f.read().strip():
                return run_id
    run_id = uuid.uuid4().hex[:12]
    rewrite(path, run_id.encode())
    return run_id
