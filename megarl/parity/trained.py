"""Computes with MegaRL's own models what a comparison needs: those that train, and the engines that generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.cross_entropy import cross_entropy
from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.config.policy import ActorRolloutRefConfig
from megarl.hybrid.generation import Generation
from megarl.hybrid.residency import Residency
from megarl.models.architecture import Architecture
from megarl.models.fill import local_view
from megarl.models.sizes import BLOCK_SIZE, blocks_for
from megarl.models.tensors import Box
from megarl.models.weights import logical_tensors
from megarl.parallel.generation_groups import generation_groups
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.parallel.train_groups import train_groups
from megarl.parallel.world import World
from megarl.parity.reference import recorded
from megarl.parity.sequences import ANSWER, Sequences
from megarl.roles.passes import MiniBatch
from megarl.roles.trained import Actor
from megarl.telemetry.timers import PhaseTimers
from megarl.types import Batch, Completion, SamplingParams, batch_of


class TrainedHere:
    """Is the actor of a run, with the weights of a folder, in a world of one rank."""

    def __init__(self, folder: str, arch: Architecture, world: World, *, dtype: str) -> None:
        self._folder, self._arch, self._world, self._dtype = folder, arch, world, dtype
        config, weights = self._config("native"), HuggingFaceWeights(folder, arch)
        layout = TrainLayout(ranks=range(1))
        self.actor = Actor(
            arch,
            train_groups(world, layout),
            model=config.model,
            megatron=config.actor.megatron,
            batching=config.actor,
            optim=config.actor.optim,
            total_steps=1,
            initial=lambda actor: actor.load(weights.box),
        )

    def _config(self, engine: str) -> ActorRolloutRefConfig:
        return ActorRolloutRefConfig.model_validate(
            {
                "model": {"path": self._folder, "dtype": self._dtype},
                "rollout": {"name": engine, "max_num_seqs": 8, "enforce_eager": True},
            }
        )

    def log_probs(self, sequences: Sequences) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute log-probabilities [tokens], 0 for the first of a sequence, and what comes out of each place."""
        with recorded(self._places()) as outputs:
            logp = self.actor.log_probs(sequences.batch, _together(sequences.batch))
        return logp, outputs

    def log_probs_of(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the log-probabilities of answers, [tokens] of each."""
        batch = batch_of(prompts, answers, range(len(prompts)))
        logp = self.actor.log_probs(batch, _together(batch))
        return list(logp[batch.response_mask].split([len(answer) for answer in answers]))

    def _places(self) -> dict[str, Any]:
        """Name the modules as `reference` does."""
        (chunk,) = self.actor.chunks
        places = {"embedding": chunk.embedding}
        for number, layer in enumerate(chunk.decoder.layers):
            places[f"layer {number}, attention"] = layer.self_attention
            places[f"layer {number}, MLP"] = layer.mlp
            places[f"layer {number}"] = layer
        return places

    def gradients(self, sequences: Sequences) -> Iterator[tuple[str, Box, Tensor]]:
        """Compute the gradients of the mean cross-entropy; yields name, box and gradient of each logical tensor."""
        batch = sequences.batch
        weights = torch.full((len(batch.tokens),), 1.0 / int(batch.response_mask.sum()))
        self.actor.accumulate_gradients(batch, _together(batch), weights, cross_entropy)
        tensors = logical_tensors(self._arch)
        parameters: Mapping[str, Any] = self.actor.parameters()
        for at in self.actor.side.placements(0):
            if tensors[at.tensor].kind != "buffer":
                yield at.tensor, at.box, local_view(parameters[at.param].main_grad, at)

    def answers(self, engine: str, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """Let an engine answer greedily, with weights that the reshard brings it from the actor."""
        residency, world = Residency(), self._world
        residency.add(self.actor.kind, self.actor.memory)
        config = self._config(engine)
        longest = max(map(len, prompts)) + ANSWER
        generation = Generation(
            self.actor,
            generation_groups(world, GenerationLayout(ranks=range(1), tp=1)),
            rollout=config.rollout,
            reshard=config.reshard,
            model_path=self._folder,
            residency=residency,
            timers=PhaseTimers(world.device),
            max_model_len=blocks_for(longest) * BLOCK_SIZE,
            decode=lambda ids: "".join(f"<{i}>" for i in ids),
        )
        with generation.phase(verify=True):
            greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER)
            completions = generation.engine.generate(prompts, greedy, seeds=[0] * len(prompts))
        generation.close()
        return completions


def _together(batch: Batch) -> MiniBatch:
    """Pass all sequences as one packed micro-batch."""
    everything = list(range(len(batch)))
    return MiniBatch(layout=TrainLayout(ranks=range(1)), sequences=everything, micro_batches=[everything])
