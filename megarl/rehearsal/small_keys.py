"""Shrinks the numbers of a configuration: batches, lengths, steps. What a step does, and in which layout, stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import Config
from megarl.config.profiler import ProfilerConfig
from megarl.config.reward import BY_MODEL
from megarl.flow_kinds import generates
from megarl.parallel.layout import TrainLayout
from megarl.trainer.layouts import train_layout
from megarl.trainer.needs import needs_of

STEPS, WARMUP_STEPS = 3, 2
RESPONSE, EPISODE = 16, 64
"""Tokens of a response, without and with an environment that answers."""
SENT_AWAY = ("wandb", "mlflow", "prometheus")
"""Values of `trainer.logger` that would show the rehearsal to others."""
NOT_REPEATED = ("console", "jsonl", *SENT_AWAY)
_OTHERS = ("critic", "reward_model", "teacher")


def small_keys(config: Config, run_dir: str) -> dict[str, Any]:
    """Return the values of a small run: three steps of a few short sequences each, in the configuration's layout."""
    tree: dict[str, Any] = config.model_dump()
    prompts = _batches(config, tree, train_layout(config))
    _lengths(config, tree)
    trainer, policy = tree["trainer"], tree["actor_rollout_ref"]
    trainer |= {
        # with a disk of the nodes' own a checkpoint is whole one step later
        "total_training_steps": STEPS + bool(config.checkpoint.local_dir),
        "critic_warmup": min(1, config.trainer.critic_warmup),
        "save_freq": 1,
        "max_ckpt_to_keep": 2,
        "test_freq": -1 if config.trainer.test_freq else 0,
        "resume_mode": "auto",
        "resume_from_path": "",
        "resume_allow": [],
        "agreement_freq": min(1, config.trainer.agreement_freq),
        "logger": [
            *dict.fromkeys(["console", "jsonl", *(name for name in config.trainer.logger if name not in SENT_AWAY)])
        ],
        "default_local_dir": run_dir,
    }
    tree["profiler"] = ProfilerConfig().model_dump()
    tree["checkpoint"] |= {
        "save_contents": ["model", "optimizer", "hf_model"],
        "local_dir": f"{run_dir}.local" if config.checkpoint.local_dir else "",
    }
    tree["data"] |= {"cache_dir": f"{run_dir}.rows"}
    warmup = tree["warmup"]
    warmup |= {
        "total_training_steps": min(WARMUP_STEPS, config.warmup.total_training_steps),
        "train_batch_size": min(config.warmup.train_batch_size, 2 * prompts),
    }
    policy["reshard"] |= {"verify": True}
    tree["reward"]["workers"] = 1
    for optim in (policy["actor"]["optim"], warmup["optim"], tree["critic"]["optim"]):
        optim["lr_warmup_steps"] = min(1, optim["lr_warmup_steps"])
    return tree


def _batches(config: Config, tree: dict[str, Any], layout: TrainLayout) -> int:
    """Shrink batches, but for the relations between them; returns the prompts of a step."""
    data, policy = config.data, config.actor_rollout_ref
    rollout, actor = policy.rollout, policy.actor
    n = min(rollout.n, max(2, needs_of(config).samples)) if generates(config) else 1
    least = layout.dp * max(2, min(4, layout.pp)) if layout.pp > 1 else 2 * layout.dp
    mini = max(2, -(-least // n))
    while mini * n % layout.dp:
        mini += 1
    whole, critic = data.train_batch_size, config.critic_mini_batch_size
    prompts = mini * min(2, max(1, whole // actor.ppo_mini_batch_size)) if generates(config) else mini
    tree["data"] |= {"train_batch_size": prompts}
    if data.gen_batch_size is not None:
        tree["data"]["gen_batch_size"] = prompts * min(2, -(-data.gen_batch_size // whole))
    filtering = tree["algorithm"]["filter_groups"]
    filtering["max_num_gen_batches"] = min(2, filtering["max_num_gen_batches"])
    tree["critic"] |= {
        "ppo_mini_batch_size": prompts // min(prompts // mini, max(1, whole // critic)),
        "ppo_epochs": min(2, config.critic.ppo_epochs),
    }
    tree["actor_rollout_ref"]["actor"] |= {"ppo_mini_batch_size": mini, "ppo_epochs": min(2, actor.ppo_epochs)}
    for section in (tree["actor_rollout_ref"]["actor"], *(tree[name] for name in _OTHERS)):
        section["ppo_micro_batch_size_per_gpu"] = min(2, section["ppo_micro_batch_size_per_gpu"])
    tree["actor_rollout_ref"]["rollout"] |= {"n": n, "max_num_seqs": min(8, rollout.max_num_seqs)}
    tree["actor_rollout_ref"]["rollout"]["val_kwargs"] |= {"n": min(2, rollout.val_kwargs.n), "k": []}
    tree["actor_rollout_ref"]["rollout"]["carry_over"]["groups"] = None
    return prompts


def _lengths(config: Config, tree: dict[str, Any]) -> None:
    if not generates(config):
        return
    settings, buffer = config.environment, tree["reward"]["overlong_buffer"]
    limit = min(config.data.max_response_length, EPISODE if settings.answers else RESPONSE)
    tree["data"]["max_response_length"] = limit
    buffer["len"] = min(buffer["len"], limit // 2)
    tree["environment"] |= {
        "max_observation_length": min(settings.max_observation_length, limit // 4),
        "max_turns": min(3, settings.max_turns),
        "timeout": min(settings.timeout, 60 * config.trainer.timeout_minutes / 2),
    }


def limit_tokens(tree: dict[str, Any], prompt: int, response: int, row: int) -> None:
    """Set limits that the rows keep to, with micro-batches that hold hardly more than a row.

    Args:
        prompt, response: tokens at most, of a sequence.
        row: tokens at most of all the sequences of a row.
    """
    tree["data"] |= {"max_prompt_length": prompt, "max_response_length": response}
    most = max(row, prompt + response)
    for section in (tree["actor_rollout_ref"]["actor"], *(tree[name] for name in _OTHERS)):
        section["ppo_max_token_len_per_gpu"] = most
    rollout = tree["actor_rollout_ref"]["rollout"]
    rollout["max_num_batched_tokens"] = min(rollout["max_num_batched_tokens"], max(most, 256))


def vary_rewards(config: Config, reward: dict[str, Any], name: str) -> bool:
    """Add a function to the score that gives each response another; returns whether that can be.

    Args:
        reward: the section's values.
        name: of the function, as `reward.name` takes it.
    """
    settings = config.reward
    if config.environment.answers or settings.batch_size is not None or settings.names == [BY_MODEL]:
        return False
    parts: Mapping[str, Any] = reward["parts"] or {"configured": {"name": settings.name, "args": settings.args}}
    reward |= {"name": "exact_match", "args": {}, "parts": {**parts, "rehearsal": {"name": name}}}
    return True
