"""Describes multi-head latent attention (MLA, arXiv 2405.04434): DeepSeek-V2's, V3's and Kimi-K2's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.models.parts.part import AttentionPart, check_counts, check_numbers
from megarl.models.parts.rotary import Yarn, check_base
from megarl.models.placements import LayerPlace, Placement, place_filled
from megarl.models.tensors import LogicalTensor, table
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout

_TRAINED = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
"""Megatron-Core's name of each module in Hugging Face files."""


@dataclass(frozen=True, kw_only=True)
class Latent(AttentionPart):
    """Describes attention whose keys and values are made of a narrow vector per token, which all heads share.

    A head's query and key are `qk_nope_head_dim` channels of its own and `qk_rope_head_dim` that are rotated. The
    rotated channels of the keys are the same in all heads. Neighbouring channels turn together, as in DeepSeek's files:
    (0, 1), (2, 3), ...

    Attributes:
        num_attention_heads: heads, each with keys and values of its own.
        kv_lora_rank: width of the vector that keys and values are made of.
        q_lora_rank: width of the vector that queries are made of; None: they are made of the hidden state.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: channels of a head.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how those frequencies are changed; None leaves them.
        latent_norm_eps: epsilon of the norms of both narrow vectors, whatever that of the other norms.
    """

    fused_norm: ClassVar = None
    transformer_engine = False
    training_module: ClassVar = "megarl.models.latent_attention"
    in_vllm: ClassVar = False

    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Yarn | None = None
    latent_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_counts(
            self, "num_attention_heads", "kv_lora_rank", *([] if self.q_lora_rank is None else ["q_lora_rank"])
        )
        check_counts(self, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_numbers(self, "rope_theta", positive=True)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even: channels turn in pairs")
        check_base(self)

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Count the channels of a query, and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Count what is kept of a token: the vector of keys and values, and the rotated channels of the keys."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Compute what products of queries and keys are multiplied by."""
        return float((1.0 if self.rope_scaling is None else self.rope_scaling.softmax_factor) / self.qk_head_dim**0.5)

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        heads = self.num_attention_heads
        query, value = dict(head=heads, head_dim=self.qk_head_dim), dict(head=heads, head_dim=self.v_head_dim)
        key_value = dict(head=heads, head_dim=self.qk_nope_head_dim + self.v_head_dim)

        def matrix(module: str, *, out_axes: int = 1, **axes: int) -> LogicalTensor:
            return table(f"{layer}self_attn.{module}.weight", "matrix", out_axes=out_axes, **axes)

        if self.q_lora_rank is None:
            yield matrix("q_proj", out_axes=2, **query, hidden=hidden)
        else:
            yield matrix("q_a_proj", rank=self.q_lora_rank, hidden=hidden)
            yield table(f"{layer}self_attn.q_a_layernorm.weight", "norm", rank=self.q_lora_rank)
            yield matrix("q_b_proj", out_axes=2, **query, rank=self.q_lora_rank)
        yield matrix("kv_a_proj_with_mqa", rank=self.cached_dim, hidden=hidden)
        yield table(f"{layer}self_attn.kv_a_layernorm.weight", "norm", rank=self.kv_lora_rank)
        yield matrix("kv_b_proj", out_axes=2, **key_value, rank=self.kv_lora_rank)
        yield matrix("o_proj", hidden=hidden, **value)

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        """Split heads over TP, and also the rows of the projections to narrow vectors, as Megatron-Core does."""
        for tensor in self.tensors("", at.hidden):
            module = tensor.name.split(".")[1]
            axis = None if tensor.kind == "norm" else 1 if module == "o_proj" else 0
            yield _share(at, tensor, f"self_attention.{_TRAINED[module]}.weight", axis)

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        """Split heads over TP; every rank has the projections to narrow vectors, and caches those of all tokens."""
        for tensor in self.tensors("", at.hidden):
            module = tensor.name.split(".")[1]
            axis = {"q_proj": 0, "q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}.get(module)
            yield _share(at, tensor, tensor.name, axis)

    def cache_shape(self, tp: int) -> tuple[int, int, int]:
        """Give (1, 1, cached_dim): whatever the number of heads, and of ranks."""
        return 1, 1, self.cached_dim

    def check_split(self, split: TensorSplit, key: str) -> None:
        if (heads := self.num_attention_heads) % split.tp:
            raise ValueError(f"{key} = {split.tp} does not divide the model's {heads} attention heads")

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        layout.check_heads(self.num_attention_heads, self.num_attention_heads)
        for rows in (self.q_lora_rank or 0, self.cached_dim):
            if rows % layout.tp:
                raise ValueError(
                    f"tensor_model_parallel_size = {layout.tp} does not divide the {rows} rows of a projection to a "
                    "narrow vector (q_lora_rank, or kv_lora_rank + qk_rope_head_dim)"
                )

    def prompt_keys(self, tp: int) -> int:
        """Count what is cached, twice, and the keys and values that are made of it, padded."""
        made = self.qk_nope_head_dim + self.v_head_dim + 3 * self.qk_head_dim
        return 2 * self.cached_dim + self.num_attention_heads // tp * made

    def training_keys(self, tp: int) -> float:
        return self.num_attention_heads * (self.qk_head_dim + self.v_head_dim) / tp

    def activations(self, hidden: int, split: TensorSplit) -> float:
        """Count heads (2 qk + 2 v) / t of queries, keys, values and the output, and twice the narrow vectors."""
        heads = 2 * self.num_attention_heads * (self.qk_head_dim + self.v_head_dim) / split.tp
        return heads + 2 * (self.cached_dim + (self.q_lora_rank or 0))

    def prefill_activations(self, hidden: int, split: TensorSplit) -> int:
        """Count heads (6 qk + 4 v) / t: before and after rotation, padded, and the output; and the narrow vectors."""
        heads = self.num_attention_heads // split.tp * (6 * self.qk_head_dim + 4 * self.v_head_dim)
        return heads + 4 * (self.cached_dim + (self.q_lora_rank or 0))

    def flops(self, tokens: float, squares: float) -> float:
        """Count tokens^2 per channel of queries and of values, half of the FLOPs of the full matrices."""
        return squares * self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)

    def megatron_fields(self) -> dict[str, Any]:
        return dict(
            multi_latent_attention=True,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_attention_heads,
            kv_channels=self.qk_head_dim,
            add_qkv_bias=False,
            qk_layernorm=False,  # the norms are of no heads, whose gradients Megatron-Core would add up over TP
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_head_dim=self.qk_nope_head_dim,
            qk_pos_emb_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            rope_type="rope",  # `megarl.models.rope` rotates
        )


def _share(at: LayerPlace, tensor: LogicalTensor, param: str, axis: int | None) -> Placement:
    """Place a rank's even share of an axis of a tensor; of None the whole tensor."""
    box = list(tensor.box)
    if axis is not None:
        n = tensor.shape[axis] // at.tp
        box[axis] = at.rank * n, (at.rank + 1) * n
    rows = tensor.hf_shape[0] // at.tp if axis == 0 else tensor.hf_shape[0]
    return place_filled(at.tensors + tensor.name, at.params + param, tuple(box), rows=rows)
