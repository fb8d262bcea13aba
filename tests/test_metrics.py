"""The registry of metrics against the code and against runs; what is measured once per step."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path
from statistics import fmean

import pytest
from tiny_run import TrainedRun, write_run

from megarl.estimate.accelerator import peak_flops
from megarl.estimate.job import active_parameter_count
from megarl.estimate.prediction import flops_of_sequences, forward_flops
from megarl.evaluation.records import Record
from megarl.evaluation.summary import metrics as validation_metrics
from megarl.evaluation.summary import summarize
from megarl.models.families.__init__ import read_architecture
from megarl.parallel.watch import Watch
from megarl.phases import Phase
from megarl.rollout.speed import Speed
from megarl.telemetry.gpu import GpuReading, GpuSampler, gpu_metrics
from megarl.telemetry.metrics import METRICS, PLACEHOLDERS, find
from megarl.trainer.records.pace import stragglers
from megarl.trainer.records.slow_node import STEPS, SlowNode
from megarl.trainer.records.step_metrics import spread_metrics
from megarl.types import Prompt, Rollout, Rollouts, Tokens

PACKAGE = Path(__file__).parents[1] / "megarl"
FREE = "{own}"


def literals() -> set[str]:
    """Every string of the code, and the fixed parts of those that are put together."""
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name != "metrics.py":
            nodes = ast.walk(ast.parse(file.read_text()))
            found |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found


def in_the_code(name: str, strings: set[str]) -> bool:
    """Whether the code has the whole name, or its prefix and every fixed part of the rest."""
    if name in strings:
        return True
    prefix, _, rest = name.partition("/")
    parts = [part for part in re.split(r"\{\w+\}", rest or prefix) if part]
    prefixed = not rest or "{" in prefix or bool({prefix, f"{prefix}/"} & strings)
    return prefixed and all(part in strings or f"{prefix}/{part}" in strings for part in parts)


def of_validations() -> set[str]:
    """Names of what several samples of several data sources give."""
    records = [
        Record(
            index=i, sample=j, source="ab"[i % 2], row=str(i), prompt="", response="", answer="", vote="x",
            score=float(i == j), finish="stop", tokens=1,
        )
        for i in range(4)
        for j in range(4)
    ]  # fmt: skip
    return {f"val/{name}" for name in validation_metrics(summarize(records))}


@pytest.mark.slow
def test_every_metric_of_a_run_is_documented(trained: TrainedRun) -> None:
    names = {name for row in trained.rows for name in row}
    assert len(names) > 60
    assert [name for name in names if (spec := find(name)) is None or FREE in spec.name] == []


@pytest.mark.slow
def test_every_documented_metric_is_logged(trained: TrainedRun) -> None:
    logged = {name for row in trained.rows for name in row} | of_validations()
    seen, strings = {find(name) for name in logged}, literals()
    unlogged = [spec.name for spec in METRICS if spec not in seen and not in_the_code(spec.name, strings)]
    assert unlogged == []
    assert not in_the_code("reward/invented", strings) and not in_the_code("invented/mean", strings)


def test_prefixes_of_the_code_are_documented() -> None:
    """`run.log("prefix", ...)` of a new prefix is in the registry before any test runs it."""
    prefixes = {spec.name.partition("/")[0] for spec in METRICS}
    logged = {
        node.args[0].value
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr, getattr(node.func.value, "id", "")) == ("log", "run")
        and isinstance(node.args[0], ast.Constant)
    }
    assert logged - prefixes <= {""} and {"reward", "actor", "critic", "teacher", "carry_over"} <= logged


def test_the_registry_describes_each_name_once() -> None:
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    for spec in METRICS:
        assert spec.meaning and not spec.meaning.endswith("."), spec.name
        assert spec.unit or FREE in spec.name, spec.name
        assert set(re.findall(r"\{(\w+)\}", spec.name)) <= PLACEHOLDERS.keys()
    described = {
        "reward/mean": "reward/mean",
        "reward/spice": "reward/{own}",
        "reward/part/math": "reward/part/{part}",
        "reward/part/math/steps": "reward/part/{part}/{own}",
        "reward/source/a/b/mean": "reward/source/{source}/mean",
        "actor/loss": "{update}/loss",
        "val/loss": "val/loss",
        "val/gsm8k/pass@16": "val/{source}/pass@{k}",
        "val/pass@16": "val/pass@{k}",
        "timing/log_probs_s": "timing/{phase}_s",
        "straggler/update_rank": "straggler/{phase}_rank",
    }
    for name, spec_name in described.items():
        spec = find(name)
        assert spec is not None and spec.name == spec_name
    assert find("timing/lunch") is None and find("actor/losses") is None and find("reward") is None
    assert all(find(f"memory/{phase}_gib") for phase in Phase)


def scored(*groups: list[float | None]) -> Rollouts:
    prompt = Prompt(index=0, token_ids=(1,), row={})
    return Rollouts(
        items=tuple(Rollout(prompt=prompt, group=i, reward=r) for i, group in enumerate(groups) for r in group)
    )


def test_spread_of_scores() -> None:
    found = spread_metrics(scored([0.0, 1.0], [1.0, 1.0], [None, 0.5], [0.5, 0.5, None]))
    scores = [0.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    mean = fmean(scores)
    assert found["std"] == pytest.approx((sum((s - mean) ** 2 for s in scores) / 7) ** 0.5)
    assert (found["min"], found["p10"], found["p50"], found["p90"], found["max"]) == (0.0, 0.0, 0.5, 1.0, 1.0)
    assert found["no_signal"] == pytest.approx(2 / 3)  # the third group has one score, which nothing compares with
    assert "no_signal" not in spread_metrics(scored([1.0], [0.0]))


def test_stragglers_name_the_slowest_rank() -> None:
    work = [{"generate": 1.0, "update": 3.0}, {"generate": 4.0, "update": 3.5}, {"generate": 1.5, "update": 3.0}]
    found = stragglers(work)
    assert found == {
        "straggler/rank": 1.0,
        "straggler/excess_s": 3.0,
        "straggler/generate_rank": 1.0,
        "straggler/generate_excess_s": 2.5,
        "straggler/update_rank": 1.0,
        "straggler/update_excess_s": 0.5,
    }
    assert stragglers(work[:1]) == {}
    assert stragglers([{}, {"save": 1.0}])["straggler/save_rank"] == 1.0


def test_a_node_that_is_slow_for_several_steps_is_named_once() -> None:
    slow_node, hosts = SlowNode(2), ["a", "a", "b", "b", "c", "c"]
    even = [{"update": 1.0}] * 6
    uneven = [*even[:2], {"update": 1.2, "generate": 0.2}, {"update": 1.4}, *even[4:]]
    for work, steps in ((even, 3), (uneven, STEPS - 1), (even, 1), (uneven, STEPS - 1)):
        for _ in range(steps):
            metrics, line = slow_node.after_step(work, hosts)
            assert line == "" and set(metrics) == {"straggler/node", "straggler/node_excess"}
    metrics, line = slow_node.after_step(uneven, hosts)
    assert metrics == {"straggler/node": 1.0, "straggler/node_excess": pytest.approx(0.4)}
    assert line.startswith(f"b (node 1) worked 40% longer than the median node in the last {STEPS} steps")
    assert [slow_node.after_step(uneven, hosts)[1] for _ in range(9)] == [""] * 9
    pair = SlowNode(1)  # of two nodes, the median is the faster one
    assert [pair.after_step([{"a": 1.0}, {"a": 1.3}], ["a", "b"])[1] != "" for _ in range(5)] == [False] * 4 + [True]
    assert SlowNode(2).after_step(even[:2], hosts) == SlowNode(1).after_step([{}, {}], hosts) == ({}, "")


def test_waiting_for_others_is_no_work() -> None:
    watch = Watch()
    began = time.perf_counter()
    with watch.waiting("all scores"):
        time.sleep(0.05)
    whole = time.perf_counter() - began
    (wait,) = watch.collect_waits()
    assert wait.phase == "" and 0.05 <= wait.seconds <= whole and watch.collect_waits() == []


def test_speed_counts_what_the_policy_drew() -> None:
    prompt, speed = Prompt(index=0, token_ids=(1,), row={}), Speed(ranks=1)

    def drawn(ids: list[int]) -> Tokens:
        return Tokens().drawn(ids, [-1.0] * len(ids))

    begun = Rollout(prompt=prompt, response=drawn([5, 6]))
    done = Rollout(prompt=prompt, response=drawn([5, 6, 7, 8, 9]))
    answered = Rollout(prompt=prompt, response=drawn([1]).observed([2]).drawn([3], [-1.0]))
    with speed.measured():
        time.sleep(0.02)
        speed.finished()
    speed.count([begun], [done, answered])
    taken = speed.collect()
    assert taken.tokens == 3 + 2 and 0.02 <= taken.latencies[0] <= taken.seconds
    assert (speed.collect().seconds, speed.tokens) == (0.0, 0)


def test_flops_of_a_batch_are_those_of_its_sequences(tmp_path: Path) -> None:
    write_run(tmp_path)
    arch = read_architecture(str(tmp_path))
    found = flops_of_sequences(arch, active_parameter_count(arch), 3 + 17 + 900, 3**2 + 17**2 + 900**2)
    assert found == pytest.approx(sum(forward_flops(arch, n) for n in (3, 17, 900)), rel=1e-12)


def test_peaks_are_of_known_gpus_alone() -> None:
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float16") == 312e12
    assert peak_flops("NVIDIA H200", "float32") is None and peak_flops("NVIDIA GeForce RTX 5090", "bfloat16") is None


def test_gpus_together() -> None:
    def reading(utilization: float, power: float, temperature: float, memory: float) -> GpuReading:
        return GpuReading(utilization=utilization, power=power, temperature=temperature, memory=memory)

    one = [reading(1.0, 600.0, 60.0, 0.5), reading(0.5, 400.0, 70.0, 0.9)]
    assert gpu_metrics([one, [reading(0.25, 100.0, 50.0, 0.1)], []]) == {
        "gpu/utilization_mean": 0.5,
        "gpu/utilization_min": 0.25,
        "gpu/power_w": 600.0,
        "gpu/temperature_max_c": 70.0,
        "gpu/memory_max": 0.9,
    }
    assert gpu_metrics([[], []]) == {}


def test_without_a_gpu_nothing_is_sampled_and_nothing_said(capfd: pytest.CaptureFixture[str]) -> None:
    sampler = GpuSampler("00000000-0000-0000-0000-000000000000")
    assert sampler.collect() == []
    sampler.close()
    assert capfd.readouterr() == ("", "")
