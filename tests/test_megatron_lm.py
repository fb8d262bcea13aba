"""Checkpoints of Megatron-LM: the same bits in every layout, the same logits, refusals, and nothing that runs."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import assert_same_weights, policy_in, read_weights, write_folder
from megatron_lm_cases import ITERATION, TOKENS, save_megatron_lm
from ranks import Ranks
from selection import quick
from tiny_run import megarl, write_run
from training_cases import Case

from megarl.checkpoint.megatron_lm import check_arguments, check_format, is_megatron_lm, newest_iteration
from megarl.checkpoint.stored_arguments import read_arguments
from megarl.models.families import read_architecture
from tools.convert import main


@pytest.mark.parametrize("name", quick(["qwen2", "qwen3", "llama", "qwen3_moe", "glm4_moe", "glm4_moe_groups"], 4))
def test_megatron_lms_own_weights(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Random weights of Megatron-LM's: transformers computes with the export what Megatron-Core's model computed."""
    import transformers

    model, root, back = write_folder(tmp_path / name, name), tmp_path / "lm", tmp_path / "back"
    logits = ranks.run(1, save_megatron_lm, str(root), str(model), "")[0]
    assert main(["megatron-to-hf", str(root), str(back), f"--model={model}", "--verify"]) == 0
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)(torch.tensor([TOKENS]))
    torch.testing.assert_close(logits[:, : theirs.logits.shape[-1]], theirs.logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "family"), [("gemma3_text", "gemma3_text"), ("qwen2_yarn", "qwen2")])
def test_layers_that_megatron_lm_has_not_are_refused(tmp_path: Path, name: str, family: str) -> None:
    arch = read_architecture(str(write_folder(tmp_path / "model", name)))
    with pytest.raises(ValueError, match=f"is Megatron-LM's, and of {family} those are not read: take the weights"):
        check_arguments(str(tmp_path), arch)


VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "layers that may differ": {"metadata": {"non_homogeneous_layers": True}},
    "norms by themselves": {"unmapped_norms": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "pp", "how"),
    [
        ("qwen2", 2, 2, "as it is"),
        ("qwen2", 1, 2, "layers that may differ"),
        ("qwen3", 2, 1, "norms by themselves"),
        ("qwen3_moe", 2, 1, "as it is"),
        ("qwen3_moe", 1, 2, "layers that may differ"),
        ("glm4_moe", 2, 2, "as it is"),
    ],
)
def test_bits_in_every_layout(ranks: Ranks, tmp_path: Path, name: str, tp: int, pp: int, how: str) -> None:
    """What our converter wrote, saved again by Megatron-LM's saver, is the same bits by convert and by ranks."""
    model, ours = write_folder(tmp_path / name, name), tmp_path / "ours"
    root, back = tmp_path / "lm", tmp_path / "back"
    assert main(["hf-to-megatron", str(model), str(ours)]) == 0
    ranks.run(tp * pp, save_megatron_lm, str(root), str(model), str(ours), tp, pp, VARIATIONS[how])
    assert main(["megatron-to-hf", str(root), str(back), f"--model={model}", "--verify"]) == 0
    assert_same_weights(read_weights(model), read_weights(back))
    for case in (Case(), Case(tp=2, pp=2)):
        ranks.run(case.world, assert_loaded, case, str(model), newest_iteration(str(root)))


def assert_loaded(case: Case, folder: str, checkpoint: str) -> None:
    """A rank reads from Megatron-LM's checkpoint what it reads from the Hugging Face folder."""
    from megarl.checkpoint.foreign_weights import load_foreign_weights
    from megarl.checkpoint.import_huggingface import HuggingFaceWeights

    with policy_in(case, folder, "float32") as policy:
        policy.load(HuggingFaceWeights(folder, policy.arch).box)
        expected = {name: value.detach().clone() for name, value in policy.parameters().items()}
        for value in policy.parameters().values():
            value.data.fill_(torch.nan)
        policy.load_weights(load_foreign_weights(checkpoint, policy.sharded_weights(), policy.groups.world))
        assert all(torch.equal(value, expected[name]) for name, value in policy.parameters().items())


@pytest.mark.slow
def test_a_run_begins_with_it(ranks: Ranks, tmp_path: Path) -> None:
    """The policy of an evaluation, and of a run, has its weights; another model is refused by one line."""
    run = tmp_path / "run"
    run.mkdir()
    config, root = write_run(run, actor_rollout_ref__model={"path": str(run), "dtype": "float32"}), tmp_path / "lm"
    ranks.run(1, save_megatron_lm, str(root), str(run), "")
    key = f"actor_rollout_ref.model.checkpoint={root}"
    done = megarl("train", str(config), key, "trainer.total_training_steps=1", timeout=600)
    assert done.returncode == 0, done.stderr
    answer = megarl("generate", str(root), str(config), "--prompt=1+2=", "--max-tokens=4", timeout=600)
    assert answer.returncode == 0, answer.stderr
    served = megarl("serve", str(root))
    assert served.returncode == 2 and "convert it first (megarl convert megatron-to-hf" in served.stderr
    other = json.loads((run / "config.json").read_text()) | {"num_attention_heads": 8, "head_dim": 4}
    (run / "config.json").write_text(json.dumps(other))
    refused = megarl("train", str(config), key, "trainer.total_training_steps=1", timeout=600)
    assert (
        refused.returncode == 2
        and "was trained with num_attention_heads = 4, and by config.json it is 8" in refused.stderr
    )


def write_common(folder: Path, args: object, **more: object) -> Path:
    """A checkpoint without tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"args": args, "iteration": ITERATION, **more}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


class Runs:
    """Makes a folder when it is unpickled, built or called."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_arguments_are_read_and_run_nothing(tmp_path: Path) -> None:
    from megatron.core.transformer.enums import AttnBackend

    harmful = Runs(str(tmp_path / "made"))
    values = {"num_layers": 4, "rotary_base": 1e6, "swiglu": True, "save": "x", "data_path": ["a"], "none": None}
    objects = {"params_dtype": torch.bfloat16, "backend": AttnBackend.auto, "silu": torch.nn.functional.silu}
    objects |= {"harmful": harmful, "path": tmp_path, "tensor": torch.zeros(3)}
    folder = write_common(tmp_path / "lm", argparse.Namespace(**values, **objects), also=harmful)
    assert read_arguments(str(folder)) == {"num_layers": 4, "rotary_base": 1e6, "swiglu": True, "save": "x"}
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02}X\x04\x00\x00\x00argscos\nmkdir\nX\x04\x00\x00\x00made\x85Rs.",  # os.mkdir
        b"\x80\x02cargparse\nNamespace\n}X\x05\x00\x00\x00state\x4b\x01sb.",  # attributes of the class itself
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x02]q\x00(h\x00h\x00e0" + b"(h\x00h\x00t" * 10 + b".",
        b"",
        b".",
    ],
)
def test_hostile_arguments(tmp_path: Path, pickled: bytes) -> None:
    folder = write_common(tmp_path / "lm", None)
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickled)
    before = set(os.listdir())
    try:
        assert read_arguments(str(folder)) == {}
    except ValueError as e:
        assert str(e).startswith("common.pt cannot be read: ") and "\n" not in str(e)
    assert set(os.listdir()) == before and not hasattr(argparse.Namespace, "state")


def test_damaged_arguments_are_a_remark(tmp_path: Path) -> None:
    arch = read_architecture(str(write_folder(tmp_path / "model", "qwen2")))
    folder = write_common(tmp_path / "lm", None)
    for content in (b"", b"PK\x03\x04", pickle.dumps({"args": 1})):
        (folder / "common.pt").write_bytes(content)
        remark = check_arguments(str(folder), arch)
        assert remark is not None and "its arguments are not compared with config.json" in remark


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"rotary_base": 123}, "rotary_base = 123"),
        ({"norm_epsilon": 1e-3}, "norm_epsilon = 0.001"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p = True"),
        ({"group_query_attention": False}, "group_query_attention = False"),
        ({"num_attention_heads": 64}, "num_attention_heads = 64"),
        ({"normalization": 1.5}, "normalization = 1.5"),
        ({"use_rope_scaling": True}, "use_rope_scaling = True"),
        ({"untie_embeddings_and_output_weights": None}, None),
    ],
)
def test_arguments_that_no_tensor_shows(tmp_path: Path, change: dict[str, Any], line: str | None) -> None:
    from megatron_lm_cases import arguments

    arch = read_architecture(str(write_folder(tmp_path / "model", "qwen2")))
    folder = write_common(tmp_path / "lm", arguments(arch, 2, 2, change))
    if line is None:
        assert check_arguments(str(folder), arch) is None
    else:
        with pytest.raises(ValueError, match=rf"was trained with {line}, and by config.json it is .*: take the config"):
            check_arguments(str(folder), arch)


def test_which_folder_is_a_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "root"
    iteration = write_common(root / "iter_0000100", None)
    tracker = root / "latest_checkpointed_iteration.txt"
    assert newest_iteration(str(root)) == str(root) and not is_megatron_lm(str(root))
    tracker.write_text("100\n")
    assert newest_iteration(str(root)) == str(iteration) and is_megatron_lm(str(iteration))
    for text in ("../../etc", "-1", "", "9" * 99):
        tracker.write_text(text)
        with pytest.raises(ValueError, match="names no iteration"):
            newest_iteration(str(root))
    tracker.write_text("release")
    with pytest.raises(ValueError, match="names release, which is not there"):
        newest_iteration(str(root))
    (iteration / "trainer.json").write_text("{}")
    assert not is_megatron_lm(str(iteration))


def test_other_formats_are_refused(tmp_path: Path) -> None:
    folder = write_common(tmp_path / "lm", None)
    check_format(str(folder))
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ValueError, match="has Megatron-LM's format zarr; write it again as torch_dist"):
        check_format(str(folder))
    (folder / "metadata.json").write_text("[]")
    with pytest.raises(ValueError, match=r"metadata\.json cannot be read"):
        check_format(str(folder))
    shutil.rmtree(folder)
    (folder / "mp_rank_00").mkdir(parents=True)
    assert is_megatron_lm(str(folder))
    with pytest.raises(ValueError, match="has Megatron-LM's format torch, which is pickled"):
        check_format(str(folder))
