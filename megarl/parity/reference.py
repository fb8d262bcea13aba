"""Computes what `transformers` makes of a model: log-probabilities, each layer's outputs, gradients, answers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.export_huggingface import append
from megarl.checkpoint.huggingface_folder import SINGLE
from megarl.checkpoint.safetensors_file import SafetensorsWriter
from megarl.checkpoint.verify import greedy_answers, in_file_names, transformers_model
from megarl.parity.sequences import ANSWER, Sequences


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Holds the numbers of a model of transformers.

    Attributes:
        logp: float32 [tokens], of each token after those before it; 0 for the first of a sequence.
        outputs: float32 [tokens, hidden] by place, in the order of the forward pass.
        answers: greedy, of each sequence.
        gradients: folder with a safetensors file: of the mean cross-entropy, float32, named as the weights.
    """

    logp: Tensor
    outputs: Mapping[str, Tensor]
    answers: list[list[int]]
    gradients: str


def reference_of(
    folder: str, sequences: Sequences, target: str, *, dtype: torch.dtype, device: torch.device
) -> Reference:
    """Compute the numbers; the model is in memory meanwhile, with its gradients.

    Args:
        target: folder for the gradients, which is made.

    Raises:
        ValueError: transformers cannot read the folder.
    """
    model: Any = transformers_model(folder, dtype).to(device)
    model.get_input_embeddings().padding_idx = None  # torch would give the pad token's row no gradient
    with torch.no_grad():
        answers = greedy_answers(model, sequences.prompts, ANSWER, eos_token_id=None, pad_token_id=0)
    with recorded(_places(model)) as outputs:
        logp = [_backward(model, torch.tensor(ids, device=device), sequences) for ids in sequences.tokens]
    os.mkdir(target)
    _write_gradients(model, os.path.join(target, SINGLE))
    del model
    gc.collect()  # the hooks and the model refer to each other
    return Reference(logp=torch.cat(logp), outputs=outputs, answers=answers, gradients=target)


def _backward(model: Any, tokens: Tensor, sequences: Sequences) -> Tensor:
    """Add a sequence's part of the mean cross-entropy to the gradients; returns its log-probabilities."""
    logp = model(tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    logp = logp.gather(-1, tokens[1:, None])[:, 0]
    (-logp.sum() / (sequences.count - len(sequences.tokens))).backward()
    return torch.cat([torch.zeros(1), logp.detach().cpu()])


def _places(model: Any) -> dict[str, Any]:
    """Name the modules whose outputs are compared, in the order of the forward pass."""
    places = {"embedding": model.get_input_embeddings()}
    for number, layer in enumerate(model.model.layers):
        attention = getattr(layer, "self_attn", None) or getattr(layer, "linear_attn", None)
        parts = {"attention": attention, "MLP": getattr(layer, "mlp", None)}
        places |= {f"layer {number}, {part}": module for part, module in parts.items() if module is not None}
        places[f"layer {number}"] = layer
    return places


@contextmanager
def recorded(places: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Record what modules put out meanwhile: float32 [tokens, width] on the host, complete afterwards.

    A module may put out a tuple: what it computed, and a bias, which is added, or things of another shape.
    """
    parts: dict[str, list[Tensor]] = {place: [] for place in places}
    outputs: dict[str, Tensor] = {}

    def record(place: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            computed, *more = output if isinstance(output, tuple) else (output,)
            bias = more[0] if more and isinstance(more[0], Tensor) and more[0].ndim == 1 else None
            whole = computed if bias is None else computed + bias
            # a copy: Megatron-Core adds the residual stream in place
            parts[place].append(whole.detach().flatten(0, -2).to("cpu", torch.float32, copy=True))

        return hook

    hooks = [module.register_forward_hook(record(place)) for place, module in places.items()]
    yield outputs
    for hook in hooks:
        hook.remove()
    outputs |= {place: torch.cat(tensors) for place, tensors in parts.items()}


def _write_gradients(model: Any, file: str) -> None:
    """Write the gradients as a file of weights; a weight that no token reached has zeros."""
    values = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        values[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    named = in_file_names(model, values)
    writer = SafetensorsWriter(file, [(name, "F32", tuple(value.shape)) for name, value in named.items()])
    for value in named.values():
        append(writer, value.float().cpu())
