"""Bytes and seconds of the models beside the policy against numbers worked out by hand."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from considered_jobs import LLAMA_3_8B, QWEN3_235B, job, slowed, with_output
from tiny_run import ROOT

from megarl import role_kinds
from megarl.config import build_config
from megarl.estimate.accelerator import H200
from megarl.estimate.budget import CacheRoom, StageBudget, budget, checkpoint_bytes, copy_bytes, host_bytes
from megarl.estimate.fit import what_does_not_fit, what_may_not_fit
from megarl.estimate.job import Job, active_parameter_count, parameter_count, training_elements
from megarl.estimate.prediction import Lengths, forward_flops, layout_warnings, step_seconds
from megarl.estimate.token_budget import largest_token_budget
from megarl.models.sizes import LOGITS_CHUNK_BYTES
from megarl.parallel.layout import TrainLayout
from megarl.phases import Item, Phase
from megarl.reshard.traffic import Traffic
from megarl.trainer.memory import job_of

GIB = 2**30
MODES = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
GAE: dict[str, Any] = {"adv_estimator": "gae"}
# Llama-3-8B: a layer's matrices, what every rank has of a layer, and the embedding
LAYER, NORMS, EMBEDDING = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336, 2 * 4096, 128_256 * 4096
# the fullest rank of a critic over TP4 x DP2; and the first stage of one over PP4 x DP2, which has the embedding
CRITIC = 32 * (LAYER // 4 + NORMS) + EMBEDDING // 4 + 4096 + 4096
CRITIC_STAGE = 8 * (LAYER + NORMS) + EMBEDDING
# Qwen2-1.5B over PP2: the first stage, with the embedding; the last one has a vector instead
QWEN_LAYER = 2 * 1536 * 1536 + 2 * 256 * 1536 + 3 * 1536 * 8960 + 1536 + 2 * 256 + 2 * 1536
QWEN_STAGE = 14 * QWEN_LAYER + 151_936 * 1536
QWEN = str(ROOT / "configs" / "models" / "qwen2_1.5b")


def considered(*, changes: dict[str, Any] | None = None, **sections: Any) -> Job:
    """That of `considered_jobs.job()`, on 8 GPUs, with other sections of the configuration.

    Args:
        changes: of `actor_rollout_ref`.
    """
    megatron = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    changes = changes or {}
    actor = {
        "ppo_mini_batch_size": 32,
        "ppo_max_token_len_per_gpu": 8192,
        "megatron": megatron,
        **changes.pop("actor", {}),
    }
    rollout = {"n": 8, "name": "vllm", "gpu_memory_utilization": 0.5, "tensor_model_parallel_size": 2}
    config = build_config(
        {
            "data": {"train_batch_size": 64, "max_prompt_length": 1024, "max_response_length": 3072},
            "actor_rollout_ref": {"actor": actor, "rollout": rollout, **changes},
            "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
            **sections,
        }
    )
    return job_of(config, LLAMA_3_8B)


def critic_over(tp: int, pp: int, **keys: Any) -> dict[str, Any]:
    """The section of a critic in another layout than the policy's."""
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    megatron = {**layout, **keys.pop("megatron", {})}
    return {"ppo_mini_batch_size": 16, "ppo_max_token_len_per_gpu": 16_384, "megatron": megatron, **keys}


def first(considered: Job) -> StageBudget:
    return budget(considered, H200, moved=1)[0]


def items_of(stage: StageBudget, what: str) -> dict[str, dict[str, int]]:
    """Phase -> the bytes of the items with that word."""
    return {phase: {i: n for i, n in items.items() if what in i} for phase, items in stage.phases.items()}


def test_a_run_without_other_models_is_predicted_as_before() -> None:
    ours, plain = considered(), job()
    assert (ours.other_models, ours.reference, ours.log_probs) == ((), False, True)
    assert budget(ours, H200, moved=1) == budget(plain, H200, moved=1)
    assert [host_bytes(ours, stage) for stage in (0, 1)] == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "contents", "per_element"),
    [
        ("bfloat16", ["model", "optimizer"], 14),
        ("bfloat16", ["model"], 2),
        ("float32", ["model", "optimizer"], 16),
        ("float32", ["model"], 4),
    ],
)
def test_a_checkpoint_is_spread_over_all_ranks(dtype: str, contents: list[str], per_element: int) -> None:
    """The weights' bytes of an element, and 12 of its fp32 weight and moments, which are written beside fp32 weights,
    too."""
    sections: dict[str, Any] = {
        "changes": {"model": {"dtype": dtype}},
        "checkpoint": {"save_contents": contents},
        "trainer": {"n_gpus_per_node": 8, "save_freq": 1},
    }
    run = considered(**sections)
    train, elements = run.train, [training_elements(run.arch, run.train, rank) for rank in run.train.ranks]
    total = sum(checkpoint_bytes(run, train.coords(rank).pp) for rank in train.ranks)
    assert total == pytest.approx(per_element * sum(elements) / train.dp, rel=1e-6)
    with_critic = considered(algorithm=GAE, critic=critic_over(4, 1), **sections)
    assert checkpoint_bytes(with_critic, 0) - checkpoint_bytes(run, 0) == per_element * CRITIC // 2
    copied = copy_bytes(run, 0)
    assert 2**30 <= copied - checkpoint_bytes(run, 0) < 2**31 and copied % 2**30 == 0
    assert copy_bytes(considered(**sections | {"checkpoint": {"async_save": False}}), 0) == 0
    assert copy_bytes(considered(**sections | {"trainer": {"n_gpus_per_node": 8}}), 0) == 0


def test_experts_are_written_by_the_ranks_that_have_them() -> None:
    """With experts dealt out over 4 of 8 ranks, two ranks have each expert, and eight the rest."""
    run = considered(checkpoint={"save_contents": ["model"]}, trainer={"n_gpus_per_node": 8, "save_freq": 1})
    run = replace(run, arch=QWEN3_235B, train=TrainLayout(ranks=range(8), ep=4))
    assert 8 * checkpoint_bytes(run, 0) == pytest.approx(2 * parameter_count(QWEN3_235B), rel=1e-6)


def test_a_critic_in_another_layout() -> None:
    stages = budget(considered(algorithm=GAE, critic=critic_over(4, 1)), H200, moved=1)
    held = {
        "critic weights": 2 * CRITIC,
        "critic gradients": 4 * CRITIC,
        "critic optimizer state": 12 * CRITIC // 2,
    }
    per_token = 4 * 4096 // 4 + 2 * 40 * 128 // 4 + 3 * 14_336 // 4
    for stage, plain in zip(stages, budget(job(), H200, moved=1), strict=True):
        assert list(stage.phases) == ["reshard", "generate", "log_probs", "values", "update_critic", "update"]
        assert {phase: stage.phases[phase] for phase in plain.phases} == {
            phase: items | held for phase, items in plain.phases.items()
        }
        policy = {
            item: n
            for item, n in plain.phases[Phase.UPDATE].items()
            if item not in ("activations", "logits of a chunk")
        }
        # four sequences of 4096 tokens at a time, no logits
        assert stage.phases[Phase.VALUES] == policy | held | {"activations": 2 * 16_384 * per_token}
        assert stage.phases[Phase.UPDATE_CRITIC] == policy | held | {"activations": 2 * 16_384 * 32 * per_token}


def test_every_rank_is_counted_as_one_of_the_fullest_stage() -> None:
    megatron = {"sequence_parallel": False}
    run = considered(algorithm=GAE, critic=critic_over(1, 4, megatron=megatron, ppo_mini_batch_size=2))
    per_token = 4 * 4096 + 2 * 40 * 128 + 3 * 14_336
    for stage in budget(run, H200, moved=1):
        assert stage.phases[Phase.UPDATE]["critic weights"] == 2 * CRITIC_STAGE
        # 2 x 8 sequences over two ranks are two micro-batches, fewer than the four that the first stage could hold
        assert stage.phases[Phase.UPDATE_CRITIC]["activations"] == 2 * 16_384 * 2 * 8 * per_token
        assert stage.phases[Phase.VALUES]["activations"] == 2 * 16_384 * per_token


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_modes_of_a_critic(dtype: str) -> None:
    """Bytes of weights, gradients, optimizer state, and of what weights are rebuilt from."""
    critic = critic_over(4, 1, megatron=MODES)
    run = considered(changes={"model": {"dtype": dtype}}, algorithm=GAE, critic=critic)
    itemsize, optimizer = (2, 6) if dtype == "bfloat16" else (4, 4)
    weights, gradients, optimizer = itemsize * CRITIC, 4 * CRITIC, optimizer * CRITIC
    masters = {"critic fp32 weights": 4 * CRITIC // 2} if dtype == "bfloat16" else {}
    names = ("critic weights", "critic gradients", "critic optimizer state")
    none = dict.fromkeys(names, 0)
    assert items_of(first(run), "critic") == {
        "reshard": none,
        "generate": none,
        "log_probs": none,
        "values": none | {"critic weights": weights} | masters,
        "update_critic": dict(zip(names, (weights, gradients, optimizer), strict=True)),
        "update": none,
    }
    assert host_bytes(run, 0) == optimizer + (weights if dtype == "float32" else 0)


def test_fp32_weights_are_only_beside_those_that_are_rebuilt() -> None:
    for modes in ({}, {"param_offload": True}, {"optimizer_offload": True}):
        run = considered(algorithm=GAE, critic=critic_over(4, 1, megatron=modes))
        assert "critic fp32 weights" not in first(run).phases[Phase.VALUES]


@pytest.mark.parametrize("offload", [False, True])
def test_a_teacher(offload: bool) -> None:
    """Over PP4, without a path the policy's shape: the last stage has the output layer and the final norm."""
    megatron = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "param_offload": offload}
    teacher = {"model": {"random_init": True}, "use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 3}
    run = considered(algorithm={"adv_estimator": "on_policy_distillation"}, teacher={**teacher, "megatron": megatron})
    stage, weights = first(run), 2 * (CRITIC_STAGE + 4096)
    assert list(stage.phases) == ["reshard", "generate", "log_probs", "teacher", "update"]
    held = {phase: items["teacher weights"] for phase, items in stage.phases.items()}
    assert held == {phase: weights if phase == "teacher" or not offload else 0 for phase in stage.phases}
    tokens = 3 * 4096
    assert stage.phases[Phase.TEACHER]["activations"] == 2 * tokens * (4 * 4096 + 2 * 40 * 128 + 3 * 14_336)
    assert stage.phases[Phase.TEACHER]["logits of a chunk"] == LOGITS_CHUNK_BYTES < 2 * tokens * 128_256
    assert host_bytes(run, 0) == (weights if offload else 0)


@pytest.mark.parametrize("offload", [False, True])
def test_a_reward_model_of_another_architecture(offload: bool) -> None:
    """Instead of the tied output it has a vector, and no logits."""
    megatron = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "param_offload": offload}
    run = considered(reward={"name": "model"}, reward_model={"model": {"path": QWEN}, "megatron": megatron})
    stage, weights = first(run), 2 * QWEN_STAGE
    assert list(stage.phases) == ["reshard", "generate", "reward", "log_probs", "update"]
    held = {phase: items["reward model weights"] for phase, items in stage.phases.items()}
    assert held == {phase: weights if phase == "reward" or not offload else 0 for phase in stage.phases}
    assert stage.phases[Phase.REWARD]["activations"] == 2 * 16_384 * (4 * 1536 + 2 * 14 * 128 + 3 * 8960)
    assert "logits of a chunk" not in stage.phases[Phase.REWARD]
    assert host_bytes(run, 0) == (weights if offload else 0)


NEEDS_REFERENCE = """
from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.estimators.grpo import grpo


@about("a test", needs=Needs(reference=True))
def with_reference(x):
    return grpo(x)
"""


def test_a_reference_that_only_the_algorithm_needs(tmp_path: Any) -> None:
    file = tmp_path / "estimator.py"
    file.write_text(NEEDS_REFERENCE)
    run = considered(algorithm={"adv_estimator": f"{file}:with_reference"})
    assert run.reference and not run.config.needs_reference
    by_keys = budget(job(actor__use_kl_loss=True), H200, moved=1)
    assert budget(run, H200, moved=1) == by_keys
    assert by_keys[0].phases[Phase.REF]["reference weights"] == by_keys[0].phases[Phase.REF]["training weights"]


def test_one_forward_pass_leaves_out_a_phase() -> None:
    one = {"ppo_mini_batch_size": 64}
    both = considered(changes={"actor": {**one, "fused_old_log_probs": False}})
    fused = considered(changes={"actor": one})
    for ours, theirs in zip(budget(fused, H200, moved=1), budget(both, H200, moved=1), strict=True):
        assert list(theirs.phases) == ["reshard", "generate", "log_probs", "update"]
        assert ours.phases == {phase: items for phase, items in theirs.phases.items() if phase != "log_probs"}
    assert seconds_of(fused) == {phase: s for phase, s in seconds_of(both).items() if phase != "log_probs"}


STATE = {
    ("critic", Item.WEIGHTS): "critic weights",
    ("critic", Item.GRADIENTS): "critic gradients",
    ("critic", Item.OPTIMIZER): "critic optimizer state",
    ("reward_model", Item.WEIGHTS): "reward model weights",
    ("teacher", Item.WEIGHTS): "teacher weights",
}


KINDS = {kind.name: kind for kind in (role_kinds.CRITIC, role_kinds.REWARD_MODEL, role_kinds.TEACHER)}


def _absent() -> dict[tuple[str, Item], set[Phase]]:
    """The predicted phases in which an item is not on the GPU, with all memory modes on."""
    (critic,) = considered(algorithm=GAE, critic=critic_over(4, 1, megatron=MODES)).other_models
    teacher = considered(
        algorithm={"adv_estimator": "on_policy_distillation"},
        teacher={"model": {"random_init": True}, "megatron": {"param_offload": True}},
        reward={"name": "model"},
        reward_model={"model": {"path": QWEN}, "megatron": {"param_offload": True}},
    )
    phases = first(replace(teacher, other_models=(critic, *teacher.other_models))).phases
    assert len(phases) == 8
    return {key: {phase for phase, items in phases.items() if items[name] == 0} for key, name in STATE.items()}


def test_absences_follow_the_table_of_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = {*Phase} - {Phase.OFFLOAD, Phase.REF, Phase.VALIDATE, Phase.SAVE}
    table = {(role, item): KINDS[role].absent[item] & predicted for role, item in STATE}
    assert _absent() == table
    for (role, item), phases in table.items():
        for changed in (phases | {Phase.VALUES}, phases - {Phase.GENERATE}):
            with monkeypatch.context() as patch:
                patch.setitem(KINDS[role].absent, item, changed)
                assert _absent() == {**table, (role, item): changed}


def test_what_does_not_fit_names_their_keys() -> None:
    run = considered(
        algorithm=GAE,
        critic=critic_over(4, 1),
        reward={"name": "model"},
        reward_model={"model": {"path": QWEN}, "megatron": {"tensor_model_parallel_size": 1}},
    )
    small = replace(H200, memory=60 * GIB)
    (line,) = what_does_not_fit(run, small, budget(run, small, moved=1))
    weights = 2 * QWEN_STAGE
    assert line.startswith("generate needs ")
    for key, nbytes in {
        "critic.megatron.optimizer_offload": 6 * CRITIC,
        "critic.megatron.grad_offload": 4 * CRITIC,
        "critic.megatron.param_offload": 2 * CRITIC,
        "reward_model.megatron.param_offload": weights,
    }.items():
        assert f"{key}=true frees {nbytes / GIB:.2f} GiB" in line
    moved = considered(
        algorithm=GAE,
        critic=critic_over(4, 1, megatron=MODES),
        reward={"name": "model"},
        reward_model={"model": {"path": QWEN}, "megatron": {"param_offload": True}},
    )
    said = list(what_may_not_fit(moved, small, budget(moved, small, moved=1)))
    assert not any("critic.megatron" in line or "reward_model.megatron" in line for line in said)


def test_a_role_of_the_flow_s_own_has_the_policy_s_stages_and_keys() -> None:
    """Two like the policy, and one that is only read."""
    run = considered()
    trained = [role_kinds.RoleKind(name=name, update=Phase.UPDATE) for name in ("one", "two")]
    beside = replace(run, own_roles=(*trained, role_kinds.RoleKind(name="read", forward=Phase.REF)))
    for plain, stage in zip(budget(run, H200, moved=1), budget(beside, H200, moved=1), strict=True):
        before, held = plain.phases["update"], stage.phases["update"]
        assert held["read weights"] == held["one weights"] == before["training weights"]
        assert held["two optimizer state"] == before["optimizer state"] and "read gradients" not in held
    small = replace(H200, memory=20 * GIB)
    (line,), (more,) = (what_does_not_fit(of, small, budget(of, small, moved=1)) for of in (run, beside))
    frees = {key: [float(re.findall(f"{key}=true frees ([0-9.]+)", of)[0]) for of in (line, more)] for key in MODES}
    for key, models in (("optimizer_offload", 3), ("grad_offload", 3)):
        assert frees[key][1] == pytest.approx(models * frees[key][0], abs=0.02)
    assert frees["param_offload"][1] == pytest.approx(
        frees["param_offload"][0] + 3 * before["training weights"] / GIB, abs=0.02
    )
    roles = run.config.actor_rollout_ref
    actor = roles.actor.model_copy(update={"ppo_max_token_len_per_gpu": 123})
    changed = run.config.model_copy(update={"actor_rollout_ref": roles.model_copy(update={"actor": actor})})
    assert [model.most_tokens for model in replace(beside, config=changed).models_beside] == [123] * 3


def test_the_token_budget_is_found_beside_a_critic_that_is_too_large() -> None:
    """Its passes do not depend on the policy's micro-batches."""
    run = considered(algorithm=GAE, critic=critic_over(4, 1, ppo_max_token_len_per_gpu=10**6))
    small = replace(H200, memory=first(run).total("log_probs") / 0.7)
    stages = budget(run, small, moved=1)
    assert first(run).total("update_critic") > small.memory > 0
    assert largest_token_budget(run, small, stages) == largest_token_budget(considered(), small, stages)


LENGTHS = Lengths(prompt=1024, response=3072)


def seconds_of(considered: Job) -> dict[Phase, float]:
    traffic = {0: Traffic(local=10**9, shared=0, sent=Counter(), received=Counter())}
    return step_seconds(considered, H200, LENGTHS, CacheRoom(bytes=10**11, tokens=10**7, sequences=1000), traffic)


def test_the_time_of_a_step() -> None:
    """512 sequences of 4096 tokens; a critic over PP4 x DP2 whose mini-batches are 16 micro-batches of four."""
    run = considered(
        algorithm=GAE,
        critic=critic_over(1, 4, ppo_epochs=2),
        reward={"name": "model"},
        reward_model={"model": {"path": QWEN}, "megatron": {"tensor_model_parallel_size": 1}},
    )
    seconds, plain = seconds_of(run), seconds_of(considered())
    assert list(seconds) == ["reshard", "generate", "reward", "log_probs", "values", "update_critic", "update"]
    assert {phase: seconds[phase] for phase in plain} == plain
    scalar = LLAMA_3_8B.with_scalar_output()
    assert active_parameter_count(scalar) == parameter_count(LLAMA_3_8B) - 2 * EMBEDDING + 4096
    forward = 512 * forward_flops(scalar, 4096) / (8 * H200.mfu * 989e12)
    output = 2 * 4096 * 2 * 4096  # final norm and score
    stages = with_output(4, forward_flops(scalar, 4096) - output, output)
    assert seconds[Phase.VALUES] == pytest.approx(forward * slowed(stages, 64))
    assert seconds[Phase.UPDATE_CRITIC] == pytest.approx(2 * 3 * forward * slowed(stages, 16))
    qwen = 28 * QWEN_LAYER + 1536 + 1536
    flops = 512 * 4096 * (2 * qwen + 2 * 4096 * 28 * 12 * 128)
    output = 2 * 4096 * 2 * 1536
    stages = with_output(2, flops / 512 - output, output)
    # all 512 sequences in micro-batches of four, on four data-parallel ranks of two stages
    assert seconds[Phase.REWARD] == pytest.approx(flops / (8 * H200.mfu * 989e12) * slowed(stages, 32))


def test_pipelines_that_wait() -> None:
    def said(**sections: Any) -> list[str]:
        return layout_warnings(considered(**sections), LENGTHS, CacheRoom(bytes=1, tokens=1, sequences=10**4))

    assert said(algorithm=GAE, critic=critic_over(1, 4)) == []
    assert said(algorithm=GAE, critic=critic_over(1, 4, ppo_mini_batch_size=4)) == [
        "pipeline stages wait 43% of an update of the critic: 4 micro-batches for 4 stages; raise "
        "critic.ppo_mini_batch_size, or lower critic.ppo_max_token_len_per_gpu or pipeline_model_parallel_size"
    ]
    megatron = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 8}
    reward_model = {"model": {"path": QWEN}, "ppo_max_token_len_per_gpu": 32 * 4096, "megatron": megatron}
    assert said(reward={"name": "model"}, reward_model=reward_model) == [
        "pipeline stages wait 36% of a pass of the reward model: 16 micro-batches for 8 stages; lower "
        "reward_model.ppo_max_token_len_per_gpu or pipeline_model_parallel_size"
    ]
