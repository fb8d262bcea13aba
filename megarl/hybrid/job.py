"""A run that is only being considered: its layouts on so many GPUs, and the sizes that follow. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.config import Config
from megarl.models.architecture import Architecture
from megarl.models.tensors import EMBEDDING, Placement, engine_placements, training_placements, volume
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.reshard.repeat import FIRST_EXPERT, Repetitions, of_expert, repetitions

ITEMSIZE = {"bfloat16": 2, "float32": 4}
"""Bytes of an element by `actor_rollout_ref.model.dtype`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A configuration with its model and layouts, which `megarl.trainer.checks.check_layouts` has passed."""

    config: Config
    arch: Architecture
    train: TrainLayout
    generation: GenerationLayout

    @property
    def gpus_per_node(self) -> int:
        """Consecutive ranks that share a node."""
        return self.config.trainer.n_gpus_per_node

    @property
    def itemsize(self) -> int:
        """Bytes of a weight or an activation."""
        return ITEMSIZE[self.config.actor_rollout_ref.model.dtype]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    @property
    def sequence_parallel(self) -> bool:
        return self.config.actor_rollout_ref.actor.megatron.sequence_parallel and self.train.tp > 1

    @property
    def sequences_per_mini_batch(self) -> int:
        """On one data-parallel rank."""
        actor = self.config.actor_rollout_ref.actor
        return actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // self.train.dp

    def micro_batches(self, tokens_per_sequence: float) -> int:
        """Micro-batches in a mini-batch of sequences of that length."""
        actor = self.config.actor_rollout_ref.actor
        per_micro_batch = actor.ppo_micro_batch_size_per_gpu
        if actor.use_dynamic_bsz:
            per_micro_batch = max(1, int(actor.ppo_max_token_len_per_gpu / tokens_per_sequence))
        return math.ceil(self.sequences_per_mini_batch / per_micro_batch)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        actor = self.config.actor_rollout_ref.actor
        limit = actor.ppo_max_token_len_per_gpu
        if not actor.use_dynamic_bsz:
            limit = actor.ppo_micro_batch_size_per_gpu * self.max_model_len
        return min(limit, self.sequences_per_mini_batch * self.max_model_len)


def training_elements(arch: Architecture, layout: TrainLayout, rank: int) -> int:
    """Elements of the weights that a rank holds for training; without the few rows of vocabulary padding."""
    at = layout.coords(rank)
    firsts = {layout.layers(arch.num_layers, at.pp, chunk)[0] for chunk in range(layout.chunks)}
    held = training_placements(arch, layout, rank, transformer_engine=True, layers=firsts, experts=FIRST_EXPERT)
    return _elements(held, repetitions(arch, chunks=layout.pp * layout.chunks))


def engine_elements(arch: Architecture, tp: int) -> int:
    """Elements of the weights that the first rank of a generation replica holds, which has the most."""
    held = engine_placements(arch, tp, 0, layers=(0,), experts=FIRST_EXPERT)
    return _elements(held, repetitions(arch))


def parameter_count(arch: Architecture) -> int:
    """Elements of all weights; tied embeddings count once."""
    return engine_elements(arch, 1)


def active_parameter_count(arch: Architecture) -> int:
    """Elements of the weights that a token is multiplied with: its experts only, no look-up of its embedding."""
    times = repetitions(arch)
    if arch.moe:
        times = Repetitions(layers=times.layers, experts=arch.moe.experts_per_token)
    held = engine_placements(arch, 1, 0, layers=(0,), experts=FIRST_EXPERT)
    return _elements((p for p in held if p.tensor != EMBEDDING or arch.tie_word_embeddings), times)


def expert_elements(arch: Architecture) -> int:
    """Elements of all experts' weights; 0 without experts."""
    held = engine_placements(arch, 1, 0, layers=(0,), experts=FIRST_EXPERT)
    return _elements((p for p in held if of_expert(p.tensor)), repetitions(arch))


def _elements(placements: Iterable[Placement], times: Repetitions) -> int:
    return sum(times.of(p.tensor) * volume(p.box) for p in placements)
