"""Trains a model: gradients over data-parallel ranks, and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.loss import (
    Loss,
    LossInput,
    LossOutput,
    Metric,
    Reduce,
    columns_for,
    computed,
    prepared,
    scope_of,
)
from megarl.config.fields import LossAggMode
from megarl.config.policy import BatchingConfig, MegatronConfig, ModelConfig, OptimConfig
from megarl.models.architecture import Architecture
from megarl.models.heads import Head, Passed, ScalarHead
from megarl.models.router_losses import RouterLosses
from megarl.parallel.offload import Dropped, OnHost, Rebuilt, Resident
from megarl.parallel.train_groups import TrainGroups
from megarl.phases import Item
from megarl.role_kinds import ACTOR, CRITIC, TRAINED_REWARD_MODEL
from megarl.roles.model import MegatronModel
from megarl.roles.optimizer import MegatronOptimizer
from megarl.roles.passes import MiniBatch, Passes
from megarl.telemetry.timers import Stopwatch
from megarl.types import Batch
from megarl.types.owners import Owners


class TrainedModel(MegatronModel):
    """Adds Megatron-Core's gradient buffers and optimizer to a `MegatronModel`.

    Attributes:
        ddp: the model's chunks in Megatron-Core's DistributedDataParallel.
        optimizer: the model's AdamW and schedule.
        memory: of weights, gradients and optimizer state.
        gradient_sync: times the last update's reduction of gradients over ranks, as far as nothing hid it.
        skipped: of each update since it was last cleared, whether the step was left out: its loss or gradient was not
            finite.
    """

    def __init__(
        self,
        arch: Architecture,
        groups: TrainGroups,
        *,
        model: ModelConfig,
        megatron: MegatronConfig,
        batching: BatchingConfig,
        balance: bool = True,
        optim: OptimConfig,
        total_steps: int,
        initial: Callable[[MegatronModel], None],
    ) -> None:
        """
        Args:
            optim, total_steps: of the first optimizer, and the optimizer steps that its schedule spans.
            initial: gives the model its first weights.
        """
        super().__init__(arch, groups, model=model, megatron=megatron, batching=batching, balance=balance)
        self._overlaps_gather = megatron.overlap_param_gather
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=megatron.use_distributed_optimizer,
            overlap_grad_reduce=megatron.overlap_grad_reduce,
            overlap_param_gather=megatron.overlap_param_gather,
        )
        with groups.active():
            self.ddp = [
                DistributedDataParallel(
                    self.transformer_config, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.pgs
                )
                for i, chunk in enumerate(self.chunks)
            ]
        modules = (module for chunk in self.chunks for module in chunk.modules())
        self._dispatchers = [module.token_dispatcher for module in modules if isinstance(module, MoELayer)]
        if arch.moe is not None:
            weights = dict(aux=megatron.moe_aux_loss_coeff, z=megatron.moe_z_loss_coeff)
            self.router_losses = RouterLosses(self.arch, groups, self.chunks, self.shard, **weights)
        self.gradient_sync = Stopwatch(next(self.ddp[0].parameters()).device)
        # hooks of the parameters hold the configuration where no collection looks: the model must not be in it
        self.transformer_config.finalize_model_grads_func = partial(_finalize_without_token_count, self.gradient_sync)
        self.transformer_config.grad_scale_func = None
        if megatron.overlap_grad_reduce:
            hooks = [chunk.no_sync for chunk in self.ddp]
            self.transformer_config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
        self.optimizer = MegatronOptimizer(self.ddp, groups, self.transformer_config, megatron=megatron)
        self.optimizer.restart(optim, total_steps)
        self._gradients = Dropped(self._gradient_buffers) if megatron.grad_offload else Resident()
        self.memory |= {
            Item.GRADIENTS: (self._gradients,),
            Item.OPTIMIZER: (self.optimizer.masters, self.optimizer.moments),
        }
        if megatron.param_offload:
            self.memory[Item.WEIGHTS] = (self._weights_that_leave(),)
        self.skipped: list[bool] = []
        initial(self)

    @property
    def kernels(self) -> str:
        """Name the kernels that a training step runs on, for people."""
        return f"{self.layers.kernels}, {self.optimizer.kernels}"

    def restart_optimizer(self, optim: OptimConfig, total_steps: int) -> None:
        """Begin a fresh optimizer and schedule over the current weights."""
        self.gather_parameters()
        self.optimizer.restart(optim, total_steps)

    def update(
        self, batch: Batch, mini_batch: MiniBatch, loss: Loss, weights: Tensor | None = None
    ) -> dict[str, Metric]:
        """Do one optimizer step on a mini-batch.

        Args:
            batch: whose tokens each rank has that passes them (`Batch.held_by`), or all.
            mini_batch: of this model's `plan`.
            loss: is minimised. It sees the fields of the batch that it names in `columns`.
            weights: float32, of the head's outputs in the loss, with the global denominator: [T] for one per token, [N]
                for one per sequence. None: the mean over the mini-batch's tokens, or over its sequences if the loss
                sees whole ones.

        Returns:
            the metrics of the whole mini-batch, on every rank. `skipped` is 1 if its loss or its gradient was not
            finite, and nothing changed.
        """
        return self._update(batch, mini_batch, loss, weights)[0]

    def evaluate(self, batch: Batch, passes: Passes, loss: Loss) -> dict[str, float]:
        """Compute the loss of a batch and its metrics, without gradients; the same on every rank, which all call it.

        Args:
            passes: see `MegatronModel.forward`.
            loss: as in `update`. There is no entropy.
        """
        everything, own = range(len(batch)), batch.own
        outputs, weights = self.forward(batch, passes), self._mean_over(batch, everything, loss)
        columns, sequence_columns = columns_for(loss, prepared(loss, batch, everything), self.head.per)
        trained = batch.response_mask
        places = trained if self.head.per == "token" else own
        by_token = {name: column[trained] for name, column in columns.items()}
        x = LossInput(
            output=outputs[places],
            weights=weights[places],
            columns=by_token | {name: column[own] for name, column in sequence_columns.items()},
            lengths=batch.own_response_lengths,
        )
        owners = batch.owners or Owners.everywhere(len(batch), self.groups.world)
        metrics = self._reduce([computed(loss, x.weighted())] if owners.leads and len(own) else [])
        return {name: float(metric.value) for name, metric in metrics.items()}

    def update_with_outputs(
        self, batch: Batch, mini_batch: MiniBatch, loss: Loss, weights: Tensor | None = None
    ) -> tuple[dict[str, Metric], Tensor]:
        """Do an optimizer step, and return what `forward` would have before it: the update computes it anyway."""
        metrics, passed = self._update(batch, mini_batch, loss, weights)
        return metrics, self._gathered(batch, passed)

    def _update(
        self, batch: Batch, mini_batch: MiniBatch, loss: Loss, weights: Tensor | None
    ) -> tuple[dict[str, Metric], list[Passed]]:
        if weights is None:
            weights = self._mean_over(batch, mini_batch.sequences, loss)
        self._check_layout(mini_batch)
        if batch.owners is not None and (mini_batch.owners is None or not batch.owners.matches(mini_batch.owners)):
            raise ValueError("other ranks have the batch's tokens than pass them; train on batch.held_by(plan.owners)")
        batch = prepared(loss, batch, mini_batch.sequences)
        if self.router_losses is not None:
            self.router_losses.begin(int(batch.lengths[list(mini_batch.sequences)].sum()))
        passed = self.accumulate_gradients(batch, mini_batch, weights, loss)
        self.groups.world.watch.waited(self.gradient_sync.seconds)
        losses = [out for micro in passed for out in micro.losses] if self._reports else []
        metrics = {"loss": Metric(value=0.0), **self._reduce(losses)}
        grad_norm, stepped = self.optimizer.step(loss=float(metrics["loss"].value))
        self.skipped.append(not stepped)
        metrics["grad_norm"] = Metric(value=grad_norm)
        metrics["lr"] = Metric(value=self.optimizer.lr)
        metrics["skipped"] = Metric(value=float(not stepped))
        if self.router_losses is not None:
            metrics |= self._of_routers(self.router_losses)
        if self.replay is not None and batch.routed_experts is not None:
            same, recorded = self.groups.world.sum_(self.replay.counts(), "the routers' choices").tolist()
            metrics["routing_agreement"] = Metric(value=same / max(1, recorded))
        return metrics, passed

    def _of_routers(self, losses: RouterLosses) -> dict[str, Metric]:
        """Add up what the routers of all ranks did with a mini-batch."""
        loads, sums = losses.totals()
        both = self.groups.world.sum_(torch.cat((loads.flatten().double(), sums)), "the loads of experts")
        loads, (aux, z) = both[:-2].view_as(loads), both[-2:].tolist()
        loads = loads / loads.mean(-1, keepdim=True).clamp(min=1e-9)
        values = {"expert_load_max": float(loads.max()), "expert_load_min": float(loads.min())}
        if losses.adds:
            values |= {"router_aux_loss": aux / len(loads), "router_z_loss": z / len(loads)}
        return {name: Metric(value=value) for name, value in values.items()}

    def accumulate_gradients(self, batch: Batch, passes: Passes, weights: Tensor, loss: Loss) -> list[Passed]:
        """Compute the gradient of a mini-batch, reduced over data-parallel ranks; `update` without the step."""
        for memory in self.memory[Item.WEIGHTS]:
            memory.restore()
        self._gradients.restore()
        self.optimizer.zero_grad()
        columns, sequence_columns = columns_for(loss, batch, self.head.per)
        (sequence_columns if self.head.per == "sequence" else columns)["weights"] = weights
        passed = self._run(batch, passes, loss, columns, sequence_columns)
        for dispatcher in self._dispatchers:
            _forget_graph(dispatcher)
        return passed

    def gather_parameters(self) -> None:
        """See `MegatronModel.gather_parameters`; ends what `overlap_param_gather` left to the next training pass.

        Other readers would find the parameters of before the optimizer's step.
        """
        super().gather_parameters()
        if self._overlaps_gather:
            for chunk in self.ddp:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)

    def saved_bytes(self, *, optimizer: bool = True) -> int:
        """See `MegatronModel.saved_bytes`; fp32 weights and two moments beside the weights."""
        stepped = sum(p.numel() // self._replicas(p) for p in self._trained()) if optimizer else 0
        return super().saved_bytes() + 3 * torch.float32.itemsize * stepped

    def sharded_state(self, prefix: str = "", *, loading: bool, optimizer: bool = True) -> dict[str, Any]:
        """See `MegatronModel.sharded_state`: weights, optimizer and schedule."""
        self._gradients.release()  # the next update needs none of them, and a checkpoint needs room
        return self.optimizer.sharded_state(self.sharded_weights(prefix), loading=loading, tensors=optimizer)

    def load_sharded(self, state: dict[str, Any], prefix: str = "") -> None:
        self._put_weights(state, prefix)
        if "optimizer" in state:  # it holds the fp32 weights that were read
            super()._rewritten()
        else:
            self._rewritten()
        self.optimizer.load(state)

    def _rewritten(self) -> None:
        super()._rewritten()
        self.optimizer.take_weights()  # else the next step would bring the old weights back

    def output_weight(self, model: Any) -> Tensor:
        weight = super().output_weight(model)
        if self._overlaps_gather and weight.requires_grad and model in self.ddp:
            # Megatron-Core waits for parameters as their module is called, and the output layer's never is
            model.param_to_bucket_group[weight].finish_param_sync(skip_next_bucket_dispatch=True)
        return weight

    def _pass_chunks(self, *, train: bool) -> list[Any]:
        return list(self.ddp) if train else list(self.chunks)

    def _mean_over(self, batch: Batch, sequences: Sequence[int], loss: Loss) -> Tensor:
        if self.head.per == "token":
            mode: LossAggMode = "token-mean" if scope_of(loss) == "token" else "seq-mean-token-mean"
            return token_weights(batch, sequences, mode)
        weights = torch.zeros(len(batch))
        weights[list(sequences)] = 1.0 / max(1, len(sequences))
        return weights

    def _weights_that_leave(self) -> Resident:
        if all(p.dtype == torch.bfloat16 for p in self._trained()):
            return Rebuilt(self._trained, self.optimizer.masters, self.optimizer.rebuild_weights)
        return OnHost(self._trained)

    def _trained(self) -> Iterator[Tensor]:
        """List the parameters that the optimizer steps: it has no fp32 weights of any others."""
        return (p for model in self.ddp for p in model.parameters() if p.requires_grad)

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for model in self.ddp:
            yield from (buffer.grad_data for buffer in model.buffers + model.expert_parallel_buffers)

    def _reduce(self, outputs: Sequence[LossOutput]) -> dict[str, Metric]:
        """Reduce metrics over all micro-batches of all data-parallel ranks."""
        outs = [{**out.metrics, "loss": Metric(value=out.loss.detach())} for out in outputs]
        kinds: dict[str, Reduce] = {name: metric.reduce for metrics in outs for name, metric in metrics.items()}
        total: dict[str, Metric] = {}
        for of_rank in self.groups.world.all_gather(_over_chunks(outs, kinds), "the metrics of an update"):
            for name, (value, kind) in of_rank.items():
                so_far = total.get(name)
                if so_far is not None:
                    value = so_far.value + value if kind == "sum" else max(so_far.value, value)
                total[name] = Metric(value=value, reduce=kind)
        return total


class Actor(TrainedModel):
    """Trains a language model."""

    kind = ACTOR
    log_probs = TrainedModel.forward
    """Log-probability of every trained token at the batch's temperature, nats."""


class Critic(TrainedModel):
    """Trains a transformer with a value head."""

    kind = CRITIC
    values = TrainedModel.forward
    """Value of the state before each trained token; 0 at prompt tokens."""

    def make_head(self) -> Head:
        return ScalarHead(per="token")


class RewardModel(TrainedModel):
    """Trains a transformer with a score head."""

    kind = TRAINED_REWARD_MODEL
    scores = TrainedModel.forward
    """Score of each sequence, read at its last token."""

    def make_head(self) -> Head:
        return ScalarHead(per="sequence")


def _over_chunks(
    metrics: Sequence[Mapping[str, Metric]], kinds: Mapping[str, Reduce]
) -> dict[str, tuple[float, Reduce]]:
    """Reduce each metric to one value, with one wait for the GPU."""
    values = []
    for name, kind in sorted(kinds.items()):
        device = torch.as_tensor(metrics[0]["loss"].value).device
        of_chunks = torch.stack([torch.as_tensor(m[name].value, device=device) for m in metrics if name in m])
        values.append(of_chunks.double().sum() if kind == "sum" else of_chunks.max().double())
    numbers = torch.stack(values).tolist() if values else []
    return {name: (number, kind) for (name, kind), number in zip(sorted(kinds.items()), numbers, strict=True)}


def _finalize_without_token_count(
    watch: Stopwatch, models: list[Any], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    """Reduce the gradients over ranks. Megatron-Core would divide them by the number of tokens; our losses already
    carry their denominator."""
    del num_tokens
    with watch:
        finalize_model_grads(models, None, **kwargs)


def _forget_graph(dispatcher: object) -> None:
    """Let go of the autograd graph of the last pass, of which a dispatcher of tokens to experts keeps tensors.

    The graph leads to the hooks of the parameters, and they to the model, where no collection looks: it would stay.
    """
    kept = {name: value for name, value in vars(dispatcher).items() if isinstance(value, Tensor)}
    vars(dispatcher).update({name: value.detach() for name, value in kept.items()})
