"""Defines the sections for the values `prometheus`, `wandb` and `mlflow` of `trainer.logger`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.fields import NonEmpty, Section, Size


class PrometheusConfig(Section):
    """Offers gauges named megarl_* to Prometheus, with the labels project, experiment, run and user."""

    mode: Literal["pull", "pushgateway", "textfile"] = Field(
        "pull",
        description="pull answers scrapes on `port`; pushgateway pushes to `gateway` after each step; textfile writes "
        "`textfile` for node_exporter",
    )
    port: int = Field(
        9464, ge=1, le=65535, description="port of rank 0's host, in the mode pull; each run of a host needs its own"
    )
    address: NonEmpty = Field(
        "127.0.0.1",
        description="address that answers scrapes without a password, in the mode pull; 0.0.0.0: for other hosts, too",
    )
    gateway: str = Field("", description="URL of a Pushgateway, such as http://host:9091")
    textfile: str = Field(
        "", description="a file NAME.prom in the folder that node_exporter's --collector.textfile.directory names"
    )


class WandbConfig(Section):
    """Logs to Weights & Biases. Its environment variables (WANDB_API_KEY, WANDB_BASE_URL ...) are read, too."""

    mode: Literal["online", "offline"] | None = Field(
        None, description="offline keeps everything in RUN/wandb, for `wandb sync`; default WANDB_MODE, or online"
    )
    entity: str = Field("", description="user or team; default the account's own")
    group: str = Field("", description="group of the run")
    tags: list[str] = Field(default_factory=list, description="labels to find the run by")
    rollouts: bool = Field(True, description="send a table of the step's sample rollouts (trainer.log_rollouts)")


class MlflowConfig(Section):
    """Logs to MLflow. Its environment variables (MLFLOW_TRACKING_TOKEN ...) are read, too."""

    tracking_uri: str = Field(
        "", description="URI of the server or store; default MLFLOW_TRACKING_URI, or MLflow's default"
    )
    tags: list[str] = Field(default_factory=list, description="labels to find the run by")
    rollouts: bool = Field(True, description="send a table of the step's sample rollouts (trainer.log_rollouts)")
    registered_model: str = Field(
        "",
        description="name in MLflow's model registry, of which each Hugging Face folder that the run exports becomes a "
        "version: its files but the weights, its path and the step's metrics; default none",
    )


class TelemetryConfig(Section):
    """Sets the servers that get metrics, and limits for a server that does not answer."""

    queue: Size = Field(
        1000, ge=1, description="records that wait for a server which does not answer; further records are dropped"
    )
    close_timeout: float = Field(
        30.0, gt=0, le=3600, description="seconds per server that a run's end waits for records that are not sent yet"
    )
    prometheus: PrometheusConfig = PrometheusConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
