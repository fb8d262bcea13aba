"""Describes decoder-only transformers of all families. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slows rotary frequencies down, for sequences longer than those of the pretraining.

    Attributes:
        factor: what the frequencies are divided by.
        low_freq_factor, high_freq_factor: with original_max_position_embeddings, Llama 3.1's rule: only waves longer
            than original_max_position_embeddings / low_freq_factor are stretched whole, those shorter than
            original_max_position_embeddings / high_freq_factor not at all, and those between in part.
        original_max_position_embeddings: sequence length of the pretraining, tokens; None stretches all frequencies
            alike (linear interpolation, arXiv 2306.15595).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Puts experts in place of every layer's MLP, and a router that sends each token to some of them.

    Attributes:
        num_experts: experts per layer.
        experts_per_token: how many of them a token goes to: the most probable under softmax(router(x)).
        norm_topk_prob: scale a token's expert weights to sum to 1; otherwise they are the probabilities themselves.
        module: the block's name within a layer, in Hugging Face files and in vLLM.
        gate_proj, up_proj, down_proj: names of an expert's matrices in Hugging Face files.
    """

    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    module: str = "mlp"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts <= MOST_EXPERTS:
            raise ValueError(f"{self.experts_per_token} experts per token of {self.num_experts} experts")
        if self.experts_per_token == 1 and self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob with one expert per token makes every weight 1, so that nothing would train the router"
            )


MOST_LAYERS = MOST_EXPERTS = 10_000
"""Every tensor of a model is listed before it is read: a folder that says more would take the memory with the list."""

_COUNTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "max_position_embeddings"),
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Holds dimensions and switches of a decoder with RMSNorm, SwiGLU, RoPE and grouped-query attention.

    Attributes:
        family: name of the module in `megarl.models.families` that described it.
        num_layers, hidden_size, ffn_hidden_size: depth, residual width, width of the MLP or of each expert.
        num_attention_heads, num_key_value_heads, head_dim: attention; query heads are a multiple of KV heads.
        vocab_size: rows of the embedding that mean something (no padding).
        max_position_embeddings: longest sequence the model was made for, tokens.
        output: what stands on the last layer: `tied` is the embedding, `lm` a matrix of its own over the vocabulary,
            `scalar` a vector (a value or a score).
        qkv_bias: biases on the q, k and v projections (Qwen2).
        qk_norm: RMSNorm over head_dim on queries and keys (Qwen3).
        norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how those frequencies are changed; None leaves them.
        moe: the experts of every layer; None is one MLP per layer.
        init_std: standard deviation of random initial weights.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    output: Literal["tied", "lm", "scalar"] = "lm"
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    moe: MixtureOfExperts | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in _COUNTS:
            most = MOST_LAYERS if name == "num_layers" else 2**31 - 1
            if type(count := getattr(self, name)) is not int or not 1 <= count <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most}, not {count!r:.40}")
        for name in ("norm_eps", "rope_theta", "init_std"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a finite number from 0 on, not {number!r:.40}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.output == "tied"

    def with_scalar_output(self) -> Architecture:
        """The same layers under a single output."""
        return replace(self, output="scalar")

    @property
    def queries_per_group(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding once every tensor-parallel rank holds the same number of them."""
        return -(-self.vocab_size // tp) * tp

    def check_training(self, *, tp: int, pp: int, chunks: int, sequence_parallel: bool) -> None:
        """Raises ValueError with what to change if the training layout cannot hold this model."""
        self._check_tp(tp, "tensor_model_parallel_size")
        qkv = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        if qkv % tp:  # with fewer KV heads than ranks Megatron-Core cuts the rows of linear_qkv where they fall
            raise ValueError(
                f"tensor_model_parallel_size = {tp} does not divide the {qkv} rows of the model's queries, keys "
                "and values"
            )
        if self.moe and tp > 1 and not sequence_parallel:
            # Megatron-Core refuses it too, in the first training step: every rank would dispatch every token.
            raise ValueError(
                f"a mixture of experts with tensor_model_parallel_size = {tp} needs "
                "actor.megatron.sequence_parallel=true"
            )
        if self.num_layers < pp * chunks:
            what = "pipeline_model_parallel_size" + (" x virtual_pipeline_model_parallel_size" if chunks > 1 else "")
            raise ValueError(f"{what} = {pp * chunks} is more than the model's {self.num_layers} layers")

    def check_generation(self, *, tp: int) -> None:
        """Raises ValueError with what to change if the generation layout cannot hold this model."""
        self._check_tp(tp, "rollout.tensor_model_parallel_size")

    def _check_tp(self, tp: int, key: str) -> None:
        if self.num_attention_heads % tp:
            raise ValueError(f"{key} = {tp} does not divide the model's {self.num_attention_heads} attention heads")
        if self.num_key_value_heads % tp and tp % self.num_key_value_heads:
            raise ValueError(
                f"{key} = {tp} neither divides nor is a multiple of the model's {self.num_key_value_heads} KV heads"
            )
        if self.ffn_hidden_size % tp:
            raise ValueError(f"{key} = {tp} does not divide the model's MLP width {self.ffn_hidden_size}")
