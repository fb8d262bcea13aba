"""Places logical tensors in each physical layout. Torch-free.

A **placement** says which box of a logical tensor a rank holds, and where: which rows of which parameter, viewed how.
From these come random initialisation, import, export and the reshard plan; vocabulary padding, tied embeddings and
KV-head replication are nothing but particular boxes.

    Megatron's linear_qkv    rows of [kv_group, query... k v, head_dim], kv groups split over TP
    the engine's qkv_proj    rows of [all queries | all keys | all values], heads split over TP
    an expert's down_proj    a parameter of its own in Megatron, row e of `w2_weight` in the engine
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass

from megarl.models.architecture import Architecture, MixtureOfExperts
from megarl.models.parameter_names import ParameterNames
from megarl.models.tensors import EMBEDDING, FINAL_NORM, OUTPUT, SCORE, Box, layer_name, mlp_leaves, router_leaf
from megarl.parallel.layout import TrainLayout

EVERY = range(sys.maxsize)
"""All layers, or all experts."""

_MEGATRON_CORE = ParameterNames()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Says where a rank holds a box of a logical tensor.

    `parameter[rows[0]:rows[1]].view(view)`, narrowed to `index` on each axis, has the shape of `box`.

    Attributes:
        tensor: name of the logical tensor.
        box: the part of it held here.
        param: name of the physical parameter on the rank.
        rows: half-open range along the parameter's first axis.
        view: shape those rows are viewed as; one entry per logical axis.
        index: half-open range per axis of the view.
    """

    tensor: str
    box: Box
    param: str
    rows: tuple[int, int]
    view: tuple[int, ...]
    index: Box

    @property
    def columns(self) -> int:
        """Count the elements in a row of the parameter."""
        first, last = self.rows
        return math.prod(self.view) // (last - first)


def geometry(placement: Placement, part: Box) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Compute size, stride and offset within the parameter of `parameter[rows].view(view)[index][part]`, elements.

    Args:
        part: half-open range per axis, within the placement's box.
    """
    stride = tuple(math.prod(placement.view[axis + 1 :]) for axis in range(len(placement.view)))
    starts = (base + lo for (base, _), (lo, _) in zip(placement.index, part, strict=True))
    return (
        tuple(hi - lo for lo, hi in part),
        stride,
        placement.rows[0] * placement.columns + sum(s * i for s, i in zip(stride, starts, strict=True)),
    )


# -------------------------------------------------------------------------------------- Megatron's training layout


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
        names: those of the model whose parameters these are.
        layers, experts: leave the others out.
    """
    at = layout.coords(rank)
    vocab_rows = arch.padded_vocab_size(layout.tp) // layout.tp
    for chunk in range(layout.chunks):
        first, last = layout.is_first(at.pp, chunk), layout.is_last(at.pp, chunk)
        tied_copy = last and arch.tied and not first
        if first:
            yield from _vocab(arch, EMBEDDING, f"{chunk}.embedding.word_embeddings.weight", vocab_rows, at.tp)
        for local, layer in enumerate(layout.layers(arch.num_layers, at.pp, chunk)):
            if layer in layers:
                prefix = f"{chunk}.decoder.layers.{local}."
                yield from _megatron_layer(arch, layer, prefix, names, layout.tp, at.tp, experts)
        if last:
            yield _whole(FINAL_NORM, f"{chunk}.decoder.final_layernorm.weight", (arch.hidden_size,))
        if tied_copy or (last and arch.output == "lm"):
            name = EMBEDDING if tied_copy else OUTPUT
            yield from _vocab(arch, name, f"{chunk}.output_layer.weight", vocab_rows, at.tp)
        elif last and arch.output == "scalar":
            yield _whole(SCORE, f"{chunk}.output_layer.weight", (1, arch.hidden_size))


def _megatron_layer(
    arch: Architecture,
    layer: int,
    prefix: str,
    names: ParameterNames,
    tp: int,
    r: int,
    experts: Container[int],
) -> Iterator[Placement]:
    def norm(leaf: str, param: str, size: int) -> Placement:
        return _whole(layer_name(layer, leaf), prefix + param, (size,))

    yield norm("input_layernorm.weight", names.input_norm, arch.hidden_size)
    for leaf in ("weight", "bias") if arch.qkv_bias else ("weight",):
        yield from _megatron_qkv(arch, layer, f"{prefix}{names.qkv}{leaf}", leaf, tp, r)
    if arch.qk_norm:
        yield norm("self_attn.q_norm.weight", names.query_norm, arch.head_dim)
        yield norm("self_attn.k_norm.weight", names.key_norm, arch.head_dim)
    yield from _o_proj(arch, layer, f"{prefix}{names.projection}weight", tp, r)
    yield norm("post_attention_layernorm.weight", names.mlp_norm, arch.hidden_size)
    if arch.moe:
        yield _router(arch, arch.moe, layer, prefix + names.router)
    for expert in range(arch.moe.num_experts) if arch.moe else (None,):
        if expert is None or expert in experts:
            gate_up, down = names.mlp(expert)
            yield from _mlp(arch, layer, expert, prefix + gate_up, prefix + down, tp, r)


def _megatron_qkv(arch: Architecture, layer: int, param: str, leaf: str, tp: int, r: int) -> Iterator[Placement]:
    """`linear_qkv` is [kv_group, queries of the group + k + v, head_dim] in rows, split evenly over TP."""
    groups, per_group, dim = arch.num_key_value_heads, arch.queries_per_group, arch.head_dim
    tail, tail_box = _hidden_tail(arch, leaf)
    slots = {"q": (0, per_group), "k": (per_group, per_group + 1), "v": (per_group + 1, per_group + 2)}
    if groups % tp == 0:
        n = groups // tp
        view = (n, per_group + 2, dim, *tail)
        for proj, (lo, hi) in slots.items():
            yield Placement(
                tensor=layer_name(layer, f"self_attn.{proj}_proj.{leaf}"),
                box=((r * n, (r + 1) * n), (0, hi - lo), (0, dim), *tail_box),
                param=param,
                rows=(0, n * (per_group + 2) * dim),
                view=view,
                index=((0, n), (lo, hi), (0, dim), *tail_box),
            )
        return
    # Fewer KV groups than ranks: a rank's rows start and end inside one group, possibly inside a head.
    rows = groups * (per_group + 2) * dim // tp
    start, stop = r * rows, (r + 1) * rows
    for head in range(start // dim, -(-stop // dim)):
        group, slot = divmod(head, per_group + 2)
        proj = next(p for p, (lo, hi) in slots.items() if lo <= slot < hi)
        query = slot - slots[proj][0]
        lo, hi = max(start, head * dim), min(stop, (head + 1) * dim)
        inside = (lo - head * dim, hi - head * dim)
        yield Placement(
            tensor=layer_name(layer, f"self_attn.{proj}_proj.{leaf}"),
            box=((group, group + 1), (query, query + 1), inside, *tail_box),
            param=param,
            rows=(lo - start, hi - start),
            view=(1, 1, hi - lo, *tail),
            index=((0, 1), (0, 1), (0, hi - lo), *tail_box),
        )


# ------------------------------------------------------------------------------------------- the engines' layout

STACKED_GATE_UP = "experts.routed_experts.w13_weight"
STACKED_DOWN = "experts.routed_experts.w2_weight"


def engine_placements(
    arch: Architecture,
    tp: int,
    r: int,
    *,
    vocab_rows: int | None = None,
    layers: Container[int] = EVERY,
    experts: Container[int] = EVERY,
) -> Iterator[Placement]:
    """List what tensor-parallel rank `r` of `tp` holds in a generation engine.

    Parameters have vLLM's names and shapes: `qkv_proj` is all queries, then keys, then values of the rank's heads;
    `gate_up_proj` is gate, then up; embeddings are split over (padded) rows. Each rank has at least one KV head, so
    with fewer KV heads than ranks a head sits on several ranks. Experts are stacked along a first axis
    ([experts, 2 * ffn / tp, hidden] and [experts, hidden, ffn / tp]), each split like an MLP.

    Args:
        vocab_rows: rows of the embedding on each rank, of an engine that pads the vocabulary further than to a
            multiple of `tp`.
        layers, experts: leave the others out.
    """
    rows = vocab_rows or arch.padded_vocab_size(tp) // tp
    yield from _vocab(arch, EMBEDDING, EMBEDDING, rows, r)
    for layer in range(arch.num_layers):
        if layer in layers:
            yield from _engine_layer(arch, layer, tp, r, experts)
    yield _whole(FINAL_NORM, FINAL_NORM, (arch.hidden_size,))
    if not arch.tied:
        yield from _vocab(arch, OUTPUT, OUTPUT, rows, r)


def _engine_layer(arch: Architecture, layer: int, tp: int, r: int, experts: Container[int]) -> Iterator[Placement]:
    def name(leaf: str) -> str:
        return layer_name(layer, leaf)

    def norm(leaf: str, size: int) -> Placement:
        return _whole(name(leaf), name(leaf), (size,))

    yield norm("input_layernorm.weight", arch.hidden_size)
    for leaf in ("weight", "bias") if arch.qkv_bias else ("weight",):
        yield from _engine_qkv(arch, layer, leaf, tp, r)
    if arch.qk_norm:
        yield norm("self_attn.q_norm.weight", arch.head_dim)
        yield norm("self_attn.k_norm.weight", arch.head_dim)
    yield from _o_proj(arch, layer, name("self_attn.o_proj.weight"), tp, r)
    yield norm("post_attention_layernorm.weight", arch.hidden_size)
    if arch.moe is None:
        yield from _mlp(arch, layer, None, name("mlp.gate_up_proj.weight"), name("mlp.down_proj.weight"), tp, r)
        return
    yield _router(arch, arch.moe, layer, name(router_leaf(arch.moe)))
    gate_up, down = (name(f"{arch.moe.module}.{leaf}") for leaf in (STACKED_GATE_UP, STACKED_DOWN))
    for expert in range(arch.moe.num_experts):
        if expert in experts:
            yield from _mlp(arch, layer, expert, gate_up, down, tp, r, stacked=True)


def _engine_qkv(arch: Architecture, layer: int, leaf: str, tp: int, r: int) -> Iterator[Placement]:
    dim = arch.head_dim
    tail, tail_box = _hidden_tail(arch, leaf)
    groups, queries = heads_on_rank(arch, tp, r)
    n_groups, n_queries = groups[1] - groups[0], queries[1] - queries[0]
    start = 0
    for proj, slots in (("q", queries), ("k", (0, 1)), ("v", (0, 1))):
        heads = n_groups * (n_queries if proj == "q" else 1)
        view = (n_groups, heads // n_groups, dim, *tail)
        yield Placement(
            tensor=layer_name(layer, f"self_attn.{proj}_proj.{leaf}"),
            box=(groups, slots, (0, dim), *tail_box),
            param=layer_name(layer, f"self_attn.qkv_proj.{leaf}"),
            rows=(start, start + heads * dim),
            view=view,
            index=tuple((0, n) for n in view),
        )
        start += heads * dim


def heads_on_rank(arch: Architecture, tp: int, r: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Find the KV groups of a rank, and its queries of each of them, as half-open ranges."""
    groups, per_group = arch.num_key_value_heads, arch.queries_per_group
    if groups % tp == 0:
        n = groups // tp
        return (r * n, (r + 1) * n), (0, per_group)
    ranks_per_group = tp // groups
    n = per_group // ranks_per_group
    group, part = divmod(r, ranks_per_group)
    return (group, group + 1), (part * n, (part + 1) * n)


# ------------------------------------------------------------------------------------------- shared by both layouts


def _whole(tensor: str, param: str, shape: tuple[int, ...]) -> Placement:
    """Place a tensor that every rank holds entirely."""
    box = tuple((0, n) for n in shape)
    return Placement(tensor=tensor, box=box, param=param, rows=(0, shape[0]), view=shape, index=box)


def _hidden_tail(arch: Architecture, leaf: str) -> tuple[tuple[int, ...], Box]:
    """Give the trailing axis that a weight has and a bias has not."""
    return ((arch.hidden_size,), ((0, arch.hidden_size),)) if leaf == "weight" else ((), ())


def _vocab(arch: Architecture, tensor: str, param: str, rows: int, r: int) -> Iterator[Placement]:
    """Place `rows` rows of the padded vocabulary on each rank; the padding belongs to no logical tensor."""
    lo, hi = r * rows, min((r + 1) * rows, arch.vocab_size)
    if lo < hi:
        view = (hi - lo, arch.hidden_size)
        box = ((lo, hi), (0, arch.hidden_size))
        index = ((0, hi - lo), (0, arch.hidden_size))
        yield Placement(tensor=tensor, box=box, param=param, rows=(0, hi - lo), view=view, index=index)


def _o_proj(arch: Architecture, layer: int, param: str, tp: int, r: int) -> Iterator[Placement]:
    groups, queries = heads_on_rank(arch, tp, r)
    view = (arch.hidden_size, groups[1] - groups[0], queries[1] - queries[0], arch.head_dim)
    yield Placement(
        tensor=layer_name(layer, "self_attn.o_proj.weight"),
        box=((0, arch.hidden_size), groups, queries, (0, arch.head_dim)),
        param=param,
        rows=(0, arch.hidden_size),
        view=view,
        index=tuple((0, n) for n in view),
    )


def _router(arch: Architecture, moe: MixtureOfExperts, layer: int, param: str) -> Placement:
    return _whole(layer_name(layer, router_leaf(moe)), param, (moe.num_experts, arch.hidden_size))


def _mlp(
    arch: Architecture, layer: int, expert: int | None, gate_up: str, down: str, tp: int, r: int, stacked: bool = False
) -> Iterator[Placement]:
    """Place a rank's share of the MLP's or an expert's width; `stacked` parameters hold expert e in row e."""
    hidden, n = arch.hidden_size, arch.ffn_hidden_size // tp
    share, whole = (r * n, (r + 1) * n), (0, hidden)
    row = (expert, expert + 1) if stacked and expert is not None else None
    gate_leaf, up_leaf, down_leaf = mlp_leaves(arch, expert)
    for i, leaf in enumerate((gate_leaf, up_leaf)):
        yield Placement(
            tensor=layer_name(layer, leaf),
            box=(share, whole),
            param=gate_up,
            rows=row or (0, 2 * n),
            view=(2 * n, hidden),
            index=((i * n, (i + 1) * n), whole),
        )
    yield Placement(
        tensor=layer_name(layer, down_leaf),
        box=(whole, share),
        param=down,
        rows=row or whole,
        view=(hidden, n),
        index=(whole, (0, n)),
    )
