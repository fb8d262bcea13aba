"""Memory that leaves and comes back: bits, storages, and whole steps of training with every mode on real ranks."""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from selection import quick
from tiny_run import numbers_of, train_in, write_run
from torch import Tensor
from training_cases import (
    ARCH,
    WITH_EXPERTS,
    Case,
    actor_in,
    fixed_batch,
    hybrid_of,
    mini_batch_of,
    policy_loss,
    reference_of,
    update,
)

from megarl.models.architecture import Architecture

MODES = ("param_offload", "grad_offload", "optimizer_offload", "ref")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def _with_modes(case: Case, modes: tuple[str, ...], megatron: dict[str, Any]) -> Case:
    actor = {"megatron": {**megatron, "sequence_parallel": case.sequence_parallel}}
    actor["megatron"] |= {mode: True for mode in modes if mode != "ref"}
    return replace(case, config={"actor": actor, "ref": {"megatron": {"param_offload": "ref" in modes}}})


def _held(*tensors: Tensor) -> int:
    from megarl.parallel.offload import storages

    return sum(storage.nbytes() for storage in storages(tensors))


def _train(case: Case, arch: Architecture, dtype: str) -> dict[str, Any]:
    """Two steps as the trainer makes them: what they computed, and the bytes that were there in each phase."""
    from megarl.algorithms.advantages import compute_advantages
    from megarl.config.algorithm import AlgorithmConfig
    from megarl.phases import Phase
    from megarl.types import Prompt, SamplingParams

    prompts = [Prompt(index=i, token_ids=(3 + i, 5, 7), row={}) for i in range(4)]
    with actor_in(case, arch, dtype, lr=3e-2) as actor:
        reference = reference_of(actor)
        hybrid = hybrid_of(actor, max_model_len=32, reference=reference)
        enter = hybrid.residency.enter
        seen, bytes_in = [], {}

        def look(phase: str) -> None:
            weights = list(actor.parameters().values())
            own = {p.untyped_storage()._cdata for p in weights}
            state = actor.optimizer.tensors()
            masters = [m for m in state["masters"] if m.untyped_storage()._cdata not in own]
            bytes_in[phase] = {
                "param_offload": _held(*weights),
                "grad_offload": _held(*actor._gradient_buffers()),
                "optimizer_offload": _held(*masters, *state["moments"]),
                "ref": _held(*reference.parameters().values()),
            }

        for step in range(2):
            with hybrid.phase():
                look("generation")
                # what was given back is used, so that memory that nobody filled again would show
                sizes, device = (8, 32, 128, 512, 2048, 8192, 32_768, 131_072), actor.groups.world.device
                taken = [torch.full((n,), torch.nan, device=device) for n in sizes for _ in "ab"]
                del taken
                rollouts = hybrid.rollouts(prompts, 2, SamplingParams(max_tokens=6), seed=1, round_=step)
            with hybrid.phase():  # as validation does, with no update in between
                pass
            seen.append([list(rollout.response.ids) for rollout in rollouts])
            batch, mini_batch = fixed_batch().with_(temperature=0.9), mini_batch_of(actor, 4)
            enter(Phase.LOG_PROBS)
            old = actor.log_probs(batch, mini_batch)
            look("log-probs")
            enter(Phase.REF)
            ref = reference.log_probs(batch, mini_batch)
            enter(Phase.UPDATE)
            look("reference done")
            batch = compute_advantages(batch.with_(old_logp=old, ref_logp=ref), AlgorithmConfig(), 0.0)
            loss = policy_loss(entropy_coeff=0.01, kl_coef=0.1)
            seen += [old, ref, update(actor, batch, loss, size=4)]
            look("update")
        enter(Phase.SAVE)
        state = actor.sharded_state(loading=False)["optimizer"]["state"]
        look("save")
        seen += [{name: p.detach().cpu().clone() for name, p in actor.parameters().items()}]
        boxes = [box for part in state.values() for numbered in part.values() for box in numbered.values()]
        seen += [{f"{box.key} {box.global_offset}": box.data.cpu().clone() for box in boxes}]
        return {"seen": seen, "bytes": bytes_in}


def _same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


CASES = {
    "tp2": (Case(tp=2, sequence_parallel=True, gen_tp=2), {}, ARCH),
    "pp2": (Case(pp=2), {}, ARCH),
    "dp2": (Case(dp=2), {}, ARCH),
    "replicated": (Case(dp=2), {"use_distributed_optimizer": False}, ARCH),
    "overlap-experts": (Case(dp=2, pp=2, chunks=2), OVERLAP, WITH_EXPERTS),
}


def _compare(ranks: Ranks, layout: str, dtype: str, choices: list[tuple[str, ...]]) -> None:
    case, megatron, arch = CASES[layout]
    plain = ranks.run(case.world, _train, _with_modes(case, (), megatron), arch, dtype)
    for modes in choices:
        results = ranks.run(case.world, _train, _with_modes(case, modes, megatron), arch, dtype)
        for got, want in zip(results, plain, strict=True):
            assert len(got["seen"]) == len(want["seen"]) and all(want["bytes"]["update"].values())
            for a, b in zip(got["seen"], want["seen"], strict=True):
                assert _same(a, b), modes
            _check_bytes(got["bytes"], want["bytes"], modes)


def _check_bytes(got: dict[str, dict[str, int]], want: dict[str, dict[str, int]], modes: tuple[str, ...]) -> None:
    """What leaves is gone in the phases that do without it, and nothing else is."""
    absent = {
        "generation": set(MODES),
        "log-probs": {"grad_offload"},
        "reference done": {"grad_offload", "ref"},
        "update": {"ref"},
        "save": {"grad_offload"},
    }
    for phase, without in absent.items():
        held = {what: 0 if what in without and what in modes else nbytes for what, nbytes in want[phase].items()}
        assert got[phase] == held, (modes, phase)


@pytest.mark.parametrize("layout", quick(CASES, 0))
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_all_modes_together_give_the_same_bits(ranks: Ranks, layout: str, dtype: str) -> None:
    _compare(ranks, layout, dtype, [MODES])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_mode_gives_the_same_bits(ranks: Ranks, dtype: str) -> None:
    _compare(ranks, "dp2", dtype, [(mode,) for mode in MODES])


def test_bytes_that_cross_slabs_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.parallel import cpu, offload

    cpu.enable_cpu_ranks()
    monkeypatch.setattr(offload, "SLAB", 64)
    tensors = [torch.randn(n) for n in (3, 16, 0, 40, 1)]
    tensors.append(tensors[3][5:9])  # a view: it shares its storage, and is right again with it
    want = [t.clone() for t in tensors]
    memory = offload.OnHost(lambda: tensors)
    for _ in range(2):
        memory.release()
        assert _held(*tensors) == 0
        memory.release()
        memory.prefetch()
        memory.restore()
        memory.restore()
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
    tensors.append(torch.ones(100))  # as moments appear with the first step
    memory.release()
    memory.restore()
    assert torch.equal(tensors[-1], torch.ones(100))


def test_old_slabs_are_given_back_before_new_ones_are_taken() -> None:
    """Moments appear with the first step: pinned memory for the tensors twice may not be there."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megarl.parallel import cpu, offload

    cpu.enable_cpu_ranks()
    taken: list[weakref.ref[Tensor]] = []
    held: list[int] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty.memory_format and made.numel() >= 2**20:
                taken.append(weakref.ref(made.untyped_storage()))
                held.append(sum(storage() is not None for storage in taken))
            return made

    tensors = [torch.ones(2**20)]
    memory = offload.OnHost(lambda: tensors)
    with Watching():
        memory.release()
        memory.restore()
        tensors.append(torch.zeros(2**20))
        memory.release()
        memory.restore()
    assert held == [1, 1] and bool(tensors[0].all())


def test_what_is_constant_is_copied_to_the_host_once() -> None:
    from megarl.parallel import cpu, offload

    cpu.enable_cpu_ranks()
    tensor = torch.ones(3)
    memory = offload.OnHost(lambda: [tensor], constant=True)

    def after_a_release(value: float) -> float:
        tensor.fill_(value)
        memory.release()
        memory.restore()
        return float(tensor[0])

    assert after_a_release(5) == 5
    assert after_a_release(7) == 5
    memory.rewritten()
    assert after_a_release(7) == 7


RUN: dict[str, Any] = {
    "actor_rollout_ref__model__dtype": "bfloat16",
    "actor_rollout_ref__actor__use_kl_loss": True,
    "actor_rollout_ref__rollout__val_kwargs": {"temperature": 1.0},
    "warmup": {"total_training_steps": 2, "train_batch_size": 20},
    "trainer__n_gpus_per_node": 2,
    "trainer__total_training_steps": 4,
    "trainer__save_freq": 2,
    "trainer__test_freq": 1,
    "checkpoint": {"save_contents": ["model", "optimizer", "hf_model"]},
}


@pytest.mark.slow
def test_a_run_its_checkpoints_and_a_resumed_run_are_the_same(tmp_path: Path, ranks: Ranks) -> None:
    """Warm-up, validation, KL to a reference, saving, stopping and resuming; with every mode and with none."""
    seen = {}
    for name in ("plain", "moving"):
        folder = tmp_path / name
        folder.mkdir()
        config = write_run(folder, **RUN)
        modes = [f"actor_rollout_ref.actor.megatron.{mode}=true" for mode in MODES if mode != "ref"]
        modes = [*modes, "actor_rollout_ref.ref.megatron.param_offload=true"] if name == "moving" else []
        if modes:
            train_in(ranks, 2, config, *modes, "trainer.total_training_steps=2")
        train_in(ranks, 2, config, *modes)
        rows = numbers_of(folder)
        checkpoint = folder / "run" / "checkpoints" / "global_step_4"
        weights = (checkpoint / "huggingface" / "model.safetensors").read_bytes()
        state = json.loads((checkpoint / "trainer.json").read_text())
        seen[name] = (rows, weights, state, sorted(os.listdir(checkpoint)))
    assert seen["moving"] == seen["plain"]
    assert [row["step"] for row in seen["plain"][0]] == [-2, -1, 0, 1, 2, 3, 4]
