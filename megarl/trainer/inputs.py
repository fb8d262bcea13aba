"""Reads the inputs of a run from disk. No Megatron: a launcher can check a run with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.checkpoint.huggingface_folder import end_tokens, further_layers_remark
from megarl.config import Config
from megarl.data.example_set import ExampleSet, load_examples
from megarl.data.examples import Example
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.flow_kinds import format_of, generates, trains
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.families.of_user import use_family
from megarl.rewards import Reward
from megarl.rewards.parts import Part, parts_of, scorers_of
from megarl.trainer.digests import tokenizer_digest
from megarl.trainer.trust import unsafe_remarks
from megarl.trainer.unread_keys import unread
from megarl.types import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Holds everything that a run reads before any rank talks to another.

    Attributes:
        stop_tokens: ids that end a response: the tokenizer's end token, those of the model's folder and those of
            `rollout.stop_token_ids`, without repeats.
        train_prompts, val_prompts: rows to answer; empty where `data.format` is another, the former also where nothing
            is trained.
        demonstrations: what the warm-up learns from; empty without a warm-up.
        rewards: the functions that scores are sums of; empty if a reward model scores, or nothing is scored.
        train_examples, val_examples: rows with answers to learn from; empty where `data.format` is prompts.
        remarks: what is allowed, but may not be meant; for the start of the run.
    """

    config: Config
    arch: Architecture
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    rewards: tuple[Part, ...]
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    demonstrations: Sequence[Example]
    train_examples: Sequence[Example] = field(default_factory=list)
    val_examples: Sequence[Example] = field(default_factory=list)
    remarks: tuple[str, ...] = ()

    @property
    def train_rows(self) -> int:
        """Count the rows of `data.train_files`, whatever they are."""
        return len(self.train_prompts) or len(self.train_examples)

    @property
    def total_steps(self) -> int:
        """Count the steps of the whole run, without those of a warm-up."""
        trainer, data = self.config.trainer, self.config.data
        return trainer.total_training_steps or trainer.total_epochs * (self.train_rows // data.train_batch_size)

    @property
    def optimizer_steps(self) -> int:
        """Count the optimizer steps of the policy in an RL run."""
        actor = self.config.actor_rollout_ref.actor
        trained = max(1, self.total_steps - self.config.trainer.critic_warmup)
        return trained * (self.config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs

    @property
    def critic_steps(self) -> int:
        """Count the optimizer steps of the critic in the whole run."""
        config = self.config
        per_step = config.data.train_batch_size // config.critic_mini_batch_size
        return self.total_steps * per_step * config.critic.ppo_epochs

    @property
    def max_sequence_length(self) -> int:
        """Count the tokens of the longest prompt and response together."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    def describe_stop_tokens(self) -> str:
        """List the stop tokens for people: "<|im_end|> (151645), <|endoftext|> (151643)"."""
        return ", ".join(f"{self.tokenizer.token(i)} ({i})".lstrip() for i in self.stop_tokens)

    def sampling(self, *, validation: bool) -> SamplingParams:
        """Return how tokens are drawn, in training or in a validation."""
        rollout = self.config.actor_rollout_ref.rollout
        source = rollout.val_kwargs if validation else rollout
        return SamplingParams(
            temperature=source.temperature,
            top_p=source.top_p,
            top_k=source.top_k,
            max_tokens=self.config.data.max_response_length,
            stop_token_ids=self.stop_tokens,
            stop=tuple(rollout.stop),
            routed_experts=rollout.enable_rollout_routing_replay and not validation,
        )


_NO_ROWS: dict[str, Any] = {"rewards": (), "train_prompts": [], "val_prompts": [], "demonstrations": []}


def read_inputs(config: Config, *, reward: Reward | None = None) -> Inputs:
    """Read everything that a run needs from disk.

    Args:
        reward: scores responses, instead of the one that the configuration names; one that is no `named` function is
            called in the ranks themselves, one response after another.

    Raises:
        ValueError: what is missing or wrong, and what to change, in one line.
    """
    model = config.actor_rollout_ref.model
    use_family(model.family)
    arch = read_architecture(model.folder)
    tokenizer = _tokenizer(config)
    rewards = parts_of(config.reward, reward) if generates(config) else ()
    rows = _prompts(config, tokenizer, rewards) if generates(config) else _examples(config, tokenizer)
    rows["remarks"] += (*unsafe_remarks(config), *(unread(config) if trains(config) else ()))
    rows["remarks"] += tuple(further_layers_remark(model.folder))
    return Inputs(
        config=config,
        arch=arch,
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(config, arch, tokenizer),
        rewards=rewards,
        **rows,
    )


def read_model(config: Config) -> Inputs:
    """Read what belongs to the model: its architecture, its tokenizer and its stop tokens, and no rows.

    Raises:
        ValueError: as `read_inputs`.
    """
    model = config.actor_rollout_ref.model
    use_family(model.family)
    arch = read_architecture(model.folder)
    tokenizer = _tokenizer(config)
    stop_tokens = _stop_tokens(config, arch, tokenizer)
    return Inputs(config=config, arch=arch, tokenizer=tokenizer, stop_tokens=stop_tokens, **_NO_ROWS)


def _tokenizer(config: Config) -> Tokenizer:
    model, data = config.actor_rollout_ref.model, config.data
    return load_tokenizer(
        model.tokenizer,
        data.apply_chat_template_kwargs,
        read_special_tokens=data.read_special_tokens,
    )


def _tokenizer_key(config: Config) -> str:
    """Digest what the tokens of a row depend on beside the row."""
    model, arguments = config.actor_rollout_ref.model, config.data.apply_chat_template_kwargs
    files = tokenizer_digest(model.tokenizer)
    return f"{files} {json.dumps(arguments, sort_keys=True)}" if arguments else files


def _prompts(config: Config, tokenizer: Tokenizer, rewards: Sequence[Part]) -> dict[str, Any]:
    """Return the fields of `Inputs` that hold rows, for a run that generates.

    Args:
        rewards: that must be able to score responses to them.
    """
    data = config.data
    read = partial(
        load_prompts,
        tokenizer=tokenizer,
        scorers=scorers_of(rewards),
        tokenizer_key=_tokenizer_key(config),
    )
    train = read(data, data.train_files) if trains(config) else None
    held_out = read(data, data.val_files, what="data.val_files") if data.val_files else None
    remarks = train.remarks if train is not None else ()
    if held_out is not None:
        remarks += held_out.remarks
    if held_out is not None and train is not None and not config.environment.answers:  # which may read other columns
        remarks += _remarks(held_out.in_common(train), len(held_out), "prompts")
    shown = _demonstrations(config, tokenizer) if config.warmup.total_training_steps else None
    return {
        "train_prompts": [] if train is None else train,
        "val_prompts": [] if held_out is None else held_out,
        "demonstrations": [] if shown is None else shown,
        "remarks": (*remarks, *(f"warm-up: {remark}" for remark in (() if shown is None else shown.remarks))),
    }


def _examples(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of `Inputs` that hold rows, for a run that learns from answers in its data."""
    data, format = config.data, format_of(config)
    for key in ("source", "filter", "curriculum", "drop_duplicates", "weights"):
        if getattr(data, key):
            raise ValueError(f"data.{key} is for prompts, and trainer.flow = {config.trainer.flow} reads {format}")
    read = partial(load_examples, data, format, tokenizer=tokenizer, tokenizer_key=_tokenizer_key(config))
    train = read(data.train_files)
    remarks, held_out = train.remarks, read(data.val_files, what="data.val_files") if data.val_files else None
    if held_out is not None:
        remarks += (*held_out.remarks, *_remarks(held_out.in_common(train), len(held_out), "examples"))
    return {
        "train_prompts": [],
        "val_prompts": [],
        "demonstrations": [],
        "train_examples": train,
        "val_examples": [] if held_out is None else held_out,
        "remarks": remarks,
    }


def _stop_tokens(config: Config, arch: Architecture, tokenizer: Tokenizer) -> tuple[int, ...]:
    """List the tokens that end a response. A chat model may end its turn with another token than the tokenizer's, which
    its generation_config.json names."""
    model, configured = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.stop_token_ids
    for i in configured:
        if not 0 <= i < arch.vocab_size:
            raise ValueError(f"rollout.stop_token_ids: {i} is no token: the model's vocab_size is {arch.vocab_size}")
    folders = dict.fromkeys((model.folder, model.tokenizer))
    end_ids = [i for folder in folders for i in end_tokens(folder, arch.vocab_size)]
    stop_tokens = tuple(dict.fromkeys((tokenizer.eos_id, *end_ids, *configured)))
    for text in config.actor_rollout_ref.rollout.stop:
        for name, i in tokenizer.special_tokens.items():
            if i not in stop_tokens and name in text:
                raise ValueError(
                    f"rollout.stop: {name} in {text!r} is a special token, which leaves no text in a response, so that "
                    f"the string would never be found; name the token instead: rollout.stop_token_ids=[{i}]"
                )
    return stop_tokens


def _remarks(both: int, held_out: int, noun: str) -> tuple[str, ...]:
    if not both:
        return ()
    return (f"remark: {both} of the {held_out} {noun} of data.val_files are training {noun}",)


def _demonstrations(config: Config, tokenizer: Tokenizer) -> ExampleSet:
    files, what = config.warmup.train_files, "warmup.train_files"
    if not files:
        files, what = config.data.train_files, "data.train_files"
    return load_examples(config.data, "demonstrations", files, tokenizer, what, tokenizer_key=_tokenizer_key(config))
