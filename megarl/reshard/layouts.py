"""The two layouts of a model between which a reshard moves its weights. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass

from megarl.models.architecture import Architecture
from megarl.models.placements import EVERY, Placement, engine_placements, training_placements
from megarl.parallel.layout import GenerationLayout, TrainLayout


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """All that a reshard's plan depends on, the same on every rank.

    Attributes:
        train, generation: of the same ranks.
        transformer_engine: see `training_placements`.
        vocab_rows: see `engine_placements`.
        ranks_per_node: consecutive ranks that share a node; by default all do.
    """

    arch: Architecture
    train: TrainLayout
    generation: GenerationLayout
    transformer_engine: bool
    vocab_rows: int | None = None
    ranks_per_node: int = sys.maxsize

    def __post_init__(self) -> None:
        assert self.train.size == self.generation.size, "both layouts are of the same ranks"

    def held(
        self, rank: int, *, layers: Container[int] = EVERY, experts: Container[int] = EVERY
    ) -> Iterator[Placement]:
        """What a rank has for training; `layers` and `experts` leave others out."""
        return training_placements(
            self.arch,
            self.train,
            rank,
            transformer_engine=self.transformer_engine,
            layers=layers,
            experts=experts,
        )

    def wanted(
        self, tp_rank: int, *, layers: Container[int] = EVERY, experts: Container[int] = EVERY
    ) -> Iterator[Placement]:
        """What a rank needs that is number `tp_rank` of its generation replica."""
        return engine_placements(
            self.arch, self.generation.tp, tp_rank, vocab_rows=self.vocab_rows, layers=layers, experts=experts
        )
