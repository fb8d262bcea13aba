"""Sends metrics, parameters, tables of sample rollouts, the configuration and versions of a model to MLflow."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar

from megarl.config import Config
from megarl.config.describe import flat
from megarl.config.secrets import for_records
from megarl.telemetry.lines import Say, rewrite
from megarl.telemetry.samples import Sample
from megarl.telemetry.sinks.background import ROLLOUT_COLUMNS, Background, Row, rollout_cells
from megarl.telemetry.sinks.metric_names import Names

RUN_FILE = "mlflow_run.txt"
"""Name of the file in the run's folder that holds the run's id at MLflow. A resumed run continues under this id."""

_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 500
"""Metrics and parameters per request, and characters per parameter, that every version of the server accepts."""

_MOST_STEPS = 100
"""Steps whose metrics are known when a checkpoint of one of them has been written."""

_SHOWN = ("val/", "reward/mean")
"""Beginnings of the metrics that a version of a registered model has as tags."""

_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Defaults of the environment for a request: few tries, because `Background` tries again anyway."""

T = TypeVar("T")


class MlflowSink(Background):
    """Logs a run named `trainer.experiment_name` in the experiment `trainer.project_name`.

    A step that is repeated after a resume or a rollback is a second point at the same step with a later time.
    """

    configured: ClassVar = True

    def __init__(self, run_dir: str, first_step: int, say: Say, config: Config) -> None:
        del first_step
        super().__init__("mlflow", _Mlflow(run_dir, config), config.telemetry, say)


class _Mlflow:
    def __init__(self, run_dir: str, config: Config) -> None:
        self._noted, self._config = os.path.join(run_dir, RUN_FILE), config
        self._client: Any = None
        self._id, self._names = "", Names(metric_name)
        self._newest: dict[int, Mapping[str, float]] = {}  # step -> metrics

    def open(self) -> None:
        for key, value in _PATIENCE.items():
            os.environ.setdefault(key, value)
        from mlflow.tracking import MlflowClient

        for noisy in ("mlflow", "alembic"):  # a new store's tables
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self._client = MlflowClient(self._config.telemetry.mlflow.tracking_uri or None)
        if os.path.exists(self._noted):
            with open(self._noted, encoding="utf-8") as f:
                self._id = f.read().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        if not self._id:
            self._id = self._create()
        self._log_parameters()
        rewrite(self._noted, self._id.encode())

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now, points = int(time.time() * 1000), []
        for step, metrics in rows:
            self._newest[step] = metrics
            names = self._names.of(metrics)
            points += [Metric(names[name], float(value), now, step) for name, value in metrics.items()]
        self._newest = dict(list(self._newest.items())[-_MOST_STEPS:])
        for part in _in_parts(points, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        if self._config.telemetry.mlflow.rollouts:
            table = {"columns": list(ROLLOUT_COLUMNS), "data": [rollout_cells(step, sample) for sample in samples]}
            self._client.log_dict(self._id, table, f"rollouts/step_{step:06d}.json")

    def artifact(self, path: str) -> None:
        """Log config.yaml as a file, and a folder of weights, which are large, as its path."""
        if os.path.isdir(path):
            self._client.set_tag(self._id, "megarl.model", os.path.abspath(path))
            if self._config.telemetry.mlflow.registered_model:
                self._register(path, self._config.telemetry.mlflow.registered_model)
        elif os.path.exists(path):  # else its checkpoint was deleted meanwhile
            self._client.log_artifact(self._id, path)

    def _register(self, path: str, name: str) -> None:
        """Make a version of a registered model. A server takes a source below the run's artifacts alone: so the files
        but the weights go there, and a tag names the folder."""
        from mlflow.exceptions import MlflowException

        checkpoint = os.path.basename(os.path.dirname(os.path.abspath(path)))
        place = f"models/{checkpoint}"
        for file in sorted(os.scandir(path), key=lambda entry: entry.name):
            if file.is_file() and not file.name.endswith(".safetensors"):
                self._client.log_artifact(self._id, file.path, place)
        try:
            self._client.create_registered_model(name)
        except MlflowException as e:
            if e.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        step = checkpoint.rpartition("_")[2]
        metrics = self._newest.get(int(step), {}) if step.isdecimal() else {}
        shown = {metric_name(key): f"{value:.6g}" for key, value in metrics.items() if key.startswith(_SHOWN)}
        self._client.create_model_version(
            name,
            f"{self._client.get_run(self._id).info.artifact_uri}/{place}",
            self._id,
            tags={"megarl.path": os.path.abspath(path), "megarl.checkpoint": checkpoint, **shown},
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def abandon(self) -> None: ...

    def _create(self) -> str:
        trainer, tags = self._config.trainer, self._config.telemetry.mlflow.tags
        experiment = self._client.get_experiment_by_name(trainer.project_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(trainer.project_name)
        run = self._client.create_run(experiment_id, run_name=trainer.experiment_name, tags=dict.fromkeys(tags, "true"))
        return str(run.info.run_id)

    def _log_parameters(self) -> None:
        from mlflow.entities import Param

        values = flat(for_records(self._config.model_dump()), ())
        parameters = [Param(metric_name(key), str(value)[:_LONGEST_PARAMETER]) for key, value in values.items()]
        for part in _in_parts(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=part)


def metric_name(name: str) -> str:
    """Replace characters that MLflow does not allow by "_": val/pass@4 -> val/pass_4."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _in_parts(items: Sequence[T], most: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, most)):
        yield part
