"""What makes a run the run that it is: recorded in its checkpoints, compared when one goes on, and between ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megarl.config import Config
from megarl.data.examples import Example
from megarl.data.prompts import PromptSet
from megarl.flow_kinds import format_of, generates
from megarl.trainer.needs import needs_of
from megarl.trainer.other_models import other_roles
from megarl.trainer.resuming.digests import digest, file_digest, tokenizer_digest
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.trainer.inputs import Inputs

Identity = dict[str, dict[str, Any]]
"""Part of a run -> what it consists of, by name; JSON values."""


def identity_of(inputs: Inputs) -> Identity:
    """The parts that `trainer.resume_allow` names. Where files lie is no part of it, what they hold is."""
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
        "reward": {**_reward(config), **_environment(config)},
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
    """What answers the policy, if anything does."""
    settings = config.environment
    if not settings.answers:
        return {}
    keys = ("name", "args", "agent", "max_turns", "max_observation_length", "role")
    code = _user_code({"environment file": settings.name or settings.agent})
    return {**{f"environment.{key}": getattr(settings, key) for key in keys}, **code}


def _data(inputs: Inputs) -> dict[str, Any]:
    """The training prompts, and what their order depends on."""
    data, prompts = inputs.config.data, inputs.train_prompts
    said: dict[str, Any] = {"rows": len(prompts), "contents": rows_digest(prompts)}
    if data.weights:
        said["data.weights"] = data.weights
    if data.curriculum:
        file = file_digest(data.curriculum.rpartition(":")[0])
        said |= {"data.curriculum": "a function" if file else data.curriculum, "file": file}
    return said


def _without_generation(inputs: Inputs) -> Identity:
    """Of a run that learns from answers in its data: what belongs to generation and to rewards is no part of it."""
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
    return {
        "model": {**asdict(inputs.arch), "dtype": model.dtype},
        "tokenizer": {
            "files": tokenizer_digest(model.tokenizer_path or model.path),
            **_flat(config.data.apply_chat_template_kwargs, "data.apply_chat_template_kwargs."),
        },
        "seed": {"data.seed": config.data.seed, "data.shuffle": config.data.shuffle},
        "flow": {"trainer.flow": config.trainer.flow, "file": _code(config.trainer.flow)},
    }


def _user_code(values: Mapping[str, str]) -> dict[str, str]:
    """Digests of the files that keys name, path/to/file.py:function."""
    found = {key: _code(value) for key, value in values.items()}
    return {key: code for key, code in found.items() if code}


def _as_read_back(identity: Identity) -> Identity:
    """No tuples."""
    plain: Identity = json.loads(json.dumps(identity))
    return plain


def differences(recorded: Identity, now: Identity, *, ignore: Iterable[str] = ()) -> dict[str, str]:
    """Part -> how it differs, in words, of the parts that both have."""
    recorded, found = _as_recorded_now(recorded, now), {}
    for part in recorded.keys() & now.keys() - set(ignore):
        old, new = recorded[part], now[part]
        changed = [key for key in (*old, *(k for k in new if k not in old)) if old.get(key) != new.get(key)]
        if changed:
            found[part] = ", ".join(_change(key, old.get(key), new.get(key)) for key in changed[:4])
            if len(changed) > 4:
                found[part] += f" and {len(changed) - 4} more"
    return {part: found[part] for part in now if part in found}


def _as_recorded_now(recorded: Identity, now: Identity) -> Identity:
    """Keys that were not recorded then had their defaults, or are as now; an architecture once said only whether its
    output layer is the embedding."""
    recorded = dict(recorded)
    if "algorithm" in recorded:
        defaults = {key: value for key, value in _algorithm(Config()).items() if key in now.get("algorithm", {})}
        recorded["algorithm"] = {**defaults, **recorded["algorithm"]}
    if "data.gen_batch_size" in now.get("batch", {}) and "batch" in recorded:  # the sampler has recorded it
        recorded["batch"] = {"data.gen_batch_size": now["batch"]["data.gen_batch_size"], **recorded["batch"]}
    model = dict(recorded.get("model", {}))
    if "tie_word_embeddings" in model:
        output = "tied" if model.pop("tie_word_embeddings") else "lm"
        recorded["model"] = {**model, "output": output}
    return recorded


def _other_models(config: Config) -> dict[str, Any]:
    """The critic, whose state is in the checkpoint, and the models that scores and targets come from."""
    found = {}
    for other in other_roles(config, needs_of(config)):
        model = other.model
        file = os.path.join(model.path, "config.json")
        found[other.name] = "random" if model.random_init else file_digest(file) if model.path else "as the policy"
    return found


def _reward(config: Config) -> dict[str, Any]:
    """What decides on scores. A key that is not used is left out, as in checkpoints from before there was one."""
    reward = config.reward
    found: dict[str, Any] = {"reward.name": reward.name, "file": _code(reward.name)}
    found |= _flat(reward.args, "reward.args.")
    if reward.batch_size is not None:
        found["reward.batch_size"] = reward.batch_size
    for label, part in reward.parts.items():
        key = f"reward.parts.{label}"
        found |= {f"{key}.name": part.name, f"{key}.weight": part.weight, **_flat(part.args, f"{key}.args.")}
        if part.data_sources:
            found |= {f"{key}.data_sources": sorted(part.data_sources), "data.source_key": config.data.source_key}
        if digest := _code(part.name):
            found[f"{key}.file"] = digest
    return found


def _code(name: str) -> str | None:
    """The digest of the file in path/to/file.py:function."""
    return file_digest(name.rpartition(":")[0])


def _algorithm(config: Config) -> dict[str, Any]:
    """What decides on advantages and loss."""
    actor = config.actor_rollout_ref.actor
    loss = ("clip_low", "clip_high", "clip_ratio_c", "loss_agg_mode", "entropy_coeff", "use_kl_loss")
    kl_loss = ("kl_loss_coef", "kl_loss_type") if actor.use_kl_loss else ()
    values = {
        **_flat(config.algorithm.model_dump(), "algorithm."),
        **{f"actor.{key}": getattr(actor, key) for key in (*loss, *kl_loss)},
        **_flat(actor.policy_loss.model_dump(), "actor.policy_loss."),
        "rollout.carry_over": config.groups_under_way if config.actor_rollout_ref.rollout.carry_over.enable else 0,
        **_flat(config.reward.overlong_buffer.model_dump(), "reward.overlong_buffer."),
        "trainer.critic_warmup": config.trainer.critic_warmup,
        **{f"critic.{key}": getattr(config.critic, key) for key in ("cliprange_value", "lam", "loss_agg_mode")},
        **{f"critic.{key}": getattr(config.critic, key) for key in ("ppo_mini_batch_size", "ppo_epochs")},
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def configuration_digest(config: Config) -> str:
    return digest([json.dumps(config.model_dump(), sort_keys=True).encode()])


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Of token ids and rows, in order."""
    return digest(
        json.dumps([prompt.token_ids, prompt.row], sort_keys=True, default=str).encode() for prompt in prompts
    )


def rows_digest(prompts: Sequence[Prompt]) -> str:
    """The same from what is known of rows that lie on disk: "rows " before it, since it is another one."""
    return f"rows {prompts.digest}" if isinstance(prompts, PromptSet) else prompts_digest(prompts)


def as_recorded_before(identity: Identity, recorded: Identity, inputs: Inputs) -> Identity:
    """The identity as a checkpoint has it whose rows were digested with their tokens; that takes a look at each."""
    then, prompts = recorded.get("data", {}).get("contents", ""), inputs.train_prompts
    if not isinstance(prompts, PromptSet) or then.startswith("rows "):
        return identity
    if recorded["data"].get("rows") != len(prompts):
        return identity
    return {**identity, "data": {**identity["data"], "contents": prompts_digest(prompts)}}


def examples_digest(examples: Sequence[Example]) -> str:
    """Of token ids, in order; and of what pairs and labels add to them."""
    return digest(json.dumps(_recorded(example)).encode() for example in examples)


def _recorded(example: Example) -> Any:
    """A prompt with its answer is recorded as the two alone."""
    (first, *more), label = example.sequences, example.label
    return [*example.sequences, label] if more or label else first


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _change(key: str, old: Any, new: Any) -> str:
    if key in ("files", "file", "contents", "demonstrations") or key.endswith(".file"):
        return f"other {key}"
    return f"{key} {json.dumps(old)} -> {json.dumps(new)}"
