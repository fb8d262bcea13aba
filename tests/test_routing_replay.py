"""Routing replay: what the engine records, and that training sends every token to the recorded experts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import changed
from ranks import Ranks
from run_cases import run_here
from selection import quick
from test_carry_over import CARRIED, PROMPTS, _config, _go_on
from test_resume import same
from tiny_engines import GROUPS, engine_of
from tiny_families import ARCHITECTURES, CONFIGS
from tiny_run import FINGERPRINT, metrics_of, numbers_of, write_run
from training_cases import ARCH, SOME_WITH_EXPERTS, WITH_EXPERTS, Case, actor_in, hybrid_of, policy_loss, reference_of

from megarl.config import load_config
from megarl.models.architecture import Architecture
from megarl.models.parts.experts import MixtureOfExperts
from megarl.rollout.engine import Request
from megarl.rollout.expert_record import empty_record
from megarl.rollout.native import engine as native
from megarl.rollout.native.scheduler import Admission, Scheduler
from megarl.trainer.admission.checks import check_run
from megarl.trainer.experience.carry_over import CarryOver
from megarl.types import Batch, Completion, Prompt, Rollouts, SamplingParams

REPLAY = "actor_rollout_ref__rollout__enable_rollout_routing_replay"

# ------------------------------------------------------------------------------------------------------- the engine

SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, stop_token_ids=(3,), routed_experts=True)


def _choices(completion: Completion) -> list[Any]:
    assert completion.response.routed is not None
    choices: list[Any] = completion.response.routed.choices.tolist()
    return choices


@pytest.mark.parametrize("family", quick(["glm4_moe", "qwen3_moe", "deepseek_v3_yarn", "gpt_oss"], 0))
def test_each_token_that_the_model_was_fed_is_recorded_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs together, also where requests had to leave and were computed again."""
    arch = ARCHITECTURES[family]
    prompts, recomputed, admit = GROUPS[:15], [], Scheduler.admit
    want = engine_of(arch, records_routing=True).generate(prompts, SAMPLED, seeds=range(15))
    assert arch.moe is not None
    for prompt, completion in zip(prompts, want, strict=True):
        choices = np.array(_choices(completion))
        fed = len(prompt) + len(completion.response) - 1
        assert choices.shape == (fed, len(arch.expert_layers), arch.moe.experts_per_token)
        assert choices.max() < arch.moe.num_experts and len(np.unique(choices)) > 3

    def watched(self: Scheduler) -> Admission:
        admission = admit(self)
        recomputed.extend(r.request.key for r in admission.computed if r.token_ids)
        return admission

    monkeypatch.setattr(Scheduler, "admit", watched)
    monkeypatch.setattr(native, "cache_blocks", lambda *_, **__: 7)
    few = engine_of(arch, records_routing=True, max_num_seqs=7, max_num_batched_tokens=9)
    got = few.generate(prompts, SAMPLED, seeds=range(15))
    assert list(map(_choices, got)) == list(map(_choices, want)) and recomputed
    unasked = few.generate(prompts[:2], replace(SAMPLED, routed_experts=False), seeds=range(2))
    assert [completion.response.routed for completion in unasked] == [None, None]


def test_a_response_that_goes_on_under_other_weights_keeps_its_experts() -> None:
    """Its prompt is computed again, for which the new weights choose others."""
    arch, prompts = ARCHITECTURES["glm4_moe"], GROUPS[::5]
    engine = engine_of(arch, records_routing=True)
    params = replace(SAMPLED, max_tokens=30, stop_token_ids=())
    engine.submit([Request(key=i, prompt=p, params=params, seed=i) for i, p in enumerate(prompts)])
    for _ in range(9):
        engine.step()
    parts = engine.interrupt()
    for name, weight in engine.parameters().items():
        if name.endswith("gate.weight"):
            weight.neg_()
    engine.wake()
    fresh = [Request(key=i, prompt=p, params=params, seed=i) for i, p in enumerate(prompts)]
    continued = [replace(r, response=parts[r.key].response, params=replace(params, max_tokens=20)) for r in fresh]
    ends = []
    for requests in (fresh, continued):
        engine.submit(requests)
        ends.append(_finished(engine))
    for i, prompt in enumerate(prompts):
        before, whole = _choices(parts[i]), _choices(ends[1][i])
        assert len(before) == len(prompt) + 8 and len(whole) == len(prompt) + 19
        assert whole[: len(before)] == before != _choices(ends[0][i])[: len(before)]


def test_what_an_environment_says_is_recorded_with_the_next_turn() -> None:
    """Whether the turn before is still in the cache or is computed again."""
    prompt, turns = GROUPS[0], []
    for keep in (True, False):
        engine = engine_of(ARCHITECTURES["glm4_moe"], records_routing=True)
        first = Request(key=1, prompt=prompt, params=replace(SAMPLED, max_tokens=9), seed=4, keep=keep)
        engine.submit([first])
        said = _finished(engine)[1].response.observed([5, 9, 4])
        assert said.routed is not None and len(said.routed) == len(prompt) + len(said) - 4
        engine.submit([replace(first, params=SAMPLED, response=said, turn_start=len(said))])
        (completion,) = _finished(engine).values()
        assert len(_choices(completion)) == len(prompt) + len(completion.response) - 1 > len(said.routed) + 4
        turns.append(_choices(completion))
        assert turns[-1][: len(said.routed)] == said.routed.choices.tolist()
    assert turns[0] == turns[1]


def _finished(engine: Any) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.busy:
        done |= engine.step()
    return done


# ------------------------------------------------------------------------------------------------------- training


def _case(micro: int = 2, recompute: bool = False, engine: dict[str, Any] | None = None, **layout: Any) -> Case:
    """Several micro-batches, of so many sequences each."""
    packed, sp = layout.get("packed", True), layout.get("tp", 1) > 1
    config = {
        "model": {"dtype": "float32", "use_remove_padding": packed, "enable_gradient_checkpointing": recompute},
        "actor": {
            "megatron": {"sequence_parallel": sp},
            "use_dynamic_bsz": False,
            "ppo_micro_batch_size_per_gpu": micro,
        },
        "rollout": engine or {},
    }
    return Case(sequence_parallel=sp, config=config, **layout)


def _generated(case: Case, arch: Architecture) -> Batch:
    """Responses of different lengths, three to a prompt, with the experts that the engine chose."""
    with actor_in(case, arch) as actor:
        generation = hybrid_of(actor, max_model_len=32)
        prompts = [Prompt(index=i, token_ids=(3 + i, *range(5, 7 + 3 * i)), row={}) for i in range(4)]
        params = SamplingParams(temperature=0.8, max_tokens=9, stop_token_ids=(1, 7), routed_experts=True)
        with generation.phase():
            rollouts = generation.rollouts(prompts, 3, params, seed=1, round_=1)
        return rollouts.to_batch()


def _taught(case: Case, arch: Architecture, batch: Batch, other_router: bool) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of an update that follows a pass of log-probabilities, and these.

    Args:
        other_router: training's chooses as little as it can of what the engine's chose.
    """
    with actor_in(case, arch, lr=1e-2) as actor:
        for name, parameter in actor.parameters().items():
            if other_router and name.endswith("router.weight"):
                parameter.data.neg_()
        plan = actor.plan(batch)
        logp = actor.log_probs(batch, plan)
        advantages = torch.linspace(-1, 2, len(logp)) * batch.response_mask
        trained = batch.with_(old_logp=logp, ref_logp=logp, advantages=advantages)
        metrics = actor.update(trained, plan.mini_batches[0], policy_loss())
        return {name: float(metric.value) for name, metric in metrics.items()}, logp


def _sent(case: Case, arch: Architecture, batch: Batch) -> int:
    """Train on one rank with another router, look where the tokens go, and count the looks."""
    from megatron.core.transformer.moe.router import TopKRouter

    assert batch.routed_experts is not None and batch.routed is not None
    seen: dict[int, list[torch.Tensor]] = {}
    with actor_in(case, arch) as actor:
        routers = [module for module in actor.chunks[0].modules() if isinstance(module, TopKRouter)]
        for i, router in enumerate(routers):
            router.weight.data.neg_()
            router.register_forward_hook(lambda _, __, out, i=i: seen.setdefault(i, []).append(out[1]))
        plan = actor.plan(batch)
        reference, alone = reference_of(actor), batch.with_(routed_experts=None, routed=None)
        assert torch.equal(reference.log_probs(batch, plan), reference.log_probs(alone, plan))
        actor.update(batch.with_(old_logp=actor.log_probs(batch, plan)), plan.mini_batches[0], _ones)
        passes = len(seen[0]) // len(plan.micro_batches)
        for i, maps in seen.items():
            updated = [micro for micro in plan.micro_batches for _ in range(passes - 1)]  # forward, and computed again
            for micro, chosen in zip(plan.micro_batches + updated, maps, strict=True):
                places = torch.cat([torch.arange(*batch.cu_seqlens[s : s + 2].tolist()) for s in micro])
                wanted = torch.zeros_like(chosen).scatter_(1, batch.routed_experts[places, i].long(), True)
                there = batch.routed[places]
                assert torch.equal(chosen[there], wanted[there]) and 0 < (~there).sum() == len(micro)
        return len(seen) * passes


def _ones(x: Any) -> Any:
    from megarl.algorithms.loss import LossOutput

    return LossOutput(loss=x.weights.dot(x.output))


LAYOUTS = [
    _case(tp=2),
    _case(pp=2, recompute=True),
    _case(dp=2, ep=2),
    _case(tp=2, packed=False, micro=3),
    _case(pp=2, chunks=2, recompute=True),
    _case(pp=2, chunks=2, packed=False),
    _case(tp=2, pp=2, ep=2, etp=1, recompute=True),
    _case(tp=2, dp=2, ep=2, etp=1, micro=1),
    _case(cp=2),
    _case(tp=2, cp=2, ep=2, etp=1, packed=False),
]
RECORDS = {"enable_rollout_routing_replay": True, "max_num_seqs": 5}


@pytest.mark.parametrize("arch", quick([SOME_WITH_EXPERTS, WITH_EXPERTS], 0), ids=lambda arch: arch.family)
def test_tokens_go_to_the_recorded_experts_in_every_layout(ranks: Ranks, arch: Architecture) -> None:
    """Numbers of one rank, on which the experts themselves are compared; a dense layer is no part of the record."""
    one = _case()
    batch = ranks.run(1, _generated, _case(engine=RECORDS), arch)[0]
    looks = ranks.run(1, _sent, _case(recompute=True), arch, batch)[0]
    assert looks == 3 * len(arch.expert_layers)  # log-probabilities, the update, and the layer once more
    ((metrics, logp),) = ranks.run(1, _taught, one, arch, batch, True)
    assert metrics["routing_agreement"] < 0.5 and metrics["ratio_max_deviation"] == 0
    ((_, alone),) = ranks.run(1, _taught, one, arch, batch.with_(routed_experts=None, routed=None), True)
    assert (logp - alone).abs().max() > 1e-2
    for case in LAYOUTS[:3]:
        for other, others in ranks.run(case.world, _taught, case, arch, batch, True):
            assert others == pytest.approx(logp, abs=1e-5), case.name
            assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6), case.name
            assert other["ratio_max_deviation"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS[3:], ids=lambda case: case.name)
def test_tokens_go_to_the_recorded_experts_in_further_layouts(ranks: Ranks, case: Case) -> None:
    arch = SOME_WITH_EXPERTS
    batch = ranks.run(1, _generated, _case(engine=RECORDS), arch)[0]
    ((metrics, logp),) = ranks.run(1, _taught, _case(), arch, batch, True)
    for other, others in ranks.run(case.world, _taught, case, arch, batch, True):
        assert others == pytest.approx(logp, abs=1e-5)
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_experts_beyond_256_are_recorded_and_replayed(ranks: Ranks) -> None:
    """Their numbers take two bytes; a record cut to one byte would send tokens to other experts."""
    moe = MixtureOfExperts(num_experts=300, experts_per_token=4, norm_topk_prob=True)
    arch = changed(ARCH, num_layers=2, ffn_hidden_size=8, moe=moe)
    batch = ranks.run(1, _generated, _case(engine=RECORDS), arch)[0]
    experts = batch.routed_experts
    assert experts.dtype == torch.int16 and 256 <= experts.max() < 300 and experts.min() >= 0
    assert ranks.run(1, _sent, _case(), arch, batch)[0] == 2 * len(arch.expert_layers)
    ((metrics, logp),) = ranks.run(1, _taught, _case(), arch, batch, False)
    assert metrics["routing_agreement"] == 1 and metrics["ratio_max_deviation"] == 0
    assert logp == pytest.approx(batch.rollout_logp, abs=1e-5)
    for other, others in ranks.run(2, _taught, _case(dp=2, ep=2), arch, batch, True):
        assert other["routing_agreement"] < 0.5 and other["ratio_max_deviation"] == 0
        assert (others - logp).abs().max() > 1e-3


ENGINES = [
    _case(engine=RECORDS | {"tensor_model_parallel_size": 2}, tp=2, gen_tp=2),
    _case(engine=RECORDS, pp=2, dp=2, gen_tp=1),
]


@pytest.mark.parametrize("case", quick(ENGINES, 1), ids=lambda case: case.name)
def test_training_chooses_as_the_engine_while_the_weights_are_equal(ranks: Ranks, case: Case) -> None:
    """So that records are in the right places: of the layers, of the tokens, of each replica's responses."""
    batch, *others = ranks.run(case.world, _generated, case, SOME_WITH_EXPERTS)
    assert batch.routed_experts is not None and batch.routed is not None
    assert all(torch.equal(batch.routed_experts, other.routed_experts) for other in others)
    assert batch.routed.sum() == len(batch.tokens) - len(batch) and not batch.routed[batch.cu_seqlens[1:] - 1].any()
    for metrics, logp in ranks.run(case.world, _taught, case, SOME_WITH_EXPERTS, batch, False):
        assert metrics["routing_agreement"] == 1 and metrics["ratio_max_deviation"] == 0
        assert logp == pytest.approx(batch.rollout_logp, abs=1e-5)


def _gradients(arch: Architecture) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights of chosen experts and gradients of the router's weight, by Megatron-Core and by a plain reference."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megarl.models.routing_replay import Recorded

    moe = arch.moe
    assert moe is not None
    with actor_in(Case(), arch) as actor:
        router = next(module for module in actor.chunks[0].modules() if isinstance(module, TopKRouter))
        generator = torch.Generator().manual_seed(3)
        x, of_each = torch.randn(20, 1, 32, generator=generator), torch.randn(20, moe.num_experts, generator=generator)
        experts = torch.rand(20, moe.num_experts, generator=generator).argsort(1)[:, : moe.experts_per_token]
        _, alone = router(x)
        experts[15:] = alone[15:].long().topk(moe.experts_per_token).indices  # what is not recorded
        router.router_replay.recorded.take(
            Recorded(experts=experts.to(torch.uint8), there=torch.arange(20) < 15), train=False
        )
        weights, _ = router(x)
        (by_megatron,) = torch.autograd.grad((weights * of_each).sum(), router.weight)
        weight = router.weight.detach().requires_grad_()
        logits = x.squeeze(1) @ weight.T
        scores = logits.softmax(1) if moe.score_function == "softmax" else logits.sigmoid()
        chosen = scores.gather(1, experts)
        if moe.norm_topk_prob:
            chosen = chosen / chosen.sum(1, keepdim=True)
        plain = torch.zeros_like(scores).scatter(1, experts, chosen * moe.scaling_factor)
        (by_hand,) = torch.autograd.grad((plain * of_each).sum(), weight)
        assert not torch.equal(weights > 0, alone)
        return [(weights.detach(), plain.detach()), (by_megatron, by_hand)]


def test_weights_of_recorded_experts_and_their_gradients(ranks: Ranks) -> None:
    """By the rule of each kind of router: groups and the correction bias do not matter once the experts are chosen."""
    plain = replace(WITH_EXPERTS.moe, norm_topk_prob=False)  # type: ignore[type-var]
    for arch in (WITH_EXPERTS, changed(WITH_EXPERTS, moe=plain), SOME_WITH_EXPERTS):
        for got, want in ranks.run(1, _gradients, arch)[0]:
            assert got == pytest.approx(want, abs=1e-5) and want.abs().max() > 0.1


# ------------------------------------------------------------------------------------------------------- whole runs


def _write(folder: Path, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = write_run(folder, **{REPLAY: True, **sections})
    experts = CONFIGS["qwen3_moe"] | {"vocab_size": 18, "max_position_embeddings": 64, "initializer_range": 0.1}
    (folder / "config.json").write_text(json.dumps(experts))
    (folder / "reward.py").write_text(FINGERPRINT)
    return config


def test_a_run_goes_on_with_recorded_experts_to_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    """Responses under way keep theirs in checkpoints, and the weights that chose them are gone."""
    steps = {"trainer__total_training_steps": 4}
    config = _write(tmp_path / "one", **{**CARRIED, **steps})
    reward = f"reward.name={tmp_path / 'one' / 'reward.py'}:score"
    assert ranks.run(1, run_here, str(config), [reward])[0][0] == ""
    one, resumed = (tmp_path / name / "run" / "checkpoints" for name in ("one", "resumed"))
    rows = metrics_of(tmp_path / "one")
    assert len(rows) == 4 and all(0.5 < row["actor/routing_agreement"] < 1 for row in rows)
    with np.load(one / "global_step_3" / "carry_over.npz") as stored:
        assert stored["routed_experts"].shape[1:] == (2, 3) and stored["routed_experts"].dtype == np.uint8
        assert len(stored["routed_experts"]) == stored["routed_tokens"].sum() > stored["length"].sum() > 100
    shutil.copytree(tmp_path / "one" / "run", tmp_path / "resumed" / "run")
    for step in (1, 2, 4):
        shutil.rmtree(resumed / f"global_step_{step}")
    ((ended, said),) = ranks.run(1, run_here, str(config), [reward, f"trainer.default_local_dir={resumed.parent}"])
    assert ended == "" and not (resumed / "global_step_1").exists(), said
    assert numbers_of(tmp_path / "resumed") == numbers_of(tmp_path / "one")
    assert same(resumed / "global_step_4", one / "global_step_4")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, ""),
        ({"routed_experts": np.full((5, 2, 3), 6, np.uint8)}, "do not add up"),
        ({"routed_experts": np.zeros((4, 2, 3), np.uint8)}, "do not add up"),
        ({"routed_experts": np.zeros((5, 2, 3), np.int64)}, "have another type or shape"),
        ({"routed_tokens": np.array([-1])}, "do not add up"),
        ({"routed_tokens": np.array([99]), "routed_experts": np.zeros((99, 2, 3), np.uint8)}, "have fewer tokens"),
    ],
)
def test_recorded_experts_of_responses_under_way_are_read_with_care(arrays: dict[str, Any], said: str) -> None:
    unrouted = empty_record(ARCHITECTURES["qwen3_moe"])
    assert unrouted is not None
    first, second = (CarryOver(_config(4, 2, 4, 1), PROMPTS, unrouted=unrouted) for _ in range(2))
    first.next_batch(lambda: [0, 1], lambda asked, quota: Rollouts(items=tuple(asked)), 1)
    rollout, choices = first._under_way[0], np.arange(30, dtype=np.uint8).reshape(5, 2, 3) % 6
    response = rollout.response.drawn([1, 2, 3], [-1.0] * 3)
    first._under_way = [replace(rollout, response=replace(response, routed=unrouted.followed_by(choices)))]
    if not said:
        _go_on(second, first)
        assert second._under_way == first._under_way
        return
    second.load_state(first.state())
    with pytest.raises(ValueError, match=rf"responses under way {said}[^\n]*$"):
        second.load_arrays([{**first.arrays(), **arrays}])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"actor_rollout_ref__rollout__name": "vllm"}, "rollout.name = vllm does not record the experts of tokens"),
        (
            {
                "actor_rollout_ref__actor__megatron": {
                    "override_transformer_config": {"moe_router_fusion": True},
                }
            },
            "the fused router of override_transformer_config.moe_router_fusion takes no choices",
        ),
        ({}, "the model has no experts whose choice could be replayed"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    config = (_write if sections else write_run)(tmp_path, **{REPLAY: True, **sections})
    with pytest.raises(ValueError) as refused:
        check_run(load_config(str(config)))
    assert str(refused.value).startswith(f"rollout.enable_rollout_routing_replay: {said}")
