"""Which bytes are on a GPU in which phase of a step, before anything runs. Torch-free.

Weights are counted from the placements of both layouts, and once where the engine reads the training weights. Optimizer
state and gradients are Megatron-Core's: fp32 gradient buffers (`grad_reduce_in_fp32`), fp32 master weights and two
moments, the latter three split over the data-parallel ranks by the distributed optimizer.

Activations are those of `megarl.models.sizes`.

A memory mode (`param_offload`, `grad_offload`, `optimizer_offload`, `ref.megatron.param_offload`) takes its item off
the GPU in the phases that `megarl.phases.AWAY` names. The phases are those that a run times.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.job import Job, own_engine_elements, training_elements
from megarl.models.sizes import (
    LOGITS_CHUNK_BYTES,
    blocks_for,
    layer_activations,
    most_blocks,
    native_activation_bytes,
    sampler_bytes,
)
from megarl.phases import Item, Phase, away
from megarl.reshard.transport.copies import TILE_WORDS, WIDEST

TILE_ENTRY = 8
"""Bytes for a tile of the copy kernel: the numbers of the copy and of the tile within it."""

Items = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True, kw_only=True)
class CacheRoom:
    """Room for keys and values in a replica of the engine.

    Attributes:
        bytes: of the cache on each rank.
        tokens: that it holds of all sequences together; every rank has its heads of each token.
        sequences: that can run together, all at their greatest length.
    """

    bytes: int
    tokens: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class StageBudget:
    """The fullest GPU of a pipeline stage.

    Attributes:
        stage: 0 is the first.
        phases: bytes on that GPU in each phase, by item.
    """

    stage: int
    phases: dict[Phase, Items]

    def total(self, phase: Phase) -> int:
        """Bytes held in a phase."""
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Bytes in the fullest phase."""
        return max(self.total(phase) for phase in self.phases)


def budget(job: Job, accelerator: Accelerator, *, moved: int) -> list[StageBudget]:
    """The phases of every pipeline stage, the first stage first.

    Args:
        moved: bytes that a rank receives in a reshard; the most of any rank.
    """
    cache = cache_room(job, accelerator).bytes
    return [_stage_budget(job, accelerator, stage, moved, cache) for stage in range(job.train.pp)]


@dataclass(frozen=True, kw_only=True)
class MemoryMode:
    """A key that takes an item off the GPU in some phases.

    Attributes:
        key: below `actor_rollout_ref`.
        item: its name among a stage's items.
        without: the phases in which the item is not on the GPU if the mode is on.
        on: whether the configuration says so.
        kept: whether the item waits on the host; otherwise nothing is kept of it.
    """

    key: str
    item: str
    without: frozenset[Phase]
    on: bool
    kept: bool


def memory_modes(job: Job) -> list[MemoryMode]:
    """All modes, also those that are off. The reference's mode is among them even if the run has no reference."""
    actor, ref = job.config.actor_rollout_ref.actor.megatron, job.config.actor_rollout_ref.ref.megatron
    return [
        MemoryMode(
            key="actor.megatron.grad_offload",
            item="gradients",
            without=away("actor", Item.GRADIENTS),
            on=actor.grad_offload,
            kept=False,
        ),
        MemoryMode(
            key="actor.megatron.optimizer_offload",
            item="optimizer state",
            without=away("actor", Item.OPTIMIZER),
            on=actor.optimizer_offload,
            kept=True,
        ),
        MemoryMode(
            key="actor.megatron.param_offload",
            item="training weights",
            without=away("actor", Item.WEIGHTS),
            on=actor.param_offload,
            kept=job.itemsize == 4,  # others are rebuilt from the optimizer's
        ),
        MemoryMode(
            key="ref.megatron.param_offload",
            item="reference weights",
            without=away("reference", Item.WEIGHTS),
            on=ref.param_offload,
            kept=True,
        ),
    ]


def host_bytes(job: Job, stage: int) -> int:
    """Pinned host memory of a rank of a stage."""
    state = _training_state(job, stage)
    return sum(state.get(mode.item, 0) for mode in memory_modes(job) if mode.on and mode.kept)


def _stage_budget(job: Job, accelerator: Accelerator, stage: int, moved: int, cache_bytes: int) -> StageBudget:
    context = {"CUDA context, NCCL": int(accelerator.runtime)}
    state, modes = _training_state(job, stage), memory_modes(job)
    weights = {"engine weights": job.itemsize * own_engine_elements(job, stage)}
    cache = {"KV cache": cache_bytes}
    awake = {} if job.config.actor_rollout_ref.rollout.free_cache_engine else weights | cache
    forward = awake | _forward(job, stage)
    phases = {
        Phase.RESHARD: awake | weights | {"reshard buffers": reshard_buffers(job, moved)},
        Phase.GENERATE: weights | cache | {"engine activations": engine_activations(job)},
        Phase.LOG_PROBS: forward,
        **({Phase.REF: forward} if job.config.needs_reference else {}),
        Phase.UPDATE: awake | _forward_and_backward(job, stage),
    }

    def held(phase: Phase) -> Items:
        absent = {mode.item for mode in modes if mode.on and phase in mode.without}
        return context | {item: 0 if item in absent else nbytes for item, nbytes in state.items()}

    return StageBudget(stage=stage, phases={phase: held(phase) | items for phase, items in phases.items()})


def _training_state(job: Job, stage: int) -> Items:
    """Weights, gradients, optimizer state and reference weights of a rank of the stage, with every memory mode off."""
    elements = training_elements(job.arch, job.train, job.train.rank(tp=0, dp=0, pp=stage))
    split = job.train.dp * job.train.cp if job.config.actor_rollout_ref.actor.megatron.use_distributed_optimizer else 1
    moments = 2 * 4
    master = 0 if job.itemsize == 4 else 4  # fp32 weights are their own master copy
    items = {
        "training weights": job.itemsize * elements,
        "gradients": 4 * elements,
        "optimizer state": -(-(master + moments) * elements // split),
    }
    return items | ({"reference weights": job.itemsize * elements} if job.config.needs_reference else {})


def layers_in_flight(job: Job, stage: int) -> int:
    """Layers of a stage, counted once per micro-batch, whose activations are alive at the schedule's peak.

    1F1B holds pp - stage micro-batches; the interleaved schedule runs 2 (pp - stage - 1) + (chunks - 1) pp chunks ahead
    (arXiv 2104.04473, section 2.2; 2205.05198, section 4.2.3).
    """
    train = job.train
    ahead = train.pp - stage - 1
    chunks = ahead + 1 if train.chunks == 1 else 2 * ahead + (train.chunks - 1) * train.pp + 1
    all_chunks = job.micro_batches(job.max_sequence_length) * train.chunks
    return min(chunks, all_chunks) * (job.arch.num_layers // (train.pp * train.chunks))


def _forward_and_backward(job: Job, stage: int) -> Items:
    config, alive = job.config.actor_rollout_ref, layers_in_flight(job, stage)
    layer = layer_activations(job.arch, tp=job.train.tp, sequence_parallel=job.sequence_parallel)
    if config.model.enable_gradient_checkpointing:
        # every layer's input, and all of the layer that is being recomputed
        kept = alive * job.arch.hidden_size / (job.train.tp if job.sequence_parallel else 1) + layer
    else:
        kept = alive * layer
    items = {"activations": int(job.itemsize * job.micro_batch_tokens * kept)}
    return items | _logits_of_a_chunk(job, stage)


def _forward(job: Job, stage: int) -> Items:
    """Without gradients a layer's activations are gone when the next one has run."""
    layer = layer_activations(job.arch, tp=job.train.tp, sequence_parallel=job.sequence_parallel)
    items = {"activations": int(job.itemsize * job.micro_batch_tokens * layer)}
    return items | _logits_of_a_chunk(job, stage)


def _logits_of_a_chunk(job: Job, stage: int) -> Items:
    """Only the last stage has logits. The output weight's gradient goes straight into the buffer of all gradients."""
    if stage < job.train.pp - 1:
        return {}
    columns = job.arch.padded_vocab_size(job.train.tp) // job.train.tp
    return {"logits of a chunk": min(LOGITS_CHUNK_BYTES, job.itemsize * job.micro_batch_tokens * columns)}


def engine_activations(job: Job) -> int:
    """Bytes of one layer's activations over the tokens computed together, and of the sampler's logits."""
    rollout, tp = job.config.actor_rollout_ref.rollout, job.generation.tp
    if rollout.name != "vllm":
        return native_activation_bytes(
            job.arch,
            tp=tp,
            itemsize=job.itemsize,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=job.max_sequence_length,
        )
    layer = layer_activations(job.arch, tp=tp, sequence_parallel=False)
    sampler = sampler_bytes(job.arch, max_num_seqs=rollout.max_num_seqs, itemsize=job.itemsize)
    return int(job.itemsize * rollout.max_num_batched_tokens * layer) + sampler


def cache_room(job: Job, accelerator: Accelerator) -> CacheRoom:
    """The blocks that `gpu_memory_utilization` leaves room for (0 if none), but no more than the engine can use."""
    rollout, block_size = job.config.actor_rollout_ref.rollout, job.block_size
    block_bytes = block_size * job.kv_bytes_per_token
    weights = job.itemsize * max(own_engine_elements(job, stage) for stage in range(job.train.pp))
    left = int(rollout.gpu_memory_utilization * accelerator.memory) - weights - engine_activations(job)
    longest = job.max_sequence_length
    useful = most_blocks(max_num_seqs=rollout.max_num_seqs, max_model_len=longest, block_size=block_size)
    blocks = min(max(0, left // block_bytes), useful)
    for_sequences = max(0, blocks - 1)
    return CacheRoom(
        bytes=blocks * block_bytes,
        tokens=for_sequences * block_size,
        sequences=for_sequences // blocks_for(longest, block_size),
    )


def reshard_buffers(job: Job, moved: int) -> int:
    """Bytes that a reshard needs beside the weights.

    Within a host that is the list of the copy kernel's tiles. Between hosts it is the collective transport's buckets:
    two directions, two rounds if one does not carry everything.

    Args:
        moved: bytes that one rank receives; it sends about as much.
    """
    reshard = job.config.actor_rollout_ref.reshard
    if reshard.transport == "auto" and job.train.world_size <= job.gpus_per_node:
        return TILE_ENTRY * (moved // (TILE_WORDS * WIDEST))
    return 2 * min(reshard.bucket_bytes, moved) * (2 if moved > reshard.bucket_bytes else 1)
