"""Counts elements, bytes and FLOPs that follow from an architecture's shape. Torch-free.

The log-probabilities and the engines, which take the memory, and `megarl.estimate`, which predicts it, use these.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from megarl.models.architecture import Architecture, Layer
from megarl.parallel.experts import TensorSplit

ITEMSIZE = {"bfloat16": 2, "float32": 4}
"""Bytes of an element by `actor_rollout_ref.model.dtype`."""

STAGING_SLAB_BYTES = 2**30
"""Of a piece of the host memory in which a checkpoint waits to be written. A larger tensor has one of the next power of
two, to which torch rounds pinned memory up."""

LOGITS_CHUNK_BYTES = 2**29
"""Bytes of the training layout's logits alive at once; their gradient takes their place. With smaller chunks each pass
would add to the whole gradient of the output weight more often."""

BLOCK_SIZE = 16
"""Tokens in a block of the native engine's KV cache."""

ROWS_SORTED = 32
"""Rows of logits that top-k and top-p sort together: sorted ones take memory."""

SORT_BYTES = 48
"""Of each logit, while they do: it and its token in order, and three sums of probabilities in float64."""


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Count the blocks of KV cache that hold so many tokens of one sequence."""
    return -(-tokens // block_size)


def most_blocks(*, max_num_seqs: int, max_model_len: int, block_size: int = BLOCK_SIZE) -> int:
    """Count the blocks of KV cache that an engine can use: those of all its sequences at their greatest length, and its
    scratch block. 10 sequences of 100 tokens in blocks of 16: 10 x 7 + 1."""
    return max_num_seqs * blocks_for(max_model_len, block_size) + 1


def kv_bytes_per_token(arch: Architecture, *, tp: int, itemsize: int) -> int:
    """Count the bytes of a token's keys and values in all layers, on each rank of a replica."""
    return itemsize * sum(count * math.prod(layer.attention.cache_shape(tp)) for layer, count in arch.layers)


def state_bytes(arch: Architecture, *, tp: int, max_num_seqs: int) -> int:
    """Count the bytes of what each rank of a native engine keeps of its sequences however long they are.

    A slot of no sequence is among them, and a decode step's copy of the largest layer's.
    """
    largest = max(_layer_state_bytes(layer, tp) for layer in arch.kinds)
    return (max_num_seqs + 1) * sequence_state_bytes(arch, tp=tp) + max_num_seqs * largest


def sequence_state_bytes(arch: Architecture, *, tp: int) -> int:
    """Count the bytes of what linear attention keeps of a sequence in all layers, in float32."""
    return sum(count * _layer_state_bytes(layer, tp) for layer, count in arch.layers)


def _layer_state_bytes(layer: Layer, tp: int) -> int:
    return ITEMSIZE["float32"] * sum(map(math.prod, layer.attention.state_shapes(tp)))


def routed_bytes_per_token(arch: Architecture) -> int:
    """Count the bytes of the experts that a token goes to in all layers: a byte each, two with more than 256 experts.

    48 layers and 8 experts per token: 384.
    """
    if arch.moe is None:
        return 0
    return len(arch.expert_layers) * arch.moe.experts_per_token * (1 if arch.moe.num_experts <= 256 else 2)


def layer_activations(
    arch: Architecture, split: TensorSplit, *, sequence_parallel: bool, without: Collection[str] = ()
) -> float:
    """Count the elements per token that the largest layer of the training layout keeps for the backward pass.

    Args:
        without: MLPs, by `MLPPart.recomputed_as`, of which nothing is kept.

    After arXiv 2205.05198, section 4, with the terms of this architecture (no dropout, no stored attention matrix,
    SwiGLU, grouped queries), t = TP:

        norms                  4 h      inputs and outputs of both norms, divided by t with sequence parallelism;
                                        8 h of four norms (2 h each)
        attention    2 (q + kv) / t     queries, keys, values and the attention's output
        MLP               3 ffn / t     gate, up and their product
        experts   k (2 h + 3 ffn / t)   of k experts per token, in place of the MLP, with their inputs and outputs

    The 34 h bytes of the paper are this with q = kv = h, 2-byte elements and, for a GeLU MLP of width 4 h, 2 x 4 h in
    place of 3 ffn, plus 2 h of dropout masks. Transformer Engine's layers keep as much as torch's with a GPU's fused
    kernels.
    """
    hidden = arch.hidden_size
    most = max(4 * (layer.input_norms + layer.output_norms) for layer in arch.kinds)
    norms = most * hidden / (split.tp if sequence_parallel else 1)

    def mlp(layer: Layer) -> float:
        return 0.0 if layer.mlp.recomputed_as in without else layer.mlp.activations(hidden, split)

    return norms + max(layer.attention.activations(hidden, split) + mlp(layer) for layer in arch.kinds)


def attention_flops(arch: Architecture, tokens: float, squares: float) -> float:
    """Count attention's FLOPs in a forward pass over all layers, but for those of its weights.

    Args:
        tokens, squares: sums of the sequences' lengths and of their squares.
    """
    return sum(count * layer.attention.flops(tokens, squares) for layer, count in arch.layers)


def prefill_activations(arch: Architecture, split: TensorSplit) -> int:
    """Count the elements per token that the native engine holds at once within its largest layer.

    They are no fewer than `layer_activations`. In its terms: 6 h of residuals, norms and sums over ranks;
    8 q / t of queries, keys and values before and after their rotation, and the attention's output; 4 ffn / t of gate,
    up and their product, with experts k (2 h + 4 ffn / t), where t is 1 if experts are whole on their ranks.
    """
    hidden = arch.hidden_size
    return 6 * hidden + max(
        layer.attention.prefill_activations(hidden, split) + layer.mlp.prefill_activations(hidden, split)
        for layer in arch.kinds
    )


def sampler_bytes(arch: Architecture, *, max_num_seqs: int, itemsize: int) -> int:
    """Count the bytes of logits [max_num_seqs, vocab_size] in the model's dtype and in fp32, and of rows being sorted.

    The logits count twice, since CUDA graphs of several batch sizes hold their own.
    """
    sort = min(max_num_seqs, ROWS_SORTED) * SORT_BYTES
    return arch.vocab_size * (2 * max_num_seqs * (itemsize + 4) + sort)


def native_activation_bytes(
    arch: Architecture,
    split: TensorSplit,
    *,
    itemsize: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> int:
    """Bound the bytes that the native engine's forward passes hold beside weights, KV cache and states.

    A prompt of more than `max_num_batched_tokens` tokens is computed in parts, which attend to the keys of all of it.
    """
    tokens, keys = max(max_num_batched_tokens, max_model_len), arch.prompt_keys(split.tp)
    seen = 0
    if keys is not None and max_model_len > max_num_batched_tokens:
        tokens, seen = max_num_batched_tokens, max_model_len * keys
    layer = itemsize * (tokens * prefill_activations(arch, split) + seen)
    return layer + sampler_bytes(arch, max_num_seqs=max_num_seqs, itemsize=itemsize)
