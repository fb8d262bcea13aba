"""Flows and engines of users' own, which declare what checks, prediction and resuming know of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import Ranks
from run_cases import run_here
from tiny_run import write_run

from megarl.config import Config, load_config
from megarl.flow_kinds import FlowKind, flow_kind, format_of, generates, trains
from megarl.rollout.kinds import NATIVE, engine_kind
from megarl.rollout.vllm.kind import VLLM
from megarl.trainer.checks import check_layouts, check_run
from megarl.trainer.layouts import generation_layout
from megarl.trainer.memory import job_of
from megarl.trainer.resuming.resume import Start, finished

ENGINE = """
from dataclasses import dataclass

import megarl
from megarl.rollout.native.engine import NativeEngine


@dataclass(frozen=True, kw_only=True)
class Kind(megarl.EngineKind):
    repeats: bool = False
    strided: bool = False
    vocab_multiple: int = 24

    def check(self, rollout, arch, *, trains):
        if rollout.max_num_seqs == 7:
            raise ValueError("Mine answers no seven at a time; lower rollout.max_num_seqs")

    def activation_bytes(self, rollout, arch, *, tp, itemsize, max_model_len):
        return 12345


class Mine(NativeEngine):
    kind = Kind()
"""


def _with_engine(folder: Path, *overrides: str) -> Config:
    (folder / "engine.py").write_text(ENGINE)
    name = f"actor_rollout_ref.rollout.name={folder / 'engine.py'}:Mine"
    return load_config(str(write_run(folder)), [name, *overrides])


def test_an_engine_declares_its_kind(tmp_path: Path) -> None:
    megatron, rollout = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
    layouts = [f"{megatron}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    config = _with_engine(tmp_path, *layouts)
    kind = engine_kind(config.actor_rollout_ref.rollout.name)
    assert kind.engine.__name__ == "Mine" and not kind.repeats and kind.block_size == NATIVE.block_size
    assert generation_layout(config).stride == 1
    assert generation_layout(load_config(str(tmp_path / "run.yaml"), layouts)).stride == 2
    job = job_of(config, check_layouts(config))
    assert job.vocab_rows == 24 and job.engine.activation_bytes(
        config.actor_rollout_ref.rollout, job.arch, tp=1, itemsize=4, max_model_len=8
    ) == 12345  # fmt: skip
    with pytest.raises(ValueError, match=r"^Mine answers no seven at a time; lower rollout.max_num_seqs$"):
        check_run(_with_engine(tmp_path, f"{rollout}.max_num_seqs=7"))
    with pytest.raises(ValueError, match=r"round as its batches fall; use rollout.name=native"):
        check_run(_with_engine(tmp_path, "trainer.deterministic=true"))


def test_engines_that_declare_nothing_are_like_the_native_one(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("class Plain:\n    pass\n")
    kind = engine_kind(f"{tmp_path / 'plain.py'}:Plain")
    assert isinstance(kind.engine, type) and kind.engine.__name__ == "Plain"
    assert (kind.repeats, kind.strided, kind.fixed_cache) == (NATIVE.repeats, NATIVE.strided, NATIVE.fixed_cache)
    assert engine_kind("native") is NATIVE and engine_kind("vllm") is VLLM
    with pytest.raises(ValueError, match=r"rollout.name = 'vlm' is not known; use vllm"):
        engine_kind("vlm")


FLOW = """
import megarl


@megarl.flow(last_loop=(0, "count"), validates=True)
def flow(run):
    for step in run.steps("count", run.inputs.total_steps):
        run.log("count", {"of": step})


@megarl.flow(reads="preferences", scores=True)
def pairs(run):
    pass


@megarl.flow(trains=False)
def looks(run):
    pass


def silent(run):
    pass
"""


def _with_flow(folder: Path, name: str, *overrides: str) -> Config:
    (folder / "flow.py").write_text(FLOW)
    return load_config(str(write_run(folder)), [f"trainer.flow={folder / 'flow.py'}:{name}", *overrides])


def test_a_flow_declares_its_kind(tmp_path: Path) -> None:
    config = _with_flow(tmp_path, "flow")
    inputs = check_run(config)
    at = {"format": 1, "order": 0, "loop": "count"}
    last = Start(folder="somewhere", state={**at, "step": inputs.total_steps})
    assert "nothing to do: somewhere has step" in (finished(inputs, last) or "")
    assert finished(inputs, replace(last, state={**at, "step": inputs.total_steps - 1})) is None
    pairs = _with_flow(tmp_path, "pairs")
    assert (
        format_of(pairs) == "preferences"
        and not generates(pairs)
        and job_of(pairs, inputs.arch).arch.output == "scalar"
    )
    assert not trains(_with_flow(tmp_path, "looks"))
    with pytest.raises(ValueError, match=r"data.format = prompts: trainer.flow = .*flow.py:pairs reads preferences"):
        check_run(_with_flow(tmp_path, "pairs", "data.format=prompts"))
    with pytest.raises(ValueError, match=r"validates on nothing: name held-out files"):
        check_run(_with_flow(tmp_path, "flow", "data.val_files=[]", "trainer.test_freq=1"))
    for silent in (_with_flow(tmp_path, "silent"), _with_flow(tmp_path, "nobody")):
        assert flow_kind(silent) == FlowKind() and generates(silent) and trains(silent)


def test_a_declared_flow_that_is_done_is_told_before_it_begins(ranks: Ranks, tmp_path: Path) -> None:
    config = str(write_run(tmp_path, trainer__total_training_steps=2, trainer__save_freq=1))
    (tmp_path / "flow.py").write_text(FLOW)
    words = [f"trainer.flow={tmp_path / 'flow.py'}:flow"]
    ended, said = ranks.run(1, run_here, config, words)[0]
    assert ended == "" and "nothing to do" not in said
    ended, said = ranks.run(1, run_here, config, words)[0]
    assert ended == "" and "nothing to do" in said
