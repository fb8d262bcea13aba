"""Steps a model with Megatron-Core's AdamW: schedule, memory and part of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import Adam, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.policy import MegatronConfig, OptimConfig
from megarl.models.kernels import adam_kernels
from megarl.parallel.megatron_internals import storage_identity
from megarl.parallel.offload import OnHost, Resident, storages
from megarl.parallel.train_groups import TrainGroups, in_its_layout
from megarl.roles.optimizer_state import (
    clip,
    copy_masters_to_weights,
    load_step,
    master_weights,
    moments,
    refuse_nonfinite,
    sharded_optimizer_state,
)
from megarl.roles.writers import spread_over_replicas


class MegatronOptimizer:
    """Owns fp32 weights, moments and the learning-rate schedule of one model.

    Attributes:
        groups: those of its model.
        masters, moments: their memory; the masters are the fp32 weights beside those of the model. Methods bring back
            what they need.
    """

    def __init__(
        self, ddp: Sequence[Any], groups: TrainGroups, config: TransformerConfig, *, megatron: MegatronConfig
    ) -> None:
        """
        Args:
            ddp: the model's chunks in Megatron-Core's DistributedDataParallel.
        """
        self.groups, self._ddp, self._config, self._megatron = groups, list(ddp), config, megatron
        self.masters: Resident = OnHost(self._separate_masters) if megatron.optimizer_offload else Resident()
        self.moments: Resident = OnHost(lambda: moments(self._adam)) if megatron.optimizer_offload else Resident()
        self._adam: Any = None
        self._schedule: Any = None

    @in_its_layout
    def restart(self, optim: OptimConfig, total_steps: int) -> None:
        """Make a fresh AdamW and schedule over the current weights; an earlier one's memory is given back first."""
        for memory in (self.masters, self.moments):  # of the old optimizer: back on the GPU before they are dropped
            memory.restore()
            memory.rewritten()
        self._adam = self._schedule = None
        self._adam = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.min_lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.adam_beta1,
                adam_beta2=optim.adam_beta2,
                adam_eps=optim.adam_eps,
                clip_grad=optim.clip_grad,
                bf16=self._config.bf16,
                params_dtype=self._config.params_dtype,
                use_distributed_optimizer=self._megatron.use_distributed_optimizer,
                overlap_param_gather=self._megatron.overlap_param_gather,
            ),
            self._ddp,
            use_gloo_process_groups=False,
            pg_collection=self.groups.pgs,
        )
        warmup = optim.warmup_of(total_steps)
        self._schedule = OptimizerParamScheduler(
            self._adam,
            init_lr=0.0,
            max_lr=optim.lr,
            min_lr=optim.lr if optim.lr_decay_style == "constant" else optim.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(total_steps, warmup + 1),
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
        """Name the kernels that the optimizer runs on, for people."""
        return adam_kernels(Adam)

    @property
    def lr(self) -> float:
        """Get the learning rate of the next step."""
        return float(self._adam.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        for model in self._ddp:
            model.zero_grad_buffer()
        self._adam.zero_grad()

    @in_its_layout
    def step(self, *, loss: float) -> tuple[float, bool]:
        """Step along the accumulated gradient, unless the gradient or the loss is not finite.

        Args:
            loss: of the mini-batch, the same on every rank.

        Returns:
            the gradient's norm before clipping, and whether there was a step; the same on every rank.
        """
        self.masters.restore()
        self.moments.restore()
        self._adam.prepare_grads()
        grad_norm = float(self._adam.get_grad_norm())
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            return grad_norm, False
        clip(self._adam, grad_norm)
        self._schedule.step(1)
        self._adam.step_with_ready_grads()
        return grad_norm, True

    def tensors(self) -> dict[str, list[Tensor]]:
        """List the fp32 weights and the moments on this rank."""
        return {"masters": list(master_weights(self._adam)), "moments": list(moments(self._adam))}

    @in_its_layout
    def take_weights(self) -> None:
        """Take the model's weights as the fp32 weights; the moments stay."""
        self.masters.restore()
        self._adam.reload_model_params()

    @torch.no_grad()
    def rebuild_weights(self) -> None:
        """Round the fp32 weights, and gather the data-parallel ranks' parts, as a step does last."""
        copy_masters_to_weights(self._adam)
        if self._megatron.use_distributed_optimizer:
            for model in self._ddp:
                model.start_param_sync(force_sync=True)

    def sharded_state(self, weights: dict[str, Any], *, loading: bool, tensors: bool) -> dict[str, Any]:
        """Describe weights, optimizer and schedule as Megatron-Core's sharded state dict, to save or to load into.

        Args:
            weights: sharded state dict of the model.
            tensors: with fp32 weights and moments.

        Raises:
            ValueError: something to save is not finite.
        """
        self.masters.restore()
        self.moments.restore()
        if not loading:
            refuse_nonfinite(self._adam, weights, self.groups.world)
            weights = spread_over_replicas(weights, self.groups.pgs)
        state = {**weights, "scheduler": self._schedule.state_dict()}
        if tensors:
            state["optimizer"] = sharded_optimizer_state(self._adam, weights, loading=loading)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Load the state that was read through `sharded_state`."""
        if "optimizer" in state:
            load_step(self._adam, state["optimizer"]["step"])
        self._schedule.num_steps = 0  # to which Megatron-Core adds the checkpoint's: a run may go back
        self._schedule.load_state_dict(state["scheduler"])

    def _separate_masters(self) -> Iterator[Tensor]:
        """List fp32 masters that have a storage: those of an fp32 model are parameters, which must not leave twice."""
        parameters = [p for model in self._ddp for p in model.parameters()]
        shared = {storage_identity(storage) for storage in storages(parameters)}
        for main in master_weights(self._adam):
            if storage_identity(main.untyped_storage()) not in shared:
                yield main
