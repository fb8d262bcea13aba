"""Checks that a run can use its folder: it is there, writable, with room, and holds no other run's results."""

from __future__ import annotations

import os

from megarl.checkpoint.folder import checkpoints, position_of, read_state
from megarl.config.trainer import TrainerConfig
from megarl.telemetry.sinks.jsonl import METRICS_FILE
from megarl.trainer.run_lock import LOCK_FILE

ROOM = 16 * 2**20  # bytes: metrics and samples of a short run; what checkpoints need is far more
_ELSEWHERE = "set trainer.default_local_dir, or an evaluation's --out"
_RESULTS = ("checkpoints", METRICS_FILE, "rollouts", "tensorboard", "validation", "eval.json")


def check_run_folder(trainer: TrainerConfig, resume_from: str | None, *, room: int = ROOM) -> None:
    """Refuse a folder into which the run must not or cannot write. Raises ValueError with what to change.

    Args:
        resume_from: checkpoint that the run goes on from.
        room: bytes that must be free.
    """
    run_dir = trainer.run_dir
    _check_place(run_dir, room)
    if trainer.resume_mode == "disable":
        paths = {name: os.path.join(run_dir, name) for name in _RESULTS}
        results = [
            name for name, path in paths.items() if (os.listdir(path) if os.path.isdir(path) else os.path.exists(path))
        ]
        if results:
            raise ValueError(
                f"{run_dir} holds another run's {', '.join(results)}, and trainer.resume_mode=disable starts anew; set "
                f"trainer.resume_mode=auto to go on with that run, or another trainer.default_local_dir or "
                f"trainer.experiment_name"
            )
    if (later := later_than(trainer, resume_from)) is not None:
        raise ValueError(later)


def later_than(trainer: TrainerConfig, resume_from: str | None) -> str | None:
    """Say that the run's folder holds checkpoints later than the one that `trainer.resume_from_path` names; None if
    none is."""
    if trainer.resume_mode != "resume_path" or resume_from is None:
        return None
    run_dir, start = trainer.run_dir, position_of(read_state(resume_from))
    for later in checkpoints(run_dir):
        if later.position > start:
            return (
                f"{run_dir} holds {later.position.name}, which is later than {start.name} of "
                f"trainer.resume_from_path; set another trainer.default_local_dir, or move the later ones away"
            )
    return None


class HeldFolder:
    """Knows whether the run's folder is still the one that the run began in.

    A folder that is moved, deleted or unmounted takes the lock along: the run would go on writing in another place, on
    a bare mount point perhaps, beside a second run.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        lock = os.path.join(run_dir, LOCK_FILE)
        # as long as they are open no other folder or file gets their numbers
        self._descriptors = {path: os.open(path, os.O_PATH) for path in (run_dir, lock) if os.path.exists(path)}

    def problem(self) -> str | None:
        """Say that the folder has gone; None if it is there."""
        for path, descriptor in self._descriptors.items():
            try:
                is_there = os.path.samestat(os.stat(path), os.fstat(descriptor))
            except OSError:
                is_there = False
            if not is_there:
                return (
                    f"the run folder {self._run_dir} has gone: it was moved, deleted or unmounted; bring it back, and "
                    f"start again to go on from its newest checkpoint"
                )
        return None

    def release(self) -> None:
        """Let the folder go; there is no problem with it any more."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}


def _check_place(run_dir: str, room: int) -> None:
    place = os.path.abspath(run_dir)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    where = run_dir if place == os.path.abspath(run_dir) else f"{run_dir}, in {place},"
    if not os.path.isdir(place):
        what = "a link to a folder that is not there" if os.path.islink(place) else "a file"
        raise ValueError(f"the run folder {run_dir} cannot be made: {place} is {what}; {_ELSEWHERE}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"the run folder {where} cannot be written; {_ELSEWHERE}")
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if free < room or (disk.f_files and not disk.f_favail):
        raise ValueError(
            f"the disk of the run folder {run_dir} has {free / 2**20:.0f} MiB and {disk.f_favail} files left; make "
            f"room, or {_ELSEWHERE}"
        )
