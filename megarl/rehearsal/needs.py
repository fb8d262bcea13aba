"""Predicts what the real run will need: memory of a GPU, disk, time. From the same estimates as `megarl plan`."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Config
from megarl.data.readers import iterate_rows
from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import budget, cache_room, checkpoint_bytes
from megarl.estimate.fit import what_does_not_fit
from megarl.estimate.job import Job, parameter_count
from megarl.estimate.prediction import Lengths, most_received, reshard_of_some_ranks, step_seconds
from megarl.rehearsal.stand_ins import absent


@dataclass(frozen=True, kw_only=True)
class RealNeeds:
    """Holds what a run is predicted to need.

    Attributes:
        gpu_bytes: the most that a GPU holds in any phase.
        checkpoint_bytes: of a checkpoint, without an export.
        export_bytes: of a Hugging Face folder.
        step_seconds: of a step, all sequences as long as they may be.
        steps: of the run; None if nobody knows here.
        too_much: what does not fit, one line each.
    """

    gpu_bytes: int
    checkpoint_bytes: int
    export_bytes: int
    step_seconds: float
    steps: int | None
    too_much: tuple[str, ...]


def needs_of_run(job: Job, accelerator: Accelerator) -> RealNeeds:
    """Predict the needs of a run on such GPUs."""
    config = job.config
    traffic = reshard_of_some_ranks(job)
    stages = budget(job, accelerator, moved=most_received(job, traffic))
    lengths = Lengths(prompt=config.data.max_prompt_length, response=config.data.max_response_length)
    cache = cache_room(job, accelerator) if job.generates else None
    ranks_of_stage = job.train.size // job.train.pp
    return RealNeeds(
        gpu_bytes=max(stage.peak for stage in stages),
        checkpoint_bytes=ranks_of_stage * sum(checkpoint_bytes(job, stage) for stage in range(job.train.pp)),
        export_bytes=job.itemsize * parameter_count(job.arch),
        step_seconds=sum(step_seconds(job, accelerator, lengths, cache, traffic).values()),
        steps=_steps(config),
        too_much=tuple(what_does_not_fit(job, accelerator, stages)),
    )


def _steps(config: Config) -> int | None:
    """Count the steps of the run; None if that takes rows that are not here."""
    trainer, data = config.trainer, config.data
    if trainer.total_training_steps:
        return trainer.total_training_steps
    if data.source or any(absent(entry) for entry in data.train_files):
        return None
    rows = sum(1 for _ in iterate_rows(data.train_files, "data.train_files"))
    return trainer.total_epochs * (rows // data.train_batch_size)
