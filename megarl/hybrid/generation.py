"""Runs generation on the ranks that train: one set of ranks, two layouts, and which bytes are held in which phase.

Training holds weights, gradients and optimizer state in the TP x PP x DP layout. A generation phase releases the parts
that the configuration names, wakes the engine's weights in the TP layout, and moves the actor's weights straight into
them. It releases the training weights too, then wakes the KV cache; at its end the engine's memory is given back
(`rollout.free_cache_engine`).

Where the layouts coincide, the engine reads the actor's own parameters, unless these are released (`param_offload`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

from megarl.config.policy import ReshardConfig, RolloutConfig
from megarl.environments.episodes import Episodes
from megarl.hybrid.residency import Residency
from megarl.hybrid.weight_sync import WeightSync
from megarl.models.weights import EMBEDDING
from megarl.own_code import OwnCodeError
from megarl.parallel.generation_groups import GenerationGroups
from megarl.phases import Item, Phase
from megarl.reshard.shared import SharedParameters
from megarl.reshard.sides import engine_side
from megarl.roles.model import MegatronModel
from megarl.rollout.engine import EngineSettings
from megarl.rollout.kinds import engine_kind
from megarl.rollout.replicas import OnFinished, Quota, begin_rollouts, generate_rollouts
from megarl.rollout.served import weights_of
from megarl.rollout.speed import Speed
from megarl.rollout.stop_strings import Decode
from megarl.telemetry.timers import PhaseTimers
from megarl.types import Prompt, Rollout, Rollouts, SamplingParams
from megarl.types.owners import Holders


class Generation:
    """Owns the generation engine, and shares the GPU's time between it and training.

    The actor is one that is trained, or one that only answers (`roles.frozen.Policy`).

    Attributes:
        groups: this rank's replica.
        engine: asleep outside `phase`.
        sync: brings the actor's weights into the engine.
        speed: counts the tokens generated since its last `collect`.
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
        drawn_by: str = "what draws the prompts",
    ) -> None:
        """Build the engine. Every rank calls it.

        Args:
            model_path: the actor's Hugging Face folder.
            residency: holds the actor's memory already.
            max_model_len: tokens of the longest prompt and response together.
            decode: token ids to text, for stop strings.
            episodes: answers the policy; None: a response is over when the policy ends it.
            drawn_by: names, in a message, what chooses the prompts.
        """
        self._actor, self._rollout, self.groups = actor, rollout, groups
        self._residency, self._timers = residency, timers
        self._episodes, self.speed, self._drawn_by = episodes, Speed(ranks=groups.layout.size), drawn_by
        self._weights_leave = actor.weights_leave
        shared = SharedParameters(
            actor.side, groups.layout, groups.world.rank, actor.parameters(), none=self._weights_leave
        )
        residency.enter(
            Phase.GENERATE
        )  # an engine that measures how much memory is free measures as much as it will later
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
        self._sleep()  # no phase has room for an engine awake beside the training weights
        self.engine.wake(weights_only=True)
        actor.gather_parameters()
        engines = engine_side(actor.arch, groups.layout, len(weights_of(self.engine)[EMBEDDING]))
        self.sync = WeightSync(actor, self.engine, engines, shared, reshard)
        self._sleep()

    @contextmanager
    def phase(self, *, verify: bool = False) -> Iterator[None]:
        """Give the engine the actor's weights, and on exit its memory back; every rank calls it.

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
            for weights in self._actor.memory[Item.WEIGHTS]:  # the next phase reads them
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
        everywhere: bool = True,
    ) -> Rollouts:
        """Generate `n` responses to each prompt, on every rank; only inside `phase`.

        Args:
            seed, round_, draw: with the prompt's index and the sample's number they make each response's seed. Draws of
                equal size have no group in common.
            on_finished: called with each response as soon as it is finished.
            everywhere: see `generate_rollouts`.
        """
        begun = begin_rollouts(prompts, n, seed=seed, round_=round_, draw=draw, first_group=draw * len(prompts))
        return self.go_on(begun, params, version=round_, on_finished=on_finished, everywhere=everywhere)

    def go_on(
        self,
        rollouts: Sequence[Rollout],
        params: SamplingParams,
        *,
        version: int,
        on_finished: OnFinished | None = None,
        quota: Quota | None = None,
        everywhere: bool = True,
    ) -> Rollouts:
        """Finish responses that wait or are under way; as `generate_rollouts`, only inside `phase`.

        Episodes are played from their beginning to their end; one can become several rollouts of its group. Where
        tokens are not `everywhere`, those of rollouts under way must not have been, either.

        Raises:
            OwnCodeError: on every rank, if one of them asks for other responses than the first.
        """
        self._check_same(rollouts)

        def finished(place: int, rollout: Rollout) -> None:
            self.speed.finished()
            if on_finished is not None:
                on_finished(place, rollout)

        with self._timers(Phase.GENERATE), self.speed.measured():
            if self._episodes is not None:
                assert quota is None, "an episode cannot wait for other weights"
                items = self._episodes.play(
                    self.engine, rollouts, params, version=version, on_finished=on_finished, everywhere=everywhere
                )
            else:
                items = generate_rollouts(
                    self.engine,
                    self.groups,
                    rollouts,
                    params,
                    version=version,
                    on_finished=finished,
                    quota=quota,
                    everywhere=everywhere,
                )
        self.speed.count(rollouts, items)
        holders = None if everywhere else self._holders
        temperature = params.temperature or 1.0
        return Rollouts(items=tuple(items), temperature=temperature, version=version, holders=holders)

    def _check_same(self, rollouts: Sequence[Rollout]) -> None:
        seeds = array("q", (rollout.seed for rollout in rollouts))  # which the prompts are a part of
        checksums = self.groups.world.all_gather(crc32(seeds.tobytes()), "which responses are asked for")
        others = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
        if others:
            raise OwnCodeError(
                f"{self._drawn_by} gives rank {others[0]} other prompts than rank 0: it must give the same on every "
                f"rank",
                everywhere=True,
            )

    @property
    def _holders(self) -> Holders:
        layout, world = self.groups.layout, self.groups.world
        first = tuple(layout.replica_ranks(replica)[0] for replica in range(layout.replicas))
        return Holders(own=self.groups.replica, first=first, ranks=world)

    def close(self, *, engine: bool = True) -> None:
        """End the episodes, and give the engine's memory and process groups back.

        Args:
            engine: also close the engine, on all ranks, while the world still stands.
        """
        if self._episodes is not None:
            self._episodes.close()
        if engine:
            self.sync.release()
            self.engine.close()

    def _sleep(self) -> None:
        if self._rollout.free_cache_engine:
            self.engine.sleep(release_weights=True)
