"""Describes a mixture of experts (arXiv 1701.06538) in place of an MLP: a router sends each token to a few of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megarl.models.parts.part import MLPPart, check_counts
from megarl.models.parts.router import Router
from megarl.models.parts.swiglu import MATRICES, check_width, gated_tensors, place_gated
from megarl.models.placements import LayerPlace, Placement
from megarl.models.tensors import LogicalTensor, table
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Router):
    """Says how a token's experts are chosen, and what they are called.

    Attributes:
        gate_proj, up_proj, down_proj: names of an expert's matrices in Hugging Face files.
    """

    gate_proj: str = MATRICES[0]
    up_proj: str = MATRICES[1]
    down_proj: str = MATRICES[2]


@dataclass(frozen=True, kw_only=True)
class Experts(MLPPart):
    """Describes experts, each a gated MLP, behind a router that every rank holds.

    Attributes:
        ffn_hidden_size: width of each expert.
        shared_ffn_hidden_size: width of an MLP beside them that every token goes through; 0: there is none.
        shared_gate: what that MLP computes of a token is multiplied by the sigmoid of a number (Qwen3-Next).
        shared_name: name of that MLP within the block, in Hugging Face files.
    """

    fused_norm: ClassVar = None  # the router needs the normalised input as well
    recomputed_as: ClassVar = "moe"
    whole: ClassVar[bool] = False
    """Whether training cannot split an expert over ranks."""

    ffn_hidden_size: int
    moe: MixtureOfExperts
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    shared_name: str = "shared_experts"

    def __post_init__(self) -> None:
        check_counts(self, "ffn_hidden_size", *(["shared_ffn_hidden_size"] if self.shared_ffn_hidden_size else []))

    @property
    def shared_module(self) -> str:
        """Name the shared MLP within a layer, in Hugging Face files and in the engines."""
        return f"{self.moe.module}.{self.shared_name}."

    @property
    def shared_gate_weight(self) -> str:
        """Name the weight of the shared MLP's gate, likewise."""
        return f"{self.moe.module}.{self.shared_name}_gate.weight"

    @property
    def _matrices(self) -> tuple[str, str, str]:
        return self.moe.gate_proj, self.moe.up_proj, self.moe.down_proj

    def _module(self, expert: int) -> str:
        return f"{self.moe.module}.experts.{expert}."

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        yield from self.moe.router_tensors(layer, hidden)
        for expert in range(self.moe.num_experts):
            yield from gated_tensors(layer + self._module(expert), self._matrices, hidden, self.ffn_hidden_size)
        if self.shared_ffn_hidden_size:
            yield from gated_tensors(layer + self.shared_module, MATRICES, hidden, self.shared_ffn_hidden_size)
        if self.shared_gate:
            yield table(layer + self.shared_gate_weight, "matrix", gate=1, hidden=hidden)

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        yield from self.moe.router_in_training(at)
        share = self._share(at)
        for local, expert in enumerate(at.expert_place.own(self.moe.num_experts)):
            if expert in at.experts:
                if at.grouped_experts:
                    params = (f"mlp.experts.linear_fc1.weight{local}", f"mlp.experts.linear_fc2.weight{local}")
                else:
                    module = f"mlp.experts.local_experts.{local}."
                    params = (f"{module}linear_fc1.weight", f"{module}linear_fc2.weight")
                yield from self._place(share, expert, params)
        module = "mlp.shared_experts."
        params = (f"{module}linear_fc1.weight", f"{module}linear_fc2.weight")
        yield from self._place_shared(at, params, f"{module}gate_weight")

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        """Stack experts along a first axis: [experts, 2 ffn / tp, hidden] and [experts, hidden, ffn / tp].

        Here tp counts the ranks that share each expert, and a rank's own experts alone are stacked.
        """
        yield from self.moe.router_in_engine(at)
        share, params = self._share(at), self.stacked_in_engine
        for local, expert in enumerate(at.expert_place.own(self.moe.num_experts)):
            if expert in at.experts:
                yield from self._place(share, expert, params, row=local)
        yield from self._place_shared(at, self.shared_in_engine, self.shared_gate_weight)

    @staticmethod
    def _share(at: LayerPlace) -> LayerPlace:
        """Locate the rank among those that share each expert."""
        return replace(at, tp=at.expert_place.tp, rank=at.expert_place.rank)

    def _place(
        self, share: LayerPlace, expert: int, params: tuple[str, str], row: int | None = None
    ) -> Iterator[Placement]:
        module = self._module(expert)
        yield from place_gated(share, module, self._matrices, params, self.ffn_hidden_size, row=row)

    @property
    def stacked_in_engine(self) -> tuple[str, str]:
        """Name the engines' parameters for all experts: gate and up together, and down."""
        stacked = f"{self.moe.module}.experts.routed_experts."
        return f"{stacked}w13_weight", f"{stacked}w2_weight"

    @property
    def shared_in_engine(self) -> tuple[str, str]:
        """Name the shared MLP's parameters in the engines: gate and up together, and down."""
        return f"{self.shared_module}gate_up_proj.weight", f"{self.shared_module}down_proj.weight"

    def _place_shared(self, at: LayerPlace, params: tuple[str, str], gate: str) -> Iterator[Placement]:
        if self.shared_ffn_hidden_size:
            yield from place_gated(at, self.shared_module, MATRICES, params, self.shared_ffn_hidden_size)
        if self.shared_gate:
            yield at.whole(self.shared_gate_weight, gate, 1, at.hidden)

    def check_split(self, split: TensorSplit, key: str) -> None:
        check_width(self.ffn_hidden_size, split.expert_tp, key)
        check_width(self.shared_ffn_hidden_size, split.tp, key)
        if self.moe.num_experts % split.ep:
            raise ValueError(
                f"{key} = {split.tp} does not divide the model's {self.moe.num_experts} experts, of which each rank "
                "has whole ones; set rollout.enable_expert_parallel=false"
            )

    def check_training(self, layout: TrainLayout, *, sequence_parallel: bool) -> None:
        if layout.tp > 1 and not sequence_parallel:
            # Megatron-Core refuses it too, in the first training step: every rank would dispatch every token.
            raise ValueError(
                f"a mixture of experts with tensor_model_parallel_size = {layout.tp} needs "
                "actor.megatron.sequence_parallel=true"
            )
        check_width(self.ffn_hidden_size, layout.expert_tp, "expert_tensor_parallel_size")
        if self.moe.num_experts % layout.ep:
            raise ValueError(
                f"expert_model_parallel_size = {layout.ep} does not divide the model's {self.moe.num_experts} experts"
            )

    def activations(self, hidden: int, split: TensorSplit) -> float:
        """Count k (2 h + 3 ffn / t): k experts per token, with their inputs and outputs; 3 ffn / t of the shared.

        Of whole experts t is 1, since all tokens may go to the experts of one rank.
        """
        routed = self.moe.experts_per_token * (2 * hidden + 3 * self.ffn_hidden_size / split.expert_tp)
        return routed + 3 * self.shared_ffn_hidden_size / split.tp

    def prefill_activations(self, hidden: int, split: TensorSplit) -> int:
        routed = self.moe.experts_per_token * (2 * hidden + 4 * self.ffn_hidden_size // split.expert_tp)
        return routed + 4 * self.shared_ffn_hidden_size // split.tp

    def megatron_fields(self) -> dict[str, Any]:
        return self.moe.router_fields() | dict(
            moe_ffn_hidden_size=self.ffn_hidden_size,
            moe_shared_expert_intermediate_size=self.shared_ffn_hidden_size or None,
            moe_shared_expert_gate=self.shared_gate,
        )
