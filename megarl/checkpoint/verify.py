"""Whether a Hugging Face folder and a Megatron-Core checkpoint are the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.checkpoint.megatron_folder import MegatronWeights
from megarl.models.architecture import Architecture
from megarl.models.gpt import build_chunks, named_parameters, transformer_config
from megarl.parallel.layout import TrainLayout
from megarl.parallel.train_groups import stand_in

ANSWER = 8
"""Tokens of a greedy answer at most."""
TIE = 1e-3
"""Log-probabilities that are closer may change places by rounding."""


def compare_weights(huggingface: str, megatron: str, arch: Architecture) -> int:
    """The number of weights (tensors), all equal bit for bit; one tensor in memory at a time.

    Raises:
        ValueError: a tensor differs; names the first.
    """
    here, there = HuggingFaceWeights(huggingface, arch), MegatronWeights(megatron, arch)
    for name, tensor in here.tensors.items():
        if not torch.equal(_bits(here.box(tensor, tensor.box).to(there.dtype)), _bits(there.tensor(name))):
            raise ValueError(f"{name} in '{huggingface}' differs from that in '{megatron}'")
    return len(here.tensors)


def _bits(tensor: Tensor) -> Tensor:
    """As integers: NaN differs from itself as a number."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


@torch.no_grad()
def compare_logits(huggingface: str, megatron: str, arch: Architecture, *, tolerance: float = 1e-4) -> float:
    """Largest difference of any log-probability, float32, between Megatron-Core's model and that of `transformers`.

    Both models are held in memory, one after the other.

    Raises:
        ValueError: the difference is more than `tolerance`, or transformers is not installed.
    """
    sequences = _sequences(arch)
    theirs = _their_log_probs(huggingface, sequences)
    with megatron_model(megatron, arch) as log_probs:
        ours = [log_probs(tokens) for tokens in sequences]
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    if not worst <= tolerance:
        raise ValueError(
            f"log-probabilities of '{megatron}' and of '{huggingface}' in transformers differ by up to {worst:.1e}"
        )
    return worst


@torch.no_grad()
def compare_answers(
    huggingface: str,
    megatron: str,
    arch: Architecture,
    prompts: Mapping[str, Sequence[int]],
    stop_tokens: Sequence[int],
) -> int:
    """The number of prompts: Megatron-Core's model and that of `transformers` answer them greedily alike, in float32.

    Both models are held in memory, one after the other.

    Args:
        prompts: token ids by their text.
        stop_tokens: ids that end an answer.

    Raises:
        ValueError: an answer differs; names the prompt and both. Or transformers reads no model there.
    """
    length = arch.max_position_embeddings - ANSWER
    asked = {text: list(ids)[:length] for text, ids in prompts.items() if ids and length > 0}
    theirs = _their_answers(huggingface, asked)
    with megatron_model(megatron, arch) as log_probs:
        for text, ids in asked.items():
            ours = list[int]()
            while len(ours) < ANSWER and not set(ours[-1:]) & set(stop_tokens):
                next_ = log_probs(torch.tensor([*ids, *ours]))[-1]
                ours.append(int(next_.argmax()))
                tied = theirs[text][len(ours) - 1 : len(ours)]
                if tied and ours[-1] != tied[0] and next_[ours[-1]] - next_[tied[0]] < TIE:
                    ours[-1] = tied[0]  # rounding decides
            if ours != theirs[text]:
                raise ValueError(
                    f"the export would not be read as the model was trained: transformers answers {text!r} with the "
                    f"ids {theirs[text]}, the checkpoint with {ours}"
                )
    return len(asked)


def _sequences(arch: Architecture) -> list[Tensor]:
    """A few random sequences of token ids."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, arch.max_position_embeddings) for n in (5, 16, 33)]
    return [torch.randint(arch.vocab_size, (n,), generator=generator) for n in lengths]


@contextmanager
def megatron_model(folder: str, arch: Architecture) -> Iterator[Callable[[Tensor], Tensor]]:
    """Log-probabilities [T, V] of token ids [T]."""
    weights = MegatronWeights(folder, arch)
    with stand_in(TrainLayout(ranks=range(1)), 0, torch.device("cpu")) as groups:
        config = transformer_config(arch, groups, dtype=torch.float32, overrides={"use_cpu_initialization": True})
        (model,) = build_chunks(arch, config, groups)
        for name, parameter in named_parameters([model]).items():
            parameter.copy_(weights.parameter(name))
        model.eval()

        def log_probs(tokens: Tensor) -> Tensor:
            hidden = model(tokens[None], torch.arange(len(tokens))[None], None)[:, 0]
            return torch.log_softmax(hidden @ model.output_weight.T, -1)

        yield log_probs


def _their_log_probs(folder: str, sequences: Sequence[Tensor]) -> list[Tensor]:
    model = _transformers_model(folder)
    return [torch.log_softmax(model(tokens[None]).logits[0], -1) for tokens in sequences]


def _their_answers(folder: str, asked: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    model = _transformers_model(folder)
    config = model.generation_config
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}  # and no penalties of its own
    settings = type(config)(max_new_tokens=ANSWER, do_sample=False, **ends)
    return {
        text: model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :].tolist()
        for text, ids in asked.items()
    }


def _transformers_model(folder: str) -> Any:
    """In float32. Raises ValueError if it cannot be read; no code of the folder's or from elsewhere is run."""
    try:
        from transformers import AutoModelForCausalLM, logging  # costs seconds to import
    except ImportError as e:
        raise ValueError("comparing with transformers needs `pip install transformers`") from e
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
        )
    except Exception as e:  # the library raises anything
        raise ValueError(f"transformers cannot read '{folder}': {' '.join(str(e).split())[:200]}") from e
    return model.eval()
