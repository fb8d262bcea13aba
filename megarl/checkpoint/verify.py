"""Whether a Hugging Face folder and a Megatron-Core checkpoint are the same model."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.checkpoint.megatron_folder import MegatronWeights
from megarl.models.architecture import Architecture
from megarl.models.gpt import build_chunks, named_parameters, transformer_config
from megarl.parallel.groups import stand_in
from megarl.parallel.layout import TrainLayout


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
    ours = _megatron_log_probs(megatron, arch, sequences)
    theirs = _transformers_log_probs(huggingface, sequences)
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    if not worst <= tolerance:
        raise ValueError(
            f"log-probabilities of '{megatron}' and of '{huggingface}' in transformers differ by up to {worst:.1e}"
        )
    return worst


def _sequences(arch: Architecture) -> list[Tensor]:
    """A few random sequences of token ids."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, arch.max_position_embeddings) for n in (5, 16, 33)]
    return [torch.randint(arch.vocab_size, (n,), generator=generator) for n in lengths]


def _megatron_log_probs(folder: str, arch: Architecture, sequences: list[Tensor]) -> list[Tensor]:
    weights = MegatronWeights(folder, arch)
    with stand_in(TrainLayout(world_size=1), 0, torch.device("cpu")) as groups:
        config = transformer_config(arch, groups, dtype=torch.float32, overrides={"use_cpu_initialization": True})
        (model,) = build_chunks(arch, config, groups, transformer_engine=False)
        for name, parameter in named_parameters([model]).items():
            parameter.copy_(weights.parameter(name))
        model.eval()
        out = []
        for tokens in sequences:
            hidden = model(tokens[None], torch.arange(len(tokens))[None], None)[:, 0]
            out.append(torch.log_softmax(hidden @ model.output_weight.T, -1))
    return out


def _transformers_log_probs(folder: str, sequences: list[Tensor]) -> list[Tensor]:
    try:
        from transformers import AutoModelForCausalLM, logging  # costs seconds to import
    except ImportError as e:
        raise ValueError("comparing logits needs `pip install transformers`") from e
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return [torch.log_softmax(model(tokens[None]).logits[0], -1) for tokens in sequences]
