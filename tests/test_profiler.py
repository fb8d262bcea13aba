"""Profiles: exactly the steps and ranks that were asked for, with the phases by name; one that fails stops nothing."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from run_cases import run_here
from tiny_run import TrainedRun, megarl, write_run

from megarl.cli.train import say_how_to_profile
from megarl.config import build_config, load_config
from megarl.endings import ExitCode
from megarl.phases import Phase
from megarl.telemetry.earlier import set_aside_earlier_run
from megarl.telemetry.profiler import MEMORY_ENTRIES, Profiler, nsight_command
from megarl.telemetry.timers import PhaseTimers
from megarl.trainer.admission.checks import check_run
from megarl.trainer.subject import evaluation_config, find_subject

CPU = torch.device("cpu")


def trace_of(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as f:
        events: list[dict[str, Any]] = json.load(f)["traceEvents"]
    return events


def test_exactly_the_asked_step_and_rank(small: TrainedRun) -> None:
    """Rank 1's second step of two, on two ranks; Perfetto reads what Chrome reads."""
    profiles = small.folder / "run" / "profiles"
    assert [path.name for path in profiles.iterdir()] == ["step_2_rank_1.json.gz"]
    events = trace_of(profiles / "step_2_rank_1.json.gz")
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    phases = {"reshard", "generate", "update", "validate", "save"}
    assert phases <= set(spans), sorted(spans)

    def within(phase: str, name: str) -> int:
        starts = [event["ts"] for event in events if event.get("cat") == "cpu_op" and event["name"] == name]
        return sum(first <= start < last for start in starts for first, last in spans[phase])

    for name in ("aten::mm", "aten::embedding_dense_backward"):  # each phase holds its own work
        assert within("update", name) and not within("reshard", name) and not within("save", name)
    assert not within("generate", "aten::embedding_dense_backward")


def profiler(folder: Path, warned: list[str], rank: int = 0, **keys: Any) -> Profiler:
    config = build_config({"profiler": keys})
    return Profiler(config.profiler, str(folder), rank=rank, device=CPU, warn=warned.append)


def test_a_step_that_does_not_end_leaves_no_trace(tmp_path: Path) -> None:
    warned: list[str] = []
    watched = profiler(tmp_path, warned, tool="torch", steps=[1, 2])
    with pytest.raises(RuntimeError, match="broken"), watched.step(1):
        raise RuntimeError("broken")
    assert not (tmp_path / "profiles").exists()
    timers = PhaseTimers(CPU, watched.phase)
    with watched.step(2), timers(Phase.UPDATE), timers(Phase.SAVE):
        torch.ones(3) + 1
    with watched.step(3), timers(Phase.UPDATE):
        torch.ones(3) + 1
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["step_2_rank_0.json.gz"] and not warned
    names = [e["name"] for e in trace_of(tmp_path / "profiles" / "step_2_rank_0.json.gz") if "dur" in e]
    assert names.count("update") == names.count("save") == 1


def test_a_profiler_that_fails_says_so_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No GPU, a profile that runs already, a folder that cannot be made; the steps go on."""
    for tool in ("nsight", "memory"):
        warned: list[str] = []
        watched = profiler(tmp_path, warned, tool=tool, steps=[1, 2])
        for step in (1, 2):
            with watched.step(step), watched.phase(Phase.UPDATE):
                pass
        assert len(warned) == 1 and warned[0].startswith(f"rank 0 records no more profiles: profiler.tool={tool} needs")
    (tmp_path / "profiles").write_text("a file")
    warned = []
    watched = profiler(tmp_path, warned, tool="torch", steps=[1, 2])
    for step in (1, 2):
        with watched.step(step):
            pass
    assert len(warned) == 1 and "exists" in warned[0]
    other = profiler(tmp_path, warned, rank=3, tool="nsight", steps=[1], ranks="all")
    with other.step(1):
        pass
    assert "megarl: warning: rank 3 records no more profiles: " in capfd.readouterr().err and len(warned) == 1


@pytest.mark.slow
def test_a_run_goes_on_without_its_profiler(ranks: Ranks, tmp_path: Path) -> None:
    config = write_run(tmp_path, profiler={"tool": "nsight", "steps": [1, 2]}, trainer__test_freq=0)
    ended, said = ranks.run(1, run_here, str(config), ["trainer.val_before_train=false"])[0]
    assert ended == "" and said.count("records no more profiles: profiler.tool=nsight needs a GPU") == 1
    assert not (tmp_path / "run" / "profiles").exists()


def test_when_memory_runs_out(tmp_path: Path) -> None:
    """The phase, what is asked for, the file or why there is none, and what to change; in one line."""
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB\nof which 1 is free."
    error = torch.OutOfMemoryError(f"{text} If reserved but unallocated memory is large try setting X")
    watched = profiler(tmp_path, [])
    with pytest.raises(torch.OutOfMemoryError), watched.phase(Phase.VALIDATE), watched.phase(Phase.GENERATE):
        raise error
    said = str(watched.out_of_memory(error))
    assert said.startswith("memory ran out in the phase generate: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "profiler.memory_snapshot=true" in said and "gpu_memory_utilization" in said and "\n" not in said
    assert "try setting" not in said
    watched = profiler(tmp_path, [], memory_snapshot=True)
    with pytest.raises(torch.OutOfMemoryError), watched.phase(Phase.UPDATE):
        raise error
    said = str(watched.out_of_memory(error))
    assert "in the phase update" in said and "ppo_max_token_len_per_gpu" in said
    assert "no snapshot could be written" in said or "out_of_memory_rank_0.pickle" in said
    assert "megarl plan" in str(profiler(tmp_path, []).out_of_memory(error)) and MEMORY_ENTRIES > 0


@pytest.mark.slow
def test_the_line_of_a_run_whose_memory_ran_out(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "import torch\n"
        "from megarl import Phase\n"
        "def flow(run):\n"
        "    for step in run.steps('rl', 2, before=0):\n"
        "        with run.phase(Phase.UPDATE):\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 7 GiB.')\n"
    )
    config = write_run(tmp_path, trainer__flow=f"{tmp_path / 'flow.py'}:flow")
    done = megarl("train", str(config))
    assert done.returncode == ExitCode.OUT_OF_MEMORY and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "memory ran out" in line]
    assert len(lines) == 1
    assert lines[0].startswith("megarl: rank 0 failed: memory ran out in the phase update: CUDA out of memory")
    assert json.loads((tmp_path / "run" / "lock").read_text())["ended"].startswith("failed: memory ran out")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["profiler.tool=torch"], "profiler.tool = torch records nothing: name profiler.steps, such as [3]"),
        (["profiler.tool=torch", "profiler.steps=[1]", "profiler.ranks=[]"], "name profiler.ranks"),
        (["profiler.tool=torch", "profiler.steps=[1]", "profiler.ranks=[1]"], "there is no rank 1, but ranks 0 to 0"),
        (["profiler.steps=[0]"], "profiler.steps.0: input should be greater than or equal to 1"),
        (["profiler.ranks=some"], "profiler.ranks"),
        (["profiler.tool=nsys"], "profiler.tool: input should be 'none', 'torch', 'nsight' or 'memory'"),
    ],
)
def test_refusals(tmp_path: Path, keys: list[str], said: str) -> None:
    config = write_run(tmp_path)
    with pytest.raises(ValueError) as refused:
        check_run(load_config(str(config), keys))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_command_for_nsys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Said by `megarl train`, unless nsys records already."""
    command = (
        "nsys profile -c cudaProfilerApi --capture-range-end=repeat:2 -t cuda,nvtx --trace-fork-before-exec=true "
        "-o megarl_%p megarl train a.yaml 'profiler.steps=[1, 2]'"
    )
    assert nsight_command("megarl train a.yaml 'profiler.steps=[1, 2]'", 2) == command
    config = build_config({"profiler": {"tool": "nsight", "steps": [1, 2]}})
    monkeypatch.setattr(sys, "argv", ["/bin/megarl", "train", "a.yaml", "profiler.steps=[1, 2]"])
    say_how_to_profile(config)
    assert (
        capsys.readouterr().err == f"megarl: profiler.tool=nsight only marks the steps; this records them: {command}\n"
    )
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    say_how_to_profile(config)
    assert capsys.readouterr().err == ""


def test_an_evaluation_of_a_profiled_run_is_not_profiled(small: TrainedRun, tmp_path: Path) -> None:
    """It may have fewer ranks than the run."""
    subject = find_subject(str(small.folder / "run"))
    config = evaluation_config(subject, subject.recorded, [], str(tmp_path / "out"), 1)
    assert config.profiler.tool == "none" and config.trainer.world_size == 1
    assert load_config(subject.recorded).profiler.ranks == [1]
    assert set_aside_earlier_run(str(tmp_path)) is None
    (tmp_path / "profiles").mkdir()
    assert set_aside_earlier_run(str(tmp_path)) == str(tmp_path / "earlier" / "1")
