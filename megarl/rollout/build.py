"""The generation engine that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megarl.config.policy import Rollout
from megarl.models.architecture import Architecture
from megarl.parallel.generation_groups import GenerationGroups
from megarl.registry import Registry
from megarl.rollout.engine import Engine, Share
from megarl.rollout.stop_strings import Decode

ENGINES: Registry[Callable[..., Engine]] = Registry(
    "rollout.name",
    "class",
    lazy={
        "native": "megarl.rollout.native.engine:NativeEngine",
        "vllm": "megarl.rollout.vllm.engine:VLLMEngine",
    },
)
"""A class of the user's is made with the arguments of `NativeEngine`."""


def build_engine(
    rollout: Rollout,
    arch: Architecture,
    groups: GenerationGroups,
    *,
    path: str,
    dtype: torch.dtype,
    max_model_len: int,
    decode: Decode,
    share: Share,
) -> Engine:
    """This rank's part of its replica's engine. Every rank calls it.

    Args:
        path: the model's Hugging Face folder.
        dtype: of weights, activations and KV cache.
        max_model_len: tokens of the longest prompt and response together.
        decode: token ids to text, for stop strings.
        share: gives the weights that are not to be the engine's own.
    """
    engine = ENGINES.load(rollout.name)
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "decode": decode,
        "share": share,
    }
    if rollout.name == "vllm":
        return engine(arch, path=path, groups=groups, sleeps=rollout.free_cache_engine, **settings)
    return engine(arch, tp_group=groups.tp, device=groups.world.device, **settings)
