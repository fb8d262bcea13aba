"""Compares a Hugging Face folder and a Megatron-Core checkpoint: are they the same model?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.checkpoint.megatron_folder import MegatronWeights
from megarl.models.architecture import Architecture
from megarl.models.fill import dtype_of
from megarl.models.gpt import build_chunks, named_parameters, transformer_config
from megarl.parallel.layout import TrainLayout
from megarl.parallel.train_groups import stand_in

ANSWER = 8
"""Tokens of a greedy answer at most."""
TIE = 1e-3
"""Log-probabilities that are closer may change places by rounding."""


def compare_weights(huggingface: str, megatron: str, arch: Architecture) -> int:
    """Compare all weights bit for bit, one tensor in memory at a time; returns the number of tensors.

    Raises:
        ValueError: a tensor differs; names the first.
    """
    folder, checkpoint = HuggingFaceWeights(huggingface, arch), MegatronWeights(megatron, arch)
    for name, tensor in folder.tensors.items():
        value = folder.box(tensor, tensor.box).to(dtype_of(tensor, checkpoint.dtype))
        if not torch.equal(_bits(value), _bits(checkpoint.tensor(name))):
            raise ValueError(f"{name} in '{huggingface}' differs from that in '{megatron}'")
    return len(folder.tensors)


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers: as a number NaN differs from itself."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


@torch.no_grad()
def compare_logits(huggingface: str, megatron: str, arch: Architecture, *, tolerance: float = 1e-4) -> float:
    """Compare log-probabilities, float32, of Megatron-Core's model and that of `transformers`.

    Returns the largest difference.

    Both models are held in memory, one after the other.

    Raises:
        ValueError: the difference is more than `tolerance`, or transformers is not installed.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, arch.max_position_embeddings) for n in (5, 16, 33)]
    sequences = [torch.randint(arch.vocab_size, (n,), generator=generator) for n in lengths]
    model = transformers_model(huggingface)
    expected = [torch.log_softmax(model(tokens[None]).logits[0], -1) for tokens in sequences]
    del model
    with megatron_model(megatron, arch) as log_probs:
        differences = [log_probs(tokens) - logp for tokens, logp in zip(sequences, expected, strict=True)]
    worst = max(float(difference.abs().max()) for difference in differences)
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
    """Compare greedy answers, float32, of Megatron-Core's model and that of `transformers`.

    Both models are held in memory, one after the other. Returns the number of prompts.

    Args:
        prompts: token ids by their text.
        stop_tokens: ids that end an answer.

    Raises:
        ValueError: an answer differs; names the prompt and both answers. Or transformers reads no model there.
    """
    length = arch.max_position_embeddings - ANSWER
    questions = {text: list(ids)[:length] for text, ids in prompts.items() if ids and length > 0}
    expected = _transformers_answers(huggingface, questions)
    with megatron_model(megatron, arch) as log_probs:
        for text, ids in questions.items():
            answer = list[int]()
            while len(answer) < ANSWER and not set(answer[-1:]) & set(stop_tokens):
                logp = log_probs(torch.tensor([*ids, *answer]))[-1]
                answer.append(int(logp.argmax()))
                tied = expected[text][len(answer) - 1 : len(answer)]
                if tied and answer[-1] != tied[0] and logp[answer[-1]] - logp[tied[0]] < TIE:
                    answer[-1] = tied[0]  # rounding decides
            if answer != expected[text]:
                raise ValueError(
                    f"the export would not be read as the model was trained: transformers answers {text!r} with the "
                    f"ids {expected[text]}, the checkpoint with {answer}"
                )
    return len(questions)


@contextmanager
def megatron_model(folder: str, arch: Architecture) -> Iterator[Callable[[Tensor], Tensor]]:
    """Load the model of a checkpoint: a function from token ids [T] to log-probabilities [T, V]."""
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


def _transformers_answers(folder: str, questions: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    model = transformers_model(folder)
    config = model.generation_config
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    return dict(zip(questions, greedy_answers(model, questions.values(), ANSWER, **ends), strict=True))


def transformers_model(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder's model, and run no code of a stranger's. Raises ValueError if it cannot be read."""
    try:
        from transformers import AutoModelForCausalLM, logging  # costs seconds to import
    except ImportError as e:
        raise ValueError("comparing with transformers needs `pip install transformers`") from e
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
        )
    except Exception as e:  # the library raises anything
        raise ValueError(f"transformers cannot read '{folder}': {' '.join(str(e).split())[:200]}") from e
    return model.eval()


def greedy_answers(model: Any, prompts: Iterable[Sequence[int]], most: int, **ends: Any) -> list[list[int]]:
    """Let a model of transformers answer with its most probable tokens.

    Args:
        most: tokens of an answer.
        ends: `eos_token_id` and `pad_token_id`.
    """
    settings = type(model.generation_config)(max_new_tokens=most, do_sample=False, **ends)  # no penalties of its own
    answers = []
    for ids in prompts:
        x = torch.tensor([ids], device=model.device)
        # without a mask, a token of the prompt that is also the pad token would be hidden
        whole = model.generate(x, attention_mask=torch.ones_like(x), generation_config=settings)
        answers.append(whole[0, len(ids) :].tolist())
    return answers


def in_file_names(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name a value for each tensor of a model of transformers as its files do; what is tied has one name.

    transformers 5 stacks experts, say, which its files have one by one: their values are taken apart.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    once = {name: value for name, value in values.items() if name not in tied}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # of transformers 4, whose models have the names of the files
        return once
    return dict(revert_weight_conversion(model, once))
