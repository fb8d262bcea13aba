"""Describes the run that a configuration asks for before it starts: layouts, and what ranks hold. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from megarl.config import Config
from megarl.data.formats import SEQUENCES
from megarl.estimate.model import ModelJob
from megarl.flow_kinds import format_of, generates
from megarl.models.architecture import Architecture
from megarl.models.parameter_names import ParameterNames
from megarl.models.placements import Placement
from megarl.models.sizes import kv_bytes_per_token, routed_bytes_per_token
from megarl.models.tensors import volume
from megarl.models.weights import EMBEDDING, engine_placements, layer_prefix, training_placements
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.reshard.repeat import Repetitions, Runs, expert_of, layer_of, of_experts, repetitions
from megarl.reshard.sharing import SharedPlace, plan_shared
from megarl.reshard.sides import Side, engine_side, training_runs, training_side
from megarl.role_kinds import ACTOR, RoleKind
from megarl.rollout.kinds import NATIVE, EngineKind, engine_kind

TP_RANKS = 4
"""Tensor-parallel ranks of a stage whose reshard is planned, spread evenly; and the last one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Holds a configuration with its models and layouts, which `trainer.admission.checks.check_layouts` has passed.

    Attributes:
        arch, train, generation: of the policy.
        other_models: those models beside it that the configuration has keys for.
        own_roles: of the flow, whose models have the policy's shape, layout and keys.
        reference: whether there is a reference, in the policy's layout.
        log_probs: whether log-probabilities before an update are a pass of their own. They are also in the steps that
            train the critic alone, which are not predicted.
    """

    config: Config
    arch: Architecture
    train: TrainLayout
    generation: GenerationLayout
    other_models: tuple[ModelJob, ...] = ()
    own_roles: tuple[RoleKind, ...] = ()
    reference: bool = False
    log_probs: bool = True

    @property
    def actor(self) -> ModelJob:
        """Describe the policy in its training layout."""
        actor = self.config.actor_rollout_ref.actor
        sequences = actor.ppo_mini_batch_size * self._sequences_per_row if self.generates else self.sequences
        return ModelJob(
            config=self.config,
            kind=ACTOR,
            section=ACTOR.name,
            arch=self.arch,
            layout=self.train,
            megatron=actor.megatron,
            batching=actor,
            forward_batch=sequences,
            mini_batch=sequences,
            epochs=actor.ppo_epochs if self.generates else 1,
        )

    @property
    def models_beside(self) -> tuple[ModelJob, ...]:
        """List the models beside the policy: the configuration's, then the flow's own."""
        actor = self.actor
        models = (
            replace(
                actor,
                kind=role,
                arch=self.arch.with_scalar_output() if role.scalar else self.arch,
                mini_batch=None if role.update is None else actor.mini_batch,
            )
            for role in self.own_roles
        )
        return (*self.other_models, *models)

    @property
    def generates(self) -> bool:
        """Say whether it trains on its own responses; otherwise it does on answers that the data holds."""
        return generates(self.config)

    @property
    def sequences(self) -> int:
        """Count the sequences of a step."""
        return self.config.data.train_batch_size * self._sequences_per_row

    @property
    def _sequences_per_row(self) -> int:
        row = format_of(self.config)
        return self.config.actor_rollout_ref.rollout.n if row == "prompts" else SEQUENCES[row]

    @property
    def ranks(self) -> int:
        """Count the ranks of the job."""
        return self.config.trainer.world_size

    @property
    def gpus_per_node(self) -> int:
        """Count the consecutive ranks that share a node."""
        return self.config.trainer.n_gpus_per_node

    @property
    def itemsize(self) -> int:
        """Count the bytes of a weight or an activation."""
        return self.actor.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Count the bytes of a token's keys and values, and of its experts if recorded, on each rank of a replica."""
        keys_and_values = kv_bytes_per_token(self.arch, tp=self.generation.tp, itemsize=self.itemsize)
        recorded = self.config.actor_rollout_ref.rollout.enable_rollout_routing_replay
        return keys_and_values + (routed_bytes_per_token(self.arch) if recorded else 0)

    @property
    def engine(self) -> EngineKind:
        """Look up the engine that generates, if the run does."""
        return engine_kind(self.config.actor_rollout_ref.rollout.name) if self.generates else NATIVE

    @property
    def training(self) -> Side:
        """Describe the policy in training. With Transformer Engine norms have other names and the same sizes."""
        return training_side(self.arch, self.train, ParameterNames())

    @property
    def engines(self) -> Side:
        """Describe the policy in the engines."""
        return engine_side(self.arch, self.generation, self.engine.vocab_rows(self.arch, self.generation.tp))

    @property
    def max_sequence_length(self) -> int:
        """Count the tokens of the longest prompt and response together."""
        return self.config.data.max_sequence_length


def training_elements(arch: Architecture, layout: TrainLayout, rank: int, *, experts_alone: bool = False) -> int:
    """Count the elements of a rank's training weights, but for the few rows that pad the vocabulary.

    Args:
        experts_alone: count no others.
    """
    times = repetitions(arch, training_runs(arch, layout))
    placements = training_placements(arch, layout, rank, layers=times.layers, experts=times.experts)
    return _elements((p for p in placements if not experts_alone or of_experts(p.tensor)), times)


def engine_elements(arch: Architecture, split: TensorSplit) -> int:
    """Count the elements of the weights of a generation replica's first rank; no other rank of it has more."""
    times = repetitions(arch, Runs(experts=split.expert_parts(arch.num_experts)))
    return _elements(engine_placements(arch, split, 0, layers=times.layers, experts=times.experts), times)


def ranks_unlike(job: Job) -> list[int]:
    """List ranks of first, middle and last stage, of several tensor-parallel ranks and replicas."""
    train = job.train
    stages = sorted({0, train.pp // 2, train.pp - 1})
    tp_ranks = sorted({k * train.tp // TP_RANKS for k in range(TP_RANKS)} | {train.tp - 1})
    places = [(stage, tp) for stage in stages for tp in tp_ranks]
    return [train.rank(tp=tp, dp=i % train.dp, pp=stage) for i, (stage, tp) in enumerate(places)]


def shared_of_first_layers(job: Job, rank: int) -> dict[str, SharedPlace]:
    """Find the engine's parameters that read the rank's training weights in place; none if those leave the GPU.

    Of layers with equal placements only the first is listed.
    """
    if job.config.actor_rollout_ref.actor.megatron.param_offload:
        return {}
    return plan_shared(job.training, job.engines, rank, first_layers=True)


def own_engine_elements(job: Job, stage: int) -> int:
    """Count the elements of the engine's weights that are no training weights: the most of any rank of the stage.

    Ranks with the same place in both tensor-parallel groups have equally many, so one of each such set is counted.
    """
    train, generation = job.train, job.generation
    first, ranks = train.rank(tp=0, dp=0, pp=stage), train.size // train.pp
    one_of_each = {(train.place(rank), generation.coords(rank).tp): rank for rank in range(first, first + ranks)}
    return max(_own_elements(job, rank) for rank in one_of_each.values())


def _own_elements(job: Job, rank: int) -> int:
    places = shared_of_first_layers(job, rank)
    shared_layers = {layer for name in places if (layer := layer_of(name)) is not None}

    engines = job.engines
    in_chunk, times = repetitions(job.arch, job.training.runs), repetitions(job.arch, engines.runs)

    def placements(layers: Container[int]) -> Iterator[Placement]:
        return engines.placements(rank, layers=layers, experts=times.experts)

    shared = (placement for placement in placements(shared_layers) if placement.param in places)
    return _elements(placements(times.layers), times) - _elements(shared, replace(in_chunk, experts=times.experts))


def parameter_count(arch: Architecture) -> int:
    """Count the elements of all weights; tied embeddings count once."""
    return engine_elements(arch, TensorSplit())


def active_parameter_count(arch: Architecture) -> int:
    """Count the elements that multiply a token: only its own experts, and not the embedding that it looks up."""
    return _in_all_layers(arch, active_parameters(arch))


def recomputed_parameter_count(arch: Architecture, modules: Collection[str]) -> int:
    """Count those of these MLPs, by `MLPPart.recomputed_as`."""
    of_mlps = {
        tensor.name
        for i in arch.firsts
        if arch.layer(i).mlp.recomputed_as in modules
        for tensor in arch.layer(i).mlp.tensors(layer_prefix(i), arch.hidden_size)
    }
    return _in_all_layers(arch, active_parameters(arch, frozenset(of_mlps))) if of_mlps else 0


def _in_all_layers(arch: Architecture, in_first: Counter[int | None]) -> int:
    return sum(count * in_first[first] for first, count in repetitions(arch).layers.items()) + in_first[None]


@cache
def active_parameters(arch: Architecture, among: frozenset[str] = frozenset()) -> Counter[int | None]:
    """Count the elements that multiply a token in the first layer of each run of equal layers, by its number.

    Those of the output are under None.

    Args:
        among: of these tensors alone; none: of all.
    """
    experts = {0: arch.moe.experts_per_token} if arch.moe else repetitions(arch).experts
    once = Repetitions(layers=dict.fromkeys(arch.firsts, 1), experts=experts)
    whole = TrainLayout(ranks=range(1))  # no engine has a scalar output
    chosen = arch.moe.experts_per_token if arch.moe else 0

    def multiplies(place: Placement) -> bool:
        """Leave the embedding out, and of stacked experts all but the first few."""
        if of_experts(place.tensor) and expert_of(place.tensor) is None:
            return place.box[0][1] <= chosen
        return place.tensor != EMBEDDING or arch.tied

    def counts(place: Placement) -> bool:
        return multiplies(place) and (not among or place.tensor in among)

    active: Counter[int | None] = Counter()
    for place in filter(counts, training_placements(arch, whole, 0, layers=once.layers, experts=once.experts)):
        active[layer_of(place.tensor)] += _elements([place], once)
    return active


def expert_elements(arch: Architecture) -> int:
    """Count the elements of all experts; 0 without experts."""
    times = repetitions(arch)
    placements = engine_placements(arch, TensorSplit(), 0, layers=times.layers, experts=times.experts)
    return _elements((p for p in placements if of_experts(p.tensor)), times)


def _elements(placements: Iterable[Placement], times: Repetitions) -> int:
    return sum(times.of(p.tensor) * volume(p.box) for p in placements)
