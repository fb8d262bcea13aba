"""Describes rotary grouped-query attention (arXiv 2305.13245): Llama's, with what later families changed of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.models.parts.part import AttentionPart, check_counts, check_numbers
from megarl.models.parts.rotary import RopeScaling, Yarn, check_base
from megarl.models.placements import LayerPlace, Placement, place_filled
from megarl.models.tensors import Box, LogicalTensor, norm, table
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout


@dataclass(frozen=True, kw_only=True)
class GroupedQuery(AttentionPart):
    """Describes attention in which several query heads read the keys and values of one KV head.

    Attributes:
        num_attention_heads, num_key_value_heads, head_dim: query heads are a multiple of KV heads.
        qkv_bias: biases on the q, k and v projections (Qwen2).
        output_bias: a bias on the projection of the output (gpt-oss).
        output_gate: what a head attends to is multiplied by the sigmoid of a gate, whose rows of `q_proj` stand after
            those of the head's query (Qwen3-Next).
        sinks: a learned logit of each query head takes part in its softmax, and counts for nothing else (gpt-oss).
        qk_norm: RMSNorm over head_dim on queries and keys (Qwen3).
        norm_over_heads: that norm is over the channels of all heads together (OLMo 2).
        rope_theta: base of the rotary frequencies.
        rope_scaling: how those frequencies are changed; None leaves them.
        partial_rotary_factor: part of each head, from its first channel on, that is rotated.
        sliding_window: tokens that a token sees, itself the last of them; None: all up to itself.
        softmax_scale: factor of queries times keys; None: 1 / sqrt(head_dim).
        zero_centered_norms: the norms on queries and keys multiply by 1 + weight (Gemma).
    """

    fused_norm: ClassVar = "self_attention.linear_qkv.layer_norm_weight"
    training_module: ClassVar = "megarl.models.attention"
    in_vllm: ClassVar = True

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    sinks: bool = False
    qk_norm: bool = False
    norm_over_heads: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | Yarn | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    softmax_scale: float | None = None
    zero_centered_norms: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "num_attention_heads", "num_key_value_heads", "head_dim")
        check_numbers(self, "rope_theta", "partial_rotary_factor", positive=True)
        if self.sliding_window is not None:
            check_counts(self, "sliding_window")
        if self.softmax_scale is not None:
            check_numbers(self, "softmax_scale", positive=True)
        check_base(self)
        assert self.qk_norm or not self.norm_over_heads
        assert not (self.norm_over_heads and self.zero_centered_norms), "a norm that no family has"
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor = {self.partial_rotary_factor} rotates {self.rotary_dim} of a head's "
                f"{self.head_dim} channels, which must be an even number of them"
            )

    @property
    def rotary_dim(self) -> int:
        """Count the channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def transformer_engine(self) -> bool:
        return self.sliding_window is None and not (self.sinks or self.output_gate)

    @property
    def fused_attention(self) -> bool:
        """Leave out norms over all heads, another scale, and YaRN, which multiplies queries and keys as it rotates."""
        ours = self.norm_over_heads or self.softmax_scale is not None or isinstance(self.rope_scaling, Yarn)
        return self.transformer_engine and not ours

    @property
    def queries_per_group(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def norm_widths(self) -> dict[str, int]:
        """Give the channels of the norms on queries and keys, whole on every rank."""
        q, k = (self.num_attention_heads, self.num_key_value_heads) if self.norm_over_heads else (1, 1)
        return {"q": q * self.head_dim, "k": k * self.head_dim}

    @property
    def _qkv_leaves(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.qkv_bias else ("weight",)

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        groups, dim = self.num_key_value_heads, self.head_dim
        for proj, query in (("q", self.queries_per_group), ("k", 1), ("v", 1)):
            gated = {"half": 2} if self.output_gate and proj == "q" else {}
            heads = dict(kv_group=groups, query=query, **gated, head_dim=dim)
            yield table(f"{layer}self_attn.{proj}_proj.weight", "matrix", out_axes=len(heads), **heads, hidden=hidden)
            if self.qkv_bias:
                yield table(f"{layer}self_attn.{proj}_proj.bias", "bias", out_axes=len(heads), **heads)
        if self.qk_norm:
            for proj, width in self.norm_widths.items():
                yield norm(f"{layer}self_attn.{proj}_norm.weight", width, zero_centered=self.zero_centered_norms)
        heads = dict(kv_group=groups, query=self.queries_per_group, head_dim=dim)
        yield table(f"{layer}self_attn.o_proj.weight", "matrix", hidden=hidden, **heads)
        if self.output_bias:
            yield table(f"{layer}self_attn.o_proj.bias", "bias", hidden=hidden)
        if self.sinks:
            yield table(f"{layer}self_attn.sinks", "matrix", out_axes=2, kv_group=groups, query=self.queries_per_group)

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        """Place `linear_qkv`: rows [kv_group, queries of the group + gates + k + v, head_dim], split evenly over TP."""
        for leaf in self._qkv_leaves:
            if self.num_key_value_heads % at.tp == 0:
                yield from self._whole_groups(at, leaf)
            else:
                yield from self._cut_groups(at, leaf)
        if self.qk_norm:
            module = "self_attention.core_attention." if self.norm_over_heads else "self_attention."
            for proj, width in self.norm_widths.items():
                yield at.whole(f"self_attn.{proj}_norm.weight", f"{module}{proj}_layernorm.weight", width)
        yield from self._output(at, "self_attention.linear_proj.", "self_attention.core_attention.sinks")

    def _slots(self) -> dict[str, tuple[int, int]]:
        """Give the heads of a group of `linear_qkv`, as half-open ranges."""
        queries = self.queries_per_group
        first = 2 * queries if self.output_gate else queries
        gates = {"gate": (queries, first)} if self.output_gate else {}
        return {"q": (0, queries), **gates, "k": (first, first + 1), "v": (first + 1, first + 2)}

    def _half(self, slot: str) -> Box:
        """Give the part of the axis that tells queries and gates apart, which only a gated `q_proj` has."""
        half = {"q": 0, "gate": 1}.get(slot) if self.output_gate else None
        return () if half is None else ((half, half + 1),)

    def _whole_groups(self, at: LayerPlace, leaf: str) -> Iterator[Placement]:
        dim, n, slots = self.head_dim, self.num_key_value_heads // at.tp, self._slots()
        tail, tail_box = _hidden_tail(at, leaf)
        (_, per_group), own = slots["v"], (at.rank * n, (at.rank + 1) * n)
        for slot, (lo, hi) in slots.items():
            half = self._half(slot)
            yield Placement(
                tensor=f"{at.tensors}self_attn.{_projection(slot)}.{leaf}",
                box=(own, (0, hi - lo), *half, (0, dim), *tail_box),
                param=f"{at.params}self_attention.linear_qkv.{leaf}",
                rows=(0, n * per_group * dim),
                view=(n, per_group, *(1 for _ in half), dim, *tail),
                within=((0, n), (lo, hi), *((0, 1) for _ in half), (0, dim), *tail_box),
            )

    def _cut_groups(self, at: LayerPlace, leaf: str) -> Iterator[Placement]:
        """Place the rows of a rank where KV groups are fewer than ranks: they are in one group, and may cut heads."""
        dim, slots = self.head_dim, self._slots()
        (_, per_group), (_, tail_box) = slots["v"], _hidden_tail(at, leaf)
        rows = self.num_key_value_heads * per_group * dim // at.tp
        start, stop = at.rank * rows, (at.rank + 1) * rows
        for head in range(start // dim, -(-stop // dim)):
            group, number = divmod(head, per_group)
            slot = next(slot for slot, (lo, hi) in slots.items() if lo <= number < hi)
            query = number - slots[slot][0]
            lo, hi = max(start, head * dim), min(stop, (head + 1) * dim)
            yield place_filled(
                f"{at.tensors}self_attn.{_projection(slot)}.{leaf}",
                f"{at.params}self_attention.linear_qkv.{leaf}",
                (
                    (group, group + 1),
                    (query, query + 1),
                    *self._half(slot),
                    (lo - head * dim, hi - head * dim),
                    *tail_box,
                ),
                first_row=lo - start,
                rows=hi - lo,
            )

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        """Place `qkv_proj`: all queries, then gates, keys and values of the rank's heads.

        Each rank has at least one KV head, so with fewer KV heads than ranks several ranks hold the same head.
        """
        groups, queries = self.heads_on_rank(at.tp, at.rank)
        for leaf in self._qkv_leaves:
            _, tail_box = _hidden_tail(at, leaf)
            row = 0
            for slot in self._slots():
                heads = (0, 1) if slot in ("k", "v") else queries
                rows = (groups[1] - groups[0]) * (heads[1] - heads[0]) * self.head_dim
                yield place_filled(
                    f"{at.tensors}self_attn.{_projection(slot)}.{leaf}",
                    f"{at.params}self_attn.qkv_proj.{leaf}",
                    (groups, heads, *self._half(slot), (0, self.head_dim), *tail_box),
                    first_row=row,
                    rows=rows,
                )
                row += rows
        if self.qk_norm:
            for proj, width in self.norm_widths.items():
                yield at.whole(f"self_attn.{proj}_norm.weight", f"self_attn.{proj}_norm.weight", width)
        yield from self._output(at, "self_attn.o_proj.", "self_attn.sinks")

    def _output(self, at: LayerPlace, projection: str, sinks: str) -> Iterator[Placement]:
        groups, queries = self.heads_on_rank(at.tp, at.rank)
        box = ((0, at.hidden), groups, queries, (0, self.head_dim))
        yield place_filled(f"{at.tensors}self_attn.o_proj.weight", f"{at.params}{projection}weight", box)
        if self.output_bias:
            yield at.whole("self_attn.o_proj.bias", f"{projection}bias", at.hidden)
        if self.sinks:
            heads = self.heads(at.tp)[0]
            yield place_filled(f"{at.tensors}self_attn.sinks", at.params + sinks, (groups, queries), rows=heads)

    def heads_on_rank(self, tp: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Find the KV groups of a rank, and its queries of each of them, as half-open ranges."""
        groups, per_group = self.num_key_value_heads, self.queries_per_group
        if groups % tp == 0:
            n = groups // tp
            return (rank * n, (rank + 1) * n), (0, per_group)
        ranks_per_group = tp // groups
        n = per_group // ranks_per_group
        group, part = divmod(rank, ranks_per_group)
        return (group, group + 1), (part * n, (part + 1) * n)

    def first_heads(self, tp: int, rank: int) -> tuple[int, int]:
        """Number a rank's first query head and its first KV head, among those of all ranks."""
        groups, queries = self.heads_on_rank(tp, rank)
        return groups[0] * self.queries_per_group + queries[0], groups[0]

    def heads(self, tp: int) -> tuple[int, int]:
        """Count the query heads and the KV heads on each rank; with fewer KV heads than ranks, ranks share them."""
        (first, last), (start, stop) = self.heads_on_rank(tp, 0)
        return (last - first) * (stop - start), last - first

    def prompt_keys(self, tp: int) -> int | None:
        """Return None with sinks, whose softmax over all keys stands in memory."""
        return None if self.sinks else super().prompt_keys(tp)

    def cache_shape(self, tp: int) -> tuple[int, int, int]:
        """Give (2: keys and values, KV heads on each rank, head_dim)."""
        return 2, self.heads(tp)[1], self.head_dim

    def check_split(self, split: TensorSplit, key: str) -> None:
        if (heads := self.num_attention_heads) % split.tp:
            raise ValueError(f"{key} = {split.tp} does not divide the model's {heads} attention heads")
        if (groups := self.num_key_value_heads) % split.tp and split.tp % groups:
            raise ValueError(f"{key} = {split.tp} neither divides nor is a multiple of the model's {groups} KV heads")

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        layout.check_heads(self.num_attention_heads, self.num_key_value_heads)
        queries = self.num_attention_heads * (2 if self.output_gate else 1)
        qkv = (queries + 2 * self.num_key_value_heads) * self.head_dim
        if qkv % layout.tp:  # with fewer KV heads than ranks Megatron-Core cuts the rows of linear_qkv evenly
            raise ValueError(
                f"tensor_model_parallel_size = {layout.tp} does not divide the {qkv} rows of the model's queries, keys "
                "and values"
            )

    def activations(self, hidden: int, split: TensorSplit) -> float:
        """Count 2 (q + kv) / t: queries, keys, values and the attention's output; 2 q / t more of a gate."""
        queries = self.num_attention_heads * (2 if self.output_gate else 1)
        return 2 * (queries + self.num_key_value_heads) * self.head_dim / split.tp

    def prefill_activations(self, hidden: int, split: TensorSplit) -> int:
        """Count 8 q / t: queries, keys and values before and after their rotation, and the attention's output; 10 q / t
        with a gate."""
        return (10 if self.output_gate else 8) * (self.num_attention_heads // split.tp) * self.head_dim

    def flops(self, tokens: float, squares: float) -> float:
        """Count 2 x tokens^2 per query channel, half of the FLOPs of the full matrix (arXiv 2205.05198, appendix A).

        A window of w counts as if every token saw w tokens, though the first w of a sequence see fewer: at most.
        """
        if self.sliding_window:
            squares = min(squares, 2 * self.sliding_window * tokens)
        return 2 * squares * self.num_attention_heads * self.head_dim

    def megatron_fields(self) -> dict[str, Any]:
        return dict(
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_key_value_heads,
            kv_channels=self.head_dim,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
            attention_output_gate=self.output_gate,
        )


def _projection(slot: str) -> str:
    return "q_proj" if slot == "gate" else f"{slot}_proj"


def _hidden_tail(at: LayerPlace, leaf: str) -> tuple[tuple[int, ...], Box]:
    """Give the shape and the box of the trailing axis, which a weight has and a bias has not."""
    return ((at.hidden,), ((0, at.hidden),)) if leaf == "weight" else ((), ())
