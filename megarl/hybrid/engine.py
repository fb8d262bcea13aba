"""The 3D-HybridEngine: one set of ranks, two layouts, and which bytes are held in which phase.

Training holds weights, gradients and optimizer state in the TP x PP x DP layout. `generation()` lets go what of it is
configured to (`grad_offload`, `optimizer_offload`), wakes the engine's weights in the TP layout, reshards the actor's
weights straight into them, lets those go too (`param_offload`), then wakes the KV cache; afterwards the engine's memory
is given back (`rollout.free_cache_engine`). The roles bring back what they need when they need it.

Where the layouts coincide, the engine reads the actor's own parameters, unless those go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from megarl.config.schema import ActorRolloutRef
from megarl.models.tensors import EMBEDDING
from megarl.reshard.alias import Alias, plan_aliases
from megarl.reshard.execute import Resharder
from megarl.reshard.layouts import Layouts
from megarl.reshard.plan import plan_reshard
from megarl.reshard.shared import check_shared, shared_tensors
from megarl.reshard.verify import verify as compare_ends
from megarl.roles.actor import Actor
from megarl.roles.policy import DTYPES
from megarl.rollout.build import build_engine
from megarl.rollout.replicas import generate_rollouts
from megarl.rollout.stop_strings import Decode
from megarl.telemetry.timers import PhaseTimers
from megarl.types import Prompt, Rollouts, SamplingParams


class HybridEngine:
    """Owns the generation engine and the plan that fills it from the actor.

    Attributes:
        aliases: the engine's parameters that are the actor's.
        leaving: memory that generation has no use for; other roles add theirs.
    """

    def __init__(
        self,
        config: ActorRolloutRef,
        actor: Actor,
        timers: PhaseTimers,
        *,
        max_model_len: int,
        decode: Decode,
    ) -> None:
        """
        Args:
            max_model_len: tokens of the longest prompt and response together.
            decode: token ids to text, for stop strings.
        """
        groups = actor.groups
        self.config, self.actor, self.groups, self.timers = config, actor, groups, timers
        self._offload = config.actor.megatron.param_offload
        self._verified = False
        self.aliases: dict[str, Alias] = {}
        self._source = actor.parameters()
        self.leaving = [actor.gradients, actor.masters, actor.moments]

        layouts = Layouts(
            arch=actor.arch,
            train=groups.train,
            generation=groups.generation,
            transformer_engine=actor.transformer_engine,
            ranks_per_node=groups.ranks_per_node,
        )

        def adopt(shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Tensor]:
            if not self._offload:
                self.aliases = plan_aliases(replace(layouts, vocab_rows=shapes[EMBEDDING][0]), groups.rank)
            return shared_tensors(self.aliases, self._source, shapes)

        with actor.away():  # an engine that measures how much memory is free finds what it will find later
            self.engine = build_engine(
                config,
                actor.arch,
                groups,
                dtype=DTYPES[config.model.dtype],
                max_model_len=max_model_len,
                decode=decode,
                adopt=adopt,
            )
        vocab_rows = len(self.engine.parameters()[EMBEDDING])
        plan = plan_reshard(replace(layouts, vocab_rows=vocab_rows), groups.rank)
        self.engine.wake(weights_only=True)
        self.resharder = Resharder(
            plan.without(self.aliases),
            self._source,
            self.engine.parameters(),
            groups.model,
            transport=config.reshard.transport,
            bucket_bytes=config.reshard.bucket_bytes,
        )
        self._sleep()

    @contextmanager
    def generation(self, *, verify: bool = False) -> Iterator[HybridEngine]:
        """The generation phase: on entry the engine has the actor's weights, on exit its memory is given back.

        Args:
            verify: check every tensor after the reshard, as is always done after the first one.
        """
        with self.timers("offload"):
            self.actor.gather_parameters()
            for memory in self.leaving:
                memory.release()
        with self.timers("reshard"):
            self.engine.wake(weights_only=True)
            check_shared(self.aliases, self._source, self.engine.parameters())
            self.resharder.run()
            if verify or self.config.reshard.verify or not self._verified:
                compare_ends(self.resharder)
                self._verified = True
        with self.timers("generate"):
            if self._offload:
                self.resharder.release()
                self.actor.weights.release()
            self.engine.wake()
        try:
            yield self
        finally:
            self._sleep()
            self.actor.weights.prefetch()

    def generate(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, seed: int, round_: int
    ) -> Rollouts:
        """`n` completions of each prompt, on every rank; only inside `generation()`."""
        return generate_rollouts(self.engine, self.groups, prompts, n, params, seed=seed, round_=round_)

    def close(self) -> None:
        """Give the engine's memory and process groups back; while the world still stands."""
        self.resharder.release()
        self.engine.close()

    def _sleep(self) -> None:
        if self.config.rollout.free_cache_engine:
            self.engine.sleep(release_weights=True)
