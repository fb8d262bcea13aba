"""Predicts which bytes are on a GPU in which phase of a step, before anything runs. Torch-free.

Weights are counted from the placements of both layouts, and once where the engine reads the training weights. What a
model holds of gradients, optimizer state and activations is in `megarl.estimate.model_memory`; the models beside the
policy are in `megarl.estimate.beside`.

A memory mode (`param_offload`, `grad_offload`, `optimizer_offload`, `ref.megatron.param_offload`) takes its item off
the GPU in the phases that `megarl.role_kinds` names. A run times the same phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.beside import passes_beside, state_beside
from megarl.estimate.job import Job, own_engine_elements
from megarl.estimate.model import item_name
from megarl.estimate.model_memory import (
    Items,
    MemoryMode,
    forward,
    forward_and_backward,
    inputs_on_host,
    modes_of,
    reference_state,
    state_of,
    written,
)
from megarl.models.sizes import STAGING_SLAB_BYTES, blocks_for, most_blocks, state_bytes
from megarl.phases import Item, Phase, in_order
from megarl.reshard.transport.copies import TILE_WORDS, WIDEST
from megarl.role_kinds import REFERENCE

TILE_ENTRY = 8
"""Bytes for a tile of the copy kernel: the numbers of the copy and of the tile within it."""


@dataclass(frozen=True, kw_only=True)
class CacheRoom:
    """Counts the room for keys and values in a replica of the engine.

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
    """Lists the bytes on the fullest GPU of a pipeline stage.

    Attributes:
        stage: 0 is the first.
        phases: bytes on that GPU in each phase, by item.
    """

    stage: int
    phases: dict[str, Items]

    def total(self, phase: str) -> int:
        """Add up a phase, bytes."""
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Find the bytes of the fullest phase."""
        return max(self.total(phase) for phase in self.phases)


def budget(job: Job, accelerator: Accelerator, *, moved: int) -> list[StageBudget]:
    """Predict every pipeline stage, the first one first.

    Args:
        moved: bytes that a rank receives in a reshard; the most of any rank.
    """
    cache = cache_room(job, accelerator).bytes if job.generates else 0
    return [_stage_budget(job, accelerator, stage, moved, cache) for stage in range(job.train.pp)]


def memory_modes(job: Job) -> list[MemoryMode]:
    """List the modes of all models, also if they are off, and the reference's even if the run has no reference."""
    reference = MemoryMode(
        key="ref.megatron.param_offload",
        item=item_name("reference", Item.WEIGHTS),
        without=REFERENCE.without(Item.WEIGHTS),
        on=job.config.actor_rollout_ref.ref.megatron.param_offload,
        kept=True,
    )
    return [*modes_of(job.actor), reference, *(mode for model in job.models_beside for mode in modes_of(model))]


def host_bytes(job: Job, stage: int) -> int:
    """Count the pinned host memory of a rank of a stage."""
    state = _state(job, stage)
    kept = sum(state.get(mode.item, 0) for mode in memory_modes(job) if mode.on and mode.kept)
    models = [job.actor, *job.models_beside]
    return kept + max(inputs_on_host(model, min(stage, model.layout.pp - 1)) for model in models)


def checkpoint_bytes(job: Job, stage: int) -> int:
    """Count what a rank of a stage writes of a checkpoint: a replica's ranks share its tensors."""
    optimizer = "optimizer" in job.config.checkpoint.save_contents
    trained = [job.actor, *(model for model in job.models_beside if model.mini_batch is not None)]
    models = sum(written(model, min(stage, model.layout.pp - 1), optimizer=optimizer) for model in trained)
    return models + (written(job.actor, stage, optimizer=False) if job.reference else 0)


def copy_bytes(job: Job, stage: int) -> int:
    """Count the pinned host memory in which a rank of a stage holds a checkpoint while it is written."""
    if not job.config.checkpoint.async_save or job.config.trainer.save_freq <= 0:
        return 0
    return STAGING_SLAB_BYTES * (-(-checkpoint_bytes(job, stage) // STAGING_SLAB_BYTES) + 1)


def _stage_budget(job: Job, accelerator: Accelerator, stage: int, moved: int, cache_bytes: int) -> StageBudget:
    context = {"CUDA context, NCCL": int(accelerator.runtime)}
    state, modes = _state(job, stage), memory_modes(job)
    engine, awake = {}, {}
    if job.generates:
        weights = {"engine weights": job.itemsize * own_engine_elements(job, stage)}
        states = sequence_states(job)
        cache = {"KV cache": cache_bytes} | ({"sequence states": states} if states else {})
        awake = {} if job.config.actor_rollout_ref.rollout.free_cache_engine else weights | cache
        engine = {
            Phase.RESHARD: awake | weights | {"reshard buffers": reshard_buffers(job, moved)},
            Phase.GENERATE: weights | cache | {"engine activations": engine_activations(job)},
        }
    phases = engine | {phase: awake | items for phase, items in passes(job, stage).items()}

    def present(phase: str) -> Items:
        absent = {mode.item for mode in modes if mode.on and phase in mode.without}
        return context | {item: 0 if item in absent else nbytes for item, nbytes in state.items()}

    return StageBudget(stage=stage, phases={phase: present(phase) | phases[phase] for phase in in_order(phases)})


def passes(job: Job, stage: int) -> dict[str, Items]:
    """Count what the passes of a phase hold on a rank of a stage, beside what is always there: the largest of each."""
    largest: dict[str, Items] = {}
    for phase, items in (*_policy_passes(job, stage), *passes_beside(job, stage)):
        largest[phase] = max(largest.get(phase, {}), items, key=lambda each: sum(each.values()))
    return largest


def _policy_passes(job: Job, stage: int) -> Iterator[tuple[str, Items]]:
    if job.log_probs:
        yield Phase.LOG_PROBS, forward(job.actor, stage)
    if job.reference:
        yield Phase.REF, forward(job.actor, stage)
    yield Phase.UPDATE, forward_and_backward(job.actor, stage)


def _state(job: Job, stage: int) -> Items:
    """Count what all models hold on a rank of the policy's stage, with every memory mode off."""
    reference = reference_state(job.actor, stage) if job.reference else {}
    return state_of(job.actor, stage) | reference | state_beside(job, stage)


def engine_activations(job: Job) -> int:
    """Count the bytes of one layer's activations over the tokens computed together, and of the sampler's logits."""
    return job.engine.activation_bytes(
        job.config.actor_rollout_ref.rollout,
        job.arch,
        tp=job.generation.tp,
        itemsize=job.itemsize,
        max_model_len=job.max_sequence_length,
    )


def sequence_states(job: Job) -> int:
    """Count the bytes of what linear attention keeps of the sequences that are decoded together."""
    rollout = job.config.actor_rollout_ref.rollout
    return state_bytes(job.arch, tp=job.generation.tp, max_num_seqs=rollout.max_num_seqs)


def cache_room(job: Job, accelerator: Accelerator) -> CacheRoom:
    """Count the blocks that `gpu_memory_utilization` leaves room for, at most as many as the engine can use."""
    rollout, block_size = job.config.actor_rollout_ref.rollout, job.engine.block_size
    block_bytes = block_size * job.kv_bytes_per_token
    weights = job.itemsize * max(own_engine_elements(job, stage) for stage in range(job.train.pp))
    beside = weights + engine_activations(job) + sequence_states(job)
    left = int(rollout.gpu_memory_utilization * accelerator.memory) - beside
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
    """Count the bytes that a reshard needs beside the weights.

    Within a host that is the list of the copy kernel's tiles. Between hosts it is the collective transport's buckets:
    two directions, two rounds if one does not carry everything.

    Args:
        moved: bytes that one rank receives; it sends about as much.
    """
    reshard = job.config.actor_rollout_ref.reshard
    if reshard.transport == "auto" and job.ranks <= job.gpus_per_node:
        return TILE_ENTRY * (moved // (TILE_WORDS * WIDEST))
    return 2 * min(reshard.bucket_bytes, moved) * (2 if moved > reshard.bucket_bytes else 1)
