"""Predicts what a step moves and computes, and the seconds that this takes at an accelerator's rates. Torch-free.

Bounds and estimates, for comparing layouts: nothing here knows of tensor-parallel communication, or of ranks that wait
for the longest response.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import CacheRoom
from megarl.estimate.job import (
    Job,
    active_parameter_count,
    engine_elements,
    expert_elements,
    parameter_count,
    ranks_unlike,
    recomputed_parameter_count,
    shared_of_first_layers,
)
from megarl.estimate.model import ModelJob
from megarl.estimate.pipeline import bubble, imbalance
from megarl.models.architecture import Architecture
from megarl.models.sizes import attention_flops, state_bytes
from megarl.phases import Phase, in_order
from megarl.reshard.traffic import Traffic, reshard_traffic

MOST_BUBBLE = 0.2
"""Part of an update: pipeline stages that wait longer are worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Holds the mean tokens of a prompt and of a response."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        return self.prompt + self.response


def reshard_of_some_ranks(job: Job) -> dict[int, Traffic]:
    """Plan the traffic of the ranks that `ranks_unlike` lists; none of a run that generates nothing."""
    if not job.generates:
        return {}
    ends, per_node = (job.training, job.engines), job.gpus_per_node
    return {
        rank: reshard_traffic(*ends, rank, ranks_per_node=per_node, places=shared_of_first_layers(job, rank))
        for rank in ranks_unlike(job)
    }


def most_received(job: Job, traffic: Mapping[int, Traffic]) -> int:
    """Count the bytes that one of the ranks receives in a reshard at most; 0 where there is none."""
    return job.itemsize * max((moved.received.total() for moved in traffic.values()), default=0)


def reshard_seconds(job: Job, accelerator: Accelerator, rank: int, traffic: Traffic) -> float:
    """Bound a rank's seconds from below: local copies and both directions of both links all work at once."""
    seconds = [2 * traffic.local / accelerator.memory_rate]
    for elements in (traffic.sent, traffic.received):
        far = between_nodes(job, rank, elements)
        seconds += [(elements.total() - far) / accelerator.peer_rate, far / accelerator.network_rate]
    return job.itemsize * max(seconds)


def between_nodes(job: Job, rank: int, elements: Counter[int]) -> int:
    """Count the elements of a rank's traffic that go to, or come from, other nodes.

    Args:
        elements: of the traffic, by peer.
    """
    node = rank // job.gpus_per_node
    return sum(n for peer, n in elements.items() if peer // job.gpus_per_node != node)


def forward_flops(arch: Architecture, tokens: float) -> float:
    """Count the FLOPs of a sequence's forward pass."""
    return flops_of_sequences(arch, active_parameter_count(arch), tokens, tokens**2)


def flops_of_sequences(arch: Architecture, parameters: int, tokens: float, squares: float) -> float:
    """Count the FLOPs of a forward pass: 2 per weight and token, and those of attention.

    Args:
        parameters: that multiply a token, see `active_parameter_count`.
        tokens, squares: sums of the sequences' lengths and of their squares.
    """
    return 2 * parameters * tokens + attention_flops(arch, tokens, squares)


def forward_seconds(job: Job, model: ModelJob, accelerator: Accelerator, lengths: Lengths) -> float:
    """Predict the seconds of a forward pass over all sequences of a step."""
    waiting = bubble(model, lengths.total, model.forward_batch, mini_batches=job.sequences // model.forward_batch)
    return _busy_seconds(job, model, accelerator, lengths) / (1 - waiting)


def update_seconds(job: Job, model: ModelJob, accelerator: Accelerator, lengths: Lengths) -> float:
    """Predict a model's optimizer steps: each sequence forward, backward (twice that), and forward as far as that is
    recomputed."""
    assert model.mini_batch is not None, "a model that is only read has no update"
    passes = model.epochs * (3 + _recomputed(job, model, lengths))
    waiting = bubble(model, lengths.total, model.mini_batch)
    return passes * _busy_seconds(job, model, accelerator, lengths) / (1 - waiting)


def _recomputed(job: Job, model: ModelJob, lengths: Lengths) -> float:
    """Return the part of a forward pass that is done once more for the backward pass."""
    settings = job.config.actor_rollout_ref.model
    if settings.enable_gradient_checkpointing or not settings.recompute_modules:
        return float(settings.enable_gradient_checkpointing)
    parameters = recomputed_parameter_count(model.arch, settings.recompute_modules)
    return 2 * parameters * lengths.total / forward_flops(model.arch, lengths.total)


def _busy_seconds(job: Job, model: ModelJob, accelerator: Accelerator, lengths: Lengths) -> float:
    """Predict the seconds of a forward pass over all sequences of a step, bubbles not counted: a GPU computes its part
    of the FLOPs, or waits for the kernels of each micro-batch to be launched, whichever takes longer."""
    flops = job.sequences * forward_flops(model.arch, lengths.total)
    micro_batches = model.micro_batches(job.sequences, lengths.total)
    if job.generates and job.config.actor_rollout_ref.model.use_prefix_grouper:
        again = job.sequences * (1 - 1 / job.config.actor_rollout_ref.rollout.n)
        flops -= again * forward_flops(model.arch, lengths.prompt)
        if model.batching.use_dynamic_bsz and model.most_tokens > lengths.prompt:
            tokens = (job.sequences * lengths.total - again * lengths.prompt) / model.layout.dp
            micro_batches = math.ceil(tokens / (model.most_tokens - lengths.prompt))  # each computes one prompt again
    launches = micro_batches * model.arch.num_layers / model.layout.pp * accelerator.launches
    return max(flops / (model.layout.size * _flops(job, model.arch, accelerator)), launches)


def generation_seconds(job: Job, accelerator: Accelerator, lengths: Lengths, cache: CacheRoom) -> float:
    """Predict generation: the prompts' FLOPs, then decode steps. inf if no sequence fits.

    A step reads from memory the weights it needs while it multiplies by them, whichever takes longer, and the running
    sequences' keys and values, half of the response being there on average; it reads and writes their states.
    """
    rollout, prompts = job.config.actor_rollout_ref.rollout, job.config.data.train_batch_size
    per_replica = math.ceil(prompts / job.generation.replicas)
    flops = job.generation.tp * _flops(job, job.arch, accelerator)
    prefill = per_replica * forward_flops(job.arch, lengths.prompt) / flops
    sequences = per_replica * rollout.n
    context = lengths.prompt + lengths.response / 2
    together = min(rollout.max_num_seqs, sequences, int(cache.tokens / context))
    if together == 0:
        return math.inf
    steps = math.ceil(sequences / together) * lengths.response
    states = 2 * state_bytes(job.arch, tp=job.generation.tp, max_num_seqs=0)
    weights = _engine_bytes_read(job, together) / accelerator.memory_rate
    matrices = together * 2 * active_parameter_count(job.arch) / flops
    caches = together * (context * job.kv_bytes_per_token + states) / accelerator.memory_rate
    launches = job.arch.num_layers * accelerator.layer
    return prefill + steps * (max(weights, matrices) + caches + launches + together * job.engine.seconds_per_token)


def _engine_bytes_read(job: Job, sequences: int) -> float:
    """Count a rank's weights, without experts that no sequence is expected to go to."""
    weights = job.itemsize * engine_elements(job.arch, job.generation.split)
    moe = job.arch.moe
    if moe is None:
        return weights
    idle = (1 - moe.experts_per_token / moe.num_experts) ** sequences
    return weights * (1 - idle * expert_elements(job.arch) / parameter_count(job.arch))


def mfu_of(arch: Architecture, accelerator: Accelerator) -> float:
    """Look up the part of an accelerator's peak that a model of this kind is assumed to reach."""
    return accelerator.mixture_mfu if arch.moe else accelerator.mfu


def _flops(job: Job, arch: Architecture, accelerator: Accelerator) -> float:
    return mfu_of(arch, accelerator) * accelerator.flops[job.config.actor_rollout_ref.model.dtype]


def step_seconds(
    job: Job, accelerator: Accelerator, lengths: Lengths, cache: CacheRoom | None, traffic: Mapping[int, Traffic]
) -> dict[str, float]:
    """Predict the seconds of each phase of a step.

    Args:
        cache: of the engine, if there is one.
        traffic: as `reshard_of_some_ranks` has it.
    """
    seconds = defaultdict[str, float](float)
    seconds[Phase.UPDATE] = update_seconds(job, job.actor, accelerator, lengths)
    if cache is not None:
        seconds[Phase.RESHARD] = max(reshard_seconds(job, accelerator, *moved) for moved in traffic.items())
        seconds[Phase.GENERATE] = generation_seconds(job, accelerator, lengths, cache)
    log_probs = forward_seconds(job, job.actor, accelerator, lengths)
    if job.log_probs:
        seconds[Phase.LOG_PROBS] = log_probs
    if job.reference:  # KTO's log-probabilities are of mismatched answers, which the reference reads as well
        seconds[Phase.REF] = log_probs * (2 if job.log_probs and not job.generates else 1)
    for model in job.models_beside:
        if model.kind.forward is not None:
            seconds[model.kind.forward] += forward_seconds(job, model, accelerator, lengths)
        if model.kind.update is not None:
            seconds[model.kind.update] += update_seconds(job, model, accelerator, lengths)
    return {phase: seconds[phase] for phase in in_order(seconds)}


def layout_warnings(job: Job, lengths: Lengths, cache: CacheRoom | None) -> list[str]:
    """Name what works, but wastes GPUs, one line each.

    Args:
        cache: of the engine, if there is one.
    """
    generation, rollout = job.generation, job.config.actor_rollout_ref.rollout
    warnings = []
    others = ((model.name, model.layout.tp) for model in job.models_beside)
    for what, tp in (("training", job.train.tp), ("generation", generation.tp), *others):
        if job.gpus_per_node % tp and job.ranks > job.gpus_per_node:
            warnings.append(
                f"{what} TP{tp} spans nodes of {job.gpus_per_node} GPUs: every layer then waits for the network"
            )
    for model in (job.actor, *job.models_beside):
        warnings += [*_pipeline_warnings(model, lengths), *_packing_hints(model)]
    if cache is None:
        return warnings
    if generation.replicas > job.config.data.train_batch_size:
        warnings.append(
            f"{generation.replicas} generation replicas share data.train_batch_size = "
            f"{job.config.data.train_batch_size} prompts: some have none"
        )
    if 0 < cache.sequences < rollout.max_num_seqs:
        warnings.append(
            f"the KV cache holds {cache.sequences} sequences of {job.max_sequence_length} tokens, fewer than "
            f"rollout.max_num_seqs = {rollout.max_num_seqs}"
        )
    return warnings


def _pipeline_warnings(model: ModelJob, lengths: Lengths) -> Iterator[str]:
    if model.kind.forward is None and model.kind.update is None:  # a role of a flow's own, of which no pass is known
        return
    sequences, stages = model.mini_batch or model.forward_batch, model.layout.pp
    waiting = bubble(model, lengths.total, sequences)
    if waiting - imbalance(model, lengths.total) <= MOST_BUBBLE:  # more micro-batches do not help against the latter
        return
    whose = "" if model.role == "actor" else f" of the {model.name}"
    work, larger = f"a pass{whose}", ""
    if model.mini_batch is not None:
        work, larger = f"an update{whose}", f"raise {model.section}.ppo_mini_batch_size, or "
    yield (
        f"pipeline stages wait {waiting:.0%} of {work}: {model.micro_batches(sequences, lengths.total)} micro-batches "
        f"for {stages} stages; {larger}lower {model.section}.ppo_max_token_len_per_gpu or pipeline_model_parallel_size"
    )


def _packing_hints(model: ModelJob) -> Iterator[str]:
    """Yield a hint if one of the longest sequences and a part of another fill a micro-batch: most then hold one."""
    longest, limit = model.config.data.max_sequence_length, model.most_tokens
    filled = model.micro_batch_tokens(model.forward_batch) == limit
    if model.batching.use_dynamic_bsz and filled and limit < 2 * longest:
        yield (
            f"{model.section}.ppo_max_token_len_per_gpu = {model.batching.limit(model.megatron)} is less than two of "
            f"the longest sequences, 2 x {longest} tokens: where memory allows, more lets sequences fill micro-batches"
        )
