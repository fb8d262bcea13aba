"""What a GPU adds to the records of a run: its counters, MFU, memory, kernels in profiles, and what held the memory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch
from tiny_run import FINGERPRINT, TrainedRun, megarl, write_run

from megarl.endings import ExitCode
from megarl.phases import Phase
from megarl.telemetry.spans import read_spans

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_GPU = {"actor_rollout_ref__model__dtype": "bfloat16", "trainer__test_freq": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Four steps, the third of them profiled."""
    folder = tmp_path_factory.mktemp("on_gpu")
    (folder / "reward.py").write_text(FINGERPRINT)
    config = write_run(
        folder,
        **ON_GPU,
        reward__name=f"{folder / 'reward.py'}:score",
        trainer__total_training_steps=4,
        profiler={"tool": "torch", "steps": [3]},
    )
    done = megarl("train", str(config), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return TrainedRun(config=config, folder=folder, out=done.stdout + done.stderr)


def test_counters_of_the_gpu_are_among_the_metrics(run: TrainedRun) -> None:
    for row in run.rows[-4:]:
        assert 0 <= row["gpu/utilization_min"] <= row["gpu/utilization_mean"] <= 1
        assert 10 < row["gpu/power_w"] < 1500 and 10 < row["gpu/temperature_max_c"] < 110
        assert 0 < row["gpu/memory_max"] <= 1
        assert 0 < row["perf/mfu"] < 1


def test_memory_is_measured_beside_what_was_predicted(run: TrainedRun) -> None:
    predicted = json.loads((run.folder / "run" / "memory.json").read_text())
    assert {Phase.GENERATE, Phase.UPDATE} <= set(predicted["phases"]) and predicted["bytes"] > 2**30
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    for phase in (Phase.GENERATE, Phase.UPDATE):
        assert 0 < run.rows[-1][f"memory/{phase}_gib"] < total


def test_spans_are_those_of_the_gpu_s_own_clock(run: TrainedRun) -> None:
    """Of events in the stream, on one axis with the host's: in order, and as long as the timings say."""
    lines = (run.folder / "run" / "timeline" / "newer.jsonl").read_bytes().splitlines(True)
    spans = [read for line in lines if (read := read_spans(line))]
    for row, step in zip(run.rows[-3:], spans[-3:], strict=True):
        (flat,) = step["ranks"]
        found = [(step["phases"][flat[i]], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
        phases = [one for one in found if one[0] != "wait"]
        assert [start for _, start, _ in phases] == sorted(start for _, start, _ in phases)
        update = sum(seconds for phase, _, seconds in phases if phase == Phase.UPDATE)
        assert update == pytest.approx(row["timing/update_s"], abs=0.01)


def test_kernels_are_in_the_profile(run: TrainedRun) -> None:
    (file,) = (run.folder / "run" / "profiles").iterdir()
    with gzip.open(file, "rt") as f:
        events = json.load(f)["traceEvents"]
    assert file.name == "step_3_rank_0.json.gz"
    assert sum(event.get("cat") == "kernel" for event in events) > 100
    marked = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {Phase.GENERATE, Phase.UPDATE, Phase.RESHARD} <= marked


@pytest.mark.parametrize("tool", ["nsight", "memory"])
def test_other_profilers_record_their_step(tool: str, tmp_path: Path) -> None:
    """Nsight's marks leave no file of their own; the memory's history is one."""
    config = write_run(tmp_path, **ON_GPU, profiler={"tool": tool, "steps": [2]})
    done = megarl("train", str(config), timeout=300)
    assert done.returncode == 0 and "records no more profiles" not in done.stderr, done.stderr
    files = sorted((tmp_path / "run").glob("profiles/*"))
    assert [file.name for file in files] == ([] if tool == "nsight" else ["step_2_rank_0.pickle"])
    for file in files:
        assert pickle.loads(file.read_bytes())["segments"]


def test_what_held_the_memory_when_it_ran_out(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "import torch\n"
        "from megarl import Phase\n"
        "def flow(run):\n"
        "    for step in run.steps('rl', 2, before=0):\n"
        "        with run.phase(Phase.UPDATE):\n"
        "            held = torch.ones(2**20, device='cuda')\n"
        "            torch.empty(2**50, device='cuda')\n"
    )
    flow = f"{tmp_path / 'flow.py'}:flow"
    config = write_run(tmp_path, **ON_GPU, trainer__flow=flow, profiler={"memory_snapshot": True})
    done = megarl("train", str(config), timeout=300)
    file = tmp_path / "run" / "profiles" / "out_of_memory_rank_0.pickle"
    assert done.returncode == ExitCode.OUT_OF_MEMORY and "Traceback" not in done.stderr
    assert "memory ran out in the phase update: CUDA out of memory" in done.stderr and str(file) in done.stderr
    blocks = [block for segment in pickle.loads(file.read_bytes())["segments"] for block in segment["blocks"]]
    assert any(block["size"] >= 2**22 and block["state"].startswith("active") for block in blocks)
