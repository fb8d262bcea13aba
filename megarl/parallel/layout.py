"""Does the rank arithmetic of the training and the generation layout. Pure Python: no torch, no process groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainCoords:
    """Locates a rank in the training layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """Has Megatron-Core's `tp-cp-dp-pp` rank order: tensor-parallel ranks are neighbours, stages farthest apart.

    Attributes:
        ranks: the job's ranks that hold the models of this layout.
        tp, pp, cp: tensor, pipeline and context parallel sizes.
        chunks: model chunks per pipeline stage (virtual pipeline size); 1 is the plain 1F1B schedule.
    """

    ranks: range
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.size % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"{self.size} ranks cannot be split into tensor x pipeline x context = "
                f"{self.tp} x {self.pp} x {self.cp}; use a multiple of {self.tp * self.pp * self.cp} ranks"
            )

    @property
    def size(self) -> int:
        """Count the ranks."""
        return len(self.ranks)

    @property
    def dp(self) -> int:
        return self.size // (self.tp * self.pp * self.cp)

    def __str__(self) -> str:
        chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        return f"TP{self.tp} x PP{self.pp}{chunks} x DP{self.dp}"

    def coords(self, rank: int) -> TrainCoords:
        rest, tp = divmod(rank - self.ranks.start, self.tp)
        cp, rest = rest % self.cp, rest // self.cp
        return TrainCoords(tp=tp, cp=cp, dp=rest % self.dp, pp=rest // self.dp)

    def rank(self, *, tp: int, dp: int, pp: int, cp: int = 0) -> int:
        return self.ranks.start + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def model_ranks(self, rank: int) -> tuple[int, ...]:
        """List the ranks that hold one whole model together with `rank`: same dp and cp, every tp and pp. Ascending."""
        at = self.coords(rank)
        return tuple(self.rank(tp=tp, cp=at.cp, dp=at.dp, pp=pp) for pp in range(self.pp) for tp in range(self.tp))

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """List the ranks of each whole model (`model_ranks`)."""
        return [self.model_ranks(self.rank(tp=0, dp=dp, pp=0, cp=cp)) for dp in range(self.dp) for cp in range(self.cp)]

    def layers(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """Number the layers in a model chunk, over the whole model (interleaved, arXiv 2104.04473 section 2.2).

        Where the chunks cannot have equally many, some have one more: not the last one, which has the output layer as
        well, but those right before it, whose stages keep the activations of the fewest micro-batches.
        """
        place, parts = chunk * self.pp + pp, self.pp * self.chunks
        least, more = divmod(num_layers, parts)
        one_more = range(parts - 1 - more, parts - 1)
        first = place * least + len(range(one_more.start, min(place, one_more.stop)))
        return range(first, first + least + (place in one_more))

    def all_layers(self, num_layers: int) -> list[range]:
        """List the `layers` of every model chunk, in the order of the model."""
        return [self.layers(num_layers, pp, chunk) for chunk in range(self.chunks) for pp in range(self.pp)]

    def layers_of_stage(self, num_layers: int, pp: int) -> int:
        """Count the layers of all of a stage's model chunks."""
        return sum(len(self.layers(num_layers, pp, chunk)) for chunk in range(self.chunks))

    def is_first(self, pp: int, chunk: int) -> bool:
        """Say whether the chunk starts the model (holds the embedding)."""
        return pp == 0 and chunk == 0

    def is_last(self, pp: int, chunk: int) -> bool:
        """Say whether the chunk ends the model (holds the final norm and the output layer)."""
        return pp == self.pp - 1 and chunk == self.chunks - 1


@dataclass(frozen=True, kw_only=True)
class GenerationCoords:
    """Locates a rank in the generation layout."""

    tp: int
    replica: int


@dataclass(frozen=True, kw_only=True)
class GenerationLayout:
    """Cuts some ranks into tensor-parallel replicas: `tp` ranks hold one whole model.

    Attributes:
        ranks: the job's ranks that generate.
        tp: tensor-parallel size.
        stride: distance between neighbouring ranks of a replica. 1 is neighbours, the only order that vLLM has.
            Where generation has a smaller tp than training, stride = training tp / generation tp puts into each rank's
            generation slice what the rank already holds for training: ranks 0 and 1 of TP4 hold the first half of
            every tensor and become the first ranks of the replicas {0, 2} and {1, 3} of TP2 (the grouping of arXiv
            2409.19256, section 5). As neighbours {0, 1} and {2, 3}, ranks 1 and 2 would have nothing in place.
    """

    ranks: range
    tp: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size % self.tp:
            raise ValueError(
                f"{self.size} ranks cannot be split into generation replicas of {self.tp}; "
                f"use a rollout tensor_model_parallel_size that divides {self.size}"
            )
        assert self.size % (self.tp * self.stride) == 0, "the stride is a quotient of tensor-parallel sizes"

    @property
    def size(self) -> int:
        """Count the ranks."""
        return len(self.ranks)

    @property
    def replicas(self) -> int:
        return self.size // self.tp

    def coords(self, rank: int) -> GenerationCoords:
        block, within = divmod(rank - self.ranks.start, self.tp * self.stride)
        tp, first = divmod(within, self.stride)
        return GenerationCoords(tp=tp, replica=block * self.stride + first)

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """List the ranks of a replica, by tensor-parallel index; ascending."""
        block, first = divmod(replica, self.stride)
        start = self.ranks.start + block * self.tp * self.stride + first
        return tuple(range(start, start + self.tp * self.stride, self.stride))


def closest_stride(train: TrainLayout, tp: int) -> int:
    """Find the generation layout's stride that leaves the least to move; 1 unless `tp` divides the training's."""
    return train.tp // tp if train.tp % tp == 0 else 1
