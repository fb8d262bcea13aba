"""The generation engine that the configuration names."""

from __future__ import annotations

import torch

from megarl.config.schema import Rollout
from megarl.models.architecture import Architecture
from megarl.parallel.groups import Groups
from megarl.rollout.engine import Adopt, Engine
from megarl.rollout.stop_strings import Decode


def build_engine(
    rollout: Rollout,
    arch: Architecture,
    groups: Groups,
    *,
    path: str,
    dtype: torch.dtype,
    max_model_len: int,
    decode: Decode,
    adopt: Adopt,
) -> Engine:
    """This rank's part of its replica's engine. Every rank calls it.

    Args:
        path: the model's Hugging Face folder.
        dtype: of weights, activations and KV cache.
        max_model_len: tokens of the longest prompt and response together.
        decode: token ids to text, for stop strings.
        adopt: gives the weights that are not to be the engine's own.
    """
    if rollout.name == "vllm":
        from megarl.rollout.vllm.engine import VLLMEngine  # an optional dependency, and slow to import

        return VLLMEngine(
            arch,
            path=path,
            groups=groups,
            dtype=dtype,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=max_model_len,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            sleeps=rollout.free_cache_engine,
            decode=decode,
            adopt=adopt,
        )

    from megarl.rollout.native.engine import NativeEngine

    return NativeEngine(
        arch,
        tp_group=groups.generation_tp if groups.generation.tp > 1 else None,
        dtype=dtype,
        device=groups.device,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        max_model_len=max_model_len,
        decode=decode,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        adopt=adopt,
    )
