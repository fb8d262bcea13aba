"""Adds losses to a model's routers, which spread tokens over experts, and counts the tokens of each expert.

Megatron-Core's own are divided by the tokens of one micro-batch on one rank, and otherwise from version to version.
These are sums over all tokens of a mini-batch, divided by their number; padding is none of them. Ranks that share a
micro-batch change nothing, and the balance is that within each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.microbatch import MicroBatch, SequenceShard
from megarl.models.router_pass import OfMicroBatch, routers_of
from megarl.parallel.train_groups import TrainGroups
from megarl.parallel.upload import upload


class RouterLosses:
    """Holds the losses and counts of one model's routers. Per mini-batch of T tokens, each with k of E experts:

        load balancing   coeff  E / (k T)  sum over micro-batches m  sum_e  n_e sum_t p_te / T_m
        z                coeff  1 / T  sum_t  log(sum_e exp(logit_te))^2

    where n_e tokens of m chose expert e, whose probability for token t is p_te; for each layer, added up (arXiv
    2101.03961, section 2.2; 2202.08906, equation 5).

    Args:
        chunks: of the model on this rank.
        shard: how ranks cut a micro-batch's tokens.
        aux, z: the coefficients; 0 leaves a loss out.
    """

    def __init__(
        self,
        arch: Architecture,
        groups: TrainGroups,
        chunks: Sequence[Any],
        shard: SequenceShard,
        *,
        aux: float,
        z: float,
    ) -> None:
        assert arch.moe is not None
        self._device, self._shard = groups.world.device, shard
        self._tp_rank, self._group = groups.layout.coords(groups.world.rank).tp, groups.pgs.tp_cp
        self._aux, self._z, self._each = aux, z, arch.moe.experts_per_token
        self._sigmoid = arch.moe.score_function == "sigmoid"
        self._tokens = 1
        self._real: dict[Any, list[OfMicroBatch[Tensor]]] = {chunk: [] for chunk in chunks}
        self._loads = torch.zeros(len(arch.expert_layers), arch.moe.num_experts, dtype=torch.int64, device=self._device)
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for chunk, routers in routers_of(arch, groups, chunks).items():
            for place, router in routers.items():
                real: OfMicroBatch[Tensor] = OfMicroBatch()
                self._real[chunk].append(real)
                router.register_forward_hook(self._hook(place, real))

    @property
    def adds(self) -> bool:
        """Say whether there are losses, not only counts."""
        return bool(self._aux or self._z)

    def begin(self, tokens: int) -> None:
        """Begin a pass over a mini-batch of so many tokens, on all ranks together."""
        self._tokens = max(1, tokens)
        self._loads.zero_()
        self._sums.zero_()
        for real in self._each_router:
            real.forget()

    def enter(self, chunk: Any, micro: MicroBatch, *, train: bool) -> None:
        """Tell the routers of a chunk which tokens of the micro-batch that enters it are no padding."""
        if self._real[chunk]:
            real = upload(micro.cells_of(self._shard, self._tp_rank) >= 0, self._device)
            for router in self._real[chunk]:
                router.take(real, train=train)

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has of the tokens of each expert, int64 [layers, experts], and of the losses without
        their coefficients, float64 [2], of the last mini-batch; on the host."""
        return self._loads.cpu(), self._sums.cpu()

    @property
    def _each_router(self) -> Iterator[OfMicroBatch[Tensor]]:
        return (real for routers in self._real.values() for real in routers)

    def _hook(self, place: int, real: OfMicroBatch[Tensor]) -> Callable[..., tuple[Tensor, Tensor] | None]:
        def count_and_add(
            router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
        ) -> tuple[Tensor, Tensor] | None:
            there, _ = real.next()
            if there is None or not (router.training and torch.is_grad_enabled()):
                return None
            probs, chosen = output
            counts = (chosen & there[:, None]).sum(0)
            self._loads[place] += counts
            if not self.adds:
                return None
            return _WithLoss.apply(probs, self._loss(router.gating(inputs[0]), there, counts)), chosen

        return count_and_add

    def _loss(self, logits: Tensor, there: Tensor, counts: Tensor) -> Tensor:
        """Compute a micro-batch's part of the losses in a layer, of the tokens on this rank."""
        logits = logits.flatten(0, -2).float()
        everywhere = torch.cat((counts, there.sum()[None]))
        if self._group.size() > 1:  # the others have other tokens of the micro-batch
            dist.all_reduce(everywhere, group=self._group)
        if self._sigmoid:
            scores = logits.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            scores = logits.softmax(-1)
        per_token = logits.shape[-1] / (self._each * everywhere[-1].clamp(min=1) * self._tokens)
        aux = ((scores * there[:, None]).sum(0) * everywhere[:-1]).sum() * per_token
        z = (logits.logsumexp(-1).square() * there).sum() / self._tokens
        self._sums += torch.stack((aux.detach(), z.detach()))
        return self._aux * aux + self._z * z


class _WithLoss(torch.autograd.Function):
    """Passes a tensor on, and has a loss differentiated with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
