"""Identifies a run by its model, data and settings.

The identity is recorded in checkpoints and compared when a run goes on from one, and between ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megarl.config import Config
from megarl.config.secrets import without_secrets
from megarl.data.example_set import ExampleSet
from megarl.data.examples import Example
from megarl.data.prompts import PromptSet
from megarl.flow_kinds import FLOWS, format_of, generates
from megarl.models.architecture import Architecture
from megarl.trainer.digests import code_digest, digest, file_digest, tokenizer_digest
from megarl.trainer.inputs import Inputs
from megarl.trainer.needs import needs_of
from megarl.trainer.other_models import other_roles
from megarl.types import Prompt

Identity = dict[str, dict[str, Any]]
"""Part of a run -> its values by key; JSON values."""


def identity_of(inputs: Inputs) -> Identity:
    """Collect the parts that `trainer.resume_allow` names. Files count by their contents, not by their paths."""
    config, roles = inputs.config, inputs.config.actor_rollout_ref
    data, actor, rollout = config.data, roles.actor, roles.rollout
    if not generates(config):
        return _without_generation(inputs)
    identity: Identity = {
        **_of_every_run(inputs),
        "data": _data(inputs),
        "warmup": {},
        "batch": {
            "data.train_batch_size": data.train_batch_size,
            "data.gen_batch_size": data.gen_batch_size,
            "data.max_response_length": data.max_response_length,
            "actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
            "actor.ppo_epochs": actor.ppo_epochs,
            "rollout.n": rollout.n,
        },
        "algorithm": {
            **_algorithm(config),
            **{f"rollout.{key}": getattr(rollout, key) for key in ("temperature", "top_p", "top_k")},
            "stop tokens": sorted(inputs.sampling(validation=False).stop_token_ids),
            "rollout.stop": sorted(rollout.stop),
        },
        "reward": {**_reward(inputs), **_environment(config)},
        "roles": {"reference": config.needs_reference, **_other_models(config)},
    }
    files = {
        "estimator file": config.algorithm.adv_estimator,
        "loss file": actor.policy_loss.loss_mode,
        "preference file": config.algorithm.preference.loss_mode,
    }
    identity["algorithm"] |= _user_code(files)
    if config.warmup.total_training_steps:
        warmup = config.warmup.model_dump(exclude={"train_files"})
        identity["warmup"] = {**_flat(warmup, "warmup."), "demonstrations": examples_digest(inputs.demonstrations)}
    return _as_read_back(identity)


def _environment(config: Config) -> dict[str, Any]:
    """Collect the settings of the environment that answers the policy, if one does."""
    settings = config.environment
    if not settings.answers:
        return {}
    keys = ("name", "args", "agent", "max_turns", "max_observation_length", "role")
    code = _user_code({"environment file": settings.name or settings.agent})
    return {**{f"environment.{key}": getattr(settings, key) for key in keys}, **code}


def _data(inputs: Inputs) -> dict[str, Any]:
    """Describe the training prompts, and the settings of their order."""
    data, prompts = inputs.config.data, inputs.train_prompts
    values: dict[str, Any] = {"rows": len(prompts), "contents": rows_digest(prompts)}
    if data.weights:
        values["data.weights"] = data.weights
    if data.curriculum:
        file = file_digest(data.curriculum.rpartition(":")[0])
        values |= {"data.curriculum": "a function" if file else data.curriculum, "file": file}
    return values


def _without_generation(inputs: Inputs) -> Identity:
    """Collect the parts of a run that learns from answers in its data, and so has no generation and no rewards."""
    data, preference = inputs.config.data, inputs.config.algorithm.preference
    return _as_read_back(
        {
            **_of_every_run(inputs),
            "data": {
                "rows": len(inputs.train_examples),
                "contents": examples_digest(inputs.train_examples),
                "data.format": format_of(inputs.config),
            },
            "batch": {"data.train_batch_size": data.train_batch_size},
            "algorithm": {
                **_flat(preference.model_dump(), "algorithm.preference."),
                **_user_code({"preference file": preference.loss_mode}),
            },
        }
    )


def _of_every_run(inputs: Inputs) -> Identity:
    config, model = inputs.config, inputs.config.actor_rollout_ref.model
    flow = config.trainer.flow
    code = {"code": code_digest(FLOWS.load(flow))} if FLOWS.was_added(flow) else {}
    return {
        "model": {**_architecture(inputs.arch), "dtype": model.dtype},
        "tokenizer": {
            "files": tokenizer_digest(model.tokenizer),
            **_flat(config.data.apply_chat_template_kwargs, "data.apply_chat_template_kwargs."),
        },
        "seed": {"data.seed": config.data.seed, "data.shuffle": config.data.shuffle},
        "flow": {"trainer.flow": flow, "file": _code(flow), **code},
    }


def _architecture(arch: Architecture) -> dict[str, Any]:
    """Collect the attributes of a model; those of its layers stand beside them where all are alike."""
    model = asdict(arch)
    kinds = [(layer["attention"] | layer["mlp"], count) for layer, count in model.pop("layers")]
    if len(kinds) > 1:
        return model | {"layers": kinds}
    ((layer, count),) = kinds
    return model | {"num_layers": count} | layer


def _user_code(values: Mapping[str, str]) -> dict[str, str]:
    """Digest the files in values of the form path/to/file.py:function."""
    return {key: code for key, value in values.items() if (code := _code(value))}


def _as_read_back(identity: Identity) -> Identity:
    """Return the identity as a checkpoint gives it back: in JSON's types, and without secrets."""
    recorded: Identity = json.loads(json.dumps({part: without_secrets(values) for part, values in identity.items()}))
    return recorded


def differences(recorded: Identity, now: Identity, *, ignore: Iterable[str] = ()) -> dict[str, str]:
    """Describe how each part differs that both identities have: {"seed": "data.seed 1 -> 2"}."""
    texts = {}
    for part, new in now.items():
        if part in recorded and part not in ignore:
            old = recorded[part]
            old = {"code": new["code"], **old} if "code" in new else old  # earlier versions recorded none
            changed = [key for key in (*old, *(k for k in new if k not in old)) if old.get(key) != new.get(key)]
            if changed:
                more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
                texts[part] = ", ".join(_change(key, old.get(key), new.get(key)) for key in changed[:4]) + more
    return texts


def _other_models(config: Config) -> dict[str, Any]:
    """Digest the files of the critic, whose state is in the checkpoint, and of models that give scores and targets."""
    files = {}
    for other in other_roles(config, needs_of(config)):
        model = other.settings.model
        file = os.path.join(model.folder, "config.json")
        files[other.kind.name] = "random" if model.random_init else file_digest(file) if model.path else "as the policy"
    return files


def _reward(inputs: Inputs) -> dict[str, Any]:
    """Collect the settings that decide on scores. Unused keys are left out: recorded identities have none of them."""
    config, reward = inputs.config, inputs.config.reward
    values: dict[str, Any] = {"reward.name": reward.name, "file": _code(reward.name)}
    if closures := [part.reward.function for part in inputs.rewards if not part.reward.named]:
        values["code"] = code_digest(closures[0])
    values |= _flat(reward.args, "reward.args.")
    if reward.batch_size is not None:
        values["reward.batch_size"] = reward.batch_size
    for label, part in reward.parts.items():
        key = f"reward.parts.{label}"
        values |= {f"{key}.name": part.name, f"{key}.weight": part.weight, **_flat(part.args, f"{key}.args.")}
        if part.data_sources:
            values |= {f"{key}.data_sources": sorted(part.data_sources), "data.source_key": config.data.source_key}
        values |= _user_code({f"{key}.file": part.name})
    return values


def _code(name: str) -> str | None:
    """Digest the file in path/to/file.py:function; None for another name."""
    return file_digest(name.rpartition(":")[0])


def _algorithm(config: Config) -> dict[str, Any]:
    """Collect the settings that decide on advantages and loss."""
    actor = config.actor_rollout_ref.actor
    loss = ("clip_low", "clip_high", "clip_ratio_c", "loss_agg_mode", "entropy_coeff", "use_kl_loss")
    kl_loss = ("kl_loss_coef", "kl_loss_type") if actor.use_kl_loss else ()
    replays = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    return {
        **_flat(config.algorithm.model_dump(), "algorithm."),
        **{f"actor.{key}": getattr(actor, key) for key in (*loss, *kl_loss)},
        **_flat(actor.policy_loss.model_dump(), "actor.policy_loss."),
        **({"rollout.enable_rollout_routing_replay": True} if replays else {}),
        "rollout.carry_over": config.groups_under_way if config.actor_rollout_ref.rollout.carry_over.enable else 0,
        **_flat(config.reward.overlong_buffer.model_dump(), "reward.overlong_buffer."),
        "trainer.critic_warmup": config.trainer.critic_warmup,
        **{f"critic.{key}": getattr(config.critic, key) for key in ("cliprange_value", "lam", "loss_agg_mode")},
        **{f"critic.{key}": getattr(config.critic, key) for key in ("ppo_mini_batch_size", "ppo_epochs")},
    }


def configuration_digest(config: Config) -> str:
    return digest([json.dumps(config.model_dump(), sort_keys=True).encode()])


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Digest token ids and rows, in order."""
    return digest(
        json.dumps([prompt.token_ids, prompt.row], sort_keys=True, default=str).encode() for prompt in prompts
    )


def rows_digest(prompts: Sequence[Prompt]) -> str:
    """Digest prompts; for rows that lie on disk the digest is that of their index, after the word "rows "."""
    return f"rows {prompts.digest}" if isinstance(prompts, PromptSet) else prompts_digest(prompts)


def examples_digest(examples: Sequence[Example]) -> str:
    """Digest `Example.contents`, in order; for an `ExampleSet` the digest is known."""
    return examples.digest if isinstance(examples, ExampleSet) else digest(example.contents for example in examples)


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _change(key: str, old: Any, new: Any) -> str:
    if key in ("files", "file", "code", "contents", "demonstrations") or key.endswith(".file"):
        return f"other {key}"
    return f"{key} {json.dumps(old)} -> {json.dumps(new)}"
