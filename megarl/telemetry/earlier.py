"""Moves the records of an earlier run in the same folder away. Nothing is deleted. Torch-free."""

from __future__ import annotations

import itertools
import os

from megarl.config.load import CONFIG_FILE

_RECORDS = (
    *("tensorboard", "rollouts", "validation", "timeline", "profiles", "memory.json"),
    *(CONFIG_FILE, "report.html", "learning_curve.png"),
    *("wandb", "wandb_run.txt", "mlflow_run.txt"),
)


def set_aside_earlier_run(run_dir: str) -> str | None:
    """Move metrics, rollouts, profiles, configuration and report into RUN/earlier/1 (2, 3 ... if that exists).

    Checkpoints stay where they are. Call it on one rank, before anything of the new run is written.

    Returns:
        the folder that now holds the records; None if there were none.
    """
    names = sorted(os.listdir(run_dir)) if os.path.isdir(run_dir) else []
    records = [name for name in names if name in _RECORDS or name.startswith("metrics.")]
    if not records:
        return None
    places = (os.path.join(run_dir, "earlier", str(i)) for i in itertools.count(1))
    place = next(place for place in places if not os.path.lexists(place))
    os.makedirs(place)
    for name in records:
        os.rename(os.path.join(run_dir, name), os.path.join(place, name))
    return place
