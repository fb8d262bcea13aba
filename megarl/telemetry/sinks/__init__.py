"""Names and opens the destinations of metrics, one module each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from megarl.config import Config
from megarl.own_code import check_runs, in_a_line
from megarl.registry import Registry
from megarl.telemetry.lines import Say
from megarl.telemetry.sinks.sink import Sink

__all__ = ["FILES", "SINKS", "Sink", "check_packages", "open_sinks"]

_BEFORE_ANY_STEP = -(2**40)

SINKS: Registry[Callable[..., Sink]] = Registry(
    "trainer.logger",
    "class",
    lazy={
        "console": "megarl.telemetry.sinks.console:ConsoleSink",
        "jsonl": "megarl.telemetry.sinks.jsonl:JsonlSink",
        "csv": "megarl.telemetry.sinks.csv_table:CsvSink",
        "tensorboard": "megarl.telemetry.sinks.tensorboard:TensorBoardSink",
        "prometheus": "megarl.telemetry.sinks.prometheus:PrometheusSink",
        "wandb": "megarl.telemetry.sinks.wandb:WandbSink",
        "mlflow": "megarl.telemetry.sinks.mlflow:MlflowSink",
    },
)
"""Classes, called with the run's folder, the first step and `say`, see `open_sinks`, or also a `Config`, see `Sink`."""

FILES = ("jsonl", "csv", "tensorboard")
"""A run does not begin if one of these cannot be opened. Without another sink it begins with a warning."""

_PACKAGES = {"prometheus": "prometheus_client", "wandb": "wandb", "mlflow": "mlflow"}


def check_packages(names: Sequence[str]) -> None:
    """Raise ValueError if a sink of `trainer.logger` needs a package that is not installed. Imports none of them."""
    for name in names:
        package = _PACKAGES.get(name)
        if package is None:
            continue
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # without an origin it is a folder of that name, as W&B leaves them
            raise ValueError(
                f"trainer.logger names {name}, and the package {package} is not installed: pip install "
                f"'megarl[loggers]', or leave {name} out"
            )


def open_sinks(
    names: Sequence[str], run_dir: str, first_step: int | None, say: Say = print, config: Config | None = None
) -> list[Sink]:
    """Open the sinks named in `trainer.logger`, which write below `run_dir`.

    Args:
        names: registered names, or `path/to/file.py:class`.
        first_step: the first step that a resumed run will log, at most 0 in a warm-up. Rows of that step and of later
            ones are dropped, so that no step appears twice. None for a fresh run, which must find no metric files:
            `set_aside_earlier_run` moves them.
        say: shows a line for each file with unreadable lines, and for each sink that cannot be opened and is left out.
        config: given to the sinks that need it; default all keys' defaults.

    Raises:
        ValueError: `SINKS` does not know a name.
        OSError: one of `FILES` cannot be opened.
    """
    keep_below = _BEFORE_ANY_STEP if first_step is None else first_step
    sinks = []
    for name in names:
        make = SINKS.load(name)
        arguments = (config or Config(),) if getattr(make, "configured", False) else ()
        try:
            sink = make(run_dir, keep_below, say, *arguments)
            check_runs(sink.log, "its method log")
            sinks.append(sink)
        except Exception as e:  # a user's class, or a library, can fail in any way
            if name in FILES:
                raise
            say(f"trainer.logger={name} cannot be opened, and gets nothing: {in_a_line(e)}")
    return sinks
