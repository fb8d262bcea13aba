"""Checks a run's memory against this machine's. No Megatron: a launcher can check a run with it."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from megarl.config import Config
from megarl.estimate.accelerator import H200, Accelerator
from megarl.estimate.budget import budget
from megarl.estimate.fit import what_does_not_fit
from megarl.estimate.job import Job
from megarl.estimate.model import ModelJob
from megarl.flow_kinds import flow_kind, generates, own_roles
from megarl.host import host_memory
from megarl.models.architecture import Architecture
from megarl.trainer.layouts import generation_layout, train_layout
from megarl.trainer.needs import needs_of, one_forward_pass
from megarl.trainer.other_models import OtherRole, architecture_of, other_roles


def check_memory(config: Config, arch: Architecture) -> None:
    """Raise ValueError, with what to change, if the run cannot fit into this machine's GPUs or, where CPU ranks train,
    into its memory."""
    job, accelerator = job_of(config, arch), this_accelerator() or _cpu_rank(config.trainer.n_gpus_per_node)
    for line in what_does_not_fit(job, accelerator, budget(job, accelerator, moved=0)):
        raise ValueError(line)


def job_of(config: Config, arch: Architecture) -> Job:
    """Return the job of a run that trains.

    Raises:
        ValueError: the ranks cannot be split as the configuration asks.
    """
    needs, kind = needs_of(config), flow_kind(config)
    return Job(
        config=config,
        arch=arch.with_scalar_output() if kind.scores else arch,
        train=train_layout(config),
        generation=generation_layout(config),
        other_models=tuple(_model_job(role, config, arch) for role in other_roles(config, needs)),
        own_roles=own_roles(config),
        reference=needs.reference,
        log_probs=not one_forward_pass(config, needs) if generates(config) else kind.compares_prompts,
    )


def _model_job(role: OtherRole, config: Config, policy: Architecture) -> ModelJob:
    """Return the job of a model beside the policy. Its forward pass goes through all sequences of a step in one
    plan."""
    settings, arch = role.settings, architecture_of(role.settings.model, policy)
    n = config.actor_rollout_ref.rollout.n
    return ModelJob(
        config=config,
        kind=role.kind,
        section=role.kind.name,
        arch=arch.with_scalar_output() if role.kind.scalar else arch,
        layout=train_layout(config, settings.megatron),
        megatron=settings.megatron,
        batching=settings,
        forward_batch=config.data.train_batch_size * n,
        mini_batch=None if role.mini_batch is None else role.mini_batch * n,
        epochs=role.epochs,
    )


def this_accelerator() -> Accelerator | None:
    """Return this rank's GPU, with its name and memory; None on CPU ranks."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0)))
    return replace(H200, name=properties.name, memory=properties.total_memory)


def _cpu_rank(ranks: int) -> Accelerator:
    """Return one of so many CPU ranks that share this machine's memory."""
    return replace(H200, name="CPU", memory=host_memory() / ranks, runtime=0, offloads=False)
