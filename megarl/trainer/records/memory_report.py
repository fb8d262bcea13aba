"""Shows the memory of a run on GPUs: predicted at the start, measured in the second step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config import Config
from megarl.estimate.budget import StageBudget, budget
from megarl.estimate.budget_file import write_budget
from megarl.estimate.budget_table import measured_table, predicted_table
from megarl.estimate.fit import what_may_not_fit
from megarl.estimate.prediction import most_received, reshard_of_some_ranks
from megarl.flow_kinds import trains
from megarl.models.architecture import Architecture
from megarl.parallel.world import World
from megarl.phases import Phase
from megarl.trainer.memory import job_of, this_accelerator
from megarl.trainer.records.report import Report


class MemoryReport:
    """Compares what a run uses with what was predicted. On CPU ranks it does nothing.

    Attributes:
        predicted: of every pipeline stage; empty on CPU ranks, and for a run that trains nothing.
    """

    def __init__(self, config: Config, arch: Architecture, world: World, report: Report) -> None:
        self._world, self._report = world, report
        self._run_dir, self._steps = config.trainer.run_dir, 0
        self._accelerator = this_accelerator()
        predicts = self._accelerator and trains(config)
        self._job = job_of(config, arch) if predicts else None
        self.predicted: list[StageBudget] = []
        if self._accelerator and self._job:
            moved = most_received(self._job, reshard_of_some_ranks(self._job))
            self.predicted = budget(self._job, self._accelerator, moved=moved)

    def predict(self) -> None:
        """Print the table, and what may turn out to be too much."""
        if self._accelerator and self._job:
            self._write()
            self._report.show(predicted_table(self._job, self.predicted, self._accelerator))
            for line in what_may_not_fit(self._job, self._accelerator, self.predicted):
                self._report.say(f"warning: if the estimates are right, {line}")

    def _write(self) -> None:
        """Write the prediction into the run's folder."""
        assert self._accelerator
        if self._world.rank == 0:
            try:
                write_budget(self._run_dir, self.predicted, self._accelerator)
            except OSError as e:
                self._report.warn(f"the predicted memory is not written: {e}")

    def measured(self, ranks: Sequence[Mapping[str, int]]) -> dict[str, float]:
        """Return the metrics of a step; every rank calls it.

        Prints those of the second step that updates the policy, on its own responses if it generates, beside the
        prediction: Adam's moments come with the first update, and a warm-up's sequences may be short.

        Args:
            ranks: the most bytes in use, by phase, of each rank.

        Returns:
            `memory/{phase}_gib`: of the rank that used most.
        """
        if not self._accelerator:
            return {}
        most: dict[str, int] = {}
        for of_rank in ranks:
            for phase, nbytes in of_rank.items():
                most[phase] = max(most.get(phase, 0), nbytes)
        whole: set[str] = {Phase.GENERATE, Phase.UPDATE} if self._job and self._job.generates else {Phase.UPDATE}
        if whole <= most.keys():
            self._steps += 1
            if self._steps == 2 and self.predicted:
                self._report.show(measured_table(self.predicted, most, self._accelerator))
        return {f"memory/{phase}_gib": nbytes / 2**30 for phase, nbytes in most.items()}
