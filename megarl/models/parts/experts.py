"""Describes a mixture of experts (arXiv 1701.06538) in place of an MLP: a router sends each token to a few of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megarl.models.parts.part import Part, check_counts
from megarl.models.parts.swiglu import MATRICES, check_width, gated_tensors, place_gated
from megarl.models.placements import LayerPlace, Placement
from megarl.models.tensors import LogicalTensor, table
from megarl.parallel.layout import TrainLayout

MOST_EXPERTS = 10_000
"""Every tensor of a model is listed before it is read: with more experts the list would fill the memory."""

STACKED = ("experts.routed_experts.w13_weight", "experts.routed_experts.w2_weight")
"""Names, within the block, of the engines' parameters for all experts: gate and up together, and down."""


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Says how a token's experts are chosen, and what the block is called.

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
    gate_proj: str = MATRICES[0]
    up_proj: str = MATRICES[1]
    down_proj: str = MATRICES[2]

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts <= MOST_EXPERTS:
            raise ValueError(f"{self.experts_per_token} experts per token of {self.num_experts} experts")
        if self.experts_per_token == 1 and self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob with one expert per token makes every weight 1, so that nothing would train the router"
            )


@dataclass(frozen=True, kw_only=True)
class Experts(Part):
    """Describes experts, each a gated MLP, behind a router that every rank holds.

    Attributes:
        ffn_hidden_size: width of each expert.
    """

    fused_norm: ClassVar = None  # the router needs the normalised input as well

    ffn_hidden_size: int
    moe: MixtureOfExperts

    def __post_init__(self) -> None:
        check_counts(self, "ffn_hidden_size")

    @property
    def router(self) -> str:
        """Name the router's weight within a layer, in Hugging Face files and in the engines."""
        return f"{self.moe.module}.gate.weight"

    @property
    def _matrices(self) -> tuple[str, str, str]:
        return self.moe.gate_proj, self.moe.up_proj, self.moe.down_proj

    def _module(self, expert: int) -> str:
        return f"{self.moe.module}.experts.{expert}."

    def tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        yield table(layer + self.router, "matrix", expert=self.moe.num_experts, hidden=hidden)
        for expert in range(self.moe.num_experts):
            yield from gated_tensors(layer + self._module(expert), self._matrices, hidden, self.ffn_hidden_size)

    def training(self, at: LayerPlace) -> Iterator[Placement]:
        yield at.whole(self.router, "mlp.router.weight", self.moe.num_experts, at.hidden)
        for local, expert in enumerate(at.expert_place.own(self.moe.num_experts)):
            if expert in at.experts:
                module = f"mlp.experts.local_experts.{local}."
                params = (f"{module}linear_fc1.weight", f"{module}linear_fc2.weight")
                yield from self._place(at, expert, params)

    def engine(self, at: LayerPlace) -> Iterator[Placement]:
        """Stack experts along a first axis: [experts, 2 ffn / tp, hidden] and [experts, hidden, ffn / tp]."""
        yield at.whole(self.router, self.router, self.moe.num_experts, at.hidden)
        gate_up, down = (f"{self.moe.module}.{name}" for name in STACKED)
        for local, expert in enumerate(at.expert_place.own(self.moe.num_experts)):
            if expert in at.experts:
                yield from self._place(at, expert, (gate_up, down), row=local)

    def _place(
        self, at: LayerPlace, expert: int, params: tuple[str, str], row: int | None = None
    ) -> Iterator[Placement]:
        share = replace(at, tp=at.expert_place.tp, rank=at.expert_place.rank)
        module = self._module(expert)
        yield from place_gated(share, module, self._matrices, params, self.ffn_hidden_size, row=row)

    def check_split(self, tp: int, key: str) -> None:
        check_width(self.ffn_hidden_size, tp, key)

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

    def activations(self, hidden: int, tp: int) -> float:
        """Count k (2 h + 3 ffn / t): k experts per token, with their inputs and outputs."""
        return self.moe.experts_per_token * (2 * hidden + 3 * self.ffn_hidden_size / tp)

    def prefill_activations(self, hidden: int, tp: int) -> int:
        return self.moe.experts_per_token * (2 * hidden + 4 * self.ffn_hidden_size // tp)

    def megatron_fields(self) -> dict[str, Any]:
        return dict(
            ffn_hidden_size=self.ffn_hidden_size,
            num_moe_experts=self.moe.num_experts,
            moe_ffn_hidden_size=self.ffn_hidden_size,
            moe_router_topk=self.moe.experts_per_token,
            moe_router_pre_softmax=not self.moe.norm_topk_prob,  # a softmax over the chosen experts alone sums to 1
            moe_router_dtype="fp32",  # rounded logits would tie, and a tie may go to another expert than in the engine
            moe_router_load_balancing_type="none",  # the configured loss alone
            moe_aux_loss_coeff=0.0,
        )
