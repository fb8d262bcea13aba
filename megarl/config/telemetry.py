"""Where metrics go beside files, for the values `prometheus`, `wandb` and `mlflow` of `trainer.logger`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.fields import NonEmpty, Section, Size


class PrometheusConfig(Section):
    """Gauges named megarl_*, with the labels project, experiment and run."""

    mode: Literal["pull", "pushgateway", "textfile"] = Field(
        "pull",
        description="pull answers scrapes on `port`; pushgateway pushes to `gateway` after each step; textfile writes "
        "`textfile` for node_exporter",
    )
    port: int = Field(
        9464, ge=1, le=65535, description="of rank 0's host, in the mode pull; one for each run of a host"
    )
    address: NonEmpty = Field(
        "127.0.0.1",
        description="where scrapes are answered, in the mode pull, without a password; 0.0.0.0: to all who reach it",
    )
    gateway: str = Field("", description="URL of a Pushgateway, such as http://host:9091")
    textfile: str = Field(
        "", description="a file NAME.prom in the folder of node_exporter's --collector.textfile.directory"
    )


class WandbConfig(Section):
    """Weights & Biases; its own environment variables (WANDB_API_KEY, WANDB_BASE_URL ...) count too."""

    mode: Literal["online", "offline"] | None = Field(
        None, description="offline keeps everything in RUN/wandb, for `wandb sync`; default WANDB_MODE, or online"
    )
    entity: str = Field("", description="user or team; default the account's own")
    group: str = Field("", description="what the run is grouped with")
    tags: list[str] = Field(default_factory=list, description="words to find the run by")
    rollouts: bool = Field(True, description="send a table of the step's sample rollouts (trainer.log_rollouts)")


class MlflowConfig(Section):
    """MLflow; its own environment variables (MLFLOW_TRACKING_TOKEN ...) count too."""

    tracking_uri: str = Field("", description="of the server or store; default MLFLOW_TRACKING_URI, or MLflow's own")
    tags: list[str] = Field(default_factory=list, description="words to find the run by")
    rollouts: bool = Field(True, description="send a table of the step's sample rollouts (trainer.log_rollouts)")


class TelemetryConfig(Section):
    """Where metrics go beside files, and how much a server that does not answer may hold back."""

    queue: Size = Field(
        1000, ge=1, description="records that wait for a server which does not answer; further ones are left out"
    )
    close_timeout: float = Field(
        30.0, gt=0, le=3600, description="seconds that the end of a run waits for what is not sent yet, per server"
    )
    prometheus: PrometheusConfig = PrometheusConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
