"""Describes gpt-oss' experts: with biases and a clamped GLU, and all of a layer in one tensor of the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.models.parts.experts import Experts
from megarl.models.parts.part import check_numbers
from megarl.models.placements import LayerPlace, Placement
from megarl.models.tensors import LogicalTensor
from megarl.parallel.layout import TrainLayout


@dataclass(frozen=True, kw_only=True)
class StackedExperts(Experts):
    """Describes experts that compute down(gate sigmoid(1.702 gate) (up + 1)), each projection with a bias.

    The files have the transposed matrices, and gate and up by turns.

    Attributes:
        limit: the gate is clamped from above, and up from both sides.
    """

    whole: ClassVar = True  # Megatron-Core would add the bias once per rank

    limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "limit", positive=True)

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        yield from self.moe.router_tensors(layer, hidden)
        count, ffn = self.moe.num_experts, self.ffn_hidden_size
        in_file = (
            ((count, hidden, 2 * ffn), (0, 3, 2, 1)),
            ((count, 2 * ffn), (0, 2, 1)),
            ((count, ffn, hidden), (0, 2, 1)),
            ((count, hidden), (0, 1)),
        )
        for (name, shape), (hf_shape, order) in zip(self._shapes(hidden, ffn).items(), in_file, strict=True):
            yield LogicalTensor(
                name=f"{layer}{self._stacked}{name}",
                shape=(count, *shape),
                hf_shape=hf_shape,
                kind="bias" if name.endswith("bias") else "matrix",
                file_axes=order,
            )

    @property
    def _stacked(self) -> str:
        return f"{self.moe.module}.experts."

    @staticmethod
    def _shapes(hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes of an expert's tensors by name; the second axis of those that have `ffn` in them is it."""
        return {
            "gate_up_proj": (2, ffn, hidden),
            "gate_up_proj_bias": (2, ffn),
            "down_proj": (hidden, ffn),
            "down_proj_bias": (hidden,),
        }

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        yield from self.moe.router_in_training(at)
        leaves = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
        share = self._share(at)
        for local, expert in enumerate(at.expert_place.own(self.moe.num_experts)):
            params = tuple(f"mlp.experts.local_experts.{local}.{leaf}" for leaf in leaves)
            yield from self._place_some(share, (expert, expert + 1), params, stacked=False)

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        yield from self.moe.router_in_engine(at)
        share = self._share(at)
        experts = at.expert_place.own(self.moe.num_experts)
        yield from self._place_some(share, (experts.start, experts.stop), self.all_in_engine, stacked=True)

    @property
    def all_in_engine(self) -> tuple[str, ...]:
        """Name the engines' parameters: gate and up together, their biases, down and its bias."""
        gate_up, down = self.stacked_in_engine
        return gate_up, gate_up.replace("weight", "bias"), down, down.replace("weight", "bias")

    def _place_some(
        self, at: LayerPlace, experts: tuple[int, int], params: tuple[str, ...], *, stacked: bool
    ) -> Iterator[Placement]:
        """Place a rank's share of the width of some experts: one that fills its parameters, or several, a row each."""
        count, n = experts[1] - experts[0], self.ffn_hidden_size // at.tp
        for (name, shape), param in zip(self._shapes(at.hidden, n).items(), params, strict=True):
            box = [experts, *((0, size) for size in shape)]
            if len(shape) > 1:
                box[2] = (at.rank * n, (at.rank + 1) * n)
            rows = shape[0] * n if name.startswith("gate_up") else shape[0]
            view = (count, *shape)
            yield Placement(
                tensor=f"{at.tensors}{self._stacked}{name}",
                box=tuple(box),
                param=at.params + param,
                rows=(0, count if stacked else rows),
                view=view,
                within=tuple((0, size) for size in view),
            )

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        super().check_training(layout, sequence_parallel=sequence_parallel)
        if layout.expert_tp > 1:
            raise ValueError(
                f"experts with biases are whole on a rank: set actor.megatron.expert_tensor_parallel_size=1, not "
                f"{layout.expert_tp}"
            )

    def megatron_fields(self) -> dict[str, Any]:
        return super().megatron_fields() | dict(
            add_bias_linear=True,
            activation_func="quick_gelu",
            activation_func_clamp_value=self.limit,
            glu_linear_offset=1.0,
        )
