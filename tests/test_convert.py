"""`megarl convert`: bits, logits, memory, refusals, and that a job reads what it wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_cases import (
    assert_same_weights,
    log_probs,
    read_weights,
    write_folder,
    write_weights,
    write_with_further_layer,
)
from ranks import Ranks
from safetensors.torch import save_file
from selection import quick
from small_disk import small_disk
from tiny_families import CONFIGS
from tiny_run import ROOT, TrainedRun
from training_cases import Case

from megarl.checkpoint.convert import new_folder
from tools.convert import main

LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 2)]


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    quick(
        [*((name, *LAYOUTS[i % 4]) for i, name in enumerate(CONFIGS)), *(("qwen3_moe", *at) for at in LAYOUTS[:3])],
        0,
        1,
        2,
    ),
)
def test_bits_survive_both_ways(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    dtype = torch.bfloat16 if pp > 1 else torch.float32
    source = write_folder(tmp_path / name, name, dtype=dtype, files=tp)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    cut = [f"--tp={tp}", f"--pp={pp}", "--max-shard-bytes=20000"]
    assert main(["hf-to-megatron", str(source), str(megatron), *cut, "--verify"]) == 0
    assert main(["megatron-to-hf", str(megatron), str(back), "--max-shard-bytes=20000", "--verify"]) == 0
    assert_same_weights(read_weights(source), read_weights(back))
    assert json.loads((back / "config.json").read_text()).items() >= CONFIGS[name].items()


@pytest.mark.parametrize("family", quick(["glm4_moe", "deepseek_v3"], 0))
def test_layers_for_multi_token_prediction_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """A checkpoint has none of them; an export beside their folder has them, bit for bit; `transformers` reads it."""
    source, alone, megatron, back = (tmp_path / name for name in ("folder", "without", "megatron", "back"))
    weights, further = write_with_further_layer(source, family)
    assert main(["hf-to-megatron", str(source), str(megatron)]) == 0
    said = capsys.readouterr().out
    assert (
        "folder' has a layer for multi-token prediction: left out; an export with --model=FOLDER has it again" in said
    )
    assert main(["megatron-to-hf", str(megatron), str(alone), "--verify"]) == 0
    assert_same_weights(weights, read_weights(alone))
    assert json.loads((alone / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert main(["megatron-to-hf", str(megatron), str(back), f"--model={source}", "--verify"]) == 0
    assert "for multi-token prediction: not trained, exported unchanged" in capsys.readouterr().out
    assert_same_weights(weights | further, read_weights(back))
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(back)
    assert torch.equal(loaded.model.norm.weight, weights["model.norm.weight"])
    assert main(["hf-to-megatron", str(back), str(tmp_path / "again"), "--verify"]) == 0


def test_a_language_model_from_beside_images_is_read(tmp_path: Path) -> None:
    """With the names that transformers leaves its weights, and Qwen's for multi-token prediction."""
    source, megatron, back = (tmp_path / name for name in ("qwen", "megatron", "back"))
    write_folder(source, "qwen3_5_text")
    weights, further = read_weights(source), {"mtp.fc.weight": torch.randn(32, 64), "mtp.norm.weight": torch.ones(32)}
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    write_weights(source, named | further)
    assert main(["hf-to-megatron", str(source), str(megatron), "--tp=2"]) == 0
    assert main(["megatron-to-hf", str(megatron), str(back), f"--model={source}", "--verify"]) == 0
    assert_same_weights(weights | further, read_weights(back))


def test_layers_that_config_json_does_not_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "glm", "glm4_moe")
    weights = read_weights(tmp_path / "glm")
    write_weights(tmp_path / "glm", weights | {"model.layers.4.eh_proj.weight": torch.ones(32, 64)})
    assert main(["hf-to-megatron", str(tmp_path / "glm"), str(tmp_path / "x")]) != 0
    assert "the architecture has no model.layers.4.eh_proj.weight" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_model(ranks: Ranks, smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut for TP3 x PP2, read by TP1 x PP3, and back."""
    megatron, back = str(tmp_path / "megatron"), tmp_path / "back"
    assert main(["hf-to-megatron", smollm2, megatron, "--tp=3", "--pp=2", "--verify=logits"]) == 0
    assert "verified: 272 weights are the same bits" in capsys.readouterr().out
    assert main(["megatron-to-hf", megatron, str(back)]) == 0
    assert_same_weights(read_weights(Path(smollm2)), read_weights(back))
    assert (back / "tokenizer.json").read_bytes() == Path(smollm2, "tokenizer.json").read_bytes()
    wanted = ranks.run(1, log_probs, Case(), smollm2)[0]
    for got in ranks.run(3, log_probs, Case(pp=3), smollm2, megatron):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


MEMORY = """
import sys, threading, time
from megarl.checkpoint.convert import new_folder
from tools.convert import main

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) * 1024

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

small, big, out = sys.argv[1:]
for source, name in ((small, "warm"), (big, "big")):  # the first conversion imports and caches
    start = peak = anonymous()
    if name == "warm":
        threading.Thread(target=watch, daemon=True).start()
    assert main(["hf-to-megatron", source, f"{out}/{name}", "--max-shard-bytes=30000000"]) == 0
    cut = ["--max-shard-bytes=30000000", "--answers-below=0"]
    assert main(["megatron-to-hf", f"{out}/{name}", f"{out}/{name}-hf", *cut]) == 0
print(peak - start)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_a_tensor(tmp_path: Path) -> None:
    """Anonymous memory (pages of mapped files are the kernel's to drop) over a model of 300 MiB."""
    small = write_folder(tmp_path / "small", "qwen3")
    big = tmp_path / "big"
    big.mkdir()
    layers, hidden, ffn, vocab = 24, 1024, 1536, 4096
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab}
    config = CONFIGS["llama"] | shape | {"head_dim": 128}
    (big / "config.json").write_text(json.dumps(config))
    from megarl.models.families import read_architecture
    from megarl.models.weights import logical_tensors

    tensors = logical_tensors(read_architecture(str(big)))
    weights = {t.name: torch.ones(t.hf_shape, dtype=torch.bfloat16) for t in tensors.values()}
    save_file(weights, big / "model.safetensors", {"format": "pt"})
    model, largest = sum(w.nbytes for w in weights.values()), max(w.nbytes for w in weights.values())
    assert model > 30 * largest
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(small), str(big), str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    growth = int(done.stdout.split()[-1])
    print(f"model {model >> 20} MiB, largest parameter {largest >> 20} MiB, growth {growth >> 20} MiB")
    assert growth < 4 * largest < model / 6


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(write_folder(tmp_path / "source", "qwen2"))
    megatron = str(tmp_path / "megatron")
    assert main(["hf-to-megatron", source, megatron]) == 0
    capsys.readouterr()
    another = str(write_folder(tmp_path / "another", "qwen3"))
    for arguments, message in [
        (["hf-to-megatron", source, megatron], f"'{megatron}' is already there"),
        (["hf-to-megatron", source, str(tmp_path / "x"), "--tp=3"], "does not divide the model's 4 attention heads"),
        (["hf-to-megatron", source, str(tmp_path / "x"), "--tp=-1"], "error: --tp -1 must be 1 or more"),
        (["hf-to-megatron", source, str(tmp_path / "x"), "--pp=0"], "error: --pp 0 must be 1 or more"),
        (["megatron-to-hf", megatron, str(tmp_path / "x"), "--max-shard-bytes=0"], "error: --max-shard-bytes 0 must"),
        (["megatron-to-hf", str(tmp_path), str(tmp_path / "x")], f"error: no config.json in '{tmp_path}'"),
        (["hf-to-megatron", megatron, str(tmp_path / "x")], "is a Megatron-Core checkpoint, not a Hugging"),
        (["megatron-to-hf", source, str(tmp_path / "x")], "is not a Megatron-Core distributed checkpoint"),
        (["megatron-to-hf", megatron, str(tmp_path / "x"), "--model", another], "is no checkpoint of this model"),
    ]:
        assert main(arguments) == 2
        printed = capsys.readouterr().err
        assert message in printed.splitlines()[-1] and not (tmp_path / "x").exists(), printed


@pytest.mark.slow
def test_of_a_run_the_newest_checkpoint_is_taken(
    small: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small.folder / "run"
    assert main(["megatron-to-hf", str(run), str(tmp_path / "out"), "--verify"]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out'} from {run}/checkpoints/global_step_2\n" in said
    assert "compared: 4 greedy answers are the same in transformers\n" in said
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for arguments, message in (([str(tmp_path / "empty")], "no whole checkpoint"), ([str(run), "--best"], "best")):
        assert main(["megatron-to-hf", arguments[0], str(tmp_path / "x"), *arguments[1:]]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_damage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, megatron = write_folder(tmp_path / "source", "qwen2"), tmp_path / "megatron"
    assert main(["hf-to-megatron", str(source), str(megatron)]) == 0
    back = ["megatron-to-hf", str(megatron), str(tmp_path / "x")]
    file = next(megatron.glob("*.distcp"))
    data = file.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1

    def refused(arguments: list[str], message: str) -> None:
        capsys.readouterr()
        assert main(arguments) == 2
        printed = capsys.readouterr().err.splitlines()[-1]
        assert printed.startswith("megarl: error: ") and message in printed, printed
        assert not list(tmp_path.glob("*x*"))

    file.write_bytes(flipped)
    refused(back, f"'{megatron}' is damaged: {file.name} is not what was written: its checksum differs (--no-check")
    file.write_bytes(data[: len(data) // 2])
    refused(back, f"is damaged: {file.name} has {len(data) // 2} bytes instead of {len(data)}")
    refused([*back, "--no-check"], f"'{megatron}': ")
    file.write_bytes(data)
    (megatron / ".metadata").write_bytes(b"")
    refused([*back, "--no-check"], f"'{megatron}': .metadata cannot be read: ")
    refused(["hf-to-megatron", str(source), "/proc/nowhere/x"], "'/proc/nowhere/x' cannot be written: ")


@pytest.mark.slow
def test_two_programs_do_not_mix_their_files(tmp_path: Path) -> None:
    target = tmp_path / "x"
    killed = f"""
import os, pathlib
from megarl.checkpoint.convert import new_folder
with new_folder({str(target)!r}) as partial:
    pathlib.Path(partial, "theirs").touch()
    os._exit(0)
"""
    with new_folder(str(target)) as partial:
        Path(partial, "before").touch()
        subprocess.run([sys.executable, "-c", killed], cwd=ROOT, check=True)
        Path(partial, "after").touch()
    assert sorted(os.listdir(target)) == ["after", "before"]
    with pytest.raises(ValueError, match="is already there"), new_folder(str(tmp_path / "y")) as partial:
        (tmp_path / "y").mkdir()
    with new_folder(str(tmp_path / "x2")):
        assert len(list(tmp_path.glob(".x.*.partial"))) == 1
    shutil.rmtree(target)
    with new_folder(str(target)):
        pass
    assert sorted(os.listdir(tmp_path)) == ["x", "x2", "y"]


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever in the conversion it is full: torch's writer of archives says so in other words."""
    source = str(write_folder(tmp_path / "source", "qwen2"))
    assert main(["hf-to-megatron", source, str(tmp_path / "megatron")]) == 0
    needed = sum(-(-file.stat().st_size // 4096) * 4 for file in (tmp_path / "megatron").iterdir())
    capsys.readouterr()
    for kib in range(8, needed, 12):
        with small_disk(tmp_path / f"disk{kib}", kib) as disk:
            assert main(["hf-to-megatron", source, str(disk / "x")]) == 2
            printed = capsys.readouterr().err.splitlines()[-1]
            assert f"'{disk}/x' cannot be written: [Errno 28] No space left on device" in printed
            assert not os.listdir(disk)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", "qwen2")
    weights = read_weights(source)
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name][0, 0] = float("-inf")
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert main(["hf-to-megatron", str(source), str(tmp_path / "x")]) == 2
    assert f"{name} is not finite everywhere" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x").exists()


def test_a_nan_is_the_same_bits(tmp_path: Path) -> None:
    from megarl.checkpoint.verify import _bits

    one, other = torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])
    assert torch.equal(_bits(one), _bits(other)) and not torch.equal(_bits(one), _bits(-other))


def test_a_converted_checkpoint_is_no_run_to_resume(tmp_path: Path) -> None:
    from megarl.checkpoint.folder import check_resumable

    megatron = tmp_path / "megatron"
    assert main(["hf-to-megatron", str(write_folder(tmp_path / "source", "llama")), str(megatron)]) == 0
    with pytest.raises(ValueError, match=r"no run to go on from; start one from it with"):
        check_resumable(str(megatron))
