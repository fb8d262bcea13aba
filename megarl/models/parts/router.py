"""Describes how a mixture of experts chooses: a router scores all experts, and a token goes to the best few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megarl.models.parts.part import check_counts, check_numbers
from megarl.models.placements import LayerPlace, Placement
from megarl.models.tensors import LogicalTensor, table

MOST_EXPERTS = 10_000
"""Every tensor of a model is listed before it is read: with more experts the list would fill the memory."""

BEST_OF_A_GROUP = 2
"""Experts whose scores, added up, are the score of their group (arXiv 2412.19437)."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """Says how a token's experts are chosen, and what they are weighted with.

    Attributes:
        num_experts: experts per layer.
        experts_per_token: how many of them a token goes to: those with the highest scores.
        norm_topk_prob: scale a token's expert weights to sum to 1; otherwise they are the scores themselves.
        score_function: of router(x): a softmax over all experts, or a sigmoid of each (arXiv 2412.19437).
        correction_bias: whether each expert has a number that is added to its score for the choice, and not for the
            weight (arXiv 2408.15664). Pretraining moved it to balance the experts; it has no gradient, and RL keeps it.
        num_groups, groups_per_token: neighbouring experts make a group; a token's experts are of its best groups.
        scaling_factor: the weights are multiplied by it, last.
        logit_bias: whether each expert has a number, which is trained, that is added to its logit.
        module: the block's name within a layer, in Hugging Face files and in vLLM.
        gate: the router's name within the block.
        bias_name: the correction bias' name within the block; None: as one of the router's own.
    """

    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scaling_factor: float = 1.0
    logit_bias: bool = False
    module: str = "mlp"
    gate: str = "gate"
    bias_name: str | None = None

    def __post_init__(self) -> None:
        check_counts(self, "num_experts", "experts_per_token", most=MOST_EXPERTS)
        check_numbers(self, "scaling_factor")
        if self.scaling_factor == 0:
            raise ValueError("routed_scaling_factor = 0 is not supported: Megatron-Core takes it for 1")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"{self.experts_per_token} experts per token of {self.num_experts} experts: there are too few"
            )
        if self.experts_per_token == 1 and self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob with one expert per token makes every weight 1, so that nothing would train the router"
            )
        if self.score_function == "sigmoid" and self.experts_per_token > 1 and not self.norm_topk_prob:
            raise ValueError("norm_topk_prob = False with sigmoid scores is not supported: Megatron-Core always scales")
        if self.grouped:
            self._check_groups()

    @property
    def grouped(self) -> bool:
        """Say whether groups matter: a token that may go to all of them chooses as if there were none."""
        return self.groups_per_token != self.num_groups

    def _check_groups(self) -> None:
        check_counts(self, "num_groups", "groups_per_token", most=MOST_EXPERTS)
        if self.groups_per_token > self.num_groups or self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.groups_per_token} of {self.num_groups} groups of {self.num_experts} experts: n_group must "
                f"divide the experts, and topk_group be no more than n_group"
            )
        size = self.num_experts // self.num_groups
        if size < BEST_OF_A_GROUP or self.experts_per_token > self.groups_per_token * size:
            raise ValueError(
                f"{self.experts_per_token} experts per token of {self.groups_per_token} groups of {size} experts: they "
                "hold too few"
            )
        if self.experts_per_token // self.groups_per_token != BEST_OF_A_GROUP:
            raise ValueError(
                f"{self.experts_per_token} experts per token of {self.groups_per_token} groups: Megatron-Core would "
                f"score a group by other experts than its best {BEST_OF_A_GROUP}"
            )

    @property
    def weight(self) -> str:
        """Name the router's weight within a layer, in Hugging Face files and in the engines."""
        return f"{self.module}.{self.gate}.weight"

    @property
    def bias(self) -> str:
        """Name the correction bias, as `weight` names the weight."""
        return f"{self.module}.{self.bias_name or f'{self.gate}.e_score_correction_bias'}"

    @property
    def added_to_logits(self) -> str:
        """Name the bias of the logits, as `weight` names the weight."""
        return f"{self.module}.{self.gate}.bias"

    def router_tensors(self, layer: str, hidden: int) -> Iterator[LogicalTensor]:
        """List the router's tensors; their names begin with `layer`."""
        yield table(layer + self.weight, "matrix", expert=self.num_experts, hidden=hidden)
        if self.correction_bias:
            yield table(layer + self.bias, "buffer", expert=self.num_experts)
        if self.logit_bias:
            yield table(layer + self.added_to_logits, "bias", expert=self.num_experts)

    def router_in_training(self, at: LayerPlace) -> Iterator[Placement]:
        """Place the router, whole on every rank, in Megatron-Core's names."""
        return self._place(at, "mlp.router.weight", "mlp.router.expert_bias", "mlp.router.bias")

    def router_in_engine(self, at: LayerPlace) -> Iterator[Placement]:
        """Place the router, whole on every rank, in vLLM's names."""
        return self._place(at, self.weight, self.bias, self.added_to_logits)

    def _place(self, at: LayerPlace, weight: str, bias: str, added: str) -> Iterator[Placement]:
        yield at.whole(self.weight, weight, self.num_experts, at.hidden)
        if self.correction_bias:
            yield at.whole(self.bias, bias, self.num_experts)
        if self.logit_bias:
            yield at.whole(self.added_to_logits, added, self.num_experts)

    def router_fields(self) -> dict[str, Any]:
        """Set Megatron-Core's TransformerConfig, by field."""
        softmax = self.score_function == "softmax"
        return dict(
            num_moe_experts=self.num_experts,
            moe_router_topk=self.experts_per_token,
            moe_router_score_function=self.score_function,
            moe_router_pre_softmax=softmax and not self.norm_topk_prob,  # over the chosen alone a softmax sums to 1
            moe_router_enable_expert_bias=self.correction_bias,
            moe_router_bias_update_rate=0.0,  # Megatron-Core would move it in every step
            moe_router_num_groups=self.num_groups if self.grouped else None,
            moe_router_group_topk=self.groups_per_token if self.grouped else None,
            moe_router_topk_scaling_factor=None if self.scaling_factor == 1.0 else self.scaling_factor,
            moe_router_dtype="fp32",  # rounded logits would tie, and a tie may go to another expert than in the engine
            moe_router_load_balancing_type="none",  # `RouterLosses` has its own
            moe_aux_loss_coeff=0.0,
            moe_z_loss_coeff=None,
        )
