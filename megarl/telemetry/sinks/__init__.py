"""Where metrics go: one file per destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from megarl.config import Config
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
"""Called with run folder, first step and `say`, as `open_sinks` describes them; see `Sink` for the configuration."""

FILES = ("jsonl", "csv", "tensorboard")
"""A run whose folder takes none of these does not begin; what keeps another sink from opening is only said."""

_PACKAGES = {"prometheus": "prometheus_client", "wandb": "wandb", "mlflow": "mlflow"}


def check_packages(names: Sequence[str]) -> None:
    """Raises ValueError if a sink of `trainer.logger` wants a package that is not there. Imports none of them."""
    for name in names:
        package = _PACKAGES.get(name)
        if package is None:
            continue
        found = find_spec(package)
        if found is None or found.origin is None:  # without an origin it is a folder of that name, as W&B leaves them
            raise ValueError(
                f"trainer.logger names {name}, and the package {package} is not installed: pip install "
                f"'megarl[loggers]', or leave {name} out"
            )


def open_sinks(
    names: Sequence[str], run_dir: str, first_step: int | None, say: Say = print, config: Config | None = None
) -> list[Sink]:
    """The sinks named in `trainer.logger`, writing below `run_dir`.

    Args:
        names: registered ones, or `path/to/file.py:class`.
        first_step: the first step that a resumed run will log, at most 0 in a warm-up. What is there of that step and
            later ones is dropped, so that no step appears twice. None for a fresh run, which must find no metric
            files: `set_aside_earlier_run` moves them.
        say: told of lines that cannot be read, and of sinks that cannot be opened, which are left out.
        config: for the sinks that want it; default all keys' defaults.

    Raises:
        ValueError: a name that `SINKS` does not know.
        OSError: one of `FILES` cannot be opened.
    """
    keep_below = _BEFORE_ANY_STEP if first_step is None else first_step
    opened = []
    for name in names:
        make = SINKS.load(name)
        more = (config or Config(),) if getattr(make, "configured", False) else ()
        try:
            opened.append(make(run_dir, keep_below, say, *more))
        except Exception as e:  # a user's class, or a library, can fail in any way
            if name in FILES:
                raise
            say(f"trainer.logger={name} cannot be opened, and gets nothing: {described(e)}")
    return opened


def described(error: BaseException) -> str:
    """Kind and message of an exception, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
