"""Which bytes are on a GPU in which phase of a step, before anything runs. Torch-free.

Weights are counted from the placements of both layouts, and once where the engine reads the training weights. Optimizer
state and gradients are Megatron-Core's: fp32 gradient buffers (`grad_reduce_in_fp32`), fp32 master weights and two
moments, the latter three split over the data-parallel ranks by the distributed optimizer.

Activations follow arXiv 2205.05198, section 4, with the terms of this architecture (no dropout, no stored attention
matrix, SwiGLU, grouped queries). A layer keeps for the backward pass, in elements per token with t = TP:

    norms                  4 h      inputs and outputs of both norms, divided by t with sequence parallelism
    attention    2 (q + kv) / t     queries, keys, values and the attention's output
    MLP               3 ffn / t     gate, up and their product
    experts   k (2 h + 3 ffn / t)   of k experts per token, in place of the MLP, with their inputs and outputs

The 34 h bytes of the paper are this with q = kv = h, 2-byte elements and, for a GeLU MLP of width 4 h, 2 x 4 h in place
of 3 ffn, plus 2 h of dropout masks. Transformer Engine's layers keep as much as torch's with a GPU's fused kernels.

What the memory modes move away (`param_offload`, `grad_offload`, `optimizer_offload`, `ref.megatron.param_offload`) is
absent from the phases that do without it. The phases are those that a run times.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.job import Job, own_engine_elements, training_elements
from megarl.models.architecture import Architecture
from megarl.models.placements import heads_on_rank
from megarl.reshard.transport.copies import TILE_WORDS, WIDEST

LOGITS_BYTES = 2**29
"""Logits alive at once, `megarl.models.logprobs.CHUNK_BYTES`; on a GPU their gradient takes their place."""
SAMPLER_COPIES = 3
"""fp32 tensors [sequences, vocabulary] alive when an engine draws tokens."""
TILE_ENTRY = 8
"""Bytes for a tile of the copy kernel: the numbers of the copy and of the tile within it."""
KV_LENGTH_MULTIPLE = 16
"""Tokens in a block of the native engine's cache, `megarl.rollout.native.blocks.BLOCK_SIZE`, and of vLLM's mostly."""

Items = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Room for keys and values on one rank of a replica.

    Attributes:
        bytes: of the rank.
        tokens: of the replica that fit.
        sequences: of the replica that can run together, at their greatest length.
    """

    bytes: int
    tokens: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class StageBudget:
    """The GPU with most on it among those of one pipeline stage.

    Attributes:
        stage: 0 is the first.
        phases: what is held in each phase.
    """

    stage: int
    phases: dict[str, Items]

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Bytes in the phase that holds most."""
        return max(self.total(phase) for phase in self.phases)


def budget(job: Job, accelerator: Accelerator, *, moved: int) -> list[StageBudget]:
    """The phases of every pipeline stage, the first stage first.

    Args:
        moved: bytes that the rank which receives most receives in a reshard.
    """
    cache = kv_cache(job, accelerator).bytes
    return [_stage_budget(job, accelerator, stage, moved, cache) for stage in range(job.train.pp)]


@dataclass(frozen=True, kw_only=True)
class MemoryMode:
    """A key that moves an item away.

    Attributes:
        key: below `actor_rollout_ref`.
        without: the phases that are then without it.
        kept: whether it waits on the host; otherwise nothing is kept of it.
    """

    key: str
    item: str
    without: set[str]
    on: bool
    kept: bool


def memory_modes(job: Job) -> list[MemoryMode]:
    """The modes that there are, whether they are on or not."""
    actor, ref = job.config.actor_rollout_ref.actor.megatron, job.config.actor_rollout_ref.ref.megatron
    resting = {"reshard", "generate"}
    return [
        MemoryMode(
            key="actor.megatron.grad_offload",
            item="gradients",
            without=resting | {"log_probs", "ref"},
            on=actor.grad_offload,
            kept=False,
        ),
        MemoryMode(
            key="actor.megatron.optimizer_offload",
            item="optimizer state",
            without=resting,
            on=actor.optimizer_offload,
            kept=True,
        ),
        MemoryMode(
            key="actor.megatron.param_offload",
            item="training weights",
            without={"generate"},
            on=actor.param_offload,
            kept=job.itemsize == 4,  # others are rebuilt from the optimizer's
        ),
        MemoryMode(
            key="ref.megatron.param_offload",
            item="reference weights",
            without=resting | {"update"},
            on=ref.param_offload,
            kept=True,
        ),
    ]


def host_bytes(job: Job, stage: int) -> int:
    """Pinned host memory of a rank of a stage."""
    state = _training_state(job, stage)
    return sum(state.get(mode.item, 0) for mode in memory_modes(job) if mode.on and mode.kept)


def _stage_budget(job: Job, accelerator: Accelerator, stage: int, moved: int, kv_bytes: int) -> StageBudget:
    context = {"CUDA context, NCCL": int(accelerator.runtime)}
    state = _training_state(job, stage)
    weights = {"engine weights": job.itemsize * own_engine_elements(job, stage)}
    cache = {"KV cache": kv_bytes}
    awake = {} if job.config.actor_rollout_ref.rollout.free_cache_engine else weights | cache
    forward = awake | _forward(job, stage)
    phases = {
        "reshard": awake | weights | {"reshard buffers": reshard_buffers(job, moved)},
        "generate": weights | cache | {"engine activations": engine_activations(job)},
        "log_probs": forward,
        **({"ref": forward} if job.config.needs_reference else {}),
        "update": awake | _forward_and_backward(job, stage),
    }

    def held(phase: str) -> Items:
        away = {mode.item for mode in memory_modes(job) if mode.on and phase in mode.without}
        return context | {item: 0 if item in away else nbytes for item, nbytes in state.items()}

    return StageBudget(stage=stage, phases={phase: held(phase) | items for phase, items in phases.items()})


def _training_state(job: Job, stage: int) -> Items:
    """What the roles hold unless a memory mode moves it."""
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


def layer_activations(arch: Architecture, *, tp: int, sequence_parallel: bool) -> float:
    """Elements per token that a layer keeps for the backward pass: the table above."""
    hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
    norms = 4 * hidden / (tp if sequence_parallel else 1)
    attention = 2 * (arch.num_attention_heads + arch.num_key_value_heads) * arch.head_dim / tp
    if arch.moe is None:
        return norms + attention + 3 * ffn / tp
    return norms + attention + arch.moe.experts_per_token * (2 * hidden + 3 * ffn / tp)


def layers_in_flight(job: Job, stage: int) -> int:
    """Layers of a stage, counted once per micro-batch, whose activations are alive at the schedule's peak.

    1F1B holds pp - stage micro-batches; the interleaved schedule runs 2 (pp - stage - 1) + (chunks - 1) pp chunks ahead
    (arXiv 2104.04473, section 2.2; 2205.05198, section 4.2.3).
    """
    train = job.train
    ahead = train.pp - stage - 1
    chunks = ahead + 1 if train.chunks == 1 else 2 * ahead + (train.chunks - 1) * train.pp + 1
    all_chunks = job.micro_batches(job.max_model_len) * train.chunks
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
    """On the last stage; the output weight's gradient goes straight into the buffer of all gradients."""
    if stage < job.train.pp - 1:
        return {}
    columns = job.arch.padded_vocab_size(job.train.tp) // job.train.tp
    return {"logits of a chunk": min(LOGITS_BYTES, job.itemsize * job.micro_batch_tokens * columns)}


def engine_activations(job: Job) -> int:
    """Bytes of one layer's activations over the tokens computed together, and of the sampler's logits."""
    rollout, data = job.config.actor_rollout_ref.rollout, job.config.data
    tokens = max(rollout.max_num_batched_tokens, data.max_prompt_length if rollout.name == "native" else 0)
    layer = layer_activations(job.arch, tp=job.generation.tp, sequence_parallel=False)
    return int(job.itemsize * tokens * layer) + SAMPLER_COPIES * 4 * rollout.max_num_seqs * job.arch.vocab_size


def kv_bytes_per_token(job: Job) -> int:
    """On one rank of a replica."""
    (first, last), _ = heads_on_rank(job.arch, job.generation.tp, 0)
    return 2 * job.arch.num_layers * (last - first) * job.arch.head_dim * job.itemsize


def kv_cache(job: Job, accelerator: Accelerator) -> KVCache:
    """What `gpu_memory_utilization` leaves (0 if nothing), but no more than the engine's sequences fill."""
    rollout, per_token = job.config.actor_rollout_ref.rollout, kv_bytes_per_token(job)
    weights = job.itemsize * max(own_engine_elements(job, stage) for stage in range(job.train.pp))
    left = int(rollout.gpu_memory_utilization * accelerator.memory) - weights - engine_activations(job)
    useful = rollout.max_num_seqs * -(-job.max_model_len // KV_LENGTH_MULTIPLE) * KV_LENGTH_MULTIPLE
    tokens = min(max(0, left // per_token), useful)
    return KVCache(
        bytes=tokens * per_token, tokens=tokens, sequences=min(rollout.max_num_seqs, tokens // job.max_model_len)
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
