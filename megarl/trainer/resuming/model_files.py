"""The model's Hugging Face files within a checkpoint: what other programs need to use it."""

from __future__ import annotations

import os

import torch.distributed as dist

from megarl.checkpoint.agreement import on_every_rank
from megarl.checkpoint.export_huggingface import export_weights
from megarl.checkpoint.huggingface_folder import copy_model_files
from megarl.config import Config
from megarl.models.placements import training_placements
from megarl.models.tensors import logical_tensors
from megarl.roles.model import MegatronModel


def write_model_files(config: Config, trained: MegatronModel | None, folder: str) -> None:
    """Configuration and tokenizer into a checkpoint's folder; on request `huggingface/`, with the weights, too.

    Every rank calls it. Raises RankFailed, on all of them, if one cannot write.

    Args:
        trained: whose weights these are, an actor or a reward model; None writes nothing.
    """
    if trained is None:
        return
    model = config.actor_rollout_ref.model
    tokenizer = model.tokenizer_path or model.path
    huggingface = os.path.join(folder, "huggingface")
    control = trained.groups.control

    def copy() -> None:
        if dist.get_rank() == 0:
            copy_model_files(model.path, tokenizer, folder)
            if config.checkpoint.save_hf:
                os.makedirs(huggingface)
                scores = trained.scalar_output
                copy_model_files(model.path, tokenizer, huggingface, dtype=model.dtype, classifier=scores)

    on_every_rank(control, copy)
    if config.checkpoint.save_hf:
        on_every_rank(control, lambda: _export(trained, huggingface))


def _export(model: MegatronModel, folder: str) -> None:
    """The ranks of the first copy of the model write its weights."""
    layout = model.groups.train
    ranks = layout.model_ranks(0)
    if model.groups.rank in ranks:
        placements = {
            rank: training_placements(model.arch, layout, rank, transformer_engine=model.transformer_engine)
            for rank in ranks
        }
        export_weights(folder, logical_tensors(model.arch), model.parameters(), placements, model.groups.model)
