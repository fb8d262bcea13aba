"""Describes a model of a run in its training layout, before the run starts. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.config import Config
from megarl.config.policy import BatchingConfig, MegatronConfig
from megarl.models.architecture import Architecture
from megarl.models.sizes import ITEMSIZE
from megarl.parallel.layout import TrainLayout
from megarl.phases import Item
from megarl.role_kinds import RoleKind


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """Holds a model's layout and keys, and how many sequences go through it.

    Attributes:
        config: of the run.
        kind: of its role.
        section: of the configuration, with its keys.
        arch: with the output that the role has.
        layout, megatron, batching: its own.
        forward_batch: sequences whose forward pass is planned at once, over all ranks.
        mini_batch: sequences of an optimizer step, over all ranks; None: it is only read.
        epochs: passes over the sequences of a step in its update.
    """

    config: Config
    kind: RoleKind
    section: str
    arch: Architecture
    layout: TrainLayout
    megatron: MegatronConfig
    batching: BatchingConfig
    forward_batch: int
    mini_batch: int | None = None
    epochs: int = 1

    @property
    def role(self) -> str:
        """Name its role."""
        return self.kind.name

    @property
    def name(self) -> str:
        """Name its role for people: "reward model"."""
        return _name(self.role)

    @property
    def itemsize(self) -> int:
        """Count the bytes of a weight or an activation."""
        return ITEMSIZE[self.config.actor_rollout_ref.model.dtype]

    @property
    def sequence_parallel(self) -> bool:
        return self.megatron.sequence_parallel and self.layout.tp > 1

    @property
    def most_tokens(self) -> int:
        """Count the tokens that a micro-batch may have with use_dynamic_bsz, over all its context-parallel ranks."""
        return self.batching.most_tokens(self.megatron)

    def micro_batches(self, sequences: int, tokens_per_sequence: float) -> int:
        """Count the micro-batches on a data-parallel rank, of so many sequences of that length over all ranks."""
        per_micro_batch = self.batching.ppo_micro_batch_size_per_gpu
        if self.batching.use_dynamic_bsz:
            per_micro_batch = max(1, int(self.most_tokens / tokens_per_sequence))
        return math.ceil(self._on_a_rank(sequences) / per_micro_batch)

    def micro_batch_tokens(self, sequences: int) -> int:
        """Count the tokens of the largest micro-batch, over its context-parallel ranks.

        Args:
            sequences: that are planned at once, over all ranks.
        """
        longest, limit = self.config.data.max_sequence_length, self.most_tokens
        if not self.batching.use_dynamic_bsz:
            limit = self.batching.ppo_micro_batch_size_per_gpu * longest
        return min(limit, self._on_a_rank(sequences) * longest)

    def rank_tokens(self, sequences: int) -> int:
        """Count those of `micro_batch_tokens` that a rank has."""
        return self.layout.rank_tokens(self.micro_batch_tokens(sequences))

    def _on_a_rank(self, sequences: int) -> int:
        return math.ceil(sequences / self.layout.dp)


def item_name(role: str, item: Item) -> str:
    """Name the memory of a role in tables and messages: "gradients", "reward model weights"."""
    if role == "actor":
        return "training weights" if item is Item.WEIGHTS else str(item)
    return f"{_name(role)} {item}"


def _name(role: str) -> str:
    return role.replace("_", " ")
