"""Describes decoder-only transformers of all families: layers of several kinds, one after another. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, Literal

from megarl.models.parts.experts import Experts, MixtureOfExperts
from megarl.models.parts.part import AttentionPart, MLPPart, Part, check_counts, check_numbers
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout

MOST_LAYERS = 10_000
"""Every tensor of a model is listed before it is read: with more layers the list would fill the memory."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Describes a kind of layer: a norm and attention, a norm and an MLP, each added to the residual stream.

    Attributes:
        input_norms: attention and MLP read the residual stream through a norm (all but OLMo 2).
        output_norms: what attention and MLP compute goes through a norm of its own before it is added (Gemma, OLMo 2).
    """

    attention: AttentionPart
    mlp: MLPPart
    input_norms: bool = True
    output_norms: bool = False

    def __post_init__(self) -> None:
        assert self.input_norms or self.output_norms
        biased = getattr(self.attention, "output_bias", False)
        assert not biased or self.megatron_fields().get("add_bias_linear"), "Megatron-Core has both biases, or neither"

    def with_attention(self, **changes: Any) -> Layer:
        """Change some attributes of the attention."""
        attention: Any = self.attention
        return replace(self, attention=replace(attention, **changes))

    def weights(self, hidden: int) -> tuple[object, ...]:
        """List what says where the weights of a layer are: the classes of its parts, its norms, and its tensors."""
        parts: tuple[Part, ...] = (self.attention, self.mlp)
        tensors = (tensor for part in parts for tensor in part.tensors("", hidden))
        return (*map(type, parts), self.input_norms, self.output_norms, *tensors)

    def megatron_fields(self) -> dict[str, Any]:
        """Set Megatron-Core's TransformerConfig, by field."""
        return self.attention.megatron_fields() | self.mlp.megatron_fields()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Holds dimensions and layers of a decoder with RMSNorm.

    Attributes:
        family: name of the module in `megarl.models.families` that described it.
        layers: kinds of layers, each with its number of consecutive layers: ((dense, 3), (experts, 58)).
        hidden_size: residual width.
        vocab_size: rows of the embedding that mean something (no padding).
        max_position_embeddings: longest sequence the model was made for, tokens.
        output: the matrix on the last layer: `tied` is the embedding, `lm` a matrix of its own over the vocabulary,
            `scalar` a vector (a value or a score).
        norm_eps: epsilon of every RMSNorm.
        init_std: standard deviation of random initial weights.
        zero_centered_norms: every RMSNorm multiplies by 1 + weight, in float32 (Gemma).
        embedding_scale: the embedding is multiplied by it, rounded to the weights' type; the output layer is not.
    """

    family: str
    layers: tuple[tuple[Layer, int], ...]
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    output: Literal["tied", "lm", "scalar"] = "lm"
    norm_eps: float = 1e-6
    init_std: float = 0.02
    zero_centered_norms: bool = False
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        for _, count in self.layers:
            if type(count) is not int or not 1 <= count <= MOST_LAYERS:
                raise ValueError(f"num_layers must be a whole number from 1 to {MOST_LAYERS}, not {count!r:.40}")
        assert len({layer.mlp.moe for layer in self.kinds if isinstance(layer.mlp, Experts)}) <= 1, "one kind of router"
        check_counts(self, "hidden_size", "vocab_size", "max_position_embeddings")
        check_numbers(self, "norm_eps", "init_std")
        check_numbers(self, "embedding_scale", positive=True)

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @cached_property
    def each_layer(self) -> tuple[Layer, ...]:
        """List the kind of each layer, in order."""
        return tuple(layer for layer, count in self.layers for _ in range(count))

    def layer(self, number: int) -> Layer:
        """Look up a layer's kind."""
        return self.each_layer[number]

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """List every kind of layer once."""
        return tuple(dict.fromkeys(layer for layer, _ in self.layers))

    @property
    def firsts(self) -> list[int]:
        """List the number of the first layer in each run of equal layers."""
        return [0, *accumulate(count for _, count in self.layers[:-1])]

    @cached_property
    def firsts_placed_alike(self) -> list[int]:
        """List the number of the first layer in each run of layers with the same weights in the same places.

        Layers of which every second has a window are one run.
        """
        weights = {kind: kind.weights(self.hidden_size) for kind in self.kinds}
        runs = zip(self.firsts, (weights[layer] for layer, _ in self.layers), strict=True)
        return [next(run)[0] for _, run in groupby(runs, key=lambda run: run[1])]

    @property
    def attention(self) -> AttentionPart:
        """Return the attention of all layers, which is of one kind."""
        (attention,) = {layer.attention for layer in self.kinds}
        return attention

    @property
    def moe(self) -> MixtureOfExperts | None:
        """Return the mixture of experts, the same in all layers that have experts; None: no layer has."""
        return next((layer.mlp.moe for layer in self.kinds if isinstance(layer.mlp, Experts)), None)

    @property
    def num_experts(self) -> int:
        """Count the experts of a layer that has some; 0: no layer has."""
        return self.moe.num_experts if self.moe else 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """List the numbers of the layers that have experts."""
        return tuple(number for number, layer in enumerate(self.each_layer) if isinstance(layer.mlp, Experts))

    @property
    def whole_experts(self) -> bool:
        """Say whether training cannot split an expert over ranks."""
        return any(layer.mlp.whole for layer in self.kinds if isinstance(layer.mlp, Experts))

    @property
    def needs_torch_layers(self) -> bool:
        """Say whether layers do what Transformer Engine's here cannot, nor those of Megatron-LM's own models."""
        return self.zero_centered_norms or any(
            layer.output_norms or not layer.attention.transformer_engine for layer in self.kinds
        )

    @property
    def fused_attention(self) -> bool:
        """Say whether Transformer Engine's attention computes that of all layers, and Megatron-LM's models have it.

        A model has one rotary embedding for all of its layers then.
        """
        attentions = {layer.attention for layer in self.kinds}
        return len(attentions) == 1 and all(attention.fused_attention for attention in attentions)

    @property
    def recurrent(self) -> bool:
        """Say whether layers keep a state of a sequence, from which only that very sequence can go on."""
        return any(layer.attention.state_shapes(1) for layer in self.kinds)

    def prompt_keys(self, tp: int) -> int | None:
        """Count the elements per token of what a part of a prompt attends to, of the layer where they are most.

        None: the native engine computes prompts whole, as a layer of this model needs it.
        """
        keys = [layer.attention.prompt_keys(tp) for layer in self.kinds]
        return None if None in keys else max(filter(None, keys))

    @property
    def tied(self) -> bool:
        """Return whether the output layer is the embedding."""
        return self.output == "tied"

    def with_scalar_output(self) -> Architecture:
        """Copy the architecture, with a single output on its layers."""
        return replace(self, output="scalar")

    def padded_vocab_size(self, tp: int) -> int:
        """Count the rows of the embedding, padded so that every tensor-parallel rank holds the same number."""
        return -(-self.vocab_size // tp) * tp

    def one_copy(self, *, tp: int, pp: int = 1, cp: int = 1) -> TrainLayout:
        """Lay one copy of the model out for training, each expert on as many ranks as can share it."""
        return TrainLayout(ranks=range(tp * pp * cp), tp=tp, pp=pp, cp=cp, etp=1 if self.whole_experts else None)

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        """Raise ValueError with what to change if the training layout cannot hold this model."""
        self._check_split(TensorSplit(tp=layout.tp), "tensor_model_parallel_size")
        for layer in self.kinds:
            for part in (layer.attention, layer.mlp):
                part.check_training(layout, sequence_parallel=sequence_parallel)
        if self.moe is None and layout.experts_apart:
            raise ValueError("expert_model_parallel_size and expert_tensor_parallel_size: the model has no experts")
        layout.all_layers(self.num_layers)

    def check_generation(self, split: TensorSplit) -> None:
        """Raise ValueError with what to change if the ranks of a generation replica cannot divide this model."""
        self._check_split(split, "rollout.tensor_model_parallel_size")
        if self.moe is None and split.ep > 1:
            raise ValueError("rollout.enable_expert_parallel: the model has no experts")

    def _check_split(self, split: TensorSplit, key: str) -> None:
        for layer in self.kinds:
            layer.attention.check_split(split, key)
            layer.mlp.check_split(split, key)
