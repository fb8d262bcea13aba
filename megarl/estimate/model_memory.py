"""Counts what a GPU holds of a model in its training layout, and beside it during a pass. Torch-free.

Optimizer state and gradients are Megatron-Core's: fp32 gradient buffers (`grad_reduce_in_fp32`), fp32 master weights
and two moments, the latter three split over the data-parallel ranks by the distributed optimizer.

Activations are those of `megarl.models.sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from megarl.estimate.job import training_elements
from megarl.estimate.model import ModelJob, item_name
from megarl.flow_kinds import generates
from megarl.models.sizes import LOGITS_CHUNK_BYTES, layer_activations
from megarl.parallel.experts import TensorSplit
from megarl.phases import Item

Items = dict[str, int]
"""Bytes by what they are for."""

FP32 = 4
"""Bytes of a master weight, of a moment and of a gradient."""


@dataclass(frozen=True, kw_only=True)
class MemoryMode:
    """Describes a key that takes an item off the GPU in some phases.

    Attributes:
        key: the configuration's; of the policy and the reference without `actor_rollout_ref.`.
        item: its name among a stage's items.
        without: the phases in which the item is not on the GPU if the mode is on.
        on: whether the configuration says so.
        kept: whether the item waits on the host; otherwise nothing is kept of it.
    """

    key: str
    item: str
    without: frozenset[str]
    on: bool
    kept: bool


def modes_of(model: ModelJob) -> list[MemoryMode]:
    """List the memory modes of a model, also if they are off."""
    megatron, trained = model.megatron, model.mini_batch is not None
    rebuilt = trained and model.itemsize < FP32  # from the optimizer's
    modes = [("param_offload", Item.WEIGHTS, megatron.param_offload, not rebuilt)]
    if trained:
        modes = [
            ("grad_offload", Item.GRADIENTS, megatron.grad_offload, False),
            ("optimizer_offload", Item.OPTIMIZER, megatron.optimizer_offload, True),
            *modes,
        ]
    return [
        MemoryMode(
            key=f"{model.section}.megatron.{key}",
            item=item_name(model.role, item),
            without=model.kind.without(item),
            on=on,
            kept=kept,
        )
        for key, item, on, kept in modes
    ]


def state_of(model: ModelJob, stage: int) -> Items:
    """Count what a rank of a stage holds, with every memory mode off: weights and, of a trained model, gradients and
    optimizer state."""
    elements = _elements(model, stage)
    items = {Item.WEIGHTS: model.itemsize * elements}
    if model.mini_batch is not None:
        moments = 2 * FP32
        items[Item.GRADIENTS] = FP32 * elements
        items[Item.OPTIMIZER] = (_master(model) + moments) * _stepped(model, stage)
    return {item_name(model.role, item): nbytes for item, nbytes in items.items()}


def reference_state(policy: ModelJob, stage: int) -> Items:
    """Count what a rank of a stage holds of a policy's reference with every memory mode off: a copy of its weights."""
    return {item_name("reference", Item.WEIGHTS): policy.itemsize * _elements(policy, stage)}


def written(model: ModelJob, stage: int, *, optimizer: bool) -> int:
    """Count the bytes that a rank of a stage writes of a model.

    Args:
        optimizer: with moments and fp32 weights, also where these are the model's own. A reference has none.
    """
    return (model.itemsize + (3 * FP32 if optimizer else 0)) * _share(model, stage)


def masters_of(model: ModelJob, stage: int, phase: str) -> Items:
    """Count the fp32 weights from which others are rebuilt as a phase begins that does without the optimizer.

    A critic's, before its values. The policy's weights are back by then; where its log-probabilities are no pass of
    their own, its fp32 weights stand in for them until the update, which is not counted.
    """
    megatron = model.megatron
    moved = megatron.param_offload and megatron.optimizer_offload and phase in model.kind.without(Item.OPTIMIZER)
    if model.mini_batch is None or not moved or not _master(model):
        return {}
    return {f"{model.role} fp32 weights": _master(model) * _stepped(model, stage)}


def _elements(model: ModelJob, stage: int, *, experts_alone: bool = False) -> int:
    rank = model.layout.rank(tp=0, dp=0, pp=stage)
    return training_elements(model.arch, model.layout, rank, experts_alone=experts_alone)


def _stepped(model: ModelJob, stage: int) -> int:
    """Count the elements whose optimizer state a rank has."""
    splits = model.megatron.use_distributed_optimizer
    return _share(model, stage) if splits else _elements(model, stage)


def _share(model: ModelJob, stage: int) -> int:
    """Count the elements that fall to a rank where the ranks that have the same ones split them: experts are on fewer
    ranks than the rest, or on more."""
    elements, of_experts = _elements(model, stage), _elements(model, stage, experts_alone=True)
    layout = model.layout
    return -(-(elements - of_experts) // layout.replicas) + -(-of_experts // layout.expert_dp)


def _master(model: ModelJob) -> int:
    """Count the bytes of a master weight; fp32 weights are their own."""
    return FP32 if model.itemsize < FP32 else 0


def layers_in_flight(model: ModelJob, stage: int) -> int:
    """Count the layers of a stage, once per micro-batch, whose activations are alive at the peak of an update.

    1F1B holds pp - stage micro-batches; the interleaved schedule runs 2 (pp - stage - 1) + (chunks - 1) pp chunks ahead
    (arXiv 2104.04473, section 2.2; 2205.05198, section 4.2.3).
    """
    assert model.mini_batch is not None, "a model that is only read keeps no layer's activations"
    layout, longest = model.layout, model.config.data.max_sequence_length
    ahead = layout.pp - stage - 1
    chunks = ahead + 1 if layout.chunks == 1 else 2 * ahead + (layout.chunks - 1) * layout.pp + 1
    all_chunks = model.micro_batches(model.mini_batch, longest) * layout.chunks
    largest = max(len(layout.layers(model.arch.num_layers, stage, chunk)) for chunk in range(layout.chunks))
    return min(chunks, all_chunks) * largest


def forward_and_backward(model: ModelJob, stage: int) -> Items:
    """Count what an update holds beside the state."""
    assert model.mini_batch is not None, "a model that is only read has no update"
    alive, layer = layers_in_flight(model, stage), _layer(model, stage)
    settings = model.config.actor_rollout_ref.model
    if not settings.enable_gradient_checkpointing:
        kept = _layer(model, stage, without=settings.recompute_modules)
        return _pass(model, stage, model.mini_batch, max(alive, 1) * kept + layer - kept)
    # the layer that is being recomputed, and every layer's input, or one that comes from the host
    inputs = min(1, alive) if settings.enable_activation_offload else alive
    return _pass(model, stage, model.mini_batch, inputs * _layer_input(model) + layer)


def inputs_on_host(model: ModelJob, stage: int) -> int:
    """Count the bytes of layers' inputs that wait in host memory for the backward pass.

    Torch rounds each up to a power of two, since it pins them.
    """
    if model.mini_batch is None or not model.config.actor_rollout_ref.model.enable_activation_offload:
        return 0
    tokens = model.rank_tokens(model.mini_batch)
    nbytes = math.ceil(model.itemsize * tokens * _layer_input(model))
    return layers_in_flight(model, stage) * (1 << (nbytes - 1).bit_length())


def _layer_input(model: ModelJob) -> float:
    """Count the elements per token of a layer's input."""
    return model.arch.hidden_size / (model.layout.tp if model.sequence_parallel else 1)


def forward(model: ModelJob, stage: int) -> Items:
    """Count what a pass without gradients holds beside the state: one layer's activations at a time."""
    return _pass(model, stage, model.forward_batch, _layer(model, stage))


def _layer(model: ModelJob, stage: int, without: Collection[str] = ()) -> float:
    """Count the elements per token of a layer's activations; embedding and loss alone keep one hidden state.

    Args:
        without: see `layer_activations`.
    """
    if model.layout.layers_of_stage(model.arch.num_layers, stage) == 0:
        return model.arch.hidden_size
    return _copied_keys(model) + layer_activations(
        model.arch, TensorSplit(tp=model.layout.tp), sequence_parallel=model.sequence_parallel, without=without
    )


def _copied_keys(model: ModelJob) -> float:
    """Count the elements per token of copies of a layer's keys and values, where each sequence gets those of a common
    prompt, or ranks that share sequences make some."""
    config, data, copies = model.config.actor_rollout_ref, model.config.data, 0.0
    if config.model.use_prefix_grouper and generates(model.config) and config.rollout.n > 1:
        n, prompt, response = config.rollout.n, data.max_prompt_length, data.max_response_length
        copies = n * (prompt + response) / (prompt + n * response)
    return model.layout.copied_keys(copies) * max(
        layer.attention.training_keys(model.layout.tp) for layer in model.arch.kinds
    )


def _pass(model: ModelJob, stage: int, sequences: int, kept: float) -> Items:
    """
    Args:
        kept: elements per token.
    """
    tokens = model.rank_tokens(sequences)
    items = {"activations": int(model.itemsize * tokens * kept)}
    if stage < model.layout.pp - 1 or model.arch.output == "scalar":
        return items
    # only the last stage has logits; the output weight's gradient goes straight into the buffer of all gradients
    columns = model.arch.padded_vocab_size(model.layout.tp) // model.layout.tp
    return items | {"logits of a chunk": min(LOGITS_CHUNK_BYTES, model.itemsize * tokens * columns)}
