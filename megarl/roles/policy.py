"""A policy in the training layout: its model chunks, and the pipelined pass over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.config.schema import ActorRolloutRef
from megarl.models.architecture import Architecture
from megarl.models.gpt import PolicyModel, build_chunks, named_parameters, transformer_config
from megarl.models.kernels import transformer_engine_available
from megarl.models.logprobs import token_log_probs, token_loss, vocab_shard
from megarl.models.placements import training_placements
from megarl.models.tensors import logical_tensors
from megarl.models.weights import Source, fill
from megarl.parallel.groups import Groups
from megarl.parallel.offload import Stays
from megarl.roles.microbatch import MicroBatch, make_micro_batch
from megarl.types import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LastStage = Callable[[Tensor, Tensor, MicroBatch, slice], Any]
"""(log-probs, entropies, the micro-batch, which of its R trained tokens they belong to) -> what the pass collects.

When training it is called for one chunk of a micro-batch after the other and returns (loss, collected), where losses
add up; otherwise for all R at once."""


class Policy:
    """Owns this rank's chunks of one language model in the training layout.

    Attributes:
        weights: their memory. Whatever of this class needs it brings it back.
    """

    def __init__(self, config: ActorRolloutRef, arch: Architecture, groups: Groups) -> None:
        self.config, self.arch, self.groups = config, arch, groups
        megatron = config.actor.megatron
        self.transformer_engine = megatron.transformer_engine == "auto" and transformer_engine_available()
        self.transformer_config = transformer_config(
            arch,
            groups,
            dtype=DTYPES[config.model.dtype],
            sequence_parallel=megatron.sequence_parallel,
            recompute=config.model.enable_gradient_checkpointing,
            transformer_engine=self.transformer_engine,
            overrides=megatron.override_transformer_config,
        )
        self.chunks = build_chunks(arch, self.transformer_config, groups, transformer_engine=self.transformer_engine)
        self.weights = Stays()
        tp = groups.train.tp
        self._shard = vocab_shard(arch.vocab_size, arch.padded_vocab_size(tp), groups.pgs.tp)
        at = groups.train.coords(groups.rank)
        self._is_last_stage = at.pp == groups.train.pp - 1
        self._reports = self._is_last_stage and at.tp == 0 and at.cp == 0

    def load(self, source: Source) -> None:
        """Fill the weights from logical tensors."""
        fill(self.parameters(), self.placements(), logical_tensors(self.arch), source)

    def placements(self) -> list[Any]:
        """Where this rank holds what, in the names of `parameters()`."""
        return list(
            training_placements(
                self.arch, self.groups.train, self.groups.rank, transformer_engine=self.transformer_engine
            )
        )

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by placement name."""
        return named_parameters(self.chunks)

    def log_probs(self, batch: Batch, micro_batches: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """Log-probability of every trained token under this policy at a temperature; float32 [T], on every rank.

        Args:
            micro_batches: this data-parallel rank's sequences, in the micro-batches that training will use: the
                same packing gives the same bits, so that the first ratio is exactly 1.
        """

        def collect(logp: Tensor, entropy: Tensor, micro: MicroBatch, part: slice) -> tuple[Tensor, Tensor]:
            del entropy, part
            return micro.index, logp

        with torch.no_grad():
            collected = self.run(batch, micro_batches, collect, temperature=temperature, train=False)
        out = torch.zeros(len(batch.tokens))
        if self._reports and collected:
            index, logp = zip(*collected, strict=True)
            out[torch.cat(index)] = torch.cat(logp).cpu()
        dist.all_reduce(out, group=self.groups.control)  # one rank has a value, the others 0: no rounding
        return out

    def run(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        last_stage: LastStage,
        *,
        temperature: float,
        train: bool,
        columns: Mapping[str, Tensor] | None = None,
    ) -> list[Any]:
        """Megatron-Core's 1F1B (or interleaved) schedule over micro-batches.

        Args:
            columns: float32 [T] each, what `last_stage` finds in `MicroBatch.columns`.

        Returns:
            what `last_stage` collected, in order; empty on the other stages.
        """
        self.weights.restore()
        pad = self.groups.train.tp if self.transformer_config.sequence_parallel else 1
        packed = self.config.model.use_remove_padding
        inputs = [
            make_micro_batch(
                batch, sequences, packed=packed, multiple_of=pad, device=self.groups.device, columns=columns
            )
            for sequences in micro_batches
        ]
        models = self.train_chunks() if train else self.chunks
        for chunk in self.chunks:
            if chunk.training != train:  # it goes through hundreds of modules
                chunk.train(train)
        schedule = get_forward_backward_func(self.groups.train.pp, self._virtual_size)
        interleaved = self.groups.train.chunks > 1
        collected = schedule(
            forward_step_func=partial(self._forward_step, last_stage, temperature, train),
            data_iterator=[iter(inputs) for _ in models] if interleaved else iter(inputs),
            model=models if interleaved else models[0],
            num_microbatches=len(inputs),
            seq_length=1,  # shapes are exchanged with each micro-batch
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
            p2p_communicator=P2PCommunicator(self.groups.pgs.pp, self.transformer_config),
            pg_collection=self.groups.pgs,
        )
        return [of_chunk for of_micro_batch in collected for of_chunk in of_micro_batch] if train else collected

    def sharded_state(self, prefix: str = "") -> dict[str, Any]:
        """The weights as Megatron-Core's sharded state dict; `prefix` tells several models in a checkpoint apart."""
        self.weights.restore()
        return {f"model{i}": chunk.sharded_state_dict(prefix) for i, chunk in enumerate(self.chunks)}

    def load_sharded(self, state: dict[str, Any], prefix: str = "") -> None:
        """Take over weights that were read through `sharded_state` with the same prefix."""
        for i, chunk in enumerate(self.chunks):
            weights = state[f"model{i}"]
            chunk.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})

    def train_chunks(self) -> list[Any]:
        """The modules that a training pass goes through."""
        return list(self.chunks)

    def output_weight(self, model: Any) -> Tensor:
        """[vocab / tp, hidden], of a chunk of the last stage, as itself or as it is trained."""
        policy: PolicyModel = getattr(model, "module", model)
        return policy.output_weight

    @property
    def _virtual_size(self) -> int | None:
        return self.groups.train.chunks if self.groups.train.chunks > 1 else None

    def _forward_step(
        self, last_stage: LastStage, temperature: float, train: bool, inputs: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(inputs)
        hidden = model(micro.tokens, micro.position_ids, None, packed_seq_params=micro.packed)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            head = self._predictors(hidden, micro), self.output_weight(model), micro.labels, self._shard
            if non_loss_data:
                return last_stage(*token_log_probs(*head, temperature=temperature), micro, slice(None))
            collected = []

            def chunk_loss(logp: Tensor, entropy: Tensor, part: slice) -> Tensor:
                loss, of_chunk = last_stage(logp, entropy, micro, part)
                collected.append(of_chunk)
                return loss

            loss = token_loss(*head, chunk_loss, temperature=temperature)
            # the weights carry the denominator, so the number of tokens plays no part
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), collected

        return hidden, finish

    def _predictors(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[L (/ tp), B, hidden] -> [R, hidden], the states that predict the trained tokens."""
        if self.transformer_config.sequence_parallel:
            # the gradient of the log-probs is already complete on every rank: split it, do not reduce it
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.groups.pgs.tp
            )
        return hidden.flatten(0, 1).index_select(0, micro.predictors)  # its gradient needs no sorting
