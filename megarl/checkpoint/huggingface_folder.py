"""Reads and copies Hugging Face model folders, and checks that one can be imported. Torch-free, to refuse it early.

config.json                          the architecture
generation_config.json               token ids that end a response
model.safetensors                    the weights, or
model.safetensors.index.json         names the one of model-0000N-of-0000M.safetensors that holds each weight
tokenizer.json, ...                  the tokenizer
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from megarl.checkpoint.safetensors_file import ITEMSIZE, Entry, copy_tensors, read_header
from megarl.checkpoint.stacked_experts import unstacked
from megarl.models.architecture import Architecture
from megarl.models.families import classifier_of, read_architecture
from megarl.models.weights import EMBEDDING, OUTPUT, SCORE, layer_prefix, logical_tensors

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FURTHER = "model-mtp.safetensors"
"""Layers for multi-token prediction in an export, as they were in the folder that the model came from."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields of `config.json` that count layers after the last, for multi-token prediction (arXiv 2412.19437)."""
_FURTHER_MODULE = "mtp."
"""Prefix of the names of such layers in Qwen's files, whose `config.json` need not count them."""
_BESIDE_IMAGES = "model.language_model."
"""Prefix that transformers 5 gives the weights of a language model that it took out of a model with images."""
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")  # buffers that old files hold and every model computes
OF_TOKENIZERS = re.compile(
    r"(special_tokens_map|added_tokens|vocab|chat_template)\.json|tokenizer.*\.(json|model)"
    r"|spiece\.model|merges\.txt|vocab\.txt|chat_template\.jinja"
)


def check_weights(folder: str, arch: Architecture) -> None:
    """Refuse weights that are not exactly those of the architecture; reads headers only. Raises ValueError.

    A tied model's `lm_head.weight` is left out, after a check that it is the embedding, byte by byte. A scalar output
    may be absent, and a language model's output, which is left out, may be in its place. There may also be layers for
    multi-token prediction, if config.json or their names say so.
    """
    tensors = logical_tensors(arch)
    stored = weight_entries(folder, tensors)
    if arch.tied and OUTPUT in stored and EMBEDDING in stored:
        if not _same_bytes(stored[OUTPUT], stored[EMBEDDING]):
            raise ValueError(
                f"'{folder}': {OUTPUT} differs from {EMBEDDING} although {CONFIG} says tie_word_embeddings = true; "
                f"set it to false to keep both"
            )
        del stored[OUTPUT]
    if arch.output == "scalar" and SCORE not in stored:
        del tensors[SCORE]
        stored.pop(OUTPUT, None)
    _refuse(folder, "the files lack", (name for name in tensors if name not in stored))
    further = _of_further_layers(stored, folder, arch)
    unknown = (name for name in stored if name not in tensors and not _COMPUTED.search(name))
    _refuse(folder, "the architecture has no", (name for name in unknown if name not in further))
    entries = {name: stored[name] for name in tensors}
    _refuse(
        folder,
        "the shape does not fit config.json:",
        (
            f"{name} (file {list(entry.shape)}, model {list(tensors[name].hf_shape)})"
            for name, entry in entries.items()
            if entry.shape != tensors[name].hf_shape
        ),
    )
    _refuse(
        folder,
        f"only {', '.join(ITEMSIZE)} can be read (no quantised weights), not",
        (f"{name} ({entry.dtype})" for name, entry in (entries | further).items() if entry.dtype not in ITEMSIZE),
    )


def further_entries(folder: str, arch: Architecture) -> dict[str, Entry]:
    """List the tensors of a folder's layers for multi-token prediction by name; none where it has no weights."""
    has_weights = any(os.path.isfile(os.path.join(folder, name)) for name in (INDEX, SINGLE))
    if not has_weights:
        return {}
    return _of_further_layers(weight_entries(folder), folder, arch)


def _of_further_layers(entries: Mapping[str, Entry], folder: str, arch: Architecture) -> dict[str, Entry]:
    prefixes = _further_prefixes(folder, arch)
    return {name: entry for name, entry in entries.items() if name.startswith(prefixes)}


def _further_prefixes(folder: str, arch: Architecture) -> tuple[str, ...]:
    layers = (layer_prefix(arch.num_layers + i) for i in range(_further_layers(read_config(folder))))
    return _FURTHER_MODULE, *layers


def further_layers_remark(folder: str, *, exports: bool = True) -> list[str]:
    """Say, in at most one line, what becomes of a folder's layers for multi-token prediction.

    Args:
        exports: whether what is written is an export, or a run that writes some; otherwise it holds no such layers.
    """
    count, prefixes = _further_layers(read_config(folder)), _further_prefixes(folder, read_architecture(folder))
    has_weights = any(name.startswith(prefixes) for name in _weight_names(folder))
    if not count and not has_weights:
        return []
    layers = f"{count} layers" if count > 1 else "a layer"
    fate = "not trained, and left out of exports"
    if has_weights:
        fate = "not trained, exported unchanged" if exports else "left out; an export with --model=FOLDER has it again"
    return [f"remark: '{folder}' has {layers} for multi-token prediction: {fate}"]


def _further_layers(config: Mapping[str, Any]) -> int:
    return max(0, *(config.get(key) or 0 for key in _FURTHER_LAYERS))


def without_further_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Change `config.json` to that of a model without layers for multi-token prediction."""
    return {**config, **{key: 0 for key in _FURTHER_LAYERS if config.get(key)}}


def copy_further_layers(source: str, target: str) -> bool:
    """Write a folder's layers for multi-token prediction, bit for bit, into another; returns whether there are any."""
    entries = further_entries(source, read_architecture(source))
    if entries:
        copy_tensors(os.path.join(target, FURTHER), entries)
    return bool(entries)


def refuse_remote_code(folder: str) -> None:
    """Refuse a model that Python code in its own folder defines. Raises ValueError."""
    if "auto_map" in read_config(folder):
        raise ValueError(
            f"'{folder}': {CONFIG} has auto_map: the model comes with Python code of its own (trust_remote_code), "
            f"which is never run"
        )


def weight_entries(folder: str, names: Container[str] = ()) -> dict[str, Entry]:
    """List every tensor in the folder's safetensors files by name.

    Args:
        names: of the model's tensors; where these are of single experts, so are the entries.

    Raises:
        ValueError: no weights, only pickled ones, those of two models, or files that the index names and that are
            missing or damaged.
    """
    index, single = os.path.join(folder, INDEX), os.path.join(folder, SINGLE)
    if os.path.isfile(index):
        files = indexed_files(folder)
        if os.path.isfile(single) and SINGLE not in files:  # transformers would read the one, vLLM the other
            raise ValueError(
                f"'{folder}' has both {SINGLE} and {INDEX}, which names other files; delete what is left over of "
                f"another model"
            )
        _refuse(folder, f"{INDEX} names missing", (x for x in files if not os.path.isfile(os.path.join(folder, x))))
    elif os.path.isfile(single):
        files = [SINGLE]
    else:
        raise ValueError(_no_weights(folder))
    headers = (read_header(os.path.join(folder, file)) for file in files)
    return unstacked({_without_images(name): entry for header in headers for name, entry in header.items()}, names)


def _weight_names(folder: str) -> Iterable[str]:
    """List the tensors of a folder without a look at each of its files; none where it has no weights.

    Raises:
        ValueError: the index, or the only file, is none.
    """
    single = os.path.join(folder, SINGLE)
    if os.path.isfile(os.path.join(folder, INDEX)):
        return map(_without_images, _index(folder))
    return map(_without_images, read_header(single)) if os.path.isfile(single) else ()


def _without_images(name: str) -> str:
    return f"model.{name.removeprefix(_BESIDE_IMAGES)}" if name.startswith(_BESIDE_IMAGES) else name


def indexed_files(folder: str) -> list[str]:
    """List the files that the index of a folder names. Raises ValueError for one that is no index, or names a path."""
    files = sorted(set(_index(folder).values()))
    _refuse(folder, f"{INDEX} names files elsewhere:", (x for x in files if os.path.basename(x) != x))
    return files


def _index(folder: str) -> dict[str, str]:
    """Read the file of each tensor that the index of a folder names. Raises ValueError if it is no index."""
    index = os.path.join(folder, INDEX)
    try:
        with open(index, encoding="utf-8") as f:
            return {name: os.fspath(file) for name, file in json.load(f)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as e:
        raise ValueError(f"'{index}' is not an index of safetensors files: {e}") from e


def read_config(folder: str, name: str = CONFIG) -> dict[str, Any]:
    """Read the folder's `config.json`, or another of its files. Raises ValueError if it is no JSON object."""
    file = os.path.join(folder, name)
    try:
        with open(file, encoding="utf-8") as f:
            config: Any = json.load(f)
    except (ValueError, RecursionError, OSError) as e:
        raise ValueError(f"'{file}' is not a JSON object: {e}") from e
    if not isinstance(config, dict):
        raise ValueError(f"'{file}' is not a JSON object: {type(config).__name__}")
    return config


def end_tokens(folder: str, vocab_size: int) -> list[int]:
    """Read the ids that end a response: `eos_token_id` of `generation_config.json` and `config.json`, without repeats.

    Args:
        vocab_size: ids from here on are no tokens of the model, and left out.

    Raises:
        ValueError: a file that is no JSON object, or an `eos_token_id` that is neither an id nor a list of them.
    """
    ends: dict[int, None] = {}
    for name in (GENERATION_CONFIG, CONFIG):
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            continue
        ids = read_config(folder, name).get("eos_token_id")
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int for i in listed):
            raise ValueError(f"'{file}': eos_token_id must be a token id or a list of them, not {ids!r:.80}")
        ends.update(dict.fromkeys(i for i in listed if 0 <= i < vocab_size))
    return list(ends)


TokenIds = Mapping[str, int | list[int] | None]
"""`eos_token_id` and the like, as `config.json` and `generation_config.json` have them."""


def copy_model_files(
    source: str,
    tokenizer: str,
    target: str,
    *,
    dtype: str | None = None,
    token_ids: TokenIds | None = None,
    classifier: bool = False,
    further_layers: bool = False,
) -> None:
    """Copy all files but the weights: `config.json`, the tokenizer and the generation settings.

    Args:
        tokenizer: folder of the tokenizer, or a SentencePiece .model file; with another one, that of `source` stays
            behind.
        dtype: of the weights, such as "bfloat16", to be written into `config.json`; None leaves that which is there.
        token_ids: to be written into both configurations; None leaves those that are there.
        classifier: the target is a sequence classifier with one label, whatever the source is.
        further_layers: the target has the layers for multi-token prediction, if the source has some.
    """
    config = {**read_config(source), **(token_ids or {})}
    if not further_layers:  # readers would look for their weights
        config = without_further_layers(config)
    config.setdefault("model_type", read_architecture(source).family)  # without it transformers and vLLM read nothing
    if classifier:
        names = config.get("architectures") or []
        config["architectures"] = [classifier_of(name) for name in names]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    _write_config(target, CONFIG, config)
    there = os.path.isfile(os.path.join(source, GENERATION_CONFIG))
    if there or token_ids is not None:
        generation = read_config(source, GENERATION_CONFIG) if there else {}
        _write_config(target, GENERATION_CONFIG, {**generation, **(token_ids or {})})
    if os.path.isfile(tokenizer):
        shutil.copyfile(tokenizer, os.path.join(target, "tokenizer.model"))
    for name in os.listdir(tokenizer) if os.path.isdir(tokenizer) else ():
        if OF_TOKENIZERS.fullmatch(name):
            shutil.copyfile(os.path.join(tokenizer, name), os.path.join(target, name))


def move_tokenizer(folder: str, name: str) -> str:
    """Move the tokenizer into a new folder within; returns that folder.

    A tokenizer.json that no program can read stays in its place: without any file transformers makes an empty tokenizer
    for some families.
    """
    target = os.path.join(folder, name)
    os.mkdir(target)
    for file in filter(OF_TOKENIZERS.fullmatch, sorted(os.listdir(folder))):
        os.rename(os.path.join(folder, file), os.path.join(target, file))
    _write_config(folder, "tokenizer.json", {"error": f"the tokenizer of this model is in {name}/"})
    return target


def _write_config(folder: str, name: str, values: Mapping[str, Any]) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        f.write(json.dumps(values, indent=2) + "\n")


def _no_weights(folder: str) -> str:
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if "metadata.json" in names:
        return f"'{folder}' is a Megatron-Core checkpoint, not a Hugging Face folder with weights"
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        return (
            f"'{folder}' has only pickled weights ({_some(pickled)}), which can run code when they are read; "
            f"convert them to safetensors"
        )
    return f"'{folder}' has no weights: neither {SINGLE} nor {INDEX}"


def _same_bytes(a: Entry, b: Entry, step: int = 16 * 2**20) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with (
        open(a.file, "rb") as f,
        open(b.file, "rb") as g,
        mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as x,
        mmap.mmap(g.fileno(), 0, access=mmap.ACCESS_READ) as y,
    ):
        return all(
            x[a.start + at : min(a.stop, a.start + at + step)] == y[b.start + at : min(b.stop, b.start + at + step)]
            for at in range(0, a.stop - a.start, step)
        )


def _refuse(folder: str, what: str, names: Iterable[str]) -> None:
    wrong = list(names)
    if wrong:
        raise ValueError(f"'{folder}': {what} {_some(wrong)}")


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
