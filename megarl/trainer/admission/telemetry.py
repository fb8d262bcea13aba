"""Checks the places that `trainer.logger` sends metrics to."""

from __future__ import annotations

import os

from megarl.config import Config
from megarl.telemetry.sinks import check_packages
from megarl.telemetry.sinks.jsonl import METRICS_FILE


def check_telemetry(config: Config) -> None:
    """Raise ValueError, with what to change, for a missing package, a missing key of Prometheus, a folder for a
    file."""
    check_packages(config.trainer.logger)
    metrics = os.path.join(config.trainer.default_local_dir, METRICS_FILE)
    if "jsonl" in config.trainer.logger and os.path.isdir(metrics):
        raise ValueError(f"'{metrics}' is a folder; move it away, or set another trainer.default_local_dir")
    settings = config.telemetry.prometheus
    if "prometheus" not in config.trainer.logger:
        return
    if settings.mode == "pushgateway" and not settings.gateway.startswith(("http://", "https://")):
        raise ValueError(
            f"telemetry.prometheus.mode=pushgateway pushes to telemetry.prometheus.gateway = {settings.gateway!r}; set "
            "it to a URL such as http://host:9091"
        )
    if settings.mode == "textfile":
        path = settings.textfile
        if not path.endswith(".prom"):  # node_exporter reads no other
            raise ValueError(
                f"telemetry.prometheus.mode=textfile writes telemetry.prometheus.textfile = {path!r}; set it to a file "
                "NAME.prom in the folder that node_exporter reads"
            )
