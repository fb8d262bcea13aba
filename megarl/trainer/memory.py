"""Whether a run fits into the GPUs of this machine. No Megatron: a launcher can check a run with it."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from megarl.config import Config
from megarl.estimate.accelerator import H200, Accelerator
from megarl.estimate.budget import budget
from megarl.estimate.fit import what_does_not_fit
from megarl.estimate.job import Job
from megarl.models.architecture import Architecture
from megarl.parallel.from_config import generation_layout, train_layout


def check_memory(config: Config, arch: Architecture) -> None:
    """Raises ValueError, with what to change, if the run cannot fit into this machine's GPUs; CPU ranks always do."""
    if accelerator := this_accelerator():
        job = job_of(config, arch)
        for line in what_does_not_fit(job, accelerator, budget(job, accelerator, moved=0)):
            raise ValueError(line)


def job_of(config: Config, arch: Architecture) -> Job:
    """Raises ValueError if the ranks cannot be split as the configuration asks."""
    return Job(config=config, arch=arch, train=train_layout(config), generation=generation_layout(config))


def this_accelerator() -> Accelerator | None:
    """This rank's GPU, its own name and memory; None on CPU ranks."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0)))
    return replace(H200, name=properties.name, memory=properties.total_memory)
