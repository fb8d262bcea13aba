"""Makes the small run of a configuration: its model, its rows and its keys, in a folder of its own."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from megarl.checkpoint.huggingface_folder import GENERATION_CONFIG, read_config
from megarl.config import Config
from megarl.config.load import build_config
from megarl.data.scan import with_answer
from megarl.data.tokenizer import has_tokenizer
from megarl.flow_kinds import generates
from megarl.models.architecture import Architecture
from megarl.rehearsal.small_keys import SENT_AWAY, limit_tokens, small_keys, vary_rewards
from megarl.rehearsal.small_model import Splits, small_config
from megarl.rehearsal.small_rows import write_rows
from megarl.rehearsal.stand_ins import VARIED, rows_of, write_tokenizer
from megarl.rewards.parts import parts_of, refusal_of, scorers_of
from megarl.rollout.kinds import engine_kind
from megarl.trainer.inputs import Inputs, read_inputs
from megarl.trainer.layouts import generation_layout, train_layout

PROMPT = 256
"""Tokens of a prompt at most; more are cut."""
_OTHERS = ("critic", "reward_model", "teacher")


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """Holds what is rehearsed.

    Attributes:
        config: of the small run.
        file: YAML with that configuration.
        differences: what the small run does otherwise than the real one, beyond being small.
    """

    config: Config
    file: str
    differences: tuple[str, ...]


class SmallRunMaker:
    """Collects the small run of a configuration in a folder."""

    def __init__(self, config: Config, folder: str, *, engine: str) -> None:
        """
        Args:
            config: in its own layout, on the ranks of the rehearsal.
            engine: name of the engine that generates.
        """
        self._config, self._folder = config, folder
        os.makedirs(folder)
        self._differences: list[str] = []
        self._tree = small_keys(config, os.path.join(folder, "run"))
        rollout = self._tree["actor_rollout_ref"]["rollout"]
        if generates(config) and rollout["name"] != engine:
            self._differences.append(f"the {engine} engine generates, in the place of {rollout['name']}")
            rollout["name"] = engine

    def make(self) -> SmallRun:
        """Write everything. Raises ValueError, in one line, for what is wrong with the run's own files."""
        self._write_models()
        self._write_rows()
        self._choose_rewards()
        self._keep_to_rows()
        if servers := [name for name in self._config.trainer.logger if name in SENT_AWAY]:
            self._differences.append(f"nothing is sent to {', '.join(servers)}")
        file = os.path.join(self._folder, "small.yaml")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as f:
            f.write(OmegaConf.to_yaml(OmegaConf.create(_escaped(self._tree))))
        return SmallRun(config=build_config(self._tree), file=file, differences=tuple(self._differences))

    def _write_models(self) -> None:
        policy = self._config.actor_rollout_ref.model
        place, vocab_size = policy.tokenizer_path or policy.path, None
        if not has_tokenizer(place):
            place = os.path.join(self._folder, "tokenizer")
            vocab_size = write_tokenizer(place, list(self._config.data.apply_chat_template_kwargs))
            self._tree["actor_rollout_ref"]["rollout"]["stop_token_ids"] = []
            self._differences.append("a tokenizer of bytes stands in for the model's, which is not here")
        self._write_model("policy", self._tree["actor_rollout_ref"]["model"], vocab_size, place)
        shared = vocab_size or read_config(policy.path)["vocab_size"]
        for name in _OTHERS:
            model = self._tree[name]["model"]
            tokenizer = model["tokenizer_path"] or model["path"]
            if name == "reward_model" and has_tokenizer(tokenizer):
                self._write_model(name, model, None, tokenizer)
            elif model["path"]:
                self._write_model(name, model, shared, place)
        if not (policy.random_init and not policy.checkpoint):
            self._differences.append("weights are random")
        self._tree["actor_rollout_ref"]["model"]["checkpoint"] = ""

    def _write_model(self, name: str, model: dict[str, Any], vocab_size: int | None, tokenizer: str) -> None:
        """Write a small model's folder, and have a section's keys name it."""
        source, folder = model["path"], os.path.join(self._folder, name)
        os.makedirs(folder)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(small_config(read_config(source), self._splits(), vocab_size, self._serves), f, indent=1)
        generation = os.path.join(source, GENERATION_CONFIG)
        if vocab_size is None and os.path.isfile(generation):  # it names the tokens that end responses
            shutil.copy(generation, folder)
        model |= {"path": folder, "tokenizer_path": os.path.abspath(tokenizer), "random_init": True}

    def _splits(self) -> Splits:
        config = self._config
        sections = (config.actor_rollout_ref.actor, config.critic, config.reward_model, config.teacher)
        layouts = [train_layout(config, section.megatron) for section in sections]
        return Splits(
            tensor=frozenset({generation_layout(config).tp, *(n for at in layouts for n in (at.tp, at.expert_tp))}),
            chunks=None if any(at.split for at in layouts) else max(at.pp * at.chunks for at in layouts),
            sequence_parallel=any(section.megatron.sequence_parallel for section in sections),
            experts=math.lcm(generation_layout(config).ep, *(layout.ep for layout in layouts)),
            heads=frozenset(at.head_splits for at in layouts),
        )

    def _serves(self, arch: Architecture) -> bool:
        """Say whether the engine can generate with a model on CPU ranks."""
        name = self._tree["actor_rollout_ref"]["rollout"]["name"]
        return refusal_of_engine(name, self._config, arch) is None

    def _write_rows(self) -> None:
        data, warmup = self._tree["data"], self._tree["warmup"]
        batch = max(data["train_batch_size"], data["gen_batch_size"] or 0)
        keys = [(data, "train_files", "data.train_files", 2 * batch), (data, "val_files", "data.val_files", 4)]
        if warmup["total_training_steps"]:
            keys.append((warmup, "train_files", "warmup.train_files", 2 * warmup["train_batch_size"]))
        missing: list[str] = []
        for section, key, what, count in keys:
            demonstrations = section is warmup
            section[key], absentees = write_rows(
                self._config, section[key], what, self._folder, count, demonstrations=demonstrations
            )
            missing += absentees
        if missing:
            self._differences.append(f"made-up rows stand in for {', '.join(dict.fromkeys(missing))}, not here")
        self._made_up = bool(missing)

    def _choose_rewards(self) -> None:
        if not generates(self._config):
            return
        reward = self._tree["reward"]
        if self._made_up and (why := self._refused_row()):
            reward |= {"name": "exact_match", "args": {}, "parts": {}}
            self._differences.append(f"exact_match scores: no made-up row will do ({why})")
        varied = os.path.join(self._folder, "varied.py")
        with open(varied, "w", encoding="utf-8") as f:
            f.write(VARIED)
        if vary_rewards(build_config(self._tree), reward, f"{varied}:score"):
            self._differences.append("a function that differs between responses is added to the score")

    def _refused_row(self) -> str:
        """Say why the rewards cannot score a made-up row; empty if they can."""
        scorers = scorers_of(parts_of(self._config.reward))
        for row in rows_of(self._config, 8):
            source = row.get(self._config.data.source_key)
            columns = with_answer(row, self._config.data.answer_key)
            if why := refusal_of(columns, source if isinstance(source, str) else "", scorers):
                return why
        return ""

    def _keep_to_rows(self) -> None:
        """Read the rows as a run does, and set the limits of tokens to what they have."""
        tree = self._tree
        tree["data"] |= {"truncation": "left", "filter_overlong_prompts": False}
        generated = generates(self._config)
        if generated:
            response = tree["data"]["max_response_length"]
            tree["data"]["max_prompt_length"] = min(PROMPT, tree["data"]["max_prompt_length"])
            tree["data"]["max_response_length"] = 2**16  # of the answers of a warm-up
        else:
            tree["data"] |= {"max_prompt_length": 2**16, "max_response_length": 2**16}
        inputs = read_inputs(build_config(tree))
        prompts, answers, rows = _tokens(inputs)
        limit_tokens(tree, prompts, max(answers, response) if generated else answers, rows)


def refusal_of_engine(name: str, config: Config, arch: Architecture) -> str | None:
    """Say why an engine cannot generate with a model on CPU ranks of this machine; None if it can."""
    policy = config.actor_rollout_ref
    try:
        engine_kind(name).check_here(policy.rollout, arch, policy.model.path, on_gpu=False)
    except ValueError as e:
        return str(e)
    return None


def _tokens(inputs: Inputs) -> tuple[int, int, int]:
    """Count the tokens of the longest prompt, the longest answer and the longest row."""
    sets = (inputs.train_prompts, inputs.val_prompts)
    prompts = [len(prompt.token_ids) for rows in sets for prompt in rows]
    examples = [*inputs.train_examples, *inputs.val_examples, *inputs.demonstrations]
    sequences = [turns for example in examples for turns in example.sequences]
    prompts += [len(first) for first, *_ in sequences]
    answers = [sum(map(len, rest)) for _, *rest in sequences]
    return max(prompts), max(answers, default=1), max((example.tokens for example in examples), default=1)


def _escaped(values: Any) -> Any:
    """Write `${` so that it is read back as it is."""
    if isinstance(values, dict):
        return {key: _escaped(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_escaped(value) for value in values]
    return values.replace("${", "\\${") if isinstance(values, str) else values
