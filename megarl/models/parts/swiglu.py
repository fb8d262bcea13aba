"""Describes a gated MLP (arXiv 2002.05202): down(activation(gate(x)) * up(x)); SwiGLU with silu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megarl.models.parts.part import MLPPart, check_counts
from megarl.models.placements import LayerPlace, Placement
from megarl.models.tensors import LogicalTensor, table
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout

MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Names of the matrices in Hugging Face files."""


@dataclass(frozen=True, kw_only=True)
class SwiGLU(MLPPart):
    """Describes an MLP that every token goes through.

    Attributes:
        ffn_hidden_size: its width.
        activation: of the gate; `gelu_tanh` is GELU's approximation by tanh (Gemma).
    """

    fused_norm: ClassVar = "mlp.linear_fc1.layer_norm_weight"
    recomputed_as: ClassVar = "mlp"

    ffn_hidden_size: int
    activation: Literal["silu", "gelu_tanh"] = "silu"

    def __post_init__(self) -> None:
        check_counts(self, "ffn_hidden_size")

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        return gated_tensors(f"{layer}mlp.", MATRICES, hidden, self.ffn_hidden_size)

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        params = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
        return place_gated(at, "mlp.", MATRICES, params, self.ffn_hidden_size)

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        params = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
        return place_gated(at, "mlp.", MATRICES, params, self.ffn_hidden_size)

    def check_split(self, split: TensorSplit, key: str) -> None:
        check_width(self.ffn_hidden_size, split.tp, key)

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        pass

    def activations(self, hidden: int, split: TensorSplit) -> float:
        """Count 3 ffn / t: gate, up and their product."""
        return 3 * self.ffn_hidden_size / split.tp

    def prefill_activations(self, hidden: int, split: TensorSplit) -> int:
        return 4 * self.ffn_hidden_size // split.tp

    def megatron_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = dict(ffn_hidden_size=self.ffn_hidden_size)
        return fields if self.activation == "silu" else fields | dict(activation_func=self.activation)


def check_width(ffn: int, tp: int, key: str) -> None:
    """Raise ValueError unless `tp` ranks can share the width of an MLP."""
    if ffn % tp:
        raise ValueError(f"{key} = {tp} does not divide the model's MLP width {ffn}")


def gated_tensors(module: str, matrices: tuple[str, str, str], hidden: int, ffn: int) -> Iterator[LogicalTensor]:
    """List the matrices of a gated MLP: gate, up, down."""
    gate, up, down = matrices
    yield table(f"{module}{gate}.weight", "matrix", ffn=ffn, hidden=hidden)
    yield table(f"{module}{up}.weight", "matrix", ffn=ffn, hidden=hidden)
    yield table(f"{module}{down}.weight", "matrix", hidden=hidden, ffn=ffn)


def place_gated(
    at: LayerPlace,
    module: str,
    matrices: tuple[str, str, str],
    params: tuple[str, str],
    ffn: int,
    *,
    row: int | None = None,
) -> Iterator[Placement]:
    """Place a rank's share of the width of a gated MLP.

    Args:
        module, matrices: as of `gated_tensors`, within the layer.
        params: gate and up together, [2 ffn / tp, hidden]; down, [hidden, ffn / tp]; within the layer.
        row: the expert's place on the first axis of stacked parameters.
    """
    hidden, n = at.hidden, ffn // at.tp
    share, whole = (at.rank * n, (at.rank + 1) * n), (0, hidden)
    stacked = None if row is None else (row, row + 1)
    gate_up, down = (at.params + param for param in params)
    for i, name in enumerate(matrices[:2]):
        yield Placement(
            tensor=f"{at.tensors}{module}{name}.weight",
            box=(share, whole),
            param=gate_up,
            rows=stacked or (0, 2 * n),
            view=(2 * n, hidden),
            within=((i * n, (i + 1) * n), whole),
        )
    yield Placement(
        tensor=f"{at.tensors}{module}{matrices[2]}.weight",
        box=(whole, share),
        param=down,
        rows=stacked or whole,
        view=(hidden, n),
        within=(whole, (0, n)),
    )
