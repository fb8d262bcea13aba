"""Holds a model in the training layout: its chunks on this rank, and the pipelined pass over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import tee
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from megarl.algorithms.loss import Loss
from megarl.config.policy import BatchingConfig, MegatronConfig, ModelConfig
from megarl.models.architecture import Architecture
from megarl.models.fill import Source, fill
from megarl.models.gpt import build_chunks, named_parameters, transformer_config
from megarl.models.heads import Head, LMHead, Passed
from megarl.models.kernels import transformer_engine_available
from megarl.models.layer_spec import torch_layers, transformer_engine_layers
from megarl.models.logprobs import vocab_shard
from megarl.models.microbatch import MicroBatch, SequenceShard, make_micro_batch
from megarl.models.router_losses import RouterLosses
from megarl.models.routing_replay import RoutingReplay
from megarl.models.weights import logical_tensors
from megarl.parallel.offload import Resident
from megarl.parallel.train_groups import TrainGroups, in_its_layout
from megarl.phases import Item
from megarl.reshard.copying import copy_weights
from megarl.reshard.sides import training_side
from megarl.role_kinds import RoleKind
from megarl.roles.passes import Passes, StepPlan, plan_passes
from megarl.roles.writers import replicas_of, spread_over_replicas
from megarl.types import Batch
from megarl.types.owners import moved

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronModel:
    """Owns this rank's chunks of one model in the training layout, all weights zero until they are loaded.

    Attributes:
        kind: of its role.
        layers: the modules of its layers.
        side: where its weights are, in the names of `parameters`.
        head: computes its outputs on the last stage.
        dtype: of its weights.
        packed: whether sequences share rows without padding.
        shard: how ranks cut a micro-batch's tokens.
        replay: gives its routers the experts that the engine chose; None: they choose by themselves.
        batching, balance: how `plan` cuts batches.
        memory: of its weights. Methods bring back what they need; readers of parameters call `gather_parameters`
            first.
    """

    kind: ClassVar[RoleKind] = RoleKind()

    def __init__(
        self,
        arch: Architecture,
        groups: TrainGroups,
        *,
        model: ModelConfig,
        megatron: MegatronConfig,
        batching: BatchingConfig,
        balance: bool = True,
    ) -> None:
        """
        Args:
            model: data type, packing and recomputation.
            megatron: kernels, and settings of Megatron-Core's TransformerConfig.
            batching: how much goes through it at once.
            balance: plans even out tokens over data-parallel ranks (`trainer.balance_batch`).
        """
        self.arch = arch = arch.with_scalar_output() if self.kind.scalar else arch
        self.groups, self.dtype, self.packed = groups, DTYPES[model.dtype], model.use_remove_padding
        self.batching, self.balance, self.shares_prompts = batching, balance, model.use_prefix_grouper
        self.head = self.make_head()
        fused = megatron.transformer_engine == "auto" and transformer_engine_available() and not arch.needs_torch_layers
        own_attention = groups.layout.shares_sequences or self.shares_prompts or not arch.fused_attention
        self.layers = transformer_engine_layers(arch, own_attention=own_attention) if fused else torch_layers(arch)
        self.transformer_config = transformer_config(
            arch,
            groups,
            dtype=self.dtype,
            sequence_parallel=megatron.sequence_parallel,
            recompute=model.recomputed,
            transformer_engine=fused,
            overrides=megatron.override_transformer_config,
        )
        self.chunks = self.make_chunks()
        self.side = training_side(arch, groups.layout, self.layers.names)
        self.shard = SequenceShard.of(groups, sequence_parallel=self.transformer_config.sequence_parallel)
        self.router_losses: RouterLosses | None = None
        # of every role: it also makes routers choose alike with gradients and without
        routing = None if arch.moe is None else RoutingReplay(arch, groups, self.chunks, self.shard)
        self.replay = routing if self.kind.replays_routing else None
        self.memory: dict[Item, tuple[Resident, ...]] = {Item.WEIGHTS: (Resident(),)}
        at = groups.layout.coords(groups.world.rank)
        last_stage = at.pp == groups.layout.pp - 1
        self._reports = last_stage and at.tp == 0
        self._offloads = model.enable_activation_offload

    @property
    def weights_leave(self) -> bool:
        """Say whether the model's weights leave the GPU while responses are generated."""
        return any(type(memory) is not Resident for memory in self.memory[Item.WEIGHTS])

    def make_head(self) -> Head:
        """Make a language model's head, its vocabulary split over the tensor-parallel ranks."""
        vocab, tp = self.arch.vocab_size, self.groups.layout.tp
        return LMHead(shard=vocab_shard(vocab, self.arch.padded_vocab_size(tp), self.groups.pgs.tp))

    def make_chunks(self) -> list[Any]:
        """Make this rank's chunks of the model, all weights zero, before anything else holds their parameters."""
        with self.groups.active():
            return build_chunks(self.arch, self.transformer_config, self.groups, self.layers)

    def load(self, source: Source) -> None:
        """Fill the weights from logical tensors."""
        self.gather_parameters()
        fill(self.parameters(), self.side.placements(self.groups.world.rank), logical_tensors(self.arch), source)
        self._rewritten()

    def copy_from(self, other: MegatronModel) -> None:
        """Take over the weights of a model of the same ranks; an output layer of another form stays as it is."""
        self.gather_parameters()
        other.gather_parameters()
        copy_weights(other.side, other.parameters(), self.side, self.parameters(), self.groups.world)
        self._rewritten()

    def parameters(self) -> dict[str, Tensor]:
        """Name this rank's parameters as its placements do."""
        return named_parameters(self.chunks)

    def saved_bytes(self, *, optimizer: bool = True) -> int:
        """Estimate the bytes that this rank writes of the model in a checkpoint: the replicas share them.

        Args:
            optimizer: as for `sharded_state`.
        """
        del optimizer
        return sum(p.nbytes // self._replicas(p) for p in self.parameters().values())

    def _replicas(self, parameter: Tensor) -> int:
        """Count the ranks that hold the same parameter."""
        return replicas_of(parameter, self.groups.pgs).size()

    def gather_parameters(self) -> None:
        """Bring the parameters back, to be read; every rank calls it."""
        for memory in self.memory[Item.WEIGHTS]:
            memory.restore()

    def plan(self, batch: Batch, sequences: int | None = None, *, together: int = 1) -> StepPlan:
        """Cut a batch into mini-batches and this rank's micro-batches, for this model and others of its layout.

        Every rank calls it: with `model.use_prefix_grouper` they compare prompts of which each has some.

        Args:
            sequences: of a mini-batch; None: all in one.
            together: neighbours that must stay together: 2 for the pairs of a loss that compares them.
        """
        return plan_passes(
            batch,
            self.groups.layout,
            self.groups.world,
            batching=self.batching,
            balance=self.balance,
            sequences=sequences,
            together=together,
            share_prompts=self.shares_prompts,
        )

    def forward(self, batch: Batch, passes: Passes) -> Tensor:
        """Compute the head's outputs, without gradients: float32 [T], of the tokens that this rank has, or, of one per
        sequence, [N], on every rank.

        Args:
            batch: if other ranks have its tokens than pass them, these get them meanwhile.
            passes: of the batch, by `plan` of this model or of another one of the same layout. The passes that training
                will use give the same bits, so that the first ratio is exactly 1.

        Raises:
            ValueError: they are of another layout.
        """
        self._check_layout(passes)
        self.gather_parameters()
        passed = batch
        if batch.owners is not None:
            assert passes.owners is not None, "passes without owners are of a batch that every rank has all of"
            recorded = () if self.replay is None else ("routed_experts", "routed")
            passed = batch.held_by(passes.owners, ("tokens", "response_mask", *recorded))
        with torch.no_grad():
            outputs = self._gathered(passed, self._run(passed, passes, None, {}, {}))
        if passed is batch or self.head.per == "sequence":
            return outputs
        assert batch.owners is not None and passed.owners is not None
        return moved({"outputs": outputs}, batch.lengths, passed.owners, batch.owners)["outputs"]

    def sharded_state(self, prefix: str = "", *, loading: bool, optimizer: bool = True) -> dict[str, Any]:
        """Describe all of the model as Megatron-Core's sharded state dict, to save or to load into.

        Args:
            prefix: tells several models in a checkpoint apart.
            optimizer: with the fp32 weights and moments of a model that is trained.

        Raises:
            ValueError: something to save of a model that is trained is not finite; others are saved as they are.
        """
        del loading, optimizer
        return spread_over_replicas(self.sharded_weights(prefix), self.groups.pgs)

    def load_sharded(self, state: dict[str, Any], prefix: str = "") -> None:
        """Load the state that was read through `sharded_state` with the same prefix."""
        self.load_weights(state, prefix)

    @in_its_layout
    def sharded_weights(self, prefix: str = "") -> dict[str, Any]:
        """Describe the weights alone."""
        self.gather_parameters()
        return {f"model{i}": chunk.sharded_state_dict(prefix) for i, chunk in enumerate(self.chunks)}

    def load_weights(self, state: dict[str, Any], prefix: str = "") -> None:
        """Load the weights that were read through `sharded_weights` with the same prefix."""
        self._put_weights(state, prefix)
        self._rewritten()

    def _put_weights(self, state: dict[str, Any], prefix: str) -> None:
        for i, chunk in enumerate(self.chunks):
            weights = state[f"model{i}"]
            chunk.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})

    def output_weight(self, model: Any) -> Tensor:
        """Get the output layer's weight in a chunk of the last stage, as itself or as it is trained."""
        weight: Tensor = getattr(model, "module", model).output_weight
        return weight

    def _rewritten(self) -> None:
        for memory in self.memory[Item.WEIGHTS]:
            memory.rewritten()

    def _pass_chunks(self, *, train: bool) -> list[Any]:
        """List the modules that a pass goes through."""
        del train
        return list(self.chunks)

    def _gathered(self, batch: Batch, trained: Sequence[Passed]) -> Tensor:
        """Turn outputs of this rank's micro-batches into those of the batch: float32 [T], where its tokens are, or
        [N]."""
        world = self.groups.world
        out = torch.zeros(len(batch) if self.head.per == "sequence" else len(batch.tokens))
        if self._reports and trained:
            out[torch.cat([micro.places for micro in trained])] = torch.cat([micro.outputs for micro in trained]).cpu()
        # one rank has a value, the others 0: no rounding
        if batch.owners is None or self.head.per == "sequence":
            return world.sum_(out, "the outputs of a pass")
        out = out.to(world.device)
        with world.watch.waiting("the outputs of a pass"):
            for group in self.groups.of_same_tokens:
                if group.size() > 1:
                    dist.all_reduce(out, group=group)
            return out.cpu()

    def _check_layout(self, passes: Passes) -> None:
        if passes.layout != self.groups.layout:
            raise ValueError(
                f"a batch was planned for {passes.layout}, and the {type(self).__name__} has {self.groups.layout}: "
                f"ranks would pass the wrong sequences; pass what its own plan(batch) gives"
            )

    @in_its_layout
    def _run(
        self,
        batch: Batch,
        passes: Passes,
        loss: Loss | None,
        columns: Mapping[str, Tensor],
        sequence_columns: Mapping[str, Tensor],
    ) -> list[Passed]:
        """Run Megatron-Core's 1F1B (or interleaved) schedule over micro-batches.

        Args:
            passes: see `forward`.
            loss: is differentiated; None is a forward pass.
            columns, sequence_columns: see `make_micro_batch`.

        Returns:
            the results of each micro-batch, in order; empty on the other stages.
        """
        self._check_layout(passes)
        train = loss is not None
        # each is made when the schedule asks for it, while the device computes the one before
        inputs = (
            make_micro_batch(
                batch,
                sequences,
                packed=self.packed,
                shard=self.shard,
                device=self.groups.world.device,
                share_prompts=self.shares_prompts,
                columns=columns,
                sequence_columns=sequence_columns,
            )
            for sequences in passes.micro_batches
        )
        models = self._pass_chunks(train=train)
        for chunk in self.chunks:
            if chunk.training != train:  # it goes through hundreds of modules
                chunk.train(train)
        if self.replay is not None:
            self.replay.begin(batch, train=train)
        layout = self.groups.layout
        interleaved = layout.chunks > 1
        schedule = get_forward_backward_func(layout.pp, layout.chunks if interleaved else None)
        collected = schedule(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=list(tee(inputs, len(models))) if interleaved else inputs,
            model=models if interleaved else models[0],
            num_microbatches=len(passes.micro_batches),
            seq_length=1,  # shapes are exchanged with each micro-batch
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
            p2p_communicator=P2PCommunicator(self.groups.pgs.pp, self.transformer_config),
            pg_collection=self.groups.pgs,
        )
        if self.replay is not None:
            self.replay.end()
        return list(collected)

    def _forward_step(
        self, loss: Loss | None, inputs: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(inputs)
        if self.router_losses is not None:
            self.router_losses.enter(getattr(model, "module", model), micro, train=loss is not None)
        if self.replay is not None:
            self.replay.enter(getattr(model, "module", model), micro)
        with save_on_cpu(pin_memory=True) if self._offloads and loss is not None else nullcontext():
            hidden = model(micro.tokens, micro.position_ids, None, packed_seq_params=micro.packed)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            hidden, weight = self._whole_sequences(hidden), self.output_weight(model)
            if loss is None:
                assert non_loss_data
                places = micro.sequences if self.head.per == "sequence" else micro.index
                return Passed(losses=[], outputs=self.head.outputs(hidden, weight, micro), places=places)
            total, trained = self.head.loss(hidden, weight, micro, loss)
            # the weights carry the denominator, so the number of tokens plays no part
            return total, torch.zeros((), dtype=torch.int, device=total.device), trained

        return hidden, finish

    def _whole_sequences(self, hidden: Tensor) -> Tensor:
        """Gather sequences: [L (/ tp), B, hidden] -> [L, B, hidden]."""
        if not self.transformer_config.sequence_parallel:
            return hidden
        # every rank's gradient of the output is complete already: split it, do not reduce it
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.groups.pgs.tp)
