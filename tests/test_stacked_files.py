"""Files in which transformers has all experts of a layer in one tensor, read as those with a tensor for each."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from full_weights import random_weights
from safetensors.torch import save_file
from tiny_families import ARCHITECTURES, CONFIGS
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.checkpoint.huggingface_folder import check_weights, weight_entries
from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.models.families import read_architecture
from megarl.models.weights import logical_tensors
from megarl.parity.cut import folder_to_compare

NAME = "qwen3_5_moe_text"


def stack(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the experts of each layer behind each other, gate and up in the rows of one matrix."""
    arch = ARCHITECTURES[NAME]
    assert arch.moe is not None
    for layer in range(arch.num_layers):
        module = f"model.layers.{layer}.mlp.experts."
        experts = [
            [weights.pop(f"{module}{i}.{matrix}_proj.weight") for matrix in ("gate", "up", "down")]
            for i in range(arch.moe.num_experts)
        ]
        weights[f"{module}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        weights[f"{module}down_proj"] = torch.stack([down for _, _, down in experts])
    return weights


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[NAME]))
    save_file(stack(random_weights(ARCHITECTURES[NAME], 1)), tmp_path / "model.safetensors", {"format": "pt"})
    return str(tmp_path)


def test_each_expert_is_found(folder: str) -> None:
    """Whole, and in boxes that begin and end within its rows and columns."""
    arch = read_architecture(folder)
    check_weights(folder, arch)
    weights, wanted = HuggingFaceWeights(folder, arch), random_weights(arch, 1)
    assert weights.dtypes == {"F32"}
    for name, tensor in logical_tensors(arch).items():
        halves = [((0, size), (size // 3, max(size // 3 + 1, size - 1))) for _, size in tensor.box]
        for box in product(*halves):
            part = wanted[name].reshape(tensor.shape)[tuple(slice(*span) for span in box)]
            assert torch.equal(weights.box(tensor, box), part), name


def test_transformers_reads_the_same(folder: str) -> None:
    """So that these are files as it has them."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    wanted, stacked = random_weights(ARCHITECTURES[NAME], 1), model.state_dict()
    module = "model.layers.0.mlp.experts."
    assert torch.equal(stacked[f"{module}down_proj"][1], wanted[f"{module}1.down_proj.weight"])


def test_first_layers_are_cut_out(folder: str) -> None:
    with folder_to_compare(folder, read_architecture(folder), count=4, random_init=False) as small:
        arch = read_architecture(small)
        check_weights(small, arch)
        weights, wanted = HuggingFaceWeights(small, arch), random_weights(ARCHITECTURES[NAME], 1)
        for name, tensor in logical_tensors(arch).items():
            assert torch.equal(weights.box(tensor, tensor.box).flatten(), wanted[name].flatten()), name


def test_other_shapes_are_refused(folder: str, tmp_path: Path) -> None:
    weights = stack(random_weights(ARCHITECTURES[NAME], 1))
    name = "model.layers.0.mlp.experts.down_proj"
    weights[name] = weights[name][:, 1:].contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the shape does not fit config\.json: .*experts\.0\.down_proj\.weight"):
        check_weights(folder, read_architecture(folder))


def test_more_experts_than_the_model_has_are_refused(folder: str, tmp_path: Path) -> None:
    """And are not listed one by one: a file may say that there are any number."""
    weights = stack(random_weights(ARCHITECTURES[NAME], 1))
    name = "model.layers.0.mlp.experts.down_proj"
    weights[name] = torch.zeros(10**7, 1, 1, dtype=torch.bfloat16)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    entries = weight_entries(folder, logical_tensors(ARCHITECTURES[NAME]))
    assert entries[name].shape == (10**7, 1, 1)
    with pytest.raises(ValueError, match=r"the files lack model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight"):
        check_weights(folder, read_architecture(folder))
