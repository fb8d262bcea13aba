"""Describes vLLM's engine. Imports neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.policy import RolloutConfig
from megarl.models.architecture import Architecture
from megarl.models.sizes import layer_activations, sampler_bytes
from megarl.parallel.experts import TensorSplit
from megarl.rollout.kinds import EngineKind
from megarl.rollout.vllm.checks import (
    BLOCK_SIZE,
    VOCAB_MULTIPLE,
    check_vllm,
    check_vllm_temperature,
    check_vllm_tp,
    check_vllm_weights,
)

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine, EngineSettings


@dataclass(frozen=True, kw_only=True)
class VLLMKind(EngineKind):
    """Describes vLLM, whose external launcher makes replicas of neighbouring ranks, whatever a layout says."""

    engine: str = "megarl.rollout.vllm.engine:VLLMEngine"
    repeats: bool = False
    strided: bool = False
    block_size: int = BLOCK_SIZE
    vocab_multiple: int | None = VOCAB_MULTIPLE
    fixed_cache: bool = True
    seconds_per_token: float = 3e-6  # measured: 2 and 3

    def check(self, rollout: RolloutConfig, arch: Architecture, *, trains: bool) -> None:
        check_vllm_temperature(rollout.val_kwargs.temperature, "rollout.val_kwargs.temperature")
        if trains:
            check_vllm_temperature(rollout.temperature, "rollout.temperature")
        check_vllm_weights(arch)
        check_vllm_tp(arch, rollout.tensor_model_parallel_size)

    def check_here(self, rollout: RolloutConfig, arch: Architecture, path: str, *, on_gpu: bool) -> None:
        check_vllm(arch, path=path, tp=rollout.tensor_model_parallel_size, on_gpu=on_gpu)

    def activation_bytes(
        self, rollout: RolloutConfig, arch: Architecture, *, tp: int, itemsize: int, max_model_len: int
    ) -> int:
        split = TensorSplit.of_replica(tp, enable_expert_parallel=rollout.enable_expert_parallel)
        layer = layer_activations(arch, split, sequence_parallel=False)
        sampler = sampler_bytes(arch, max_num_seqs=rollout.max_num_seqs, itemsize=itemsize)
        return int(itemsize * rollout.max_num_batched_tokens * layer) + sampler

    def build(self, settings: EngineSettings) -> Engine:
        rollout = settings.rollout
        return self.load()(
            settings.arch,
            path=settings.path,
            groups=settings.groups,
            enable_expert_parallel=rollout.enable_expert_parallel,
            dtype=settings.dtype,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            sleeps=rollout.free_cache_engine,
            decode=settings.decode,
            share=settings.share,
        )


VLLM = VLLMKind()
