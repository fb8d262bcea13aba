"""Print the command with which vLLM serves a checkpoint; this program does not serve.

PATH is a path that `megarl eval` takes. vLLM reads a Hugging Face folder: the checkpoint's (hf_model in
checkpoint.save_contents), or else one that is made next to it, PATH-huggingface. Only the command goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence

from megarl.checkpoint.huggingface_folder import CONFIG, check_weights, end_tokens, read_config
from megarl.checkpoint.manifest import is_made_from
from megarl.checkpoint.megatron_lm import is_megatron_lm
from megarl.cli.convert import ANSWERS_BELOW, SHARD_BYTES, hide_gpus
from megarl.cli.words import add_checkpoint
from megarl.config import Config, load_config
from megarl.config.policy import RolloutConfig
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.parallel.experts import TensorSplit
from megarl.plain import plain
from megarl.trainer.subject import Subject, find_subject

EXAMPLE = "megarl serve runs/math/run --best --tp 2"
_FAST_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl serve`."""
    add_checkpoint(parser)
    parser.add_argument("--out", help="where to make the Hugging Face folder, if there is none")
    parser.add_argument("--tp", type=int, help="GPUs that share the model; default as the run generated, or 1")
    parser.add_argument("--max-model-len", type=int, help="tokens of prompt and answer; default the model's positions")
    parser.add_argument("--chat-template", metavar="FILE", help="if the tokenizer has none")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the command. Raises ValueError, in one line, if vLLM cannot serve the model."""
    del rest
    subject = find_subject(args.path, best=args.best)
    if is_megatron_lm(subject.folder):
        how = f"megarl convert megatron-to-hf {args.path} FOLDER --model MODEL"
        raise ValueError(f"'{args.path}' is Megatron-LM's, which has no tokenizer: convert it first ({how})")
    arch = read_architecture(subject.folder)
    config = load_config(subject.recorded) if subject.recorded else None
    rollout = config.actor_rollout_ref.rollout if config else RolloutConfig()
    tp = rollout.tensor_model_parallel_size if args.tp is None else args.tp
    split = TensorSplit.of_replica(tp, enable_expert_parallel=rollout.enable_expert_parallel)
    length = arch.max_position_embeddings if args.max_model_len is None else args.max_model_len
    _check(arch, split, length, args.chat_template)
    if "model_type" not in read_config(subject.folder):
        raise ValueError(f"vLLM needs the field model_type in '{subject.folder}/{CONFIG}' (qwen2, say): add it")
    from megarl.data.tokenizer import tokenizer_place

    folder = _huggingface(subject, args.out)
    values = read_config(folder)
    words = ["vllm", "serve", os.path.abspath(folder), "--served-model-name", subject.name]
    words += ["--dtype", str(values.get("dtype") or values.get("torch_dtype") or "auto")]
    words += ["--tensor-parallel-size", str(tp), "--max-model-len", str(length), "--generation-config", "auto"]
    words += ["--enable-expert-parallel"] if split.ep > 1 else []
    if config is not None and (sampling := _sampling(config)):
        words += ["--override-generation-config", json.dumps(sampling)]
    if args.chat_template:
        words += ["--chat-template", os.path.abspath(args.chat_template)]
    tokenizer = tokenizer_place(folder)
    if tokenizer != folder:
        words += ["--tokenizer", os.path.abspath(tokenizer)]
    line = shlex.join(words)
    if plain(line) != line:
        raise ValueError(f"a name in the command has control characters, which are not printed; rename it: {line}")
    for remark in _remarks(folder, tokenizer, config, args.chat_template):
        print(f"megarl: {remark}", file=sys.stderr)
    print(line)
    return 0


def _check(arch: Architecture, split: TensorSplit, length: int, chat_template: str | None) -> None:
    from megarl.rollout.vllm.checks import check_vllm_tp

    if split.tp < 1:
        raise ValueError(f"--tp {split.tp} must be 1 or more")
    arch.check_generation(split)
    check_vllm_tp(arch, split.tp)
    if not 1 <= length <= arch.max_position_embeddings:
        raise ValueError(f"--max-model-len {length}: the model has {arch.max_position_embeddings} positions")
    if chat_template and not os.path.isfile(chat_template):
        raise ValueError(f"--chat-template: no file at '{chat_template}'")


def _huggingface(subject: Subject, out: str | None) -> str:
    """Return the Hugging Face folder, which is made if there is none."""
    if not subject.is_checkpoint:
        return subject.folder
    export = out or f"{os.path.normpath(subject.folder)}-huggingface"
    for folder in (os.path.join(subject.folder, "huggingface"), export):
        if os.path.isfile(os.path.join(folder, CONFIG)):
            if folder == export and not is_made_from(export, subject.folder):
                origin = f"'{export}' was not made from '{subject.folder}' as that is now"
                raise ValueError(f"{origin}: delete it, or give --out a new folder")
            check_weights(folder, read_architecture(folder))
            return folder
    hide_gpus()
    from megarl.checkpoint.convert import megatron_to_huggingface  # imports torch

    print(f"megarl: {subject.folder} has no Hugging Face folder; making {export}", file=sys.stderr)
    for remark in megatron_to_huggingface(
        subject.folder,
        export,
        model_files=subject.folder,
        max_shard_bytes=SHARD_BYTES,
        check=True,
        answers_below=ANSWERS_BELOW,
        advance=lambda done, total: None,
    ):
        print(f"megarl: {remark}", file=sys.stderr)
    return export


def _sampling(config: Config) -> dict[str, float]:
    """Return the sampling of the run's rollouts, as far as it differs from vLLM's defaults."""
    rollout = config.actor_rollout_ref.rollout
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    return {name: value for name, value in sampling.items() if value != usual[name] or name == "temperature"}


def _remarks(folder: str, tokenizer: str, config: Config | None, chat_template: str | None) -> list[str]:
    """List what a user must know and the command cannot express."""
    remarks, names = [], os.listdir(tokenizer)
    if not any(name in names for name in _FAST_TOKENIZERS):
        remarks.append("the tokenizer is a SentencePiece file alone, which vLLM may not read: add a tokenizer.json")
    if not chat_template and not _has_chat_template(tokenizer):
        remarks.append("no chat template: ask /v1/completions, or give one with --chat-template")
    if config is not None and (arguments := config.data.apply_chat_template_kwargs):
        remarks.append(f"the run told its chat template more: ask with chat_template_kwargs={json.dumps(arguments)}")
    if config is not None and (tokens := _other_ends(folder, config)):
        remarks.append(f"the run ended responses with other tokens, too: ask with stop_token_ids={tokens}")
    if config is not None and config.actor_rollout_ref.rollout.stop:
        remarks.append(f"the run ended responses with strings: ask with stop={config.actor_rollout_ref.rollout.stop}")
    return remarks


def _other_ends(folder: str, config: Config) -> list[int]:
    ends = end_tokens(folder, read_architecture(folder).vocab_size)
    return [i for i in config.actor_rollout_ref.rollout.stop_token_ids if i not in ends]


def _has_chat_template(folder: str) -> bool:
    if any(os.path.isfile(os.path.join(folder, name)) for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as f:
            return bool(json.load(f).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
