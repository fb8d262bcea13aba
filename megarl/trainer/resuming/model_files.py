"""Writes the model's Hugging Face files into a checkpoint, for other programs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megarl.checkpoint.export_huggingface import export_weights
from megarl.checkpoint.exported_files import export_model_files, keep_tokenizer, token_ids
from megarl.checkpoint.huggingface_folder import copy_model_files
from megarl.checkpoint.rank_failures import on_every_rank, on_first_rank
from megarl.data.tokenizer import tokenizer_place
from megarl.models.weights import logical_tensors
from megarl.trainer.inputs import Inputs

if TYPE_CHECKING:  # checks of a run do without Megatron-Core
    from megarl.roles.model import MegatronModel


def write_model_files(inputs: Inputs, trained: MegatronModel | None, folder: str) -> None:
    """Write configuration and tokenizer into a checkpoint's folder; on request `huggingface/`, with the weights, too.

    Every rank calls it. Raises RankFailed on all ranks if one cannot write.

    Args:
        trained: the actor or reward model to export; None writes nothing.
    """
    if trained is None:
        return
    config, model = inputs.config, inputs.config.actor_rollout_ref.model
    tokenizer = tokenizer_place(model.tokenizer_path or model.path)
    huggingface = os.path.join(folder, "huggingface")
    world = trained.groups.world

    def copy() -> None:
        ids = token_ids(model.path, tokenizer, inputs.tokenizer, inputs.stop_tokens)
        copy_model_files(model.path, tokenizer, folder, token_ids=ids)
        keep_tokenizer(model.path, tokenizer, folder)
        if config.checkpoint.save_hf:
            os.makedirs(huggingface)
            write_exported_files(inputs, huggingface, classifier=trained.kind.scalar)

    on_first_rank(world, copy)
    if config.checkpoint.save_hf:
        on_every_rank(world, lambda: _export(trained, huggingface))


def write_exported_files(inputs: Inputs, folder: str, *, classifier: bool = False) -> list[str]:
    """Write all files of `huggingface/` but the weights into an empty folder; returns remarks.

    Raises:
        OSError: they cannot be written, or would not be read as the model was trained.
    """
    model = inputs.config.actor_rollout_ref.model
    try:
        return export_model_files(
            model.path,
            model.tokenizer_path or model.path,
            folder,
            dtype=model.dtype,
            stop_tokens=inputs.stop_tokens,
            classifier=classifier,
        )
    except ValueError as e:
        raise OSError(str(e)) from e  # as on a full disk, the run warns and goes on


def _export(model: MegatronModel, folder: str) -> None:
    """Write the weights, on the ranks of the first copy of the model."""
    ranks = model.side.copies[0]
    if model.groups.world.rank in ranks:
        placements = {rank: model.side.placements(rank) for rank in ranks}
        export_weights(folder, logical_tensors(model.arch), model.parameters(), placements, model.groups.model)
