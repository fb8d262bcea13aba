"""Makes a run need less GPU memory after it ran out: the key that decides how much the failing phase holds is halved.

Micro-batches sum up to the same gradient however small they are. RUN/less_memory.json remembers the keys, for later
starts in the folder: {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192}. Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from typing import Any

from megarl.config import Config
from megarl.flow_kinds import compared_together
from megarl.phases import Phase
from megarl.telemetry.lines import no_link, rewrite

FILE = "less_memory.json"
LEAST_SHARE = 0.1
"""Share of a GPU below which `rollout.gpu_memory_utilization` is not lowered."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_SECTIONS: Mapping[str, str] = {
    Phase.UPDATE: _ACTOR,
    Phase.LOG_PROBS: _ACTOR,
    Phase.REF: _ACTOR,
    Phase.VALUES: "critic",
    Phase.UPDATE_CRITIC: "critic",
    Phase.TEACHER: "teacher",
    Phase.REWARD: "reward_model",
}
_MAX_NUM_SEQS, _SHARE = f"{_ROLLOUT}.max_num_seqs", f"{_ROLLOUT}.gpu_memory_utilization"
_KEYS = {_MAX_NUM_SEQS, _SHARE} | {
    f"{section}.{key}"
    for section in _SECTIONS.values()
    for key in ("ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
}


def smaller(config: Config, phase: str) -> tuple[str, float]:
    """Return a key with the value with which the phase holds less.

    Raises:
        ValueError: no key makes the phase smaller, or it is as small as can be: one sequence.
    """
    key, least = _key(config, phase)
    value = value_of(config, key)
    less = max(least, value * 0.75 if key == _SHARE else int(value) // 2)
    if less >= value:
        raise ValueError(f"{key} = {value:g} cannot be lower: that is {_what_is_least(key)}")
    return key, less


def remembered(run_dir: str, config: Config) -> dict[str, float]:
    """Read the keys that earlier starts lowered, those whose values are lower than the configuration's.

    Raises:
        ValueError: the file holds something else.
    """
    path = os.path.join(run_dir, FILE)
    try:
        with open(path, encoding="utf-8", opener=no_link) as f:
            text = f.read(2**16)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise ValueError(f"{path} cannot be read ({e.strerror}); delete it") from e
    values: Any = None
    with suppress(ValueError, RecursionError):
        values = json.loads(text)
    if not isinstance(values, dict) or not all(
        key in _KEYS and type(value) in (int, float) and 0 < value < 2**63 for key, value in values.items()
    ):
        raise ValueError(f"{path} does not hold what a run lowered when GPU memory ran out; delete it")
    return {key: value for key, value in values.items() if value < value_of(config, key)}


def remember(run_dir: str, values: Mapping[str, float]) -> None:
    """Add lowered keys to those that the folder remembers. Raises OSError."""
    path, known = os.path.join(run_dir, FILE), {}
    with suppress(OSError, ValueError), open(path, encoding="utf-8", opener=no_link) as f:
        known = json.load(f)
    os.makedirs(run_dir, mode=0o700, exist_ok=True)
    rewrite(path, (json.dumps({**known, **values}) + "\n").encode())


def as_overrides(values: Mapping[str, float]) -> list[str]:
    """Write keys as the command line takes them."""
    return [f"{key}={value:.10g}" for key, value in values.items()]


def value_of(config: Config, key: str) -> float:
    """Return the number that a configuration has for a dotted key."""
    value: float = reduce(getattr, key.split("."), config)  # type: ignore[assignment]
    return value


def _key(config: Config, phase: str) -> tuple[str, float]:
    """Return the key that decides how much a phase holds, and its least value."""
    if phase in (Phase.GENERATE, Phase.VALIDATE):
        return _MAX_NUM_SEQS, 1
    if phase in (Phase.OFFLOAD, Phase.RESHARD):
        return _SHARE, LEAST_SHARE
    if phase not in _SECTIONS:
        raise ValueError(f"no key makes {f'the phase {phase}' if phase else 'what it held'} smaller")
    section = _SECTIONS[phase]
    batching: Any = reduce(getattr, section.split("."), config)
    together = compared_together(config)
    if batching.use_dynamic_bsz:
        least = batching.least_tokens(together * config.data.max_sequence_length, batching.megatron)
        return f"{section}.ppo_max_token_len_per_gpu", least
    return f"{section}.ppo_micro_batch_size_per_gpu", together


def _what_is_least(key: str) -> str:
    if key == _SHARE:
        return "the least share that holds an engine"
    return "one sequence" if key == _MAX_NUM_SEQS else "one sequence, or one pair"
