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


def write_model_files(config: Config, actor: MegatronModel | None, folder: str) -> None:
    """Configuration and tokenizer into a checkpoint's folder; on request `huggingface/`, with the weights, too.

    Every rank calls it. Raises RankFailed, on all of them, if one cannot write.

    Args:
        actor: whose weights these are; None writes nothing.
    """
    if actor is None:
        return
    model = config.actor_rollout_ref.model
    tokenizer = model.tokenizer_path or model.path
    huggingface = os.path.join(folder, "huggingface")
    control = actor.groups.control

    def copy() -> None:
        if dist.get_rank() == 0:
            copy_model_files(model.path, tokenizer, folder)
            if config.checkpoint.save_hf:
                os.makedirs(huggingface)
                copy_model_files(model.path, tokenizer, huggingface, dtype=model.dtype)

    on_every_rank(control, copy)
    if config.checkpoint.save_hf:
        on_every_rank(control, lambda: _export(actor, huggingface))


def _export(actor: MegatronModel, folder: str) -> None:
    """The ranks of the first copy of the model write its weights."""
    layout = actor.groups.train
    ranks = layout.model_ranks(0)
    if actor.groups.rank in ranks:
        placements = {
            rank: training_placements(actor.arch, layout, rank, transformer_engine=actor.transformer_engine)
            for rank in ranks
        }
        export_weights(folder, logical_tensors(actor.arch), actor.parameters(), placements, actor.groups.model)
