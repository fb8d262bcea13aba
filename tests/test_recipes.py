"""The recipes: every one loads, its layout holds the model, and what its first lines predict is what is predicted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_run import ROOT

from megarl.cli.main import main
from megarl.config import load_config
from megarl.flow_kinds import generates
from megarl.trainer.admission.checks import check_layouts

FOLDER = ROOT / "configs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def _shape(text: str) -> str:
    found = re.search(r"configs/models/[a-z0-9_.]+[a-z0-9]", text)
    assert found is not None
    return str(ROOT / found[0])


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_planned_as_its_first_lines_say(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = FOLDER / f"{name}.yaml"
    text = file.read_text()
    model = f"actor_rollout_ref.model.path={_shape(text)}"
    config = load_config(str(file), [model])
    assert f"configs/recipes/{name}.yaml" in text and config.trainer.run_dir == f"runs/recipes/{name}"
    assert re.search(rf", {config.trainer.world_size} GPUs? of 80 GB", text)
    if not generates(config):
        check_layouts(config)
        return
    assert main(["plan", str(file), "--gpu-memory", "80GB", model]) == 0
    said = capsys.readouterr().out
    totals = [line for line in said.splitlines() if "total" in line]
    most = max(float(size) for line in totals for size in re.findall(r"([0-9.]+) GiB", line))
    seconds = re.search(r"│ all +│ +([0-9.]+) s", said)
    assert seconds is not None
    predicted = re.search(r"([0-9.]+) GiB of a GPU at most, (\d+) s per step", text)
    assert predicted is not None and "Prediction, not a measurement" in text
    assert float(predicted[1]) == pytest.approx(most, abs=0.1) and float(predicted[2]) == round(float(seconds[1]))


def test_the_table_has_them_all() -> None:
    table = (FOLDER / "README.md").read_text()
    named = re.findall(r"\]\(([^)]+)\.yaml\)", table)
    assert sorted(named) == RECIPES and len(RECIPES) == 10
    for name in RECIPES:
        line = next(line for line in table.splitlines() if f"({name}.yaml)" in line)
        text = (FOLDER / f"{name}.yaml").read_text()
        predicted = re.search(r"([0-9.]+) GiB of a GPU at most, (\d+) s", text)
        assert predicted is None or f"{predicted[1]} GiB, {predicted[2]} s" in line


def test_the_shapes_are_those_of_their_names() -> None:
    from megarl.estimate.job import parameter_count
    from megarl.models.families import read_architecture

    billions = {"qwen2.5_0.5b": 0.494, "qwen2_1.5b": 1.544, "qwen2.5_7b": 7.616, "llama3_8b": 8.03}
    billions |= {"qwen2.5_32b": 32.76, "qwen3_30b_a3b": 30.53, "llama3_70b": 70.55}
    for name, count in billions.items():
        arch = read_architecture(str(Path(ROOT, "configs", "models", name)))
        assert parameter_count(arch) / 1e9 == pytest.approx(count, rel=2e-3), name
