"""Computes multi-head latent attention in Megatron-Core's layers: its modules, our rotation and torch's kernels."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarl.models.attention import CausalAttention, PackedSequences, cos_sin_of, rotate
from megarl.models.norm import RMSNorm
from megarl.models.parts.latent import Latent
from megarl.models.rope import pairs_apart

if not isinstance(multi_latent_attention.TELinear, type):
    # Megatron-Core 0.16 takes a stand-in for Transformer Engine for what is installed, and asks for its classes
    multi_latent_attention.HAVE_TE = False


class LatentAttention(MLASelfAttention):
    """Is Megatron-Core's latent attention, but for the way to queries, keys and values.

    Its own reads the lengths of packed sequences on the host, keeps a rotary table per length, and gives each
    tensor-parallel rank the gradient of the rotated keys for its own heads only.
    """

    kind: Latent  # set by `set_modules`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb
        kind = self.kind
        self.kv_layernorm = RMSNorm(self.config, kind.kv_lora_rank, kind.latent_norm_eps)
        if kind.q_lora_rank is not None:
            self.q_layernorm = RMSNorm(self.config, kind.q_lora_rank, kind.latent_norm_eps)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: PackedSequences | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of the rank's heads, and the narrow vectors they are made of.

        Args:
            hidden_states: [tokens, 1, hidden] packed or [length, batch, hidden], split with sequence parallelism.
        """
        kind, heads = self.kind, self.num_attention_heads_per_partition
        kv_narrow, turned = self._narrow(self.linear_kv_down_proj, hidden_states, kind.kv_lora_rank)
        kv_narrow = self.kv_layernorm(kv_narrow)
        turned = copy_to_tensor_model_parallel_region(turned, group=self.pg_collection.tp)  # for the heads of all ranks
        if kind.q_lora_rank is None:
            q_narrow, up = hidden_states, self.linear_q_proj
        else:
            q_narrow, _rest = self._narrow(self.linear_q_down_proj, hidden_states, kind.q_lora_rank)
            q_narrow, up = self.q_layernorm(q_narrow), self.linear_q_up_proj
        q, k_and_v = (x.unflatten(-1, (heads, -1)) for x in (up(q_narrow)[0], self.linear_kv_up_proj(kv_narrow)[0]))
        turned = turned.unsqueeze(-2)
        if packed_seq_params is not None:
            q, k_and_v, turned = (x.squeeze(1) for x in (q, k_and_v, turned))
        cos_sin = cos_sin_of(kind, q, packed_seq_params, self.pg_collection.cp)
        q_still, q_turned = q.split((kind.qk_nope_head_dim, kind.qk_rope_head_dim), dim=-1)
        k_still, v = k_and_v.split((kind.qk_nope_head_dim, kind.v_head_dim), dim=-1)
        q_turned, k_turned = (rotate(pairs_apart(x), cos_sin) for x in (q_turned, turned))
        q = torch.cat((q_still, q_turned), dim=-1)
        k = torch.cat((k_still, k_turned.expand(*k_still.shape[:-1], -1)), dim=-1)
        return q, k, v, q_narrow, kv_narrow

    def _narrow(self, linear: torch.nn.Module, hidden_states: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Compute a narrow vector, split as the hidden state is, and what else the layer computes, for all tokens."""
        group, sequence_parallel = self.pg_collection.tp, self.config.sequence_parallel
        out = gather_from_tensor_model_parallel_region(linear(hidden_states)[0], group=group)
        narrow, rest = out.split((width, out.shape[-1] - width), dim=-1)
        return scatter_to_sequence_parallel_region(narrow, group=group) if sequence_parallel else narrow, rest


def set_modules(spec: ModuleSpec, attention: Latent) -> None:
    """Set classes in Megatron-Core's spec of self-attention, which builds modules from them."""
    spec.module = type("LatentAttention", (LatentAttention,), {"kind": attention})
    spec.submodules.core_attention = type("CausalAttention", (CausalAttention,), {"scale": attention.softmax_scale})
