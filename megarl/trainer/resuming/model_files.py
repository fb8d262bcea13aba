"""Writes the model's Hugging Face files into a checkpoint, for other programs."""

from __future__ import annotations

import os

from megarl.checkpoint.export_beside import HUGGINGFACE
from megarl.checkpoint.exported_files import export_model_files, keep_tokenizer, token_ids
from megarl.checkpoint.huggingface_folder import copy_model_files
from megarl.data.tokenizer import tokenizer_place
from megarl.role_kinds import RoleKind
from megarl.trainer.inputs import Inputs


def write_model_files(inputs: Inputs, trained: RoleKind, folder: str) -> None:
    """Write configuration and tokenizer into a checkpoint's folder; with hf_model all files of `huggingface/` but the
    weights, too. Raises OSError.

    Args:
        trained: what the actor or reward model of the run is.
    """
    config, model = inputs.config, inputs.config.actor_rollout_ref.model
    tokenizer = tokenizer_place(model.tokenizer)
    ids = token_ids(model.folder, tokenizer, inputs.tokenizer, inputs.stop_tokens)
    copy_model_files(model.folder, tokenizer, folder, token_ids=ids)
    keep_tokenizer(model.folder, tokenizer, folder)
    if config.checkpoint.exports:
        huggingface = os.path.join(folder, HUGGINGFACE)
        os.makedirs(huggingface)
        write_exported_files(inputs, huggingface, classifier=trained.scalar)


def write_exported_files(inputs: Inputs, folder: str, *, classifier: bool = False) -> list[str]:
    """Write all files of `huggingface/` but the weights into an empty folder; returns remarks.

    Raises:
        OSError: they cannot be written, or would not be read as the model was trained.
    """
    model = inputs.config.actor_rollout_ref.model
    try:
        return export_model_files(
            model.folder,
            model.tokenizer,
            folder,
            dtype=model.dtype,
            stop_tokens=inputs.stop_tokens,
            classifier=classifier,
        )
    except ValueError as e:
        raise OSError(str(e)) from e  # as on a full disk, the run warns and goes on
