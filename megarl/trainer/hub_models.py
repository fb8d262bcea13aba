"""Puts a run's models of the Hugging Face Hub into this node's cache, and their commits into the configuration.

The launcher does it before it starts the ranks, which make no request. Under torchrun the first rank finds the commits,
and the first rank of each node fetches the files; the others wait for them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from megarl.checkpoint.folder import checkpoints
from megarl.checkpoint.hub_download import Wanted, fetch, pin
from megarl.config import Config
from megarl.config.fields import ModelFiles
from megarl.config.load import CONFIG_FILE, read_yaml
from megarl.config.trainer import TrainerConfig
from megarl.hub import HubModel, hidden_by_folder, hub_model
from megarl.plain import plain
from megarl.trainer.needs import needs_of
from megarl.trainer.other_models import other_roles

POLL_SECONDS, WORD_SECONDS = 0.2, 60.0


@dataclass(frozen=True, kw_only=True)
class _Mention:
    """Describes a model of the Hub that a key of the configuration names."""

    section: str
    name: str
    model: HubModel
    wanted: Wanted
    own_tokenizer: bool

    @property
    def key(self) -> str:
        return f"{self.section}.model.{self.name}"


def fetch_models(config: Config, *, config_only: bool = False, alone: bool = False) -> Config:
    """Return the configuration with the commit of each model of the Hub, whose files are in the cache then.

    Args:
        config_only: fetch `config.json` alone.
        alone: this process is no rank, whatever the environment says.

    Raises:
        ValueError: a model cannot be had, in one line that says what to do.
    """
    mentions = list(_mentions(config, config_only))
    if alone or "RANK" not in os.environ:
        _say_hidden(config)
        pins = _pins(mentions, _recorded(mentions, config.trainer))
        _fetch(mentions, pins)
    elif not mentions:
        return config
    elif "MEGARL_LAUNCHER" not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        pins = _pins_of_all_ranks(mentions, config.trainer)
    else:
        pins = _pins(mentions, {}, offline=True)
        _fetch(mentions, pins, offline=True)
    return _with_pins(config, mentions, pins)


def pinned_keys(config: Config) -> list[str]:
    """List `key=value` for each model of the Hub, so that ranks take the same commits."""
    return [f"{mention.key}={mention.model}" for mention in _mentions(config, config_only=False)]


def _mentions(config: Config, config_only: bool) -> Iterator[_Mention]:
    policy = config.actor_rollout_ref.model
    models: dict[str, tuple[ModelFiles, bool]] = {
        "actor_rollout_ref": (policy, not (policy.random_init or policy.checkpoint))
    }
    for role in other_roles(config, needs_of(config)):
        models[role.kind.name] = (role.settings.model, not role.settings.model.random_init)
    for section, (files, with_weights) in models.items():
        content = Wanted.CONFIG if config_only else Wanted.WEIGHTS if with_weights else Wanted.TOKENIZER
        own_tokenizer = section == "actor_rollout_ref" and not files.tokenizer_path and not config_only
        if model := hub_model(files.path):
            yield _Mention(section=section, name="path", model=model, wanted=content, own_tokenizer=own_tokenizer)
        if not config_only and (model := hub_model(files.tokenizer_path)):
            name = "tokenizer_path"
            yield _Mention(section=section, name=name, model=model, wanted=Wanted.TOKENIZER, own_tokenizer=True)


def _pins(
    mentions: Sequence[_Mention], recorded: Mapping[str, HubModel], *, offline: bool = False
) -> dict[str, HubModel]:
    """Find the commits; by key."""
    commits: dict[HubModel, HubModel] = {}
    pins: dict[str, HubModel] = {}
    for mention in mentions:
        earlier, model = recorded.get(mention.key), mention.model
        if not model.is_pinned and earlier is not None and earlier.repository == model.repository:
            pins[mention.key] = earlier
            _say(f"{mention.key}: the run goes on with {earlier}; to change that, name another commit")
            continue
        if not (model.is_pinned or offline or model in commits):
            _say(f"{mention.key}: there is no folder {model.repository} here: it is looked for on the Hugging Face Hub")
        with _named(mention):
            pins[mention.key] = commits[model] = commits.get(model) or pin(model, offline=offline)
    return pins


def _fetch(mentions: Sequence[_Mention], pins: Mapping[str, HubModel], *, offline: bool = False) -> None:
    for mention in mentions:
        with _named(mention):
            fetch(pins[mention.key], mention.wanted, offline=offline, own_tokenizer=mention.own_tokenizer)


@contextmanager
def _named(mention: _Mention) -> Iterator[None]:
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{mention.key}: {str(e).removeprefix('actor_rollout_ref.model.path: ')}") from e


def _with_pins(config: Config, mentions: Sequence[_Mention], pins: Mapping[str, HubModel]) -> Config:
    for mention in mentions:
        section = getattr(config, mention.section)
        model = section.model.model_copy(update={mention.name: str(pins[mention.key])})
        config = config.model_copy(update={mention.section: section.model_copy(update={"model": model})})
    return config


def _recorded(mentions: Sequence[_Mention], trainer: TrainerConfig) -> dict[str, HubModel]:
    """Read the commits that a run began with, by key; none if it begins afresh, or names all its commits itself."""
    if trainer.resume_mode == "disable" or all(mention.model.is_pinned for mention in mentions):
        return {}
    run_dir = trainer.run_dir
    if trainer.resume_mode == "resume_path":
        run_dir = os.path.dirname(os.path.dirname(os.path.abspath(trainer.resume_from_path)))
    elif not checkpoints(run_dir):
        return {}
    try:
        tree = read_yaml(os.path.join(run_dir, CONFIG_FILE))
    except Exception:  # of a record that is gone, or that a person has changed; the parsers raise anything
        return {}
    models = {}
    for section in ("actor_rollout_ref", "critic", "teacher", "reward_model"):
        for name in ("path", "tokenizer_path"):
            value: Any = OmegaConf.select(tree, f"{section}.model.{name}")
            model = hub_model(value) if isinstance(value, str) else None
            if model is not None and model.is_pinned:
                models[f"{section}.model.{name}"] = model
    return models


def _pins_of_all_ranks(mentions: Sequence[_Mention], trainer: TrainerConfig) -> dict[str, HubModel]:
    """Have the first rank find the commits, and one rank of each node fetch the files. Every rank calls it.

    Raises:
        ValueError: on every rank, if that rank could not.
    """
    from megarl.parallel.meeting import job_store  # imports torch

    store, place = job_store(), f"megarl/hub/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def once(key: str, does: bool, work: Any) -> str:
        """Do a piece of work on one rank; returns its result on all."""
        if not does:
            return _awaited(store, key)
        try:
            result = work()
        except ValueError as e:
            store.set(key, json.dumps({"refused": str(e)}))
            raise
        store.set(key, json.dumps({"result": result}))
        return str(result)

    def commits() -> str:
        pins = _pins(mentions, _recorded(mentions, trainer))
        return json.dumps({key: str(model) for key, model in pins.items()})

    def files() -> str:
        _fetch(mentions, pins)
        return "there"

    commits_by_key = json.loads(once(f"{place}/commits", os.environ["RANK"] == "0", commits))
    pins = {key: model for key, value in commits_by_key.items() if (model := hub_model(value)) is not None}
    once(f"{place}/node {os.environ.get('GROUP_RANK', '0')}", os.environ["LOCAL_RANK"] == "0", files)
    return pins


def _awaited(store: Any, key: str) -> str:
    """Wait for another rank's result: torchrun ends this one if that rank ends."""
    next_word = time.monotonic() + WORD_SECONDS
    while not store.check([key]):
        if time.monotonic() >= next_word:
            next_word += WORD_SECONDS
            _say(f"rank {os.environ['RANK']} waits for the rank that fetches models from the Hub")
        time.sleep(POLL_SECONDS)
    answer = json.loads(store.get(key))
    if "refused" in answer:
        raise ValueError(answer["refused"])
    return str(answer["result"])


def _say_hidden(config: Config) -> None:
    for model in (config.actor_rollout_ref.model, config.critic.model, config.teacher.model, config.reward_model.model):
        if hidden := hidden_by_folder(model.path):
            _say(f"{hidden} is the folder of that name here, and not the Hub's model, which is in the cache, too")


def _say(text: str) -> None:
    print(f"megarl: {plain(text)}", file=sys.stderr, flush=True)
