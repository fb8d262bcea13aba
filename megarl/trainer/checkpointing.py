"""Saves what a run's next step depends on, and brings it back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.checkpoint.folder import Position, prune_checkpoints
from megarl.checkpoint.store import SaveFailed, load_checkpoint, save_checkpoint
from megarl.roles.actor import Actor
from megarl.roles.reference import Reference
from megarl.roles.writers import spread_over_replicas
from megarl.trainer.inputs import Inputs
from megarl.trainer.model_files import write_model_files
from megarl.trainer.report import Report
from megarl.trainer.resume import Start
from megarl.trainer.stopped import RunRefused, RunStopped


class Checkpointing:
    """The roles whose state is saved, and the latest checkpoint.

    Attributes:
        reference: None as long as there is none.
        latest: folder of the checkpoint that was written or read last.
        position: its position.
    """

    def __init__(self, inputs: Inputs, actor: Actor, start: Start, report: Report) -> None:
        self._inputs, self._config, self._actor, self._report = inputs, inputs.config, actor, report
        self.reference: Reference | None = None
        self.latest, self.position = start.folder, start.position if start.folder else None

    def save(self, position: Position, state: Mapping[str, Any]) -> bool:
        """A checkpoint. One that cannot be written is said, and the earlier ones stay; returns whether it was.

        Raises:
            RunStopped: something to save is not finite.
        """
        run_dir, control = self._config.trainer.run_dir, self._actor.groups.control
        try:
            sharded = self._sharded_state(loading=False)
        except ValueError as e:
            raise RunStopped(f"not saved: {e}; the last checkpoint is {self.latest or 'none'}") from e
        try:
            self.latest = save_checkpoint(
                run_dir,
                position,
                sharded,
                {**state, "identity": self._inputs.identity},
                write_model=partial(write_model_files, self._config, self._actor),
                control=control,
            )
        except SaveFailed as e:
            self._report.warn(f"{e}")
            return False
        self.position = position
        if self._actor.groups.rank == 0:
            prune_checkpoints(run_dir, self._config.trainer.max_ckpt_to_keep, self.latest)
        return True

    def load(self, folder: str) -> None:
        """Weights, optimizer, schedule and random numbers of a checkpoint; the reference's weights, if there is one."""
        wanted = self._sharded_state(loading=True)
        try:
            loaded = load_checkpoint(folder, wanted, rng=True, control=self._actor.groups.control)
        except ValueError as e:
            raise RunRefused(str(e)) from e
        self._actor.load_training_state(loaded["actor"])
        if self.reference is not None:
            self.reference.load_sharded(loaded["reference"], "reference.")

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"actor": self._actor.sharded_training_state(loading=loading)}
        if self.reference is not None:
            weights = self.reference.sharded_state("reference.")
            state["reference"] = spread_over_replicas(weights, self._actor.groups.pgs.dp_cp)
        return state
