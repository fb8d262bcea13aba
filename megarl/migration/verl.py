"""Names verl's defaults, and the MegaRL keys that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from megarl.migration.entry import Settings

A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
C, J, M = "critic", "reward_model", "actor_rollout_ref.model"
MODULE = "-m"
"""The setting that names which of verl's trainers a command starts, if it is not PPO's."""

DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{A}.ppo_mini_batch_size": 256,
    f"{A}.use_dynamic_bsz": False,
    f"{R}.tensor_model_parallel_size": 2,
    f"{R}.n": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}
"""Defaults of the keys that the rules of other keys read."""

_SPREAD = ("ulysses_sequence_parallel_size", "megatron.context_parallel_size")


def is_sft(settings: Settings) -> bool:
    """Say whether the settings are a demonstrations trainer's: its name or its sections tell."""
    heads = ("model.", "optim.", "engine.")
    return "sft" in str(settings.of(MODULE)) or any(key.startswith(heads) for key in settings.written)


def needs_critic(settings: Settings) -> bool:
    """Say whether the estimator has a critic."""
    return not is_sft(settings) and str(settings.of("algorithm.adv_estimator")) == "gae"


def updates(settings: Settings, model: str) -> int:
    """Count the optimizer steps of a training step; a critic has the policy's keys where it has none."""

    if is_sft(settings):
        return 1

    def number_of(key: str, default: int) -> int:
        return settings.number(f"{model}.{key}", settings.number(f"{A}.{key}", default))

    rows = settings.number("data.train_batch_size")
    return max(1, rows // number_of("ppo_mini_batch_size", 256)) * number_of("ppo_epochs", 1)


def longest(settings: Settings) -> int:
    """Count the tokens of a prompt and its response."""
    if whole := settings.number("data.max_length", 0):
        return whole
    return settings.number("data.max_prompt_length") + settings.number("data.max_response_length")


def ranks_of_a_sequence(settings: Settings, model: str) -> int:
    """Count the ranks that share a sequence, in verl those of context parallelism or of Ulysses."""
    return prod(settings.number(f"{model}.{name}") for name in _SPREAD)


def is_dynamic(settings: Settings, model: str) -> bool:
    """Say whether a number of tokens bounds micro-batches, rather than one of sequences."""
    dynamic = settings.of(f"{model}.use_dynamic_bsz")
    return bool(settings.of(f"{A}.use_dynamic_bsz") if dynamic is None else dynamic)


def budget(settings: Settings, model: str) -> int:
    """Count the tokens that verl's keys allow a rank of a micro-batch: at least its part of one whole sequence."""
    ranks = ranks_of_a_sequence(settings, model)
    if is_dynamic(settings, model):
        tokens = settings.number(f"{model}.ppo_max_token_len_per_gpu", 16_384) * ranks
    else:
        rows = settings.number(f"{model}.ppo_micro_batch_size_per_gpu", 0)
        gpus = settings.number("trainer.nnodes") * settings.number("trainer.n_gpus_per_node")
        rows = rows or max(1, settings.number(f"{model}.ppo_micro_batch_size", 1) // gpus)
        tokens = rows * longest(settings)
    return -(-max(tokens, longest(settings)) // ranks)


def complete(settings: Settings, result: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """List keys to set beside the user's, each with its value and the reason."""
    default = "verl's default"
    added: dict[str, tuple[Any, str]] = {
        "data.train_batch_size": (1024, default),
        "data.answer_key": ("reward_model.ground_truth", "where verl's rows hold the reference answer"),
        "algorithm.adv_estimator": ("gae", default),
        f"{A}.ppo_mini_batch_size": (256, default),
        f"{A}.ppo_max_token_len_per_gpu": (budget(settings, A), "tokens of the micro-batches that verl's keys allow"),
        f"{A}.clip_ratio_c": (3.0, f"{default}: dual clip is on"),
        f"{R}.n": (1, default),
        f"{R}.name": ("vllm", "generates in verl too"),
        "trainer.n_gpus_per_node": (8, default),
        "trainer.total_epochs": (30, default),
    }
    if result.get(f"{R}.name", "vllm") == "vllm":
        added[f"{R}.tensor_model_parallel_size"] = (2, default)
        added[f"{R}.max_num_seqs"] = (1024, default)
    if needs_critic(settings):
        added[f"{C}.ppo_max_token_len_per_gpu"] = (budget(settings, C), "as for the policy")
        for key in ("ppo_epochs", "loss_agg_mode"):
            if f"{A}.{key}" in result:
                added[f"{C}.{key}"] = (result[f"{A}.{key}"], f"{default}: the policy's")
    if settings.under(f"{A}.megatron") and result.get(f"{A}.megatron.tensor_model_parallel_size", 1) > 1:
        added[f"{A}.megatron.sequence_parallel"] = (True, default)
    if "profiler.steps" in result and settings.of("trainer.profile_steps"):
        added["profiler.tool"] = ("nsight", "verl's trainer.profile_steps are for nsys")
    if "profiler.tool" in result:
        added["profiler.steps"] = ([3], "verl's global_profiler.steps names none")
    if result.get(f"{R}.top_p", 1) < 1 or result.get(f"{R}.top_k", -1) > 0:
        added["algorithm.rollout_correction.rollout_is"] = ("token", "top_p and top_k sample from another distribution")
    if not any(key.startswith("reward.parts") or key == "reward.name" for key in result):
        added |= _reward(settings)
    return added


def _reward(settings: Settings) -> dict[str, tuple[Any, str]]:
    """Guess `reward.name` from the data files' names; verl chooses a reward by each row's data source."""
    files = f"{settings.of('data.train_files')}".lower()
    why = "verl chooses by the rows' data_source; here this key does, and it is guessed from data.train_files"
    if "gsm8k" in files and "math" not in files.replace("gsm8k", ""):
        return {"reward.name": ("gsm8k", why)}
    return {"reward.name": ("math_verify", f"{why}: look whether it is right for your data")}
