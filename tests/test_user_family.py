"""A model family in a file of the user's own: planned, compared, trained, exported, and read by `transformers`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from tiny_run import ROOT, train_in, write_run

from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.cli.main import main
from megarl.models.families import read_architecture
from megarl.models.families.of_user import VARIABLE, use_family

FILE = str(ROOT / "tests" / "user_family.py")
KEY = "actor_rollout_ref.model.family"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's configuration, whose model is of a family that the program does not know."""
    monkeypatch.setenv(VARIABLE, "")  # what a command sets is taken back
    saves = {"checkpoint__save_contents": ["model", "hf_model"], "trainer__save_freq": 1}
    config = write_run(tmp_path, trainer__total_training_steps=1, **saves)
    model = json.loads((tmp_path / "config.json").read_text())
    names = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(model | names | {"head_dim": 16}))
    return config


def _check(folder: str) -> int:
    """The exit code of `megarl model check`, in a rank that has imported everything."""
    variables = dict(os.environ)
    os.environ[VARIABLE] = f"{FILE}:architecture"
    try:
        return main(["model", "check", folder])
    finally:
        os.environ.clear()
        os.environ.update(variables)


def test_planned_and_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run), f"{KEY}={FILE}:architecture"]) == 0
    assert "seed_oss" in capsys.readouterr().out
    for value, reason in (
        ("", "architecture SeedOssForCausalLM is not supported; supported: Llama"),
        (f"{FILE}:nothing", f"{KEY}: '{FILE}' has no function 'nothing'; it has architecture"),
        ("nowhere.py:architecture", f"{KEY}: no file at '{Path('nowhere.py').resolve()}'"),
    ):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(VARIABLE, "")
            assert main(["plan", str(run), f"{KEY}={value}"]) == 2
        err = capsys.readouterr().err
        assert reason in err and err.count("\n") == 1


def test_the_key_is_that_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run in the process is read as if there had been none before; one that is refused changes nothing."""
    for of_caller in ("", f"{ROOT / 'tests' / 'user_family.py'}:of_caller"):
        monkeypatch.setenv(VARIABLE, of_caller)
        for _ in range(2):
            use_family(f"{FILE}:architecture")
            assert os.environ[VARIABLE] == f"{FILE}:architecture"
        with pytest.raises(ValueError, match="no file at"):
            use_family("nowhere.py:architecture")
        assert os.environ[VARIABLE] == f"{FILE}:architecture"
        use_family("")
        assert os.environ[VARIABLE] == of_caller


@pytest.mark.slow
def test_trained_and_exported(
    run: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_in(ranks, 1, run, f"{KEY}={FILE}:architecture")
    folder = run.parent / "run" / "checkpoints" / "global_step_1" / "huggingface"
    monkeypatch.setenv(VARIABLE, f"{FILE}:architecture")
    arch = read_architecture(str(folder))
    ours = HuggingFaceWeights(str(folder), arch)
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    weights = dict(model.named_parameters())
    biases = [name for name in ours.tensors if name.endswith("_proj.bias")]
    assert len(biases) == 3 * 4 and any(weights[name].any() for name in biases)
    assert ranks.launch(1, _check, str(folder)) == [0]
    assert main(["generate", str(run.parent / "run"), "--prompt", "1+1="]) == 2
    assert f"({KEY}); if you trust it, set {KEY}" in capsys.readouterr().err
