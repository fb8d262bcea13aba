"""`megarl model check`: what is the same, what differs, and where it is found first."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import read_weights, write_folder, write_weights
from ranks import Ranks
from selection import quick
from tiny_families import ARCHITECTURES, CONFIGS
from tiny_run import ROOT

from megarl.cli.main import main
from megarl.models.families import FAMILIES
from megarl.parity.cut import cut_config, first_layers


def _run(words: list[str], attentions: list[dict[str, Any]]) -> tuple[int, str]:
    """Exit code and output; with `attentions`, qwen3's layers have these changes."""
    variables, out, family = dict(os.environ), io.StringIO(), FAMILIES["Qwen3ForCausalLM"]
    if attentions:
        kind = ARCHITECTURES["qwen3"].layer(0)
        layers = tuple((kind.with_attention(**changes), 1) for changes in attentions)
        FAMILIES["Qwen3ForCausalLM"] = lambda config: replace(ARCHITECTURES["qwen3"], layers=layers)
    try:
        with redirect_stdout(out):
            return main(["model", "check", *words]), out.getvalue()
    finally:
        os.environ.update(variables)  # of the pool's rank, which the command is none of
        FAMILIES["Qwen3ForCausalLM"] = family


def check(ranks: Ranks, *words: str, code: int = 0, attentions: Sequence[dict[str, Any]] = ()) -> dict[str, list[str]]:
    """State, then finding and details, of each row that a check prints."""
    ((exit_code, out),) = ranks.launch(1, _run, list(words), list(attentions))
    assert exit_code == code
    rows: dict[str, list[str]] = {}
    for line in out.splitlines()[1:-1]:
        if not line.startswith(" "):
            name, state, finding = line.split(maxsplit=2)
            rows[name] = [state, finding]
        else:
            rows[name].append(line.strip())
    return rows


@pytest.mark.parametrize("name", quick(CONFIGS, 7))
def test_families_are_the_same(ranks: Ranks, name: str, tmp_path: Path) -> None:
    rows = check(ranks, str(write_folder(tmp_path / "model", name, pad_token_id=0)))
    assert [rows[name][0] for name in ("tensors", "log-probs", "gradients", "native")] == ["same"] * 4
    assert rows["vllm"][0] == "-", "vLLM has no heads so narrow on CPU ranks"


@pytest.mark.slow
def test_vllm_answers_where_it_takes_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama", head_dim=32)
    command = [sys.executable, "-m", "megarl.cli.main", "model", "check", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = r"^vllm +same +3 answers" if importlib.util.find_spec("vllm") else r"^vllm +- .* is not installed"
    assert re.search(wanted, done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_first_layers_with_random_weights_in_bfloat16(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek_v3"]))
    rows = check(ranks, str(tmp_path), "--random-init", "--layers=1", "--dtype=bfloat16")
    assert {state for state, *_ in rows.values()} == {"same", "-"}


def test_the_layer_that_differs_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """Of a family that rotates the second layer's heads otherwise: nothing before its attention differs."""
    folder = str(write_folder(tmp_path / "model", "qwen3"))
    rows = check(ranks, folder, code=1, attentions=[{"rope_theta": 1e4}, {"rope_theta": 1e2}])
    assert rows["tensors"][0] == "same"
    state, *_, place = rows["log-probs"]
    assert state == "DIFFERS" and place.startswith("first in layer 1, attention: what comes out differs by ")
    assert rows["gradients"][0] == rows["native"][0] == "DIFFERS"
    assert rows["gradients"][2].startswith("lm_head.weight: differs by ")


def test_tensors_that_differ_are_named(ranks: Ranks, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    weights = read_weights(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_weights(folder, weights | {"model.layers.9.bias": torch.ones(32)})
    (rows,) = check(ranks, str(folder), code=1).values()
    assert rows[2:] == [
        "model.layers.1.mlp.up_proj.weight [48, 32]: not in the files",
        "model.layers.9.bias [32]: only in the files",
    ]
    (rows,) = check(ranks, str(folder), "--random-init", code=1, attentions=[{"qk_norm": False}] * 2).values()
    assert rows[2] == "model.layers.0.self_attn.q_norm.weight [16]: only in transformers"


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"intermediate_size": 2**30}))
    for words, reason in (
        ([], "has no weights: neither model.safetensors nor model.safetensors.index.json; --random-init draws some"),
        (["--layers=0"], "--layers 0 must be 1 or more"),
        (["--random-init"], "GB are free: compare its first layers with --layers 1"),
    ):
        assert main(["model", "check", str(tmp_path), *words]) == 2
        err = capsys.readouterr().err
        assert reason in err and err.count("\n") == 1
    assert main(["model", "check", str(tmp_path / "nope")]) == 2
    assert capsys.readouterr().err.startswith(f"megarl: error: no folder at '{tmp_path}/nope', which is no name")


def test_models_are_cut_behind_a_layer_of_each_kind() -> None:
    assert [first_layers(ARCHITECTURES["deepseek_v3"], each) for each in (1, 2, 9)] == [2, 3, 4]
    assert first_layers(ARCHITECTURES["llama"], 1) == 1
    cut = cut_config({"num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "eos_token_id": [1, 2]}, 3, 2)
    assert cut == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "eos_token_id": [1, 2]}
