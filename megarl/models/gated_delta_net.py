"""Computes gated delta nets in Megatron-Core's layers: its linear layers around our convolution and delta rule.

Megatron-Core's own module refuses packed sequences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.models.attention import PackedSequences
from megarl.models.delta_rule import Heads, Packing, convolve, delta_rule, gated_norm, projected
from megarl.models.parts.gated_delta import GatedDelta


class GatedDeltaNet(MegatronModule):
    """Is linear attention in place of Megatron-Core's self-attention.

    Every tensor-parallel rank has some key heads, with their value heads.
    """

    kind: GatedDelta  # set by `set_modules`

    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__(config)
        kind, self.tp_group = self.kind, pg_collection.tp
        self._key_heads = kind.num_key_heads // self.tp_group.size()
        linear: dict[str, Any] = dict(config=config, init_method=config.init_method, bias=False, tp_group=self.tp_group)
        rows, values = kind.num_key_heads * kind.width, kind.num_value_heads * kind.value_head_dim
        self.in_proj = ColumnParallelLinear(config.hidden_size, rows, gather_output=False, **linear)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )
        heads = self._key_heads * kind.values_per_key
        self.conv1d = self._of_heads(self._key_heads * kind.conv_width, kind.conv_kernel)
        self.dt_bias, self.A_log = self._of_heads(heads), self._of_heads(heads)
        self.norm = self._parameter(kind.value_head_dim)

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        return torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))

    def _of_heads(self, *shape: int) -> torch.nn.Parameter:
        parameter = self._parameter(*shape)
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedSequences | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        """Compute [tokens, 1, hidden] packed or [length, batch, hidden] -> the same."""
        kind, heads = self.kind, self.in_proj(hidden_states)[0]
        length, batch = heads.shape[:2]
        lengths = (length,) * batch if packed_seq_params is None else packed_seq_params.lengths
        packing = _packing(lengths, kind, heads.device)
        heads = heads.transpose(0, 1).flatten(0, 1).unflatten(1, (self._key_heads, -1))
        channels, gate, scalars = projected(kind, heads)
        convolved, _last = convolve(channels.flatten(1), self.conv1d, packing)
        convolved = convolved.unflatten(1, channels.shape[1:])
        out, _states = delta_rule(Heads.of(kind, convolved, scalars, self.A_log, self.dt_bias), packing)
        # each rank's heads give the norm a gradient, which is the sum over all ranks, whatever its tokens
        norm = copy_to_tensor_model_parallel_region(self.norm, group=self.tp_group)
        out = gated_norm(out, gate.reshape(out.shape), norm, self.config.layernorm_epsilon)
        out, _bias = self.out_proj(out.flatten(1).unflatten(0, (batch, length)).transpose(0, 1))
        return out, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Say for a checkpoint that each tensor-parallel rank has its heads' rows of these parameters."""
        parameters = {"conv1d": self.conv1d, "dt_bias": self.dt_bias, "A_log": self.A_log}
        groups = dict(tp_group=self.tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group"))
        shards: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        shards |= make_sharded_tensors_for_checkpoint(
            parameters, prefix, dict.fromkeys(parameters, 0), sharded_offsets, **groups
        )
        return shards


@lru_cache(maxsize=16)  # of the micro-batches in a pipeline, each of which all layers need
def _packing(lengths: tuple[int, ...], kind: GatedDelta, device: torch.device) -> Packing:
    return Packing.of(lengths, kind, device)


def set_modules(spec: ModuleSpec, attention: GatedDelta) -> None:
    """Set classes in Megatron-Core's spec of self-attention, which builds modules from them."""
    spec.module = type("GatedDeltaNet", (GatedDeltaNet,), {"kind": attention})
