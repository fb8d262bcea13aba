"""Computes attention for models without Transformer Engine: rotary embedding, torch's kernels, packed or padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.models.exchange import EXCHANGES
from megarl.models.norm import HeadsNorm, RMSNorm
from megarl.models.packed_attention import SharedKeys, packed_attention, padded_attention
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.parts.rotary import Rotary
from megarl.models.rope import apply_rope, rope_table
from megarl.parallel.upload import upload


@dataclass
class PackedSequences(PackedSeqParams):
    """Describes a packed micro-batch to Megatron-Core, and to torch's attention.

    Attributes:
        lengths: tokens of each sequence; on the host.
        positions: int64 [tokens], the place in its sequence of each token that this rank has.
        slots: int64 [tokens], each token's place in the padded [sequences * longest] view.
        shared: the keys of sequences of which some begin with the same tokens; None: none do.
    """

    lengths: tuple[int, ...] = ()
    positions: Tensor | None = None
    slots: Tensor | None = None
    shared: SharedKeys | None = None


def packed_sequences(lengths: list[int], device: torch.device, own: tuple[int, int] | None = None) -> PackedSequences:
    """Describe sequences that lie one after another in one row of tokens.

    Args:
        own: the first of the tokens that this rank has, and the one after the last; None: it has all.
    """
    longest = max(lengths)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    cu_seqlens = upload(cu_seqlens, device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        positions=upload(positions if own is None else positions[slice(*own)], device),
        slots=upload(row * longest + positions, device),
    )


def queries_with_keys(
    queries: list[int], keys: list[int], rows: Tensor, positions: Tensor, device: torch.device
) -> PackedSequences:
    """Describe runs of queries, one after another, each of which are the last tokens of its keys.

    So have sequences that begin with the same tokens, which a row has once, keys in common.

    Args:
        queries, keys: tokens of each run.
        rows: int64 [sum of keys], the place of each key among all that attention gets, run after run.
        positions: int64, the places in their sequences of the tokens that this rank has.
    """
    packed, of_keys = packed_sequences(queries, device), packed_sequences(keys, device)
    cu_seqlens, longest, slots = of_keys.cu_seqlens_kv, of_keys.max_seqlen_kv, of_keys.slots
    assert slots is not None
    packed.cu_seqlens_kv, packed.max_seqlen_kv, packed.lengths = cu_seqlens, longest, of_keys.lengths
    packed.positions = upload(positions, device)
    packed.shared = SharedKeys(rows=upload(rows, device), cu_seqlens=cu_seqlens, longest=longest, slots=slots)
    return packed


def queries_of_a_rank(
    queries: list[int], keys: list[int], rows: Tensor, positions: Tensor, own: Tensor, device: torch.device
) -> PackedSequences:
    """Describe the runs of queries that a rank has of sequences that ranks share, where it attends to all keys.

    Args:
        queries, keys: tokens of each sequence that the row has for it alone, and of the whole sequence.
        rows: int64 [sum of keys], the place of each token of each sequence among all that attention gets.
        positions: int64 [row], the place of each token of the row in its sequence.
        own: int64, the places in the row of the tokens that this rank has, in its order.
    """
    at, sequence = positions[own], torch.repeat_interleave(torch.tensor(queries))[own]
    goes_on = (own.diff() == 1) & (sequence.diff() == 0)
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), (~goes_on).nonzero().flatten() + 1))
    after = torch.cat((begins[1:], torch.tensor([len(own)])))
    starts = torch.tensor([0, *keys]).cumsum(0)[sequence[begins]].tolist()
    counts = (at[after - 1] + 1).tolist()
    seen_rows = torch.cat([rows[start : start + count] for start, count in zip(starts, counts, strict=True)])
    return queries_with_keys((after - begins).tolist(), counts, seen_rows, at, device)


class CausalAttention(torch.nn.Module):
    """Is causal attention, as Megatron-Core's `core_attention` submodule.

    Packed half-precision sequences on a GPU go through `varlen_attn` (FlashAttention); everything else through
    `scaled_dot_product_attention` on a padded view, where causality already hides the padding at the end.
    """

    scale: float | None = None  # of products of queries and keys; None: 1 / sqrt(channels)

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.exchange = EXCHANGES[config.cp_comm_type](pg_collection.cp)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Attend: query [tokens, heads, dim] packed or [length, batch, heads, dim] -> the same, heads * dim last."""
        assert attention_mask is None and attention_bias is None, "causal masks only"
        query, key = self.rotated(query, key, packed_seq_params)
        # the names are taken over: rotated tensors that were exchanged for others are freed before attention
        query, key, value = self.exchange.before_attention(query, key, value)
        return self.exchange.after_attention(self._attend(packed_seq_params, query, key, value)).flatten(-2)

    def _attend(self, packed: PackedSequences | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if packed is None:
            return padded_attention(*(x.transpose(0, 1) for x in (query, key, value)), **self.rule).transpose(0, 1)
        assert packed.slots is not None
        return packed_attention(
            query,
            key,
            value,
            cu_seqlens=packed.cu_seqlens_q,
            longest=packed.max_seqlen_q,
            slots=packed.slots,
            shared=packed.shared,
            **self.rule,
        )

    def rotated(self, query: Tensor, key: Tensor, packed: PackedSequences | None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys that are not rotated yet; first normalise them, where Megatron-Core has not."""
        return query, key

    @property
    def rule(self) -> dict[str, Any]:
        """Give `packed_attention` and `padded_attention` what they need to know of the layer."""
        return {"scale": self.scale}


class TorchAttention(CausalAttention):
    """Is causal grouped-query attention with rotary embedding."""

    attention: GroupedQuery  # set by `set_modules`

    def __init__(
        self, config: TransformerConfig, *args: Any, pg_collection: ProcessGroupCollection, **more: Any
    ) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **more)
        self._tp_group = pg_collection.tp
        self.sinks: Tensor | None = None
        if self.attention.sinks:
            heads = config.num_attention_heads // self._tp_group.size()
            device = torch.cuda.current_device()
            self.sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)
        if self.attention.norm_over_heads:
            tp, dim, widths = self._tp_group, self.attention.head_dim, self.attention.norm_widths
            q, k = self.attention.first_heads(tp.size(), tp.rank())
            self.q_layernorm = HeadsNorm(config, widths["q"], q * dim, tp)
            self.k_layernorm = HeadsNorm(config, widths["k"], k * dim, tp)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Say for a checkpoint that each tensor-parallel rank has its heads' sinks, and the whole of the norms."""
        parameters = dict(self.named_parameters())
        groups = dict(tp_group=self._tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group"))
        shards: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            parameters, prefix, {"sinks": 0}, sharded_offsets, **groups
        )
        return shards

    @property
    def rule(self) -> dict[str, Any]:
        """See `CausalAttention.rule`."""
        sinks = None if self.sinks is None else self.exchange.own_heads(self.sinks)
        return dict(window=self.attention.sliding_window, scale=self.attention.softmax_scale, sinks=sinks)

    def rotated(self, query: Tensor, key: Tensor, packed: PackedSequences | None) -> tuple[Tensor, Tensor]:
        """See `CausalAttention.rotated`."""
        if self.attention.norm_over_heads:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        cos_sin = cos_sin_of(self.attention, query, packed, self.exchange.group)
        return rotate(query, cos_sin), rotate(key, cos_sin)


class GatedSelfAttention(SelfAttention):
    """Is Megatron-Core's attention with an output gate, also with fewer KV heads than tensor-parallel ranks.

    Its own then gives each rank the gates of all heads of a KV head, and the queries of its own heads.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Compute queries, keys, values and gates, each [tokens, batch, heads of this rank, head_dim]."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        heads = query.shape[2]
        part = self.pg_collection.tp.rank() % (gate.shape[2] // heads)
        return query, key, value, gate[:, :, part * heads : (part + 1) * heads]


def cos_sin_of(attention: Rotary, tokens: Tensor, packed: PackedSequences | None, group: dist.ProcessGroup) -> Tensor:
    """Take the rows of the rotary table for tokens [tokens, ...] packed or [length, batch, ...], as `rotate` has them.

    Args:
        group: ranks that have the tokens before these, and those after them.

    Returns: float32 [tokens, 2, rotary_dim / 2], or [length * batch, 2, rotary_dim / 2].
    """
    if packed is None:
        (length, batch), before = tokens.shape[:2], group.rank() * len(tokens)
        return _cached_rope(attention, before + length, tokens.device)[before:].repeat_interleave(batch, 0)
    assert packed.positions is not None
    return _cached_rope(attention, packed.max_seqlen_kv, tokens.device)[packed.positions]


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the first channels of queries or keys, [tokens, heads, dim] or [length, batch, heads, dim]."""
    return apply_rope(x.flatten(0, -3), cos_sin).view(x.shape)


_ROPE: dict[tuple[Rotary, torch.device], Tensor] = {}


def _cached_rope(attention: Rotary, length: int, device: torch.device) -> Tensor:
    """Cut `length` rows of one table for all layers, which grows: a table per length would fill the GPU."""
    key = (attention, device)
    if key not in _ROPE or len(_ROPE[key]) < length:
        _ROPE[key] = rope_table(attention, -(-length // 1024) * 1024, device)
    return _ROPE[key][:length]


def core_attention(attention: GroupedQuery) -> type[TorchAttention]:
    """Make the class of a layer's attention between its projections, which also normalises and rotates."""
    return type("TorchAttention", (TorchAttention,), {"attention": attention})


def set_modules(spec: ModuleSpec, attention: GroupedQuery) -> None:
    """Set classes in Megatron-Core's spec of self-attention, which builds modules from them."""
    parts = spec.submodules
    if attention.output_gate:
        spec.module = GatedSelfAttention
    parts.core_attention = core_attention(attention)
    by_head = attention.qk_norm and not attention.norm_over_heads
    parts.q_layernorm = parts.k_layernorm = RMSNorm if by_head else IdentityOp
