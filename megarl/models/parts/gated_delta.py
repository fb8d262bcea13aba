"""Describes gated delta nets (arXiv 2412.06464), linear attention with a state of fixed size: Qwen3-Next's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.models.parts.part import AttentionPart, check_counts
from megarl.models.placements import LayerPlace, Placement, place_filled
from megarl.models.tensors import Box, LogicalTensor, table
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout

CHUNK = 64
"""Tokens of a sequence that are computed together; between chunks only the state is passed on."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta(AttentionPart):
    """Describes heads that each keep a matrix of a sequence, which a token decays, corrects and reads.

    Queries, keys and values go through a causal convolution over the last tokens of each channel. A key head and its
    query serve several value heads. The parameters here have the channels of a key head together: query, key, values,
    output gates, and of each value head the strength of its correction and its decay.

    Attributes:
        num_key_heads, num_value_heads: value heads are a multiple of key heads.
        key_head_dim, value_head_dim: channels of a head.
        conv_kernel: tokens that the convolution sees, itself the last of them.
        joined: whether the files have projections by key head in two matrices (Qwen3-Next), or queries of all heads,
            then keys, then values in one matrix, and three more (Qwen3.5).
    """

    fused_norm: ClassVar = None
    training_module: ClassVar = "megarl.models.gated_delta_net"
    transformer_engine = False
    in_vllm: ClassVar = False

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    joined: bool

    def __post_init__(self) -> None:
        check_counts(self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.num_value_heads}) must be a multiple of linear_num_key_heads "
                f"({self.num_key_heads})"
            )

    @property
    def values_per_key(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def widths(self) -> dict[str, int]:
        """Count the channels of a key head, in the order of the parameters."""
        values = self.values_per_key * self.value_head_dim
        key, scalars = self.key_head_dim, self.values_per_key
        return {"query": key, "key": key, "value": values, "gate": values, "strength": scalars, "decay": scalars}

    @property
    def width(self) -> int:
        """Count all channels of a key head."""
        return sum(self.widths.values())

    @property
    def conv_width(self) -> int:
        """Count the first channels of a key head, which are convolved: query, key and values."""
        return 2 * self.key_head_dim + self.values_per_key * self.value_head_dim

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        name, heads, widths = f"{layer}linear_attn.", self.num_key_heads, self.widths
        channels = heads * self.conv_width
        yield table(f"{name}dt_bias", "norm", head=self.num_value_heads)
        yield table(f"{name}A_log", "bias", head=self.num_value_heads)
        yield LogicalTensor(
            name=f"{name}conv1d.weight",
            shape=(channels, self.conv_kernel),
            hf_shape=(channels, 1, self.conv_kernel),
            kind="matrix",
        )
        if not self.joined:
            yield table(f"{name}in_proj_qkv.weight", "matrix", channel=channels, hidden=hidden)
        for module, parts in self._projections.items():
            rows = sum(widths[part] for part in parts)
            yield table(f"{name}{module}.weight", "matrix", out_axes=2, key_head=heads, channel=rows, hidden=hidden)
        yield table(f"{name}norm.weight", "norm", width=self.value_head_dim)
        yield table(
            f"{name}out_proj.weight", "matrix", hidden=hidden, head=self.num_value_heads, head_dim=self.value_head_dim
        )

    @property
    def _projections(self) -> dict[str, tuple[str, ...]]:
        """List the channels of a key head that each matrix of the files has together, head after head."""
        if self.joined:
            return {"in_proj_qkvz": ("query", "key", "value", "gate"), "in_proj_ba": ("strength", "decay")}
        return {"in_proj_z": ("gate",), "in_proj_b": ("strength",), "in_proj_a": ("decay",)}

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        return self._place(at, "self_attention.")

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        return self._place(at, "linear_attn.")

    def _place(self, at: LayerPlace, module: str) -> Iterator[Placement]:
        """Split heads over TP; training and the engines have the same parameters."""
        tensors, params, whole = f"{at.tensors}linear_attn.", at.params + module, (0, at.hidden)
        n = self.num_key_heads // at.tp
        keys, values = _own(at, n), _own(at, self.num_value_heads // at.tp)
        for name in ("dt_bias", "A_log"):
            yield place_filled(tensors + name, params + name, (values,))
        yield from self._convolved(at, f"{tensors}conv1d.weight", f"{params}conv1d", (0, self.conv_kernel), 0)
        first = 0
        if not self.joined:
            yield from self._convolved(
                at, f"{tensors}in_proj_qkv.weight", f"{params}in_proj.weight", whole, self.width - self.conv_width
            )
            first = self.conv_width
        for name, parts in self._projections.items():
            rows = sum(self.widths[part] for part in parts)
            yield Placement(
                tensor=f"{tensors}{name}.weight",
                box=(keys, (0, rows), whole),
                param=f"{params}in_proj.weight",
                rows=(0, n * self.width),
                view=(n, self.width, at.hidden),
                within=((0, n), (first, first + rows), whole),
            )
            first += rows
        yield at.whole("linear_attn.norm.weight", f"{module}norm", self.value_head_dim)
        yield place_filled(
            f"{tensors}out_proj.weight", f"{params}out_proj.weight", (whole, values, (0, self.value_head_dim))
        )

    def _convolved(
        self, at: LayerPlace, tensor: str, param: str, columns: tuple[int, int], others: int
    ) -> Iterator[Placement]:
        """Place queries of all heads, then keys, then values of a file into rows by key head.

        Args:
            others: rows of each head that follow.
        """
        heads = range(*_own(at, self.num_key_heads // at.tp))
        in_file = in_head = 0
        for part in ("query", "key", "value"):
            rows = self.widths[part]
            for local, head in enumerate(heads):
                box: Box = ((in_file + head * rows, in_file + (head + 1) * rows), columns)
                first = local * (self.conv_width + others) + in_head
                yield place_filled(tensor, param, box, first_row=first, rows=rows)
            in_file += self.num_key_heads * rows
            in_head += rows

    def prompt_keys(self, tp: int) -> int | None:
        """Return None: the state after a part of a prompt is no beginning."""
        return None

    def cache_shape(self, tp: int) -> tuple[int, int, int]:
        """Give (0, 1, 1): nothing is kept of a token."""
        return 0, 1, 1

    def state_shapes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Give shapes: of the last tokens' channels before the convolution, and of the matrices of the rank's heads."""
        heads = self.num_key_heads // tp
        matrices = (heads, self.values_per_key, self.key_head_dim, self.value_head_dim)
        return (self.conv_kernel - 1, heads * self.conv_width), matrices

    def check_split(self, split: TensorSplit, key: str) -> None:
        if (heads := self.num_key_heads) % split.tp:
            raise ValueError(
                f"{key} = {split.tp} does not divide the {heads} key heads of the model's linear attention"
            )

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        if layout.shares_sequences:
            raise ValueError("context_parallel_size must be 1: linear attention goes through a sequence token by token")

    def activations(self, hidden: int, split: TensorSplit) -> float:
        """Count what plain torch keeps: twice the projections, and in float32, which counts twice, of each value head
        products of a chunk's tokens, keys and values before and after they are solved for, and the state."""
        key, value = self.key_head_dim, self.value_head_dim
        float32 = 5 * CHUNK + 6 * (key + value) + key * value / CHUNK
        return (2 * self.num_key_heads * self.width + 2 * self.num_value_heads * float32) / split.tp

    def prefill_activations(self, hidden: int, split: TensorSplit) -> int:
        """Count as much as `activations`: the products of all chunks are there at once."""
        return math.ceil(self.activations(hidden, split))

    def flops(self, tokens: float, squares: float) -> float:
        """Count three products with the state, and those with a chunk's tokens, per token and value head."""
        key, value = self.key_head_dim, self.value_head_dim
        return tokens * self.num_value_heads * (6 * key * value + CHUNK * (5 * key + 3 * value))

    def megatron_fields(self) -> dict[str, Any]:
        """Set no field: its module in training reads the part, and the model's other layers set the number of heads."""
        return {}


def _own(at: LayerPlace, count: int) -> tuple[int, int]:
    return at.rank * count, (at.rank + 1) * count
