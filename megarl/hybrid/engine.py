"""The 3D-HybridEngine: one set of ranks, two layouts, and which bytes are held in which phase.

Training holds weights, gradients and optimizer state in the TP x PP x DP layout. `generation()` wakes the engine's
weights in the TP layout, reshards the actor's weights straight into them, then wakes the KV cache; afterwards both
are given back (`rollout.free_cache_engine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megarl.config.schema import ActorRolloutRef
from megarl.reshard.execute import Resharder
from megarl.reshard.plan import plan_reshard
from megarl.reshard.verify import verify
from megarl.roles.actor import Actor
from megarl.roles.policy import DTYPES
from megarl.rollout.engine import Engine
from megarl.rollout.native.engine import NativeEngine
from megarl.rollout.replicas import generate_rollouts
from megarl.telemetry.timers import PhaseTimers
from megarl.types import Prompt, Rollouts, SamplingParams


class HybridEngine:
    """Owns the generation engine and the plan that fills it from the actor."""

    def __init__(self, config: ActorRolloutRef, actor: Actor, timers: PhaseTimers, *, max_model_len: int) -> None:
        """
        Args:
            max_model_len: tokens of the longest prompt and response together.
        """
        groups = actor.groups
        self.config, self.actor, self.groups, self.timers = config, actor, groups, timers
        rollout = config.rollout
        self.engine: Engine = NativeEngine(
            actor.arch,
            tp_group=groups.generation_tp if groups.generation.tp > 1 else None,
            dtype=DTYPES[config.model.dtype],
            device=groups.device,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        plan = plan_reshard(
            actor.arch,
            groups.train,
            groups.generation,
            groups.rank,
            transformer_engine=actor.transformer_engine,
        )
        self.engine.wake(weights_only=True)
        self.resharder = Resharder(
            plan,
            actor.parameters(),
            self.engine.parameters(),
            groups.model,
            bucket_bytes=config.reshard.bucket_bytes,
        )
        self._sleep()

    @contextmanager
    def generation(self) -> Iterator[HybridEngine]:
        """The generation phase: on entry the engine has the actor's weights, on exit its memory is given back."""
        with self.timers("reshard"):
            self.engine.wake(weights_only=True)
            self.resharder.run()
            if self.config.reshard.verify:
                verify(self.resharder)
            self.engine.wake()
        try:
            yield self
        finally:
            self._sleep()

    def generate(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, seed: int, round_: int
    ) -> Rollouts:
        """`n` completions of each prompt, on every rank; only inside `generation()`."""
        return generate_rollouts(self.engine, self.groups, prompts, n, params, seed=seed, round_=round_)

    def _sleep(self) -> None:
        if self.config.rollout.free_cache_engine:
            self.engine.sleep(release_weights=True)
