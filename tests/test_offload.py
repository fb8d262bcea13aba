"""Memory that leaves and comes back: bits, storages, and whole steps of training with every mode on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from training_cases import ARCH, SEQUENCES, WITH_EXPERTS, Case, actor_in, fixed_batch, hybrid_of, micro_batches_of

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
    from megarl.algorithms.aggregation import token_weights
    from megarl.algorithms.policy_loss import PolicyLoss
    from megarl.config.schema import Algorithm, Optim
    from megarl.roles.optimizer_state import master_weights, moments
    from megarl.roles.reference import Reference
    from megarl.types import Prompt, SamplingParams

    prompts = [Prompt(index=i, token_ids=(3 + i, 5, 7), row={}) for i in range(4)]
    with actor_in(case, arch, dtype) as actor:
        hybrid = hybrid_of(actor, max_model_len=32)
        actor.start_optimizer(Optim(lr=3e-2), 4)
        reference = Reference(actor)
        hybrid.leaving.append(reference.weights)
        seen, bytes_in = [], {}

        def look(phase: str) -> None:
            weights = list(actor.parameters().values())
            own = {p.untyped_storage()._cdata for p in weights}
            masters = [m for m in master_weights(actor.optimizer) if m.untyped_storage()._cdata not in own]
            bytes_in[phase] = {
                "param_offload": _held(*weights),
                "grad_offload": _held(*actor._gradient_buffers()),
                "optimizer_offload": _held(*masters, *moments(actor.optimizer)),
                "ref": _held(*reference.parameters().values()),
            }

        for step in range(2):
            with hybrid.generation() as engine:
                look("generation")
                rollouts = engine.generate(prompts, 2, SamplingParams(max_tokens=6), seed=1, round_=step)
            with hybrid.generation():  # as validation does, with no update in between
                pass
            seen.append([list(c.token_ids) for c in rollouts.completions])
            batch, micro_batches = fixed_batch(), micro_batches_of(actor)
            reference.weights.prefetch()
            old = actor.log_probs(batch, micro_batches, 0.9)
            look("log-probs")
            ref = reference.log_probs(batch, micro_batches, 0.9)
            look("reference done")
            batch = compute_advantages(batch.with_(old_logp=old, ref_logp=ref), Algorithm(), 0.0)
            weights = token_weights(batch, range(SEQUENCES), "token-mean", 12)
            loss = PolicyLoss(clip_low=0.2, clip_high=0.28, entropy_coeff=0.01, kl_coef=0.1)
            seen += [old, ref, actor.update(batch, micro_batches, weights, loss, temperature=0.9)]
            look("update")
        state = actor.sharded_training_state(loading=False)["optimizer"]["state"]
        look("save")
        seen += [{name: p.detach().clone() for name, p in actor.parameters().items()}]
        seen += [{f"{i}.{name}": part[name].data.clone() for i, part in state.items() for name in part}]
        return {"seen": seen, "bytes": bytes_in}


def _same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


CASES = [
    (Case(tp=2, sequence_parallel=True, gen_tp=2), {}, ARCH),
    (Case(pp=2), {}, ARCH),
    (Case(dp=2), {}, ARCH),
    (Case(dp=2), {"use_distributed_optimizer": False}, ARCH),
    (Case(dp=2), OVERLAP, ARCH),
    (Case(dp=2, pp=2, chunks=2), OVERLAP, WITH_EXPERTS),
]


@pytest.mark.parametrize(("case", "megatron", "arch"), CASES, ids=lambda x: getattr(x, "name", None) or "")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_mode_gives_the_same_bits(
    ranks: Ranks, case: Case, megatron: dict[str, Any], arch: Architecture, dtype: str
) -> None:
    plain = ranks.run(case.world, _train, _with_modes(case, (), megatron), arch, dtype)
    for modes in [*[(mode,) for mode in MODES], MODES]:
        for got, want in zip(
            ranks.run(case.world, _train, _with_modes(case, modes, megatron), arch, dtype), plain, strict=True
        ):
            assert len(got["seen"]) == len(want["seen"])
            for a, b in zip(got["seen"], want["seen"], strict=True):
                assert _same(a, b), modes
            full = want["bytes"]["update"]
            assert all(full.values()) or dtype == "float32"
            assert got["bytes"]["generation"] == {k: 0 if k in modes else n for k, n in _generating(want).items()}
            gone = {"grad_offload"} & set(modes)
            for phase, absent in (
                ("log-probs", gone),
                ("reference done", gone | ({"ref"} & set(modes))),
                ("update", {"ref"} & set(modes)),
                ("save", gone | ({"ref"} & set(modes))),
            ):
                assert got["bytes"][phase] == {k: 0 if k in absent else n for k, n in full.items()}, phase


def _generating(seen: dict[str, Any]) -> dict[str, int]:
    """Bytes that are there in generation when nothing leaves."""
    return dict(seen["bytes"]["generation"])
