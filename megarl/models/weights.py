"""Lists the weights of a whole model, and the places where each layout holds them. Torch-free."""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial

from megarl.models.architecture import Architecture, Layer
from megarl.models.parameter_names import ParameterNames
from megarl.models.placements import EVERY, LayerPlace, Placement, place_filled, place_whole
from megarl.models.tensors import LogicalTensor, norm, table
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
SCORE = "score.weight"

INPUT_NORM = "input_layernorm.weight"
OUTPUT_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
"""On what attention and MLP compute, in layers that have norms there."""

_MEGATRON_CORE = ParameterNames()


def layer_prefix(layer: int) -> str:
    """Give the prefix of the names of a layer's weights."""
    return f"model.layers.{layer}."


def mlp_norm(layer: Layer) -> str:
    """Name the norm before the MLP; in a block of two norms Hugging Face calls it `post_attention_layernorm`."""
    return "pre_feedforward_layernorm.weight" if layer.output_norms else "post_attention_layernorm.weight"


def logical_tensors(arch: Architecture) -> dict[str, LogicalTensor]:
    """List every weight of the model once, by name."""
    hidden = arch.hidden_size
    layer_norm = partial(norm, width=hidden, zero_centered=arch.zero_centered_norms)
    tensors = [table(EMBEDDING, "matrix", vocab=arch.vocab_size, hidden=hidden)]
    for number, layer in enumerate(arch.each_layer):
        prefix = layer_prefix(number)
        tensors += [layer_norm(prefix + INPUT_NORM)] * layer.input_norms
        tensors += layer.attention.tensors(prefix, hidden)
        tensors += [layer_norm(prefix + mlp_norm(layer))] * layer.input_norms
        tensors += layer.mlp.tensors(prefix, hidden)
        tensors += [layer_norm(prefix + name) for name in OUTPUT_NORMS if layer.output_norms]
    tensors.append(layer_norm(FINAL_NORM))
    if arch.output == "lm":
        tensors.append(table(OUTPUT, "matrix", vocab=arch.vocab_size, hidden=hidden))
    elif arch.output == "scalar":
        tensors.append(table(SCORE, "matrix", label=1, hidden=hidden))
    return {tensor.name: tensor for tensor in tensors}


def buffers(arch: Architecture) -> frozenset[str]:
    """Name the tensors that are float32 whatever the type of the weights; the engines give them the same names."""
    return frozenset(tensor.name for tensor in logical_tensors(arch).values() if tensor.kind == "buffer")


def training_placements(
    arch: Architecture,
    layout: TrainLayout,
    rank: int,
    *,
    names: ParameterNames = _MEGATRON_CORE,
    layers: Container[int] = EVERY,
    experts: Container[int] = EVERY,
) -> Iterator[Placement]:
    """List what a rank of the training layout holds, in the names of its `GPTModel` chunks ("{chunk}.decoder...").

    Args:
        names: of the parameters of the training layout's model.
        layers, experts: list these alone.
    """
    at, expert_place = layout.coords(rank), layout.expert_place(rank)
    vocab_rows = arch.padded_vocab_size(layout.tp) // layout.tp
    for chunk in range(layout.chunks):
        first, last = layout.is_first(at.pp, chunk), layout.is_last(at.pp, chunk)
        tied_copy = last and arch.tied and not first
        if first:
            yield from _vocab(arch, EMBEDDING, f"{chunk}.embedding.word_embeddings.weight", vocab_rows, at.tp)
        for local, number in enumerate(layout.layers(arch.num_layers, at.pp, chunk)):
            if number in layers:
                layer = arch.layer(number)
                place = LayerPlace(
                    tensors=layer_prefix(number),
                    params=f"{chunk}.decoder.layers.{local}.",
                    hidden=arch.hidden_size,
                    tp=layout.tp,
                    rank=at.tp,
                    expert_place=expert_place,
                    grouped_experts=names.grouped_experts,
                    experts=experts,
                )
                yield from layer.attention.training(place)
                yield from layer.mlp.training(place)
                yield from _norms(layer, place, (names.input_norm(layer), names.mlp_norm(layer)), names.output_norms)
        if last:
            yield place_whole(FINAL_NORM, f"{chunk}.decoder.final_layernorm.weight", (arch.hidden_size,))
        if tied_copy or (last and arch.output == "lm"):
            name = EMBEDDING if tied_copy else OUTPUT
            yield from _vocab(arch, name, f"{chunk}.output_layer.weight", vocab_rows, at.tp)
        elif last and arch.output == "scalar":
            yield place_whole(SCORE, f"{chunk}.output_layer.weight", (1, arch.hidden_size))


def engine_placements(
    arch: Architecture,
    split: TensorSplit,
    r: int,
    *,
    vocab_rows: int | None = None,
    layers: Container[int] = EVERY,
    experts: Container[int] = EVERY,
) -> Iterator[Placement]:
    """List what tensor-parallel rank `r` holds in a generation engine, in vLLM's names and shapes.

    Args:
        split: how the engine's ranks divide layers.
        vocab_rows: rows of the embedding on each rank, of an engine that pads the vocabulary further than to a
            multiple of their number.
        layers, experts: list these alone.
    """
    rows, hidden = vocab_rows or arch.padded_vocab_size(split.tp) // split.tp, arch.hidden_size
    expert_place = split.expert_place(r)
    yield from _vocab(arch, EMBEDDING, EMBEDDING, rows, r)
    for number, layer in enumerate(arch.each_layer):
        if number in layers:
            prefix = layer_prefix(number)
            place = LayerPlace(
                tensors=prefix,
                params=prefix,
                hidden=hidden,
                tp=split.tp,
                rank=r,
                expert_place=expert_place,
                experts=experts,
            )
            yield from layer.attention.engine(place)
            yield from layer.mlp.engine(place)
            yield from _norms(layer, place, (INPUT_NORM, mlp_norm(layer)), OUTPUT_NORMS)
    yield place_whole(FINAL_NORM, FINAL_NORM, (hidden,))
    if not arch.tied:
        yield from _vocab(arch, OUTPUT, OUTPUT, rows, r)


def _norms(layer: Layer, place: LayerPlace, inputs: tuple[str, str], outputs: tuple[str, str]) -> Iterator[Placement]:
    """Place the norms of a layer, given their parameters."""
    before = zip((INPUT_NORM, mlp_norm(layer)), inputs, strict=True) if layer.input_norms else ()
    behind = zip(OUTPUT_NORMS, outputs, strict=True) if layer.output_norms else ()
    for tensor, param in (*before, *behind):
        yield place.whole(tensor, param, place.hidden)


def _vocab(arch: Architecture, tensor: str, param: str, rows: int, r: int) -> Iterator[Placement]:
    """Place `rows` rows of the padded vocabulary on each rank; the padding belongs to no logical tensor."""
    lo, hi = r * rows, min((r + 1) * rows, arch.vocab_size)
    if lo < hi:
        yield place_filled(tensor, param, ((lo, hi), (0, arch.hidden_size)))
