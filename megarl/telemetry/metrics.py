"""Registers the metrics: name, unit, meaning and reduction of each. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megarl.phases import Phase

Reduction = Literal["mean", "sum", "max", "min", "quantile", "first update", "rank 0", "last"]
"""How many values become one number.

mean, sum, max, min, quantile: over the items that the meaning names, on all ranks: responses, tokens, calls, updates.
first update: the largest value within the step's first update.
rank 0: measured on rank 0 alone.
last: the value at the end of the step, the same on every rank.
"""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """Describes a metric, or a family of metrics.

    Attributes:
        name: as in the metric files; a family has `PLACEHOLDERS` such as `{phase}` in its name.
        unit: "s", "tokens"; "1" for shares and numbers without a unit.
        meaning: one sentence.
        reduction: see `Reduction`.
    """

    name: str
    unit: str
    meaning: str
    reduction: Reduction

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of all names in the family."""
        parts = re.split(r"\{(\w+)\}", self.name)
        return re.compile("".join(_PATTERNS[part] if i % 2 else re.escape(part) for i, part in enumerate(parts)))


PLACEHOLDERS: dict[str, str] = {
    "phase": "a phase of a step: " + ", ".join(Phase) + ", or a name that a user's flow gives",
    "update": "the updated model: `actor` or `critic`; `train` or `warmup` in loops over examples, or a name that a "
    "user's flow gives",
    "examples": "`train`, of the step's examples, or `val`, of all of `data.val_files`",
    "loop": "a loop other than that of the RL steps: `warmup`, `train`, or a loop of a user's flow",
    "part": "the label of a part of the reward, `reward.parts`",
    "source": "a data source of the rows",
    "k": "a number of samples",
    "own": "a name that a reward function gives",
}
"""Meanings of the words in braces in names."""

_PATTERNS = {
    "phase": "[a-z][a-z0-9_-]*",
    "update": "[a-z][a-z0-9_-]*",
    "examples": "(?:train|val)",
    "loop": "[a-z][a-z0-9-]*",
    "part": "[^/]+",
    "source": ".+",
    "k": "[0-9]+",
    "own": ".+",
}

TIMED = (
    *("timing/", "tokens_per_s", "perf/", "gpu/", "straggler/", "memory/"),
    *("reward/latency_", "response/latency_", "episode/tool_s"),
)
"""Prefixes of metrics of the clock and the machine, which differ between otherwise equal runs."""


def _m(name: str, unit: str, meaning: str, reduction: Reduction = "mean") -> MetricSpec:
    return MetricSpec(name=name, unit=unit, meaning=meaning, reduction=reduction)


_STEP = (
    _m(
        "step",
        "steps",
        "number of the row: the RL step; 0 is the validation before the first step, a warm-up's steps are negative",
        "last",
    ),
    _m("{loop}/step", "steps", "number of the step within its loop, from 1", "last"),
    _m("tokens", "tokens", "prompt and response tokens of the batch that is trained on", "sum"),
    _m("tokens_per_s", "tokens/s", "`tokens` per second of the whole step, all ranks together", "rank 0"),
)

_REWARD = (
    _m("reward/mean", "score", "score of the responses that have one"),
    _m("reward/accuracy", "1", "share of the scored responses whose score is 1 or more"),
    _m("reward/failed", "responses", "responses whose scoring failed; no other metric counts them", "sum"),
    _m("score/std", "score", "standard deviation of the scores over all responses"),
    _m("score/min", "score", "lowest score", "min"),
    _m("score/max", "score", "highest score", "max"),
    _m("score/p10", "score", "10th percentile of the scores", "quantile"),
    _m("score/p50", "score", "median score", "quantile"),
    _m("score/p90", "score", "90th percentile of the scores", "quantile"),
    _m("score/no_signal", "1", "share of the prompts whose responses all scored the same: nothing to learn from them"),
    _m("reward/greedy", "score", "score of the greedy responses, ReMax's baseline"),
    _m("reward/kl", "nats", "KL to the reference that is subtracted from the rewards, summed over a response"),
    _m(
        "reward/kl_coef",
        "score per nat",
        "coefficient of that KL: `algorithm.kl_ctrl.kl_coef`, adjusted during training if adaptive",
    ),
    _m("reward/overlong_penalty", "score", "addition of `reward.overlong_buffer` to a score; at most 0"),
    _m("reward/retried", "calls", "further calls of a reward function after one that failed", "sum"),
    _m("reward/latency_mean_s", "s", "seconds of a call of a reward function"),
    _m("reward/latency_p50_s", "s", "median duration of a call", "quantile"),
    _m("reward/latency_p95_s", "s", "95th percentile of the calls' durations", "quantile"),
    _m("reward/latency_max_s", "s", "seconds of the longest call", "max"),
    _m("reward/part/{part}", "score", "score of a part of the reward, before its weight"),
    _m("reward/source/{source}/mean", "score", "score of the responses to one data source, if there are several"),
    _m("reward/source/{source}/accuracy", "1", "share of a data source's scored responses with a score of 1 or more"),
    _m("reward/tests_passed", "1", "share of the tests of a row that the response passes (reward `code`)"),
    _m("reward/timed_out", "1", "share of a response's runs that took too long (reward `code`)"),
    _m("reward/block", "1", "share of the responses that hold a block of code (reward `code`)"),
    _m("reward/part/{part}/{own}", "", "a number that a part's reward function returned with its score"),
    _m("reward/{own}", "", "a number that a reward function returned with its score"),
)

_RESPONSE = (
    _m("response/length_mean", "tokens", "tokens of a response"),
    _m("response/length_max", "tokens", "tokens of the longest response", "max"),
    _m("response/truncated", "1", "share of the responses that were cut off at `data.max_response_length`"),
    _m(
        "response/latency_p50_s",
        "s",
        "from the start of generation until half of the responses were finished",
        "quantile",
    ),
    _m(
        "response/latency_p95_s",
        "s",
        "from the start of generation until 95 % of the responses were finished",
        "quantile",
    ),
    _m("response/latency_max_s", "s", "from the start of generation until the last response was finished", "max"),
    _m("episode/turns_mean", "turns", "responses of the policy in an episode"),
    _m("episode/turns_max", "turns", "responses of the policy in the longest episode", "max"),
    _m("episode/tool_s", "s", "seconds of work of environments or agents, per episode"),
    _m("episode/observed", "1", "share of the responses' tokens that the policy did not generate"),
    _m("episode/limited", "1", "share of the episodes that a limit ended"),
    _m(
        "filter_groups/draws",
        "draws",
        "draws of prompts until enough groups differed (DAPO's dynamic sampling)",
        "last",
    ),
    _m("filter_groups/kept", "1", "share of the drawn prompts whose responses differ"),
    _m("carry_over/groups", "prompts", "prompts whose responses the next step continues", "sum"),
    _m("carry_over/finished", "prompts", "carried-over prompts whose responses are all finished", "sum"),
    _m("carry_over/tokens", "tokens", "tokens of the carried-over responses so far", "sum"),
)

_ROLLOUT = (
    _m("rollout/logp_gap_mean", "nats", "|log-probability by training - by the engine| of a response token"),
    _m(
        "rollout/logp_gap_max",
        "nats",
        "largest |log-probability by training - by the engine| of a response token",
        "max",
    ),
    _m("rollout/kl_k1", "nats", "KL(engine || training) per token, estimated by the mean log-ratio"),
    _m("rollout/kl_k3", "nats", "KL(engine || training) per token by the estimator k3, which is never negative"),
    _m("rollout/ratio_p01", "1", "first percentile of p_training / p_engine of the response tokens", "quantile"),
    _m("rollout/ratio_p50", "1", "median of p_training / p_engine", "quantile"),
    _m("rollout/ratio_p99", "1", "99th percentile of p_training / p_engine", "quantile"),
    _m("rollout/staleness_mean", "versions", "number of versions between a token's weights and the newest weights"),
    _m(
        "rollout/staleness_max",
        "versions",
        "largest number of versions between a token's weights and the newest",
        "max",
    ),
    _m("rollout/weight_mean", "1", "importance weight of a token, with `algorithm.rollout_correction`"),
    _m("rollout/rejected", "1", "share of the response tokens whose importance weight is 0"),
)

_UPDATE = (
    _m("actor/pg_loss", "1", "policy-gradient loss alone"),
    _m(
        "actor/ppo_kl",
        "nats",
        "mean log-ratio per token of the probabilities before an update's batch to the current ones",
    ),
    _m("actor/clipfrac", "1", "share of the loss whose gradient the clip leaves out or changes"),
    _m("actor/ratio_max_deviation", "1", "largest |p_new / p_old - 1| of a token", "max"),
    _m(
        "actor/first_ratio_max_deviation",
        "1",
        "largest |p_new / p_old - 1| while the policy is the one that generated: 0 if training is exact",
        "first update",
    ),
    _m(
        "actor/routing_agreement",
        "1",
        "share of the recorded choices of experts that the training router would have made as well, with "
        "`rollout.enable_rollout_routing_replay`; mean over the step's updates",
    ),
    _m("actor/entropy", "nats", "entropy of the next token's distribution"),
    _m("actor/ref_kl", "nats", "KL to the reference per token, by `actor.kl_loss_type`"),
    _m("critic/vf_loss", "1", "value loss"),
    _m("critic/vf_clipfrac", "1", "share of the tokens where the clipped value's error is the larger"),
    _m("critic/vpred_mean", "score", "predicted value of a token"),
    _m("critic/explained_variance", "1", "1 - var(returns - values) / var(returns), before the update"),
    _m("teacher/kl", "nats", "mean log-ratio of the policy to the teacher, per response token"),
    _m(
        "{examples}/accuracy",
        "1",
        "share of the pairs whose chosen answer has the higher reward; of KTO's answers on "
        "their right side. Of a validation of an RL run: share of the scored responses with a score of 1 or more",
    ),
    _m("{examples}/margin", "score", "reward of the chosen answer less that of the rejected one, or KTO's distance"),
    _m("{examples}/chosen_reward", "score", "reward of the chosen answers, as the loss defines it"),
    _m("{examples}/rejected_reward", "score", "reward of the rejected answers"),
    _m("{examples}/sft_loss", "nats", "cross-entropy of the chosen answers (ORPO)"),
    _m("train/reward", "score", "beta times an answer's log-ratio to the reference (KTO)"),
    _m("{examples}/reference_point", "nats", "KL to the reference from which answers are measured (KTO)"),
    _m("{update}/loss", "1", "the loss that is differentiated; mean over the step's updates"),
    _m(
        "{update}/expert_load_max",
        "1",
        "tokens of the expert with the most, over those of an expert of its layer on average; mean over the step's "
        "updates; a prompt that is computed once (`model.use_prefix_grouper`) counts once",
    ),
    _m("{update}/expert_load_min", "1", "the same of the expert with the fewest"),
    _m(
        "{update}/router_aux_loss", "1", "loss that spreads tokens over experts, without its weight; mean of the layers"
    ),
    _m("{update}/router_z_loss", "1", "squared logarithm of the routers' sum of exp(logits), likewise"),
    _m("{update}/grad_norm", "1", "L2 norm of the gradient before it is clipped; mean over the step's updates"),
    _m("{update}/lr", "1", "learning rate; mean over the step's updates"),
    _m(
        "{update}/skipped", "1", "share of the step's updates that were omitted because loss or gradient was not finite"
    ),
)

_VALIDATION = (
    _m(
        "val/reward", "score", "score of the responses to the held-out prompts; of KTO's held-out answers, their reward"
    ),
    _m("val/reward_ci95", "score", "half of the 95 % confidence interval of val/reward, over prompts"),
    _m("val/failed", "responses", "responses to held-out prompts without a score", "sum"),
    _m("val/turns", "turns", "responses of the policy in an episode"),
    _m("val/retried", "calls", "further calls of a reward function after one that failed", "sum"),
    _m("val/part/{part}", "score", "score that a part of the reward gave, before its weight"),
    _m("val/pass@{k}", "1", "chance that one of k samples is right (arXiv 2107.03374), mean over prompts"),
    _m("val/maj@{k}", "1", "chance that the answer that most of k samples give is right, mean over prompts"),
    _m("val/perplexity", "1", "exp of val/loss, in supervised training", "last"),
    _m("val/tests_passed", "1", "as reward/tests_passed, of the held-out prompts"),
    _m("val/timed_out", "1", "as reward/timed_out, of the held-out prompts"),
    _m("val/block", "1", "as reward/block, of the held-out prompts"),
    _m("val/loss", "1", "loss over all of `data.val_files`, in flows that learn from examples"),
    _m("val/part/{part}/{own}", "", "a number that a part's reward function returned with its score"),
    _m("val/{source}/mean", "score", "score of the responses to one data source"),
    _m("val/{source}/mean_ci95", "score", "half of the 95 % confidence interval of val/{source}/mean"),
    _m("val/{source}/pass@{k}", "1", "pass@k of one data source"),
    _m("val/{source}/maj@{k}", "1", "maj@k of one data source"),
    _m("val/{own}", "", "a number that a reward function returned with its score"),
)

_MACHINE = (
    _m("timing/step_s", "s", "time of the whole step", "rank 0"),
    _m("timing/{phase}_s", "s", "time in a phase; nested phases count once, for the inner one", "rank 0"),
    _m(
        "perf/gradient_sync_s",
        "s",
        "time in which an update of the actor reduces gradients over ranks, waits for slower ranks included and what "
        "`overlap_grad_reduce` hides left out; mean of the step's updates",
        "rank 0",
    ),
    _m(
        "perf/generated_tokens_per_s",
        "tokens/s",
        "response tokens of the step per second of the phase `generate`, all ranks together",
        "rank 0",
    ),
    _m("perf/generated_tokens_per_s_per_gpu", "tokens/s", "`perf/generated_tokens_per_s` per rank", "rank 0"),
    _m("perf/samples_per_s", "responses/s", "responses or examples of the step per second of the whole step", "rank 0"),
    _m(
        "perf/shared_prompt_tokens",
        "1",
        "part of the step's tokens that the actor did not compute, as a neighbour's prompt had them "
        "(`model.use_prefix_grouper`)",
        "rank 0",
    ),
    _m(
        "perf/mfu",
        "1",
        "matrix products of the actor's passes and updates per second of the phases `log_probs` and "
        "`update`, as a share of the GPUs' peak; recomputation is not counted (arXiv 2204.02311, appendix B)",
        "rank 0",
    ),
    _m("perf/since_start_s", "s", "seconds since this process of the run began", "rank 0"),
    _m("perf/timestamp_s", "s", "end of the step, seconds since 1970", "rank 0"),
    _m(
        "perf/skipped_updates",
        "updates",
        "updates omitted since this process of the run began because loss or gradient was not finite",
        "sum",
    ),
    _m(
        "straggler/rank",
        "rank",
        "the rank that worked longest in the step, waits for all ranks and for their gradients left out; those "
        "inside the collectives of a pass count as work",
        "max",
    ),
    _m("straggler/node", "node", "the node whose ranks worked longest in the step; with several nodes", "max"),
    _m("straggler/node_excess", "1", "how much longer that node worked than the median node, as a share", "max"),
    _m("straggler/excess_s", "s", "how much longer the slowest rank worked in the step than the median rank", "max"),
    _m(
        "straggler/{phase}_rank",
        "rank",
        "the rank that worked longest in a phase, waits for all ranks and for their gradients left out; those inside "
        "the collectives of a pass (tensor, pipeline) count as work",
        "max",
    ),
    _m(
        "straggler/{phase}_excess_s",
        "s",
        "how much longer the slowest rank worked in a phase than the median rank",
        "max",
    ),
    _m("memory/{phase}_gib", "GiB", "peak memory in use during a phase, of the rank with the highest peak", "max"),
    _m("gpu/utilization_mean", "1", "share of the time in which a GPU ran a kernel, as NVML says; mean over GPUs"),
    _m("gpu/utilization_min", "1", "share of the time in which the least busy GPU ran a kernel", "min"),
    _m("gpu/power_w", "W", "power that the GPUs draw together, mean over the step", "sum"),
    _m("gpu/temperature_max_c", "°C", "highest temperature of a GPU during the step", "max"),
    _m("gpu/memory_max", "1", "largest share of a GPU's memory in use during the step", "max"),
)

METRICS: tuple[MetricSpec, ...] = (*_STEP, *_REWARD, *_RESPONSE, *_ROLLOUT, *_UPDATE, *_VALIDATION, *_MACHINE)
"""All metrics in the order of the documentation. If several fit a name, `find` returns the most specific."""


@lru_cache(maxsize=4096)
def find(name: str) -> MetricSpec | None:
    """Find the metric that describes a name of the metric files; None if the registry has none."""
    fitting = [spec for spec in _BY_PRECISION if spec.pattern.fullmatch(name)]
    return fitting[0] if fitting else None


def _vagueness(spec: MetricSpec) -> tuple[bool, int, int]:
    free = "{own}" in spec.name
    return free, 0 if free else spec.name.count("{"), -len(re.sub(r"\{\w+\}", "", spec.name))


_BY_PRECISION = sorted(METRICS, key=_vagueness)
