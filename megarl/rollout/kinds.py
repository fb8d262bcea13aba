"""Describes the engines of `rollout.name`, as the rest of the program knows them before one is built. Torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megarl.config.policy import RolloutConfig
from megarl.models.architecture import Architecture
from megarl.models.sizes import BLOCK_SIZE, native_activation_bytes
from megarl.parallel.experts import TensorSplit
from megarl.registry import Registry

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine, EngineSettings


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """Holds facts of an engine for checks, prediction and layouts. The defaults are those of the native engine.

    A class of the user's may have another in its attribute `kind`.

    Attributes:
        engine: the class, or "module:class", which is imported where ranks build it.
        repeats: whether it gives the same bits for the same requests, however they come together in batches.
        strided: whether the ranks of a replica may be apart from each other (`GenerationLayout.stride`).
        block_size: tokens in a block of its KV cache.
        vocab_multiple: the rows of its embedding are padded to a multiple of this; None: of the tensor-parallel size.
        fixed_cache: whether it takes the whole KV cache that `gpu_memory_utilization` allows, or fails; else it lives
            with what is left.
        seconds_per_token: that its host adds to each token of a decode step.
        records_routing: whether it can record the experts that tokens go to; it is then made with the further argument
            `records_routing`, if `rollout.enable_rollout_routing_replay` is set.
    """

    engine: Callable[..., Engine] | str = ""
    repeats: bool = True
    strided: bool = True
    block_size: int = BLOCK_SIZE
    vocab_multiple: int | None = None
    fixed_cache: bool = False
    seconds_per_token: float = 0.0
    records_routing: bool = False

    def check(self, rollout: RolloutConfig, arch: Architecture, *, trains: bool) -> None:
        """Raise ValueError, with what to change, for keys or a model that the engine cannot serve anywhere.

        Args:
            trains: whether responses are sampled to train on; else only those of a validation.
        """

    def check_here(self, rollout: RolloutConfig, arch: Architecture, path: str, *, on_gpu: bool) -> None:
        """Raise ValueError, with what to change, for what depends on this machine and on the model's folder.

        Args:
            path: the model's Hugging Face folder.
        """

    def activation_bytes(
        self, rollout: RolloutConfig, arch: Architecture, *, tp: int, itemsize: int, max_model_len: int
    ) -> int:
        """Bound the bytes that a rank's forward passes and sampler hold beside weights and KV cache."""
        return native_activation_bytes(
            arch,
            TensorSplit.of_replica(tp, enable_expert_parallel=rollout.enable_expert_parallel),
            itemsize=itemsize,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=max_model_len,
        )

    def vocab_rows(self, arch: Architecture, tp: int) -> int:
        """Count the rows of the embedding on each rank of a replica."""
        multiple = self.vocab_multiple or tp
        return -(-arch.vocab_size // multiple) * multiple // tp

    def build(self, settings: EngineSettings) -> Engine:
        """Build this rank's part of its replica's engine. Every rank calls it."""
        rollout, groups = settings.rollout, settings.groups
        return self.load()(
            settings.arch,
            tp_group=groups.tp,
            enable_expert_parallel=rollout.enable_expert_parallel,
            dtype=settings.dtype,
            device=groups.world.device,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            decode=settings.decode,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            share=settings.share,
            **({"records_routing": True} if rollout.enable_rollout_routing_replay else {}),
        )

    def load(self) -> Callable[..., Engine]:
        """Import the engine's class, which may need modules that only ranks have."""
        if not isinstance(self.engine, str):
            return self.engine
        module, _, name = self.engine.partition(":")
        engine: Callable[..., Engine] = getattr(importlib.import_module(module), name)
        return engine


NATIVE = EngineKind(engine="megarl.rollout.native.engine:NativeEngine", records_routing=True)

ENGINES: Registry[Any] = Registry(
    "rollout.name",
    "class",
    lazy={"native": "megarl.rollout.kinds:NATIVE", "vllm": "megarl.rollout.vllm.kind:VLLM"},
)
"""Kinds, and the classes of users'."""


def engine_kind(name: str) -> EngineKind:
    """Return the kind of engine that a configuration names.

    Raises:
        ValueError: there is none of that name.
    """
    named = ENGINES.load(name)
    if isinstance(named, EngineKind):
        return named
    kind: EngineKind = getattr(named, "kind", replace(NATIVE, records_routing=False))
    return replace(kind, engine=named)
