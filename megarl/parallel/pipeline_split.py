"""Divides a model's layers into pipeline stages as Megatron-LM's keys say. Pure Python: no torch, no process groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

_REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
"""A group and a letter that occur several times, in the order in which Megatron-Core spells them out."""
_BOUNDARY_KEYS = "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
_ACCOUNT_KEYS = "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split"


@dataclass(frozen=True, kw_only=True)
class PipelineSplit:
    """Holds Megatron-LM's keys of stages that differ. Without any, stages differ by a layer at most.

    80 layers in 6 stages are 13, 13, 14, 14, 14, 12; with 12 in the first stage and 12 in the last the others have 14.

    Attributes:
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: in all chunks of the stage together; the
            other stages share the other layers equally.
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: whether embedding and loss count as
            a layer of their stage, and all stages have equally many.
        pipeline_model_parallel_layout: what each stage holds; see `spelt_out`. Empty: the other keys say it.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str = ""

    def __post_init__(self) -> None:
        if self._boundary and self._accounted:
            raise ValueError(f"{_BOUNDARY_KEYS} contradict {_ACCOUNT_KEYS}; set the former or the latter")
        if self.pipeline_model_parallel_layout:
            spelt_out(self.pipeline_model_parallel_layout)
            if self._boundary or self._accounted:
                raise ValueError(
                    "pipeline_model_parallel_layout says what every stage holds; leave out the keys num_layers_in_* "
                    "and account_for_*"
                )

    def __bool__(self) -> bool:
        return bool(self._boundary or self._accounted or self.pipeline_model_parallel_layout)

    def __str__(self) -> str:
        """Write the keys that are set as on a command line."""
        if self.pipeline_model_parallel_layout:
            return f"actor.megatron.pipeline_model_parallel_layout='{self.pipeline_model_parallel_layout}'"
        return " ".join(f"actor.megatron.{key}={value}" for key, value in asdict(self).items() if value)

    @property
    def _boundary(self) -> int:
        """Count the stages whose layers are set."""
        stages = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        return sum(layers is not None for layers in stages)

    @property
    def _accounted(self) -> int:
        """Count the embedding and the loss, as far as the split counts them as layers."""
        return self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    def chunks(self, pp: int, virtual: int | None) -> int:
        """Count the model chunks of a stage.

        Args:
            virtual: the key `virtual_pipeline_model_parallel_size`, which a layout makes unnecessary.

        Raises:
            ValueError: the layout has other stages.
        """
        if not self.pipeline_model_parallel_layout:
            return virtual or 1
        stages = len(spelt_out(self.pipeline_model_parallel_layout))
        key = f"pipeline_model_parallel_layout = {self.pipeline_model_parallel_layout} has {stages} stages"
        if stages % pp or stages > pp == 1:
            raise ValueError(f"{key}; write pipeline_model_parallel_size = {pp} of them, or twice, three times as many")
        if virtual is not None and virtual != stages // pp:
            raise ValueError(
                f"{key}, {stages // pp} for each of pipeline_model_parallel_size = {pp}, and "
                f"virtual_pipeline_model_parallel_size = {virtual}; leave the latter out"
            )
        return stages // pp

    def layers_of_chunks(self, num_layers: int, *, pp: int, chunks: int) -> list[int]:
        """Count the layers of every model chunk, in the order of the model: the first chunks of all stages come first.

        Raises:
            ValueError: the model's layers do not go into the stages that way.
        """
        if self.pipeline_model_parallel_layout:
            return self._written(num_layers)
        if self._boundary:
            return self._with_boundaries(num_layers, pp, chunks)
        if self._accounted:
            return self._with_embedding_and_loss(num_layers, pp, chunks)
        return balanced(num_layers, pp, chunks)

    def _written(self, num_layers: int) -> list[int]:
        counts = [stage.count("t") for stage in spelt_out(self.pipeline_model_parallel_layout)]
        if sum(counts) != num_layers:
            raise ValueError(
                f"pipeline_model_parallel_layout = {self.pipeline_model_parallel_layout} has {sum(counts)} layers (t), "
                f"and the model {num_layers}"
            )
        return counts

    def _with_boundaries(self, num_layers: int, pp: int, chunks: int) -> list[int]:
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        rest, others = num_layers - (first or 0) - (last or 0), pp - self._boundary
        if pp == 1 or others < 0:
            raise ValueError(f"{_BOUNDARY_KEYS} need pipeline_model_parallel_size of 2 or more")
        if rest < others or (rest % others if others else rest):
            raise ValueError(
                f"{_BOUNDARY_KEYS} leave {rest} of {num_layers} layers for {others} other stages, which must have "
                "equally many, one at least; pipeline_model_parallel_layout takes any split"
            )
        middle = rest // others if others else 0
        stages = [first or middle, *[middle] * (pp - 2), last or middle]
        for layers in stages:
            if layers % chunks:
                raise ValueError(
                    f"{_BOUNDARY_KEYS}: {layers} layers of a stage do not divide into "
                    f"virtual_pipeline_model_parallel_size = {chunks}; pipeline_model_parallel_layout takes any split"
                )
        return [layers // chunks for layers in stages] * chunks

    def _with_embedding_and_loss(self, num_layers: int, pp: int, chunks: int) -> list[int]:
        total, parts = num_layers + self._accounted, pp * chunks
        if total % parts:
            raise ValueError(
                f"{_ACCOUNT_KEYS}: {num_layers} layers and {self._accounted} more do not divide into {parts} equal "
                "parts; pipeline_model_parallel_layout takes any split"
            )
        counts = [total // parts] * parts
        counts[0] -= self.account_for_embedding_in_pipeline_split
        counts[-1] -= self.account_for_loss_in_pipeline_split
        return counts


BALANCED = PipelineSplit()
"""No key is set."""


def balanced(num_layers: int, pp: int, chunks: int) -> list[int]:
    """Count the layers of every model chunk such that no two differ by more than one.

    Where they cannot have equally many, some have one more: not the last one, which has the output layer as well, but
    those right before it, whose stages keep the activations of the fewest micro-batches.
    """
    parts = pp * chunks
    if num_layers < parts:
        virtual = " x virtual_pipeline_model_parallel_size" if chunks > 1 else ""
        what = f"pipeline_model_parallel_size{virtual}"
        raise ValueError(f"{what} = {parts} is more than the model's {num_layers} layers")
    least, more = divmod(num_layers, parts)
    return [least + (parts - 1 - more <= part < parts - 1) for part in range(parts)]


def spelt_out(layout: str) -> list[str]:
    """Spell out what stages hold: "Et*2|(t|)*2L" is "Ett", "t", "t" and "L".

    E is the embedding, t a layer, L the final norm and the loss; "|" stands between stages, commas mean nothing.

    Raises:
        ValueError: Megatron-Core, or this program, has no such pipeline.
    """
    key, text = f"pipeline_model_parallel_layout = {layout}", layout.replace(",", "")
    if re.search(r"\*\d{5}", text):
        raise ValueError(f"{key} repeats a part more than 9,999 times")
    for pattern in _REPEATED:
        if sum(len(part) * int(times) for part, times in re.findall(pattern, text)) > 10**6:
            raise ValueError(f"{key} has more than a million layers")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if unknown := sorted(set(text) - set("EtLm|")):
        raise ValueError(f"{key} has '{unknown[0]}'; write E (embedding), t (layer), L (loss), | and *number")
    if "m" in text:
        raise ValueError(f"{key}: layers of multi-token prediction (m) are not trained; leave them out")
    stages = text.split("|")
    if not re.fullmatch("Et*L", "".join(stages)) or stages[0][:1] != "E" or stages[-1][-1:] != "L":
        raise ValueError(
            f"{key} must begin with E in the first stage, go on with layers (t) and end with L in the last"
        )
    if "" in stages:
        raise ValueError(f"{key}: stage {stages.index('') + 1} of {len(stages)} holds nothing")
    return stages


def written(layers: Sequence[int]) -> str:
    """Write the `pipeline_model_parallel_layout` of stages with so many layers: (2, 1, 1, 2) is "Ett|(t|)*2ttL"."""
    first, *middle, last = layers
    text = f"E{_letters(first)}|"
    for count, group in groupby(middle):
        stage, times = f"{_letters(count)}|", len(list(group))
        text += f"({stage})*{times}" if times > 1 else stage
    return f"{text}{_letters(last)}L"


def _letters(layers: int) -> str:
    return "t" * layers if layers <= 2 else f"t*{layers}"
