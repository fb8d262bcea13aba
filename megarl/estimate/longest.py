"""Finds the longest sequence that training has memory for, and what makes it longer. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import StageBudget, budget, passes
from megarl.estimate.fit import RESERVE
from megarl.estimate.job import Job
from megarl.estimate.model import ModelJob
from megarl.estimate.token_budget import STEP, most_that_fit
from megarl.flow_kinds import compared_together
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.parallel.context import CONTEXT_KINDS

_POSITIONS = 8
"""Nobody looks for sequences of more than so many times the model's positions."""


def most_looked_for(job: Job) -> int:
    """Count the tokens of the longest sequence that is considered."""
    return -(-_POSITIONS * job.arch.max_position_embeddings // STEP) * STEP


def longest_sequence(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget]) -> int | None:
    """Count the tokens of the longest sequence, alone in its micro-batch or with the other of its pair, with which all
    passes of training leave `RESERVE` of the memory free; in steps of `STEP`. Generation is not looked at.

    Args:
        stages: of `budget`.

    Returns:
        0 if none does; no more than `most_looked_for`. None where attention takes memory that nothing here counts.
    """
    if any(isinstance(layer.attention, GroupedQuery) and layer.attention.sinks for layer in job.arch.kinds):
        return None
    room = (1 - RESERVE) * accelerator.memory
    beside = [
        {phase: stage.total(phase) - nbytes for phase, nbytes in _passes(job, stage.stage).items()} for stage in stages
    ]

    def fit(tokens: int) -> bool:
        longer = _with_sequences_of(job, tokens)
        return all(
            rest[phase] + nbytes <= room
            for stage, rest in zip(stages, beside, strict=True)
            for phase, nbytes in _passes(longer, stage.stage).items()
        )

    return most_that_fit(most_looked_for(job), fit)


def longer_sequences(job: Job, accelerator: Accelerator, *, moved: int) -> Iterator[tuple[str, int]]:
    """List keys that let sequences be longer on as many GPUs, each with the longest then.

    Args:
        moved: see `budget`.
    """
    for key, other in _alternatives(job):
        yield key, longest_sequence(other, accelerator, budget(other, accelerator, moved=moved)) or 0


def _passes(job: Job, stage: int) -> dict[str, int]:
    """Count the bytes that the passes of training hold, by phase."""
    return {phase: sum(items.values()) for phase, items in passes(job, stage).items()}


def _with_sequences_of(job: Job, tokens: int) -> Job:
    """Give all models such sequences, as many of them as before, one or a pair to a micro-batch."""
    together = compared_together(job.config)
    data = job.config.data.model_copy(update={"max_prompt_length": 1, "max_response_length": tokens - 1})

    def batching(model: ModelJob) -> dict[str, Any]:
        return {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": model.layout.rank_tokens(together * tokens)}

    roles = job.config.actor_rollout_ref
    actor = roles.actor.model_copy(update=batching(job.actor))
    roles = roles.model_copy(update={"actor": actor})
    config = job.config.model_copy(update={"data": data, "actor_rollout_ref": roles})
    others = [
        replace(model, config=config, batching=model.batching.model_copy(update=batching(model)))
        for model in job.other_models
    ]
    return replace(job, config=config, other_models=tuple(others))


def _alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    roles = job.config.actor_rollout_ref
    keys = ("enable_gradient_checkpointing", "enable_activation_offload")
    if key := next((key for key in keys if not getattr(roles.model, key)), None):
        parts = roles.model.recompute_modules  # of which a layer that is recomputed whole has none
        model = roles.model.model_copy(update={key: True, "recompute_modules": []})
        config = job.config.model_copy(update={"actor_rollout_ref": roles.model_copy(update={"model": model})})
        yield f"model.{key}=true{' and model.recompute_modules=[]' * bool(parts)}", replace(job, config=config)
    megatron, cp = roles.actor.megatron, 2 * job.train.cp
    kinds = [job.train.context, *(kind for kind in CONTEXT_KINDS.values() if kind.proposed)]
    for kind in kinds if job.train.dp % 2 == 0 else []:
        layout = replace(job.train, cp=cp, context=kind)
        if kind.no_padding and not roles.model.use_remove_padding:
            continue
        try:
            job.arch.check_training(layout, sequence_parallel=megatron.sequence_parallel)
        except ValueError:  # heads that do not divide, say
            continue
        over_more = megatron.model_copy(update={"context_parallel_size": cp, "cp_comm_type": kind.name})
        actor = roles.actor.model_copy(update={"megatron": over_more})
        config = job.config.model_copy(update={"actor_rollout_ref": roles.model_copy(update={"actor": actor})})
        more = "" if kind == job.train.context else f" and actor.megatron.cp_comm_type={kind.name}"
        yield f"actor.megatron.context_parallel_size={cp}{more}", replace(job, config=config, train=layout)
        return
