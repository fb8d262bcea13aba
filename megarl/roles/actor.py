"""The policy that is trained: a Policy with gradient buffers, optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import Adam, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megarl.algorithms.policy_loss import LossOutput, TokenBatch
from megarl.config.schema import ActorRolloutRef, Optim
from megarl.models.architecture import Architecture
from megarl.models.kernels import adam_kernels, layer_kernels
from megarl.parallel.groups import Groups
from megarl.parallel.megatron_internals import storage_identity
from megarl.parallel.offload import Dropped, OnHost, Rebuilt, Stays, storages
from megarl.roles.microbatch import MicroBatch
from megarl.roles.optimizer_state import (
    clip,
    copy_masters_to_weights,
    load_optimizer_state,
    master_weights,
    moments,
    refuse_nonfinite,
    sharded_optimizer_state,
)
from megarl.roles.policy import Policy
from megarl.roles.writers import spread_over_replicas
from megarl.types import Batch

Loss = Callable[[TokenBatch], LossOutput]


class Actor(Policy):
    """Owns the trained model, its gradients (Megatron-Core's DDP) and its AdamW (Megatron-Core's optimizer).

    Attributes:
        weights, gradients, masters, moments: their memory; the masters are fp32 weights beside those of the model. They
            may be released once the optimizer is there. Whatever of this class needs them brings them back.
    """

    def __init__(
        self,
        config: ActorRolloutRef,
        arch: Architecture,
        groups: Groups,
        *,
        initial: Callable[[Policy], None],
    ) -> None:
        """
        Args:
            initial: gives the policy its first weights. `start_optimizer` must follow before the first update.
        """
        super().__init__(config, arch, groups)
        initial(self)
        megatron = config.actor.megatron
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=megatron.use_distributed_optimizer,
            overlap_grad_reduce=megatron.overlap_grad_reduce,
            overlap_param_gather=megatron.overlap_param_gather,
        )
        self._ddp = [
            DistributedDataParallel(
                self.transformer_config, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.pgs
            )
            for i, chunk in enumerate(self.chunks)
        ]
        self.transformer_config.finalize_model_grads_func = _finalize_without_token_count
        self.transformer_config.grad_scale_func = None
        self.gradients = Dropped(self._gradient_buffers) if megatron.grad_offload else Stays()
        self.masters = OnHost(self._own_masters) if megatron.optimizer_offload else Stays()
        self.moments = OnHost(lambda: moments(self.optimizer)) if megatron.optimizer_offload else Stays()
        if megatron.param_offload:
            rounded = all(p.dtype == torch.bfloat16 for p in self._weights())
            self.weights = (
                Rebuilt(self._weights, self.masters, self._rebuild_weights) if rounded else OnHost(self._weights)
            )
        if megatron.overlap_grad_reduce:
            hooks = [model.no_sync for model in self._ddp]
            self.transformer_config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]

    def start_optimizer(self, optim: Optim, total_steps: int) -> None:
        """A fresh AdamW and schedule over the current weights; an earlier one's memory is given back first."""
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.min_lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.adam_beta1,
                adam_beta2=optim.adam_beta2,
                adam_eps=optim.adam_eps,
                clip_grad=optim.clip_grad,
                bf16=self.transformer_config.bf16,
                params_dtype=self.transformer_config.params_dtype,
                use_distributed_optimizer=self.config.actor.megatron.use_distributed_optimizer,
                overlap_param_gather=self.config.actor.megatron.overlap_param_gather,
            ),
            self._ddp,
            use_gloo_process_groups=False,
            pg_collection=self.groups.pgs,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optim.lr,
            min_lr=optim.lr if optim.lr_decay_style == "constant" else optim.min_lr,
            lr_warmup_steps=optim.lr_warmup_steps,
            lr_decay_steps=max(total_steps, optim.lr_warmup_steps + 1),
            lr_decay_style=optim.lr_decay_style,
            start_wd=optim.weight_decay,
            end_wd=optim.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            # of a checkpoint only the position counts: a decay stretched over more steps would else end where it was
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    @property
    def kernels(self) -> str:
        """What the training step runs on, for people."""
        return f"{layer_kernels(self.transformer_engine)}, {adam_kernels(Adam)}"

    def update(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        weights: Tensor,
        loss: Loss,
        *,
        temperature: float,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch.

        Args:
            micro_batches: this data-parallel rank's share of the mini-batch.
            weights: float32 [T], the tokens' weights in the loss, with the global denominator.
            loss: what is minimised.
            temperature: of the log-probabilities.

        Returns:
            the metrics of the whole mini-batch, on every rank; `actor/skipped` is 1 if its loss or its gradient was not
            finite, and nothing changed.
        """
        outputs = self.accumulate_gradients(batch, micro_batches, weights, loss, temperature=temperature)
        metrics = {"actor/loss": 0.0, **self._reduce(outputs if self._reports else [])}
        grad_norm, stepped = self.step_optimizer(loss=metrics["actor/loss"])
        metrics["actor/grad_norm"] = grad_norm
        metrics["actor/lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["actor/skipped"] = float(not stepped)
        return metrics

    def accumulate_gradients(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        weights: Tensor,
        loss: Loss,
        *,
        temperature: float,
    ) -> list[LossOutput]:
        """The gradient of a mini-batch, reduced over data-parallel ranks; `update` without the optimizer's step."""
        self.gradients.restore()
        for model in self._ddp:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        columns = {
            "weights": weights,
            "old_logp": batch.old_logp,
            "advantages": batch.advantages,
            "ref_logp": batch.ref_logp,
        }

        def last_stage(logp: Tensor, entropy: Tensor, micro: MicroBatch, part: slice) -> tuple[Tensor, LossOutput]:
            values = {name: column[part] for name, column in micro.columns.items()}
            out = loss(TokenBatch(logp=logp, entropy=entropy, **values))
            return out.loss, out

        return self.run(
            batch,
            micro_batches,
            last_stage,
            temperature=temperature,
            train=True,
            columns={name: column for name, column in columns.items() if column is not None},
        )

    def step_optimizer(self, *, loss: float) -> tuple[float, bool]:
        """One step along the accumulated gradient, unless the gradient or the loss is not finite.

        Args:
            loss: of the mini-batch, the same on every rank.

        Returns:
            the gradient's norm before clipping, and whether there was a step; the same on every rank.
        """
        self.masters.restore()
        self.moments.restore()
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            return grad_norm, False
        clip(self.optimizer, grad_norm)
        self.scheduler.step(1)
        self.optimizer.step_with_ready_grads()
        return grad_norm, True

    def log_probs(self, batch: Batch, micro_batches: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """See `Policy.log_probs`. What the update needs comes back meanwhile."""
        self.gather_parameters()
        self.masters.prefetch()
        self.moments.prefetch()
        return super().log_probs(batch, micro_batches, temperature)

    def run(self, *args: Any, train: bool, **kwargs: Any) -> list[Any]:
        """See `Policy.run`."""
        if not train:
            self.gather_parameters()
        return super().run(*args, train=train, **kwargs)

    def gather_parameters(self) -> None:
        """Bring the weights back, with what `overlap_param_gather` left to the next training pass; every rank calls it.

        Whatever else reads parameters would find none, or those of before the optimizer's step.
        """
        self.weights.restore()
        if self.config.actor.megatron.overlap_param_gather:
            for model in self._ddp:
                for group in model.bucket_groups + model.expert_parallel_bucket_groups:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)

    def sharded_training_state(self, *, loading: bool) -> dict[str, Any]:
        """Weights, optimizer and schedule as Megatron-Core's sharded state dict, to save or to load into."""
        self.gather_parameters()
        self.gradients.release()  # the next update needs none of them, and a checkpoint needs room
        self.masters.restore()
        self.moments.restore()
        weights = self.sharded_state()
        split = self.config.actor.megatron.use_distributed_optimizer
        if not loading:
            refuse_nonfinite(self.optimizer, weights, self.groups.control)
            weights = spread_over_replicas(weights, self.groups.pgs.dp_cp)
        optimizer = sharded_optimizer_state(
            self.optimizer, weights, self.groups.pgs.dp_cp if split else None, loading=loading
        )
        return {**weights, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Take over what was read through `sharded_training_state`."""
        self.load_sharded(state)
        load_optimizer_state(self.optimizer, self.sharded_state(), state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    @contextmanager
    def away(self) -> Iterator[None]:
        """Without weights and gradients, if they leave the GPU in generation; before there is an optimizer."""
        weights = OnHost(self._weights) if self.config.actor.megatron.param_offload else Stays()
        self.gradients.release()
        weights.release()
        yield
        weights.restore()

    def train_chunks(self) -> list[Any]:
        return list(self._ddp)

    def output_weight(self, model: Any) -> Tensor:
        weight = super().output_weight(model)
        if self.config.actor.megatron.overlap_param_gather and model in self._ddp:
            # Megatron-Core waits for parameters as their module is called, and the output layer's never is
            model.param_to_bucket_group[weight].finish_param_sync(skip_next_bucket_dispatch=True)
        return weight

    def _weights(self) -> Iterator[Tensor]:
        yield from self.parameters().values()

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for model in self._ddp:
            yield from (buffer.grad_data for buffer in model.buffers + model.expert_parallel_buffers)

    def _own_masters(self) -> Iterator[Tensor]:
        """Those that are no views of the weights."""
        theirs = {storage_identity(storage) for storage in storages(self._weights())}
        for main in master_weights(self.optimizer):
            if storage_identity(main.untyped_storage()) not in theirs:
                yield main

    @torch.no_grad()
    def _rebuild_weights(self) -> None:
        """What the optimizer's step does last: round the fp32 weights, and gather the data-parallel ranks' parts."""
        copy_masters_to_weights(self.optimizer)
        if self.config.actor.megatron.use_distributed_optimizer:
            for model in self._ddp:
                model.start_param_sync(force_sync=True)

    def _reduce(self, outputs: Sequence[LossOutput]) -> dict[str, float]:
        """Metrics over all micro-batches of all data-parallel ranks."""
        sums = _over_chunks([out.sums for out in outputs], lambda values: values.double().sum())
        maxima = _over_chunks([out.maxima for out in outputs], torch.max)
        total: dict[str, float] = {}
        for rank_sums, rank_maxima in self.groups.all_gather((sums, maxima)):
            for name, value in rank_sums.items():
                total[name] = total.get(name, 0.0) + value
            for name, value in rank_maxima.items():
                total[name] = max(total.get(name, float("-inf")), value)
        return total


def _over_chunks(metrics: Sequence[dict[str, Tensor]], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """One value per metric; the GPU is waited for once, not for each value."""
    names = sorted({name for of_chunk in metrics for name in of_chunk})
    values = [reduce(torch.stack([m[name] for m in metrics if name in m])) for name in names]
    return dict(zip(names, torch.stack(values).tolist(), strict=True)) if names else {}


def _finalize_without_token_count(models: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron-Core would divide the gradients by the number of tokens; our losses already carry their denominator."""
    del num_tokens
    finalize_model_grads(models, None, **kwargs)
