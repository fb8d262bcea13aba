"""Defines what every part of a layer says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Protocol

from megarl.models.placements import LayerPlace, Placement
from megarl.models.tensors import LogicalTensor
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout


class Part(Protocol):
    """Describes attention or MLP of a layer, which reads the residual stream through a norm and adds to it.

    Attributes:
        fused_norm: name of the norm's weight within the layer where Transformer Engine keeps the norm in the linear
            layer after it; None: it keeps the norm apart.
    """

    fused_norm: ClassVar[str | None]

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        """List the part's weights; their names begin with `layer`."""
        ...

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        """List what a rank of the training layout holds, in the names of Megatron-Core's modules."""
        ...

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        """List what a rank of a generation engine holds, in vLLM's names and shapes."""
        ...

    def check_split(self, split: TensorSplit, key: str) -> None:
        """Raise ValueError if ranks cannot divide the part so; `key` names the setting of their number."""
        ...

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        """Raise ValueError, beyond `check_split`, if the layout's ranks cannot train the part."""
        ...

    def activations(self, hidden: int, split: TensorSplit) -> float:
        """Count the elements per token that the part keeps for the backward pass."""
        ...

    def prefill_activations(self, hidden: int, split: TensorSplit) -> int:
        """Count the elements per token that the part holds at once in the native engine."""
        ...

    def megatron_fields(self) -> dict[str, Any]:
        """Set Megatron-Core's TransformerConfig, by field; functions by their names in `megarl.models.activations`."""
        ...


class MLPPart(Part, Protocol):
    """Describes the MLP of a layer, or its experts.

    Attributes:
        recomputed_as: its name in `model.recompute_modules`.
    """

    recomputed_as: ClassVar[Literal["mlp", "moe"]]


class AttentionPart(Part, Protocol):
    """Describes the attention of a layer, which keeps keys and values, say, of earlier tokens in the KV cache.

    Attributes:
        training_module: name of the Python module whose `set_modules` makes it of Megatron-Core's spec.
        transformer_engine: whether it is trained in Transformer Engine's layers, where that is installed.
        in_vllm: whether vLLM's parameters can be written in place.
    """

    training_module: ClassVar[str]
    in_vllm: ClassVar[bool]

    @property
    def transformer_engine(self) -> bool: ...

    @property
    def fused_attention(self) -> bool:
        """Say whether Transformer Engine's own rotary embedding and attention compute it in those layers."""
        return self.transformer_engine

    def cache_shape(self, tp: int) -> tuple[int, int, int]:
        """Give the shape of a token in the KV cache of a rank: tensors (keys and values: 2), heads, width of a head."""
        ...

    def training_keys(self, tp: int) -> float:
        """Count the elements per token of keys and values in the training layout."""
        return math.prod(self.cache_shape(tp))

    def prompt_keys(self, tp: int) -> int | None:
        """Count the elements per token of what a part of a prompt attends to: the keys and values of all of it.

        None: the native engine computes prompts whole.
        """
        return 2 * math.prod(self.cache_shape(tp))

    def state_shapes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Give the shapes of what a rank keeps of a sequence, however long it is: float32, beside the KV cache."""
        return ()

    def flops(self, tokens: float, squares: float) -> float:
        """Count a forward pass's FLOPs but for those of its weights.

        Args:
            tokens, squares: sums of the sequences' lengths and of their squares.
        """
        ...


def check_counts(part: object, *names: str, most: int = 2**31 - 1) -> None:
    """Raise ValueError unless these attributes are whole numbers from 1 to `most`."""
    for name in names:
        if type(count := getattr(part, name)) is not int or not 1 <= count <= most:
            raise ValueError(f"{name} must be a whole number from 1 to {most}, not {count!r:.40}")


def check_numbers(part: object, *names: str, positive: bool = False) -> None:
    """Raise ValueError unless these attributes are finite numbers from 0 on, or above 0."""
    for name in names:
        number = getattr(part, name)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 <= number < float("inf") or (positive and number == 0):
            raise ValueError(
                f"{name} must be a finite number {'above 0' if positive else 'from 0 on'}, not {number!r:.40}"
            )
