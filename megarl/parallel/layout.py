"""Does the rank arithmetic of the training and the generation layout. Pure Python: no torch, no process groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megarl.parallel.context import ALL_TO_ALL, ContextKind
from megarl.parallel.experts import ExpertPlace, TensorSplit, dealt_out
from megarl.parallel.pipeline_split import BALANCED, PipelineSplit


@dataclass(frozen=True, kw_only=True)
class TrainCoords:
    """Locates a rank in the training layout.

    Attributes:
        ep: which part of the experts it has.
        expert_tp: its place among the ranks that share these.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """Has Megatron-Core's `tp-cp-dp-pp` rank order: tensor-parallel ranks are neighbours, stages farthest apart.

    The ranks of a stage hold its experts in an order of their own, `tp-ep-dp`, with other sizes.

    Attributes:
        ranks: the job's ranks that hold the models of this layout.
        tp, pp, cp: tensor, pipeline and context parallel sizes.
        chunks: model chunks per pipeline stage (virtual pipeline size); 1 is the plain 1F1B schedule.
        split: how many layers the stages have.
        ep: ranks over which the experts of a layer are dealt out.
        etp: ranks that share each expert; None: tp.
        context: how context-parallel ranks share sequences.
    """

    ranks: range
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    ep: int = 1
    etp: int | None = None
    split: PipelineSplit = BALANCED
    context: ContextKind = ALL_TO_ALL

    def __post_init__(self) -> None:
        if self.size % self.block_size:
            raise ValueError(
                f"{self.size} ranks cannot be split into tensor x pipeline x context = "
                f"{self.tp} x {self.pp} x {self.cp}; use a multiple of {self.block_size} ranks"
            )
        if self._stage % (self.expert_tp * self.ep):
            raise ValueError(
                f"the {self._stage} ranks of a pipeline stage cannot be split into expert x expert-tensor = "
                f"{self.ep} x {self.expert_tp}; use a multiple of {self.expert_tp * self.ep * self.pp} ranks"
            )

    @property
    def size(self) -> int:
        """Count the ranks."""
        return len(self.ranks)

    @property
    def megatron_sizes(self) -> dict[str, Any]:
        """Give the sizes in Megatron-Core's names."""
        return dict(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.expert_tp,
        )

    @property
    def block_size(self) -> int:
        """Count the ranks of each of `data_blocks`."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        return self.size // self.block_size

    @property
    def replicas(self) -> int:
        """Count the ranks that have the same part of the model, but for its experts."""
        return self.dp * self.cp

    @property
    def shares_sequences(self) -> bool:
        """Say whether several ranks have a part of the tokens of each sequence."""
        return self.cp > 1

    def rank_tokens(self, tokens: int) -> int:
        """Count those of a micro-batch's tokens that a rank has."""
        return -(-tokens // self.cp)

    def micro_batch_tokens(self, rank_tokens: int) -> int:
        """Count the tokens of a micro-batch of which each rank has so many."""
        return rank_tokens * self.cp

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Raise ValueError, with what to change, unless the ranks that share sequences can share such attention."""
        self.context.check_heads(self.cp, heads // self.tp, max(1, kv_heads // self.tp))

    def copied_keys(self, copies: float) -> float:
        """See `ContextKind.copied_keys`."""
        return self.context.copied_keys(self.cp, copies)

    @property
    def head_splits(self) -> tuple[int, int]:
        """Count the tensor-parallel ranks over which a layer's heads are split, and the context-parallel ranks."""
        return self.tp, self.cp if self.context.splits_heads else 1

    @property
    def expert_tp(self) -> int:
        """Count the ranks that share each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Count the ranks that have the same part of the same experts."""
        return self._stage // (self.expert_tp * self.ep)

    @property
    def experts_apart(self) -> bool:
        """Say whether experts are divided otherwise than the rest."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def _stage(self) -> int:
        """Count the ranks of a pipeline stage."""
        return self.size // self.pp

    def __str__(self) -> str:
        chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        experts = f", experts EP{self.ep} x TP{self.expert_tp}" if self.experts_apart else ""
        context = f" x CP{self.cp}{self.context.remark}" if self.cp > 1 else ""
        return f"TP{self.tp} x PP{self.pp}{chunks}{context} x DP{self.dp}{experts}"

    def coords(self, rank: int) -> TrainCoords:
        rest, tp = divmod(rank - self.ranks.start, self.tp)
        cp, rest = rest % self.cp, rest // self.cp
        of_experts, expert_tp = divmod((rank - self.ranks.start) % self._stage, self.expert_tp)
        ep = of_experts % self.ep
        return TrainCoords(tp=tp, cp=cp, dp=rest % self.dp, pp=rest // self.dp, ep=ep, expert_tp=expert_tp)

    def expert_place(self, rank: int) -> ExpertPlace:
        """Locate a rank among those of its stage that hold experts together."""
        at = self.coords(rank)
        return ExpertPlace(tp=self.expert_tp, rank=at.expert_tp, ep=self.ep, part=at.ep)

    def expert_parts(self, count: int) -> list[range]:
        """Number the experts, of so many in a layer, that are dealt out together."""
        return dealt_out(count, self.ep)

    def rank(self, *, tp: int, dp: int, pp: int, cp: int = 0) -> int:
        return self.ranks.start + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def place(self, rank: int) -> tuple[int, ...]:
        """Say what tells a rank's part of the model from another's: ranks of one place hold the same."""
        at = self.coords(rank)
        return at.pp, at.tp, at.ep, at.expert_tp

    def model_ranks(self, rank: int) -> tuple[int, ...]:
        """List the ranks of the same dp and cp, every tp and pp, ascending: a whole model but for experts of others."""
        at = self.coords(rank)
        return tuple(self.rank(tp=tp, cp=at.cp, dp=at.dp, pp=pp) for pp in range(self.pp) for tp in range(self.tp))

    @property
    def data_blocks(self) -> tuple[tuple[int, ...], ...]:
        """List the ranks of each data-parallel share, every tp, cp and pp: all of them pass the same sequences."""
        return tuple(
            tuple(
                self.rank(tp=tp, cp=cp, dp=dp, pp=pp)
                for pp in range(self.pp)
                for cp in range(self.cp)
                for tp in range(self.tp)
            )
            for dp in range(self.dp)
        )

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """List the ranks, ascending, that hold one whole model together, of each copy.

        That is neighbours in every stage, as few as have a multiple both of the tensor-parallel ranks and of those with
        all experts: of the former there may be several sets in a copy, or of the latter.
        """
        each = math.lcm(self.tp, self.expert_tp * self.ep)
        starts = [self.ranks.start + pp * self._stage for pp in range(self.pp)]
        return [
            tuple(start + first + i for start in starts for i in range(each)) for first in range(0, self._stage, each)
        ]

    def layers(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """Number the layers in a model chunk, over the whole model (interleaved, arXiv 2104.04473 section 2.2)."""
        return self.all_layers(num_layers)[chunk * self.pp + pp]

    def all_layers(self, num_layers: int) -> list[range]:
        """List the `layers` of every model chunk, in the order of the model.

        Raises:
            ValueError: they do not go into the stages.
        """
        counts = self.split.layers_of_chunks(num_layers, pp=self.pp, chunks=self.chunks)
        assert len(counts) == self.pp * self.chunks, "a layout has the chunks of its split"
        return [range(first, after) for first, after in pairwise([0, *accumulate(counts)])]

    def layers_of_stage(self, num_layers: int, pp: int) -> int:
        """Count the layers of all of a stage's model chunks."""
        return sum(len(self.layers(num_layers, pp, chunk)) for chunk in range(self.chunks))

    def with_layers(self, num_layers: int) -> str:
        """Write the layout and, where stages are not equal, their layers: "TP8 x PP3 x DP2, 12 + 14 + 12 layers"."""
        counts = [self.layers_of_stage(num_layers, stage) for stage in range(self.pp)]
        return f"{self}, {' + '.join(map(str, counts))} layers" if len(set(counts)) > 1 else str(self)

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
        ep: see `TensorSplit`.
    """

    ranks: range
    tp: int = 1
    stride: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        assert self.ep in (1, self.tp)
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

    @property
    def split(self) -> TensorSplit:
        """Say how the ranks of a replica divide layers."""
        return TensorSplit(tp=self.tp, ep=self.ep)

    def __str__(self) -> str:
        return f"TP{self.tp} x {self.replicas} replicas" + (f", experts EP{self.ep}" if self.ep > 1 else "")

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
