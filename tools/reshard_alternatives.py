"""Other ways to get the actor's weights into the generation layout, for tools/bench_reshard.py to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from reshard_links import memory_at
from torch import Tensor

from megarl.models.fill import local_view
from megarl.models.gpt import build_chunks, transformer_config
from megarl.models.placements import Placement
from megarl.models.tensors import Box, volume
from megarl.models.weights import EMBEDDING, engine_placements, logical_tensors
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.roles.model import MegatronModel

if TYPE_CHECKING:
    from megarl.reshard.transport.copy_kernel import FusedCopy


# ------------------------------------------------------------------------------------------- per-tensor all-gather


class TensorGather:
    """What an export in Hugging Face's form does: every tensor whole on every rank, one after the other.

    The tensor-parallel ranks of the stage that holds it gather its boxes, the pipeline ranks get it from them, and each
    copies its slice into the engine's parameter.
    """

    def __init__(self, model: MegatronModel, engine: Mapping[str, Tensor], generation: GenerationLayout) -> None:
        groups, arch = model.groups, model.arch
        self._model, self._engine, self._pgs = model, engine, groups.pgs
        self._tensors = logical_tensors(arch)
        train, at = groups.layout, groups.layout.coords(groups.world.rank)
        self._stages = {
            pp: {
                tp: _by_tensor(model.side.placements(train.rank(tp=tp, dp=at.dp, pp=pp, cp=at.cp)))
                for tp in range(train.tp)
            }
            for pp in range(train.pp)
        }
        self._roots = {pp: train.rank(tp=at.tp, dp=at.dp, pp=pp, cp=at.cp) for pp in range(train.pp)}
        self._wanted = _by_tensor(
            engine_placements(
                arch,
                generation.split,
                generation.coords(groups.world.rank).tp,
                vocab_rows=len(engine[EMBEDDING]),
            )
        )
        self._stage, self._first = at.pp, next(iter(engine.values()))

    @torch.no_grad()
    def __call__(self) -> None:
        parameters = self._model.parameters()
        for name, tensor in self._tensors.items():
            stage = next(pp for pp, held in self._stages.items() if name in held[0])
            whole = self._first.new_empty(tensor.shape)
            if stage == self._stage:
                self._gather(whole, [held.get(name, []) for held in self._stages[stage].values()], parameters)
            if len(self._stages) > 1:
                dist.broadcast(whole, self._roots[stage], self._pgs.pp)
            for place in self._wanted.get(name, ()):
                local_view(self._engine[place.param], place).copy_(whole[_slices(place.box)])

    def _gather(self, whole: Tensor, held: list[list[Placement]], parameters: Mapping[str, Tensor]) -> None:
        """Args:
        held: where each tensor-parallel rank has which boxes.
        """
        mine = held[self._pgs.tp.rank()]
        if all(place.box == held[0][0].box for places in held for place in places):
            whole.copy_(local_view(parameters[mine[0].param], mine[0]))
            return
        width = max(sum(volume(place.box) for place in places) for places in held)
        flat, everyone = whole.new_empty(width), whole.new_empty(len(held) * width)
        start = 0
        for place in mine:
            flat[start : start + volume(place.box)] = local_view(parameters[place.param], place).reshape(-1)
            start += volume(place.box)
        dist.all_gather_into_tensor(everyone, flat, self._pgs.tp)
        for places, row in zip(held, everyone.split(width), strict=True):
            start = 0
            for place in places:
                box = whole[_slices(place.box)]
                box.copy_(row[start : start + box.numel()].view(box.shape))
                start += box.numel()


def _by_tensor(placements: Iterable[Placement]) -> dict[str, list[Placement]]:
    """Of tied embeddings on one rank, listed twice, the first."""
    out: dict[str, list[Placement]] = {}
    for place in placements:
        known = out.setdefault(place.tensor, [])
        if all(place.box != other.box for other in known):
            known.append(place)
    return out


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*i) for i in box)


# -------------------------------------------------------------------------------------------------- copy engines


class CopyEngines:
    """The copies of a fused kernel, each by `copy_`: the GPU's copy engines where rows are dense."""

    def __init__(self, fused: FusedCopy, device: torch.device, streams: int = 4) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(streams)]
        self._pairs = []
        for c in fused.copies:
            destination, source = (
                memory_at(
                    int(fused.bases[c[side]] + c[f"{side}_offset"]),
                    rows=int(c["rows"]),
                    width=int(c["row_bytes"]),
                    stride=int(c[f"{side}_stride"]),
                    device=device,
                )
                for side in ("destination", "source")
            )
            # the two ends of a copy may be aligned differently
            common = torch.int64 if source.dtype == destination.dtype == torch.int64 else torch.uint8
            self._pairs.append((destination.view(common), source.view(common)))

    def __call__(self) -> None:
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for i, (destination, source) in enumerate(self._pairs):
            with torch.cuda.stream(self._streams[i % len(self._streams)]):
                destination.copy_(source, non_blocking=True)
        for stream in self._streams:
            current.wait_stream(stream)


# ----------------------------------------------------------------------------------------- Megatron-Core's refit


class Refit:
    """`megatron.core.resharding.refit.swap_model_weights` into a second GPTModel in the generation layout.

    Attributes:
        own_bytes: of that model's parameters.

    Raises:
        NotImplementedError: it cannot do this.
    """

    def __init__(self, model: MegatronModel, tp: int) -> None:
        try:
            from megatron.core.resharding.refit import swap_model_weights
        except ImportError as e:
            raise NotImplementedError(f"no refit in this Megatron-Core: {e}") from e
        groups, arch = model.groups, model.arch
        if len(model.chunks) > 1:
            raise NotImplementedError("refit takes one model chunk per rank")
        if arch.padded_vocab_size(groups.layout.tp) != arch.padded_vocab_size(tp):
            # one rank alone would find out, and leave the others waiting
            raise NotImplementedError("refit takes vocabularies that both layouts pad alike")
        layout = TrainLayout(ranks=groups.layout.ranks, tp=tp)
        there = replace(groups, layout=layout, pgs=_groups_of(tp, layout.size))
        config = transformer_config(
            arch,
            there,
            dtype=model.transformer_config.params_dtype,
            transformer_engine=not model.layers.rotates,
        )
        (self.target,) = build_chunks(arch, config, there, model.layers, model_class=GPTModel)
        self._source, self._swap = model.chunks[0], swap_model_weights
        self.own_bytes = sum(parameter.nbytes for parameter in self.target.parameters())
        try:
            self()
        except Exception as e:  # whatever it stumbles over, the other ways are worth showing
            raise NotImplementedError(f"swap_model_weights failed: {type(e).__name__}: {e}") from e

    @torch.no_grad()
    def __call__(self) -> None:
        self._swap(self._source, self.target, "nccl")


def _groups_of(tp: int, world: int) -> ProcessGroupCollection:
    """Groups of a layout with replicas of `tp` neighbours, and of one rank where an axis has no size."""
    replicas = [dist.new_group(list(range(i, i + tp))) for i in range(0, world, tp)]
    across = [dist.new_group(list(range(i, world, tp))) for i in range(tp)]
    alone = [dist.new_group([i]) for i in range(world)]
    rank = dist.get_rank()
    pgs = ProcessGroupCollection()
    for name in ("pp", "cp", "ep", "embd", "pos_embd", "hcp"):
        setattr(pgs, name, alone[rank])
    for name in ("tp", "mp", "tp_cp", "expt_tp", "tp_ep", "tp_ep_pp"):
        setattr(pgs, name, replicas[rank // tp])
    for name in ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp"):
        setattr(pgs, name, across[rank % tp])
    return pgs
