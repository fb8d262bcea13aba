"""Defines the sections of advantages, KL control, corrections and preferences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.fields import KlPenalty, NonEmpty, Section, Size, Whole


class KlCtrlConfig(Section):
    """Controls the coefficient of the KL that is subtracted from the reward (Ziegler et al. 2019, section 2.2)."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive steers the KL towards target_kl")
    kl_coef: float = Field(0.001, ge=0, description="coefficient, or its first value when adaptive")
    target_kl: float = Field(0.1, gt=0, description="nats per sequence, adaptive only")
    horizon: Whole = Field(10_000, ge=1, description="sequences over which the adaptive controller reacts")


class RolloutCorrectionConfig(Section):
    """Corrects the gap between the engine's distribution and the training layout's by weights and rejection."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="truncated importance sampling by the ratio p_train / p_rollout of each token or sequence"
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="upper limit of importance weights")
    rollout_is_batch_normalize: bool = Field(
        False, description="divide the truncated weights by their mean over the batch's tokens, or sequences"
    )
    rollout_rs: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="reject tokens, or sequences by product or geometric mean, whose ratio is outside the range"
    )
    rollout_rs_threshold: float = Field(2.0, ge=1, description="upper end of the range")
    rollout_rs_threshold_lower: float | None = Field(
        None, gt=0, le=1, description="lower end of the range; default 1 / upper end"
    )
    rollout_token_veto_threshold: float | None = Field(
        None, gt=0, lt=1, description="reject every sequence with a token whose ratio is below this"
    )

    @property
    def corrects(self) -> bool:
        """Tell whether a correction is on."""
        return (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold) != (None, None, None)

    @property
    def rs_lower(self) -> float:
        lower = self.rollout_rs_threshold_lower
        return 1 / self.rollout_rs_threshold if lower is None else lower


class FilterGroupsConfig(Section):
    """Replaces groups whose responses all score the same, which teach nothing, by others: dynamic sampling (DAPO)."""

    enable: bool = Field(False, description="draw more prompts to replace groups without differences")
    metric: Literal["acc", "score", "seq_reward"] = Field(
        "acc", description="value that must differ within a group: score >= 1, the score, or the score with penalties"
    )
    max_num_gen_batches: Size = Field(
        10, ge=1, description="maximum of draws per step; then left-out groups fill the batch"
    )


class PreferenceConfig(Section):
    """Chooses the loss on pairs of answers, or on answers with a label."""

    loss_mode: NonEmpty = Field("dpo", description="a name of `megarl algorithms`, or path/to/file.py:function")
    beta: float = Field(0.1, gt=0, description="weight of the log-ratio to the reference (ORPO: of the odds ratio)")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of pairs whose order is taken to be wrong")
    length_normalization: bool = Field(
        False, description="an answer's log-probability is the mean over its tokens instead of the sum"
    )
    gamma: float = Field(0.5, ge=0, description="SimPO: margin, as a share of beta")
    sft_coef: float = Field(
        0.0, ge=0, description="weight of the chosen answers' cross-entropy, which is added to the loss"
    )
    desirable_weight: float = Field(1.0, gt=0, description="KTO: weight of desirable answers")
    undesirable_weight: float = Field(1.0, gt=0, description="KTO: weight of undesirable answers")


class AlgorithmConfig(Section):
    """Sets the computation of advantages from rewards."""

    adv_estimator: NonEmpty = Field(
        "grpo",
        description="estimator of advantages: a name of `megarl algorithms`, or path/to/file.py:function",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="GAE: decay per token of the temporal-difference errors")
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_filtering: bool = Field(
        False, description="leave responses that were cut off at max_response_length out of the loss"
    )
    preference: PreferenceConfig = PreferenceConfig()
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="divide by the group's standard deviation (false: Dr. GRPO)"
    )
    use_kl_in_reward: bool = Field(False, description="subtract the KL to the reference model from the reward")
    kl_penalty: KlPenalty = Field("k1", description="per-token estimator of that KL")
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
