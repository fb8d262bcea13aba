"""Gives Prometheus the newest value of every metric: scraped, pushed, or in a file for node_exporter."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    delete_from_gateway,
    make_wsgi_app,
    push_to_gateway,
    write_to_textfile,
)
from prometheus_client.core import GaugeMetricFamily

from megarl.config import Config
from megarl.host import user_name
from megarl.telemetry.lines import Say
from megarl.telemetry.metrics import find
from megarl.telemetry.samples import Sample
from megarl.telemetry.sinks.background import Background, Row
from megarl.telemetry.sinks.metric_names import Names
from megarl.telemetry.sinks.sink import Sink

JOB = "megarl"
_SECONDS = 10.0  # for one push, and for a scraping client to send its request
_MOST = 16  # scrapes at a time: idle connections must not use up the rank's file descriptors


def prometheus_name(name: str) -> str:
    """Name a metric for Prometheus: reward/mean -> megarl_reward_mean, val/pass@4 -> megarl_val_pass_4."""
    return "megarl_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name)


class Gauges:
    """Holds the newest value of each metric for prometheus_client.

    A metric that a row lacks keeps its value, such as that of the latest validation.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self._names = dict(labels), Names(prometheus_name)
        self._newest: dict[str, tuple[str, float]] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def set(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {**metrics, "step": float(step)}
        values = {short: (name, row[name]) for name, short in self._names.of(row).items()}
        self._newest = {**self._newest, **values}  # one assignment: a scrape sees whole rows

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for short, (name, value) in self._newest.items():
            spec = find(name)
            text = f"{name} ({spec.unit}): {spec.meaning}" if spec else name
            gauge = GaugeMetricFamily(short, text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge


class PrometheusSink:
    """Shows a run's metrics in the mode that `telemetry.prometheus.mode` names.

    `close` removes them: it ends the server, deletes the Pushgateway's group, or deletes the file.
    """

    configured: ClassVar = True
    append_only: ClassVar = True

    def __init__(self, run_dir: str, first_step: int, say: Say, config: Config) -> None:
        del first_step
        settings, trainer = config.telemetry.prometheus, config.trainer
        run = os.path.basename(os.path.abspath(run_dir))
        labels = {
            "project": trainer.project_name,
            "experiment": trainer.experiment_name,
            "run": run,
            "user": user_name(),  # equal names of two users are two groups of a Pushgateway
        }
        self._sink: Sink
        if settings.mode == "pull":
            self._sink = _Pull(Gauges(labels), settings.port, settings.address, say)
        elif settings.mode == "textfile":
            self._sink = _Textfile(Gauges(labels), settings.textfile)
        else:
            self._sink = Background("prometheus", _Push(Gauges({}), settings.gateway, labels), config.telemetry, say)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sink.log(step, metrics)

    def close(self) -> None:
        self._sink.close()


class _Handler(WSGIRequestHandler):
    timeout = _SECONDS

    def log_message(self, format: str, *args: Any) -> None: ...


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each scrape in its own thread, at most `_MOST` at a time. It closes further connections at once."""

    daemon_threads = True
    request_queue_size = 128  # with socketserver's 5, clients retry a connection to a full queue seconds later

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self._open: set[Any] = set()
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if len(self._open) >= _MOST:
            return False
        self._open.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that left or took too long."""


class _Pull:
    """Answers scrapes from a thread of this process."""

    def __init__(self, gauges: Gauges, port: int, address: str, say: Say) -> None:
        self._gauges = gauges
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        try:
            self._server = _Server(address, port, gauges.registry)
            self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="megarl-prometheus")
            self._thread.start()
        except OSError as e:
            say(
                f"trainer.logger=prometheus: telemetry.prometheus.port = {port} of {address} cannot be used ({e}); "
                "nobody can scrape this run"
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._gauges.set(step, metrics)

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Textfile:
    """Replaces a file after each step."""

    def __init__(self, gauges: Gauges, path: str) -> None:
        self._gauges, self._path = gauges, path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._gauges.set(step, metrics)
        write_to_textfile(self._path, self._gauges.registry)

    def close(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)


class _Push:
    def __init__(self, gauges: Gauges, gateway: str, grouping: Mapping[str, str]) -> None:
        self._gauges, self._gateway, self._grouping = gauges, gateway, dict(grouping)

    def open(self) -> None: ...

    def log(self, rows: Sequence[Row]) -> None:
        for step, metrics in rows:
            self._gauges.set(step, metrics)
        push_to_gateway(self._gateway, JOB, self._gauges.registry, grouping_key=self._grouping, timeout=_SECONDS)

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None: ...
    def artifact(self, path: str) -> None: ...
    def abandon(self) -> None: ...

    def close(self) -> None:
        delete_from_gateway(self._gateway, JOB, grouping_key=self._grouping, timeout=_SECONDS)
