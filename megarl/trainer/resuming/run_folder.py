"""Whether a run can use its folder: a place to write to, with room, with no other run's results in it, and there."""

from __future__ import annotations

import os

from megarl.checkpoint.folder import checkpoints, position_of, read_state
from megarl.config.trainer import TrainerConfig
from megarl.telemetry.sinks.jsonl import METRICS_FILE
from megarl.trainer.resuming.run_lock import LOCK_FILE

ROOM = 16 * 2**20  # bytes: metrics and samples of a short run; what checkpoints need is far more
_RESULTS = ("checkpoints", METRICS_FILE, "rollouts", "tensorboard", "validation", "eval.json")


def check_run_folder(trainer: TrainerConfig, resume_from: str | None, *, room: int = ROOM) -> None:
    """Raises ValueError, in one line with what to change, if the run must not or cannot write into its folder.

    Args:
        resume_from: the checkpoint that the run goes on from.
        room: bytes that must be free.
    """
    run_dir = trainer.run_dir
    _check_place(run_dir, room)
    if trainer.resume_mode == "disable":
        found = [name for name in _RESULTS if _holds_something(os.path.join(run_dir, name))]
        if found:
            raise ValueError(
                f"{run_dir} holds another run's {', '.join(found)}, and trainer.resume_mode=disable starts anew; set "
                f"trainer.resume_mode=auto to go on with that run, or another trainer.default_local_dir or "
                f"trainer.experiment_name"
            )
    if trainer.resume_mode == "resume_path" and resume_from is not None:
        start = position_of(read_state(resume_from))
        for later in checkpoints(run_dir):
            if later.position > start:
                raise ValueError(
                    f"{run_dir} holds {later.position.name}, which is later than {start.name} of "
                    f"trainer.resume_from_path; set another trainer.default_local_dir, or move the later ones away"
                )


class HeldFolder:
    """Knows whether the run's folder is still the one that the run began in.

    One that is moved, deleted or unmounted takes the lock along: what the run wrote from then on would lie in another
    place, on a bare mount point perhaps, beside a second run.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        lock = os.path.join(run_dir, LOCK_FILE)
        # as long as they are open no other folder or file gets their numbers
        self._held = {path: os.open(path, os.O_PATH) for path in (run_dir, lock) if os.path.exists(path)}

    def problem(self) -> str | None:
        """What to say of a folder that has gone; None if it is there."""
        for path, descriptor in self._held.items():
            try:
                there = os.path.samestat(os.stat(path), os.fstat(descriptor))
            except OSError:
                there = False
            if not there:
                return (
                    f"the run folder {self._run_dir} has gone: it was moved, deleted or unmounted; bring it back, and "
                    f"start again to go on from its newest checkpoint"
                )
        return None

    def release(self) -> None:
        """Let it go; there is no problem with it any more."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held = {}


def _check_place(run_dir: str, room: int) -> None:
    place = os.path.abspath(run_dir)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    where = run_dir if place == os.path.abspath(run_dir) else f"{run_dir}, in {place},"
    if not os.path.isdir(place):
        what = "a link to a folder that is not there" if os.path.islink(place) else "a file"
        raise ValueError(f"the run folder {run_dir} cannot be made: {place} is {what}; set trainer.default_local_dir")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"the run folder {where} cannot be written; set trainer.default_local_dir")
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if free < room or (disk.f_files and not disk.f_favail):
        raise ValueError(
            f"the disk of the run folder {run_dir} has {free / 2**20:.0f} MiB and {disk.f_favail} files left; make "
            f"room, or set trainer.default_local_dir"
        )


def _holds_something(path: str) -> bool:
    return bool(os.listdir(path)) if os.path.isdir(path) else os.path.exists(path)
