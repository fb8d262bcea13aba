"""The 3D-HybridEngine: one set of ranks, two layouts, and which bytes are held in which phase.

Training holds weights, gradients and optimizer state in the TP x PP x DP layout. A generation phase lets go what of it
is configured to, wakes the engine's weights in the TP layout, moves the actor's weights straight into them, lets those
go too, then wakes the KV cache; afterwards the engine's memory is given back (`rollout.free_cache_engine`).

Where the layouts coincide, the engine reads the actor's own parameters, unless those go (`param_offload`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megarl.config.policy import ReshardConfig, RolloutConfig
from megarl.environments.episodes import Episodes
from megarl.hybrid.residency import Residency
from megarl.hybrid.weight_sync import WeightSync, layouts_of
from megarl.parallel.generation_groups import GenerationGroups
from megarl.phases import Item, Phase
from megarl.reshard.shared import SharedParameters
from megarl.roles.model import MegatronModel
from megarl.rollout.engine import EngineSettings
from megarl.rollout.kinds import engine_kind
from megarl.rollout.replicas import OnFinished, Quota, begin_rollouts, generate_rollouts
from megarl.rollout.speed import Speed
from megarl.rollout.stop_strings import Decode
from megarl.telemetry.timers import PhaseTimers
from megarl.types import Prompt, Rollout, Rollouts, SamplingParams


class Generation:
    """Owns the generation engine, and shares the GPU's time between it and training.

    The actor is one that is trained, or one that only answers (`roles.frozen.Policy`).

    Attributes:
        groups: this rank's replica.
        engine: asleep outside `phase`.
        sync: what brings the actor's weights into it.
        speed: of what was generated since somebody asked.
    """

    def __init__(
        self,
        actor: MegatronModel,
        groups: GenerationGroups,
        *,
        rollout: RolloutConfig,
        reshard: ReshardConfig,
        model_path: str,
        residency: Residency,
        timers: PhaseTimers,
        max_model_len: int,
        decode: Decode,
        episodes: Episodes | None = None,
    ) -> None:
        """Every rank calls it.

        Args:
            model_path: the actor's Hugging Face folder.
            residency: knows the actor's memory already.
            max_model_len: tokens of the longest prompt and response together.
            decode: token ids to text, for stop strings.
            episodes: who answers the policy; None: a response is over when the policy ends it.
        """
        self._actor, self._rollout, self.groups = actor, rollout, groups
        self._residency, self._timers = residency, timers
        self._episodes, self.speed = episodes, Speed()
        self._weights_leave = actor.weights_leave
        layouts = layouts_of(actor, groups.layout)
        shared = SharedParameters(layouts, groups.world.rank, actor.parameters(), none=self._weights_leave)
        residency.enter(Phase.GENERATE)  # an engine that measures how much memory is free finds what it will find later
        settings = EngineSettings(
            arch=actor.arch,
            groups=groups,
            rollout=rollout,
            path=model_path,
            dtype=actor.dtype,
            max_model_len=max_model_len,
            decode=decode,
            share=shared.tensors,
        )
        self.engine = engine_kind(rollout.name).build(settings)
        self._sleep()  # what it holds awake beside the training weights no phase has room for
        self.engine.wake(weights_only=True)
        actor.gather_parameters()
        self.sync = WeightSync(actor, self.engine, layouts, shared, reshard)
        self._sleep()

    @contextmanager
    def phase(self, *, verify: bool = False) -> Iterator[None]:
        """On entry the engine gets the actor's weights, on exit its memory is given back; every rank calls it.

        Args:
            verify: check every tensor that the engine got, as is always done the first time.
        """
        with self._timers(Phase.OFFLOAD):
            self._actor.gather_parameters()
            self._residency.enter(Phase.RESHARD, keep=self._actor.memory[Item.WEIGHTS])
        with self._timers(Phase.RESHARD):
            self.engine.wake(weights_only=True)
            self.sync.run(verify=verify)
        with self._timers(Phase.GENERATE):
            if self._weights_leave:
                self.sync.release()
            self._residency.enter(Phase.GENERATE)
            self.engine.wake()
        try:
            yield
        finally:
            self._sleep()
            for weights in self._actor.memory[Item.WEIGHTS]:  # whatever comes next reads them
                weights.prefetch()

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        *,
        seed: int,
        round_: int,
        draw: int = 0,
        on_finished: OnFinished | None = None,
    ) -> Rollouts:
        """`n` responses to each prompt, on every rank; only inside `phase`.

        Args:
            seed, round_, draw: with the prompt's index and the sample's number they make each response's seed. Draws of
                equal size have no group in common.
            on_finished: is told of each response as soon as it is finished.
        """
        begun = begin_rollouts(prompts, n, seed=seed, round_=round_, draw=draw, first_group=draw * len(prompts))
        return self.go_on(begun, params, version=round_, on_finished=on_finished)

    def go_on(
        self,
        rollouts: Sequence[Rollout],
        params: SamplingParams,
        *,
        version: int,
        on_finished: OnFinished | None = None,
        quota: Quota | None = None,
    ) -> Rollouts:
        """Responses that are not begun or under way, finished; as `generate_rollouts`, only inside `phase`.

        Episodes are played from their beginning to their end; one can become several rollouts of its group.
        """

        def told(place: int, rollout: Rollout) -> None:
            self.speed.finished()
            if on_finished is not None:
                on_finished(place, rollout)

        with self._timers(Phase.GENERATE), self.speed.measured():
            if self._episodes is not None:
                assert quota is None, "an episode cannot wait for other weights"
                made = self._episodes.play(self.engine, rollouts, params, version=version, on_finished=on_finished)
            else:
                made = generate_rollouts(
                    self.engine, self.groups, rollouts, params, version=version, on_finished=told, quota=quota
                )
        self.speed.count(rollouts, made)
        return Rollouts(items=tuple(made), temperature=params.temperature or 1.0, version=version)

    def close(self, *, engine: bool = True) -> None:
        """End what plays episodes, and give the engine's memory and process groups back.

        Args:
            engine: the second, on all ranks, while the world still stands.
        """
        if self._episodes is not None:
            self._episodes.close()
        if engine:
            self.sync.release()
            self.engine.close()

    def _sleep(self) -> None:
        if self._rollout.free_cache_engine:
            self.engine.sleep(release_weights=True)
