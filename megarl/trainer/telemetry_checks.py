"""Whether metrics can go where `trainer.logger` says, before any rank starts."""

from __future__ import annotations

from megarl.config import Config
from megarl.telemetry.sinks import check_packages


def check_telemetry(config: Config) -> None:
    """Raises ValueError, with what to change: a package is missing, or Prometheus' mode lacks its key."""
    check_packages(config.trainer.logger)
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
