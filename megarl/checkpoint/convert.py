"""Converts Hugging Face folders to Megatron-Core checkpoints and back in one process, one parameter at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from socket import gethostname

import psutil
import torch
from torch import Tensor

from megarl.checkpoint.export_huggingface import Advance, refuse_nonfinite, write_weights
from megarl.checkpoint.exported_files import export_model_files, keep_tokenizer, prompts_of
from megarl.checkpoint.folder import STATE_FILE, check_whole
from megarl.checkpoint.huggingface_folder import (
    check_weights,
    copy_model_files,
    further_layers_remark,
    refuse_remote_code,
)
from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.checkpoint.manifest import (
    checksum_problem,
    files_of,
    one_line,
    read_manifest,
    record_files,
    record_source,
    write_manifest,
)
from megarl.checkpoint.megatron_folder import MegatronWeights, StoredParameter, describe, write_megatron
from megarl.checkpoint.megatron_lm import check_arguments, check_format, is_megatron_lm
from megarl.checkpoint.rank_failures import os_error
from megarl.checkpoint.verify import compare_answers
from megarl.data.tokenizer import tokenizer_place
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.fill import fill
from megarl.models.tensors import Box, LogicalTensor, volume
from megarl.models.weights import logical_tensors


def huggingface_to_megatron(
    source: str, target: str, *, tp: int, pp: int, dtype: torch.dtype | None, max_file_bytes: int, advance: Advance
) -> list[str]:
    """Write the checkpoint that a job of tp x pp ranks would write; a job in any other layout can read it, too.

    Args:
        dtype: of the weights; None takes the narrowest of bfloat16 and float32 that changes no weight.

    Returns:
        remarks for readers of the checkpoint.

    Raises:
        ValueError: the source cannot be imported, or the target is already there.
    """
    arch = read_architecture(source)
    refuse_remote_code(source)
    check_weights(source, arch)
    layout = arch.one_copy(tp=tp, pp=pp)
    arch.check_training(layout, sequence_parallel=True)
    weights = HuggingFaceWeights(source, arch)
    dtype = dtype or (torch.bfloat16 if weights.dtypes == {"BF16"} else torch.float32)
    ranks = [describe(arch, layout, rank, dtype) for rank in layout.ranks]
    written = [p for rank in ranks for p in rank.parameters.values() if p.chunks(p.meta)]
    total, done = sum(p.meta.numel() for p in written), 0

    def finite(tensor: LogicalTensor, box: Box) -> Tensor:
        value = weights.box(tensor, box)
        refuse_nonfinite(tensor.name, value)
        return value

    def write(parameter: StoredParameter, data: Tensor) -> None:
        nonlocal done
        fill({p.param: data for p in parameter.placements}, parameter.placements, weights.tensors, finite)
        done += data.numel()
        advance(done, total)

    with new_folder(target) as partial:
        write_megatron(partial, ranks, write, max_file_bytes=max_file_bytes)
        tokenizer = tokenizer_place(source)
        copy_model_files(source, tokenizer, partial, dtype=dtype_name(dtype))
        keep_tokenizer(source, tokenizer, partial)
        write_manifest(partial, record_files(partial, files_of(partial), sync=True))
    return further_layers_remark(source, exports=False)


def megatron_to_huggingface(
    source: str,
    target: str,
    *,
    model_files: str,
    max_shard_bytes: int,
    check: bool,
    answers_below: float,
    advance: Advance,
) -> list[str]:
    """Write a Hugging Face folder from the actor's weights in a checkpoint, in the type that they have there.

    Args:
        model_files: folder with the model's `config.json` and tokenizer; a checkpoint has its own.
        check: compare every file of the checkpoint with its manifest first.
        answers_below: GB that the weights, in float32, may take for greedy answers to be compared with transformers'.

    Returns:
        lines on the comparisons that were made or left out, and remarks for readers of the folder.

    Raises:
        ValueError: the source is no checkpoint of that model, is damaged or not finite, the target is already there, or
            transformers would read it in another way.
    """
    if check:
        check_contents(source)
    arch = read_architecture(model_files)
    remarks = further_layers_remark(model_files)
    if is_megatron_lm(source):
        check_format(source)
        remarks += [remark for remark in [check_arguments(source, arch)] if remark is not None]
    weights = MegatronWeights(source, arch)
    elements = sum(volume(tensor.box) for tensor in logical_tensors(arch).values())
    with new_folder(target) as partial:
        remarks += export_model_files(model_files, model_files, partial, dtype=dtype_name(weights.dtype))
        write_weights(weights, partial, arch, max_shard_bytes=max_shard_bytes, advance=advance)
        record_source(partial, source)
        remarks.append(_compared(partial, source, arch, 4 * elements, answers_below * 1e9))
    return remarks


def _compared(folder: str, source: str, arch: Architecture, needed: int, limit: float) -> str:
    """Compare a whole folder, as transformers reads it, with the checkpoint where both fit; returns a line on it.

    Args:
        needed: bytes of the weights in float32.
        limit: bytes that they may take.
    """
    if arch.output == "scalar":
        return "not compared: what transformers makes of it (a model of scores)"
    if needed > limit or needed > psutil.virtual_memory().available:
        return f"not compared: answers; one model in float32 takes {needed / 1e9:.1f} GB of memory (--answers-below)"
    prompts, stop_tokens = prompts_of(folder, arch)
    count = compare_answers(folder, source, arch, prompts, stop_tokens)
    return f"compared: {count} greedy answers are the same in transformers"


def check_contents(folder: str) -> None:
    """Refuse a checkpoint whose files differ from its manifest. Raises ValueError."""
    if not os.path.isfile(os.path.join(folder, STATE_FILE)):
        return  # Megatron-Core's own programs write no manifest; what is no checkpoint is refused by its reader
    check_whole(folder)
    records = read_manifest(folder)
    if problem := checksum_problem(folder, records, records):
        raise ValueError(f"'{folder}' is damaged: {problem} (--no-check converts it all the same)")


def dtype_name(dtype: torch.dtype) -> str:
    """Name the type as `config.json` does, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def new_folder(target: str) -> Iterator[str]:
    """Make a folder to write into, which gets its name when it is whole. Raises ValueError if the name is taken.

    Its name until then has this process's number in it: two programs that make the same folder would mix their files.
    """
    target = os.path.abspath(target)
    _refuse_taken(target)
    parent, name = os.path.split(target)
    prefix = f".{name}.{gethostname()}-"
    partial = os.path.join(parent, f"{prefix}{os.getpid()}.partial")
    try:
        os.makedirs(parent, exist_ok=True)
        _remove_left(parent, prefix)
        os.mkdir(partial)
    except OSError as e:
        raise ValueError(f"'{target}' cannot be written: {one_line(e)}") from e
    try:
        yield partial
        _refuse_taken(target)
        os.rename(partial, target)
    except (OSError, RuntimeError) as e:
        if (cause := os_error(e)) is None:
            raise
        raise ValueError(f"'{target}' cannot be written: {one_line(cause)}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_taken(target: str) -> None:
    if os.path.lexists(target):
        raise ValueError(f"'{target}' is already there; delete it or give another name")


def _remove_left(parent: str, prefix: str) -> None:
    """Delete partial folders of killed processes of this host: a full disk would stay full."""
    for name in os.listdir(parent):
        pid = name.removeprefix(prefix).removesuffix(".partial")
        if name == f"{prefix}{pid}.partial" and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
