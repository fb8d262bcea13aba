"""The native engine on the actor's own parameters: which, what is left to copy, what it generates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import changed
from full_weights import random_weights
from ranks import Ranks
from selection import quick
from shared_cases import Seen, generate_with_shared_weights, move_a_parameter
from tiny_engines import engine_of
from tiny_families import ARCHITECTURES
from training_cases import Case

from megarl.models.architecture import Architecture

TIED = replace(ARCHITECTURES["qwen2"], vocab_size=128)
UNTIED = replace(ARCHITECTURES["llama"], vocab_size=128)
MOE = replace(ARCHITECTURES["qwen3_moe"], vocab_size=128)
QKV = ("self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias")
EXPERTS = ("mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight")


def _case(**layout: int) -> Case:
    rollout = {"tensor_model_parallel_size": layout["gen_tp"], "max_num_seqs": 8}
    config = {"rollout": rollout, "reshard": {"verify": True, "bucket_bytes": 1 << 16}}
    return Case(sequence_parallel=layout.get("tp", 1) > 1, config=config, **layout)


def _both(ranks: Ranks, case: Case, arch: Architecture) -> list[Seen]:
    """With sharing; every rank generates exactly what it does without."""
    shared = ranks.run(case.world, generate_with_shared_weights, case, arch, "float32", True)
    copied = ranks.run(case.world, generate_with_shared_weights, case, arch, "float32", False)
    for a, b in zip(shared, copied, strict=True):
        assert a.completions == b.completions
        assert a.completions[0] != a.completions[1] != a.completions[2]
        assert a.gap < 1e-5
        assert a.own < b.own
        assert a.received == b.received
        assert b.copied - a.copied == b.own_bytes - a.own_bytes  # no padding here: what is shared would be copied
    return shared


def _names(leaves: tuple[str, ...], layers: range) -> set[str]:
    return {f"model.layers.{i}.{leaf}" for i in layers for leaf in leaves}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("arch", "leaves"), [(TIED, QKV), (UNTIED, QKV[:1]), (MOE, QKV[:1] + EXPERTS)], ids=["tied", "untied", "moe"]
)
def test_identical_layouts(ranks: Ranks, arch: Architecture, leaves: tuple[str, ...], tp: int) -> None:
    """With two ranks each has one of the two KV heads, so that even queries, keys and values are in order."""
    for seen in _both(ranks, _case(tp=tp, gen_tp=tp), arch):
        assert seen.own == _names(tuple(leaf for leaf in leaves if tp == 1 or leaf not in QKV), range(arch.num_layers))
        assert seen.copied == seen.own_bytes
        assert seen.received == 0


def test_several_kv_heads_on_a_rank_are_copied(ranks: Ranks) -> None:
    arch = changed(UNTIED, num_key_value_heads=4)
    qkv = 4 * (2 + 2 * 2) * arch.layer(0).attention.head_dim * arch.hidden_size
    for seen in _both(ranks, _case(tp=2, dp=2, gen_tp=2), arch):
        assert seen.own == _names(QKV[:1], range(2))
        assert seen.copied == seen.own_bytes == 2 * qkv


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("arch", quick([TIED, UNTIED], 0), ids=["tied", "untied"])
def test_a_rank_shares_its_own_stage(ranks: Ranks, arch: Architecture, tp: int) -> None:
    for rank, seen in enumerate(_both(ranks, _case(tp=tp, pp=2, gen_tp=tp), arch)):
        stage = rank // tp
        elsewhere = {name for name in seen.own if not (tp == 1 and name.endswith(QKV))}
        assert not any(f"layers.{stage}." in name for name in elsewhere)
        assert {name for name in elsewhere if "layers." not in name} == {
            (0, True): {"model.norm.weight"},
            (0, False): {"model.norm.weight", "lm_head.weight"},
            (1, True): set(),
            (1, False): {"model.embed_tokens.weight"},
        }[stage, arch.tied]
        assert sum(f"layers.{1 - stage}." in name for name in elsewhere) >= 4
        assert seen.received > 0


def test_part_of_a_larger_parameter(ranks: Ranks) -> None:
    """TP1 to TP2: half of the embeddings' rows, a KV group of the queries, keys and values, and the norms."""
    for seen in _both(ranks, _case(dp=2, gen_tp=2), UNTIED):
        leaves = ("self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight")
        assert seen.own == _names(leaves, range(2))


def test_vocabulary_padding_that_the_actor_has_not_is_not_shared(ranks: Ranks) -> None:
    """61 rows: the second of two engine ranks has 31, one of which is padding, and the actor's 61 end before it."""
    case = _case(dp=2, gen_tp=2)
    first, second = ranks.run(2, generate_with_shared_weights, case, ARCHITECTURES["llama"], "float32", True)
    embeddings = {"model.embed_tokens.weight", "lm_head.weight"}
    assert second.own - first.own == embeddings and not first.own & embeddings


def test_a_parameter_that_moved_is_an_error(ranks: Ranks) -> None:
    (said,) = ranks.run(1, move_a_parameter, _case(gen_tp=1), UNTIED)
    assert said.startswith("model.norm.weight is no longer where 0.decoder.final_layernorm.weight is")


def test_adopted_tensors_are_neither_allocated_nor_released() -> None:
    arch = ARCHITECTURES["qwen3"]
    given = {"model.norm.weight": torch.full((arch.hidden_size,), 0.5), "lm_head.weight": torch.randn(61, 32)}
    engine = engine_of(arch, share=lambda shapes: {name: given[name] for name in shapes if name in given})
    held = engine.parameters()
    assert all(held[name] is tensor for name, tensor in given.items())
    for _ in range(2):
        engine.sleep(release_weights=True)
        sizes = {name: p.untyped_storage().nbytes() for name, p in held.items()}
        assert all(size == (held[name].nbytes if name in given else 0) for name, size in sizes.items())
        engine.wake(weights_only=True)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in held.values())
    # `engine_of` fills all parameters; these have kept it
    assert torch.equal(given["lm_head.weight"], random_weights(arch, seed=1)["lm_head.weight"])
