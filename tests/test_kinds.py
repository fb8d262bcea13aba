"""Flows and engines of users' own, which declare what checks, prediction and resuming know of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import Ranks
from run_cases import run_here
from tiny_run import metrics_of, write_run

from megarl.config import Config, load_config
from megarl.estimate.accelerator import H200
from megarl.estimate.budget import budget
from megarl.estimate.job import parameter_count, training_elements
from megarl.estimate.model import item_name
from megarl.estimate.prediction import Lengths, step_seconds
from megarl.flow_kinds import FlowKind, flow_kind, format_of, generates, trains
from megarl.phases import Item
from megarl.rollout.kinds import NATIVE, engine_kind
from megarl.rollout.vllm.kind import VLLM
from megarl.trainer.admission.checks import check_layouts, check_run
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
    assert job.engines.vocab_rows == 24 and job.engine.activation_bytes(
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


ROLE = """
from torch.nn.functional import logsigmoid

import megarl
from megarl.models.heads import ScalarHead


class Verifier(megarl.Actor):
    kind = megarl.RoleKind(
        name="verifier",
        scalar=True,
        forward="verify",
        update=megarl.Phase.UPDATE,
        absent={item: frozenset({megarl.Phase.GENERATE}) for item in megarl.Item},
    )

    def make_head(self):
        return ScalarHead(per="sequence")


def verdict(x):
    return megarl.LossOutput(loss=-x.weights.dot(logsigmoid(x.output * (2 * x.columns["rewards"] - 1))))


verdict.columns = ("rewards",)
"""

VERIFIES = """
import megarl
from role import Verifier, verdict


@megarl.flow(roles=(Verifier.kind,))
def flow(run):
    roles = run.config.actor_rollout_ref
    own = {"model": roles.model, "megatron": roles.actor.megatron, "batching": roles.actor, "optim": roles.actor.optim}
    actor = run.add("actor", megarl.build_actor(run.inputs, run.groups, optim=roles.actor.optim, total_steps=4))
    verifier = Verifier(run.inputs.arch, run.groups, total_steps=4, initial=lambda it: it.copy_from(actor), **own)
    run.add("verifier", verifier)
    generation, prompts = run.generation(actor), run.add("prompts", megarl.prompt_sampler(run.inputs))
    for step in run.steps("verify", run.inputs.total_steps):
        chosen = [run.inputs.train_prompts[i] for i in prompts.next()]
        with generation.phase():
            made = generation.rollouts(chosen, 2, run.inputs.sampling(validation=False), seed=1, round_=step)
        batch = run.score(made).to_batch()
        with run.phase("verify"):
            scores = verifier.forward(batch, verifier.plan(batch))
        run.log("verifier", {"score": float(scores.mean())})
        with run.phase(megarl.Phase.UPDATE):
            run.log("verifier", verifier.update(batch, *verifier.plan(batch).mini_batches, verdict))
"""


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("megarl.Actor", r"its roles are no tuple of megarl.RoleKind, such as \(Verifier.kind,\)$"),
        ("(megarl.Actor,)", r"its roles are no tuple of megarl.RoleKind"),
        ("(megarl.Actor.kind,)", r"its roles are called \['actor'\]; give each a name of its own, not one of"),
        ("(megarl.RoleKind(),)", r"its roles are called \[''\]; give each a name of its own"),
        ("(megarl.RoleKind(name='v'), megarl.RoleKind(name='v'))", r"its roles are called \['v', 'v'\]"),
        ("(megarl.RoleKind(name='v', update='generate'),)", "its role v computes in a phase of the engine"),
    ],
)
def test_roles_that_a_plan_cannot_tell_apart_are_refused(tmp_path: Path, roles: str, said: str) -> None:
    (tmp_path / "flow.py").write_text(f"import megarl\n@megarl.flow(roles={roles})\ndef flow(run):\n    pass\n")
    config = load_config(str(write_run(tmp_path)), [f"trainer.flow={tmp_path / 'flow.py'}:flow"])
    with pytest.raises(ValueError, match=rf"^trainer.flow = .*flow.py:flow: {said}"):
        job_of(config, check_layouts(config))


def _check_plan(config: Config) -> None:
    """It counts the verifier's state, what its passes hold, and their seconds in the flow's own phase."""
    job = job_of(config, check_layouts(config))
    (verifier,) = job.models_beside
    assert verifier.layout == job.train and verifier.mini_batch == job.actor.mini_batch
    held, beside = (budget(of, H200, moved=0)[0].phases for of in (job, replace(job, own_roles=())))
    assert list(held) == [*beside, "verify"]
    of_policy = {str(item): held["update"][item_name("actor", item)] for item in Item}
    of_verifier = {str(item): held["update"][f"verifier {item}"] for item in Item}
    scalar = job.arch.with_scalar_output()
    for item, nbytes in of_verifier.items():
        assert nbytes * parameter_count(job.arch) == of_policy[item] * training_elements(scalar, job.train, 0)
    assert not any(held["generate"].get(f"verifier {item}") for item in Item)
    lengths = Lengths(prompt=8, response=8)
    seconds, without = (step_seconds(of, H200, lengths, None, {}) for of in (job, replace(job, own_roles=())))
    assert seconds["verify"] > 0 and seconds["update"] > without["update"]


def test_a_role_an_engine_and_a_phase_of_the_users(ranks: Ranks, tmp_path: Path) -> None:
    """Each in a file of its own; the run is stopped half-way, goes on, and ends with the same numbers."""
    megatron = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
    keys = {"trainer__logger": ["jsonl"], "trainer__val_before_train": False, "trainer__save_freq": 1}
    seen = []
    for name, stops in (("whole", [4]), ("halves", [2, 4])):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in (("role", ROLE), ("flow", VERIFIES), ("engine", ENGINE)):
            (folder / f"{file}.py").write_text(text)
        config = str(write_run(folder, actor_rollout_ref__actor__megatron=megatron, **keys))
        own = [f"trainer.flow={folder / 'flow.py'}:flow"]
        own += [f"actor_rollout_ref.rollout.name={folder / 'engine.py'}:Mine"]
        _check_plan(load_config(config, own))
        for steps in stops:
            words = [*own, f"trainer.total_training_steps={steps}"]
            ended, said = ranks.run(1, run_here, config, words)[0]
            assert ended == "", ended + said
        rows = metrics_of(folder)
        assert all("timing/verify_s" in row for row in rows)
        seen.append([(row["step"], row["verifier/score"], row["verifier/loss"]) for row in rows])
    assert seen[0] == seen[1] and len(seen[0]) == 4
    spans = (tmp_path / "whole" / "run" / "timeline" / "newer.jsonl").read_text().splitlines()
    assert all("verify" in json.loads(line)["phases"] for line in spans)


WRONG_ENGINES = """
from dataclasses import replace

from megarl.rollout.native.engine import NativeEngine
from megarl.types import Completion, Tokens


def engine(change):
    class Mine(NativeEngine):
        def step(self):
            return change(self, super().step())
    return Mine


def each(change):
    return engine(lambda self, completions: {key: change(completion) for key, completion in completions.items()})


class Bare(NativeEngine):
    def parameters(self):
        return None


Nothing = engine(lambda self, completions: None)
Keys = engine(lambda self, completions: {f"{key}": completion for key, completion in completions.items()})
Idle = engine(lambda self, completions: {})
Ids = each(lambda completion: completion.response.ids)
Empty = each(lambda completion: replace(completion, response=Tokens()))
Listed = each(lambda completion: replace(completion, response=Tokens(ids=[3], logp=[0.0])))
Uneven = each(lambda it: replace(it, response=replace(it.response, logp=it.response.logp[1:])))
Long = each(lambda completion: replace(completion, response=Tokens().drawn([3] * 9, [0.0] * 9)))
Reason = each(lambda completion: replace(completion, finish_reason="done"))
"""


@pytest.mark.slow
def test_an_engine_that_returns_something_else_is_named(ranks: Ranks, tmp_path: Path) -> None:
    config = str(write_run(tmp_path, trainer__val_before_train=False))
    (tmp_path / "engines.py").write_text(WRONG_ENGINES)
    for name, wanted in {
        "Nothing": r"step\(\) must return completions by key, not NoneType",
        "Keys": r"step\(\) returned key '\d+', of no request that is not finished",
        "Idle": r"is not busy, and 64 requests are not finished",
        "Ids": r"step\(\) returned for request \d+ array, and no Completion with Tokens",
        "Empty": r"step\(\) returned for request \d+ 0 new tokens; there must be 1 to 4",
        "Listed": r"step\(\) returned for request \d+ token ids that are no array\('i'\), or .*; use Tokens.drawn",
        "Uneven": r"step\(\) returned for request \d+ (\d) token ids with \d log-probabilities",
        "Long": r"step\(\) returned for request \d+ 9 new tokens; there must be 1 to 4",
        "Reason": r"step\(\) returned for request \d+ finish_reason = 'done', and not 'stop' or 'length'",
        "Bare": r"parameters\(\) must return all weights by name, model.embed_tokens.weight among them, not NoneType",
    }.items():
        words = [f"actor_rollout_ref.rollout.name={tmp_path}/engines.py:{name}"]
        ended, said = ranks.run(1, run_here, config, [*words, f"trainer.default_local_dir={tmp_path / name}"])[0]
        assert re.fullmatch(rf"refused: the engine (Bare|engine.<locals>.Mine):? {wanted}", ended), (name, ended + said)
