"""Context parallelism: what each rank has of a micro-batch, sequences of any length, whole runs, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from architectures import changed
from ranks import Ranks
from run_cases import run_here
from selection import quick
from tiny_run import FINGERPRINT, metrics_of, numbers_of, write_run
from training_cases import ARCH, LATENT, LINEAR, Case, actor_in, fixed_batch

from megarl.config import load_config
from megarl.config.policy import MegatronConfig
from megarl.models.architecture import Architecture
from megarl.parallel.context import ALL_GATHER, ALL_TO_ALL, CONTEXT_KINDS
from megarl.parallel.layout import TrainLayout
from megarl.trainer.admission.checks import check_layouts
from megarl.types import batch_of


def _parts(packed: bool, gathers: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What this rank has of a micro-batch, and what one rank alone would have."""
    from megarl.models.microbatch import SequenceShard, make_micro_batch

    cpu = torch.device("cpu")
    made = []
    for shard in (SequenceShard(cp=dist.group.WORLD, context=ALL_GATHER if gathers else ALL_TO_ALL), SequenceShard()):
        micro = make_micro_batch(
            fixed_batch(),
            [3, 1, 4],
            packed=packed,
            shard=shard,
            device=cpu,
            columns={"place": torch.arange(len(fixed_batch().tokens)).float()},
        )
        made.append(
            dict(
                tokens=micro.tokens,
                labels=micro.labels,
                index=micro.index,
                places=micro.at_own_tokens()["place"],
                sequences=micro.sequences,
                cells=micro.cells,
            )
        )
    return made[0], made[1]


@pytest.mark.parametrize(
    ("packed", "gathers"), quick([(True, False), (False, False), (True, True)], 1, 2), ids=["a2a", "padded", "gathered"]
)
def test_the_parts_of_the_ranks_are_the_micro_batch(ranks: Ranks, packed: bool, gathers: bool) -> None:
    answers = ranks.run(4, _parts, packed, gathers)
    parts, whole = [part for part, _ in answers], answers[0][1]
    assert {part["tokens"].shape for part in parts} == {parts[0]["tokens"].shape}
    tokens = torch.cat([part["tokens"] for part in parts], dim=1)
    if gathers:  # of eight parts each rank has one from the begin and one from the end
        eighths = tokens.unflatten(1, (8, -1))
        tokens = eighths[:, [0, 2, 4, 6, 7, 5, 3, 1]].flatten(1)
    width = whole["tokens"].shape[1]
    assert 0 <= tokens.shape[1] - width < (8 if gathers else 4) and torch.equal(tokens[:, :width], whole["tokens"])
    assert not tokens[:, width:].any()  # padding
    for name in ("labels", "index", "places", "sequences"):
        every = torch.cat([part[name] for part in parts])
        assert torch.equal(every.sort().values, whole[name].sort().values), name
    assert all(torch.equal(part["places"].long(), part["index"]) for part in parts)
    cells = torch.cat([part["cells"] for part in parts])
    assert torch.equal(cells[cells >= 0].sort().values, whole["cells"][whole["cells"] >= 0].sort().values)


def _pairs(lengths: list[int]) -> int:
    """How many pairs of a query and a key a layer's attention of this rank computes."""
    from megarl.models.microbatch import SequenceShard, make_micro_batch

    batch = batch_of([[1]] * len(lengths), [[2] * (n - 1) for n in lengths], list(range(len(lengths))))
    shard = SequenceShard(cp=dist.group.WORLD, context=ALL_GATHER)
    which = range(len(lengths))
    packed = make_micro_batch(batch, which, packed=True, shard=shard, device=torch.device("cpu")).packed
    assert packed is not None
    queries, keys = packed.cu_seqlens_q.diff().long(), packed.cu_seqlens_kv.diff().long()
    return int((queries * keys - queries * (queries - 1) // 2).sum())


@pytest.mark.parametrize(("lengths", "most"), [([4096], 1.0), ([2048, 512, 1024, 512], 1.6)], ids=["one", "four"])
def test_gathered_keys_give_ranks_as_much_to_attend(ranks: Ranks, lengths: list[int], most: float) -> None:
    """Exactly, of one sequence; and together all pairs, each once."""
    pairs = ranks.run(4, _pairs, lengths)
    assert sum(pairs) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(pairs) <= most * sum(pairs) / 4


def _of_a_long_sequence(case: Case, length: int) -> torch.Tensor:
    arch = changed(ARCH, num_layers=2, max_position_embeddings=length)
    tokens = torch.randint(61, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    with actor_in(case, arch) as actor:
        batch = batch_of([tokens[:5]], [tokens[5:]], [0])
        logp: torch.Tensor = actor.log_probs(batch, actor.plan(batch))
        return logp


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True], ids=["a2a", "all_gather"])
def test_log_probs_of_a_sequence_of_32k_tokens(ranks: Ranks, gathers: bool) -> None:
    length = 2**15
    keys = {"actor": {"ppo_max_token_len_per_gpu": length}}
    (want,) = ranks.run(1, _of_a_long_sequence, Case(config=keys), length)
    for cp in (2, 4):
        keys = {"actor": {"ppo_max_token_len_per_gpu": length // cp}}
        for got in ranks.run(cp, _of_a_long_sequence, Case(cp=cp, gathers=gathers, config=keys), length):
            assert want.std() > 0.01
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


SECTIONS: dict[str, Any] = {
    "trainer__logger": ["jsonl"],
    "trainer__test_freq": 0,
    "trainer__val_before_train": False,
    "trainer__save_freq": 1,
    "algorithm__adv_estimator": "gae",
    "algorithm__lam": 0.95,
    "critic__optim__lr": 1e-2,
    "trainer__total_training_steps": 3,
}
OVER_FOUR: dict[str, Any] = {
    "actor_rollout_ref__actor__megatron": {"context_parallel_size": 2},
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 64,
    "critic__megatron": {"context_parallel_size": 4, "cp_comm_type": "all_gather"},
    "critic__ppo_max_token_len_per_gpu": 32,
    "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
    "trainer__n_gpus_per_node": 4,
}


def _run(ranks: Ranks, folder: Path, world: int, **sections: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(FINGERPRINT)
    sections = {**SECTIONS, "reward__name": f"{folder / 'reward.py'}:score", **sections}
    ended, said = ranks.run(world, run_here, str(write_run(folder, **sections)))[0]
    assert ended == "", said
    return metrics_of(folder)


@pytest.mark.slow
def test_a_run_and_the_rest_of_it(ranks: Ranks, tmp_path: Path) -> None:
    """As on one rank, with a critic over twice as many ranks as the policy; and a run goes on in this layout."""
    alone, over = _run(ranks, tmp_path / "alone", 1), _run(ranks, tmp_path / "over", 4, **OVER_FOUR)
    for ours, theirs in zip(over, alone, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["rollout/logp_gap_max"] < 1e-5
        for name in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    _run(ranks, tmp_path / "half", 4, **OVER_FOUR | {"trainer__total_training_steps": 1})
    _run(ranks, tmp_path / "half", 4, **OVER_FOUR)
    assert numbers_of(tmp_path / "half")[1:] == numbers_of(tmp_path / "over")[1:]


@pytest.mark.parametrize(
    ("arch", "layout", "said"),
    [
        (ARCH, dict(cp=8), "splits the 4 query heads and 2 KV heads of a tensor-parallel rank over these ranks"),
        (ARCH, dict(tp=2, cp=4), "splits the 2 query heads and 1 KV heads"),
        (LATENT, dict(cp=8), "context_parallel_size = 8: attention splits"),
        (
            LINEAR,
            dict(cp=2),
            "context_parallel_size must be 1: linear attention goes through a sequence token by token",
        ),
    ],
)
def test_what_does_not_divide_is_refused(arch: Architecture, layout: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        arch.check_training(TrainLayout(ranks=range(8), **layout), sequence_parallel=True)


def test_gathered_keys_split_no_heads(tmp_path: Path) -> None:
    """They want several ranks, and packed rows."""
    ARCH.check_training(TrainLayout(ranks=range(8), cp=8, context=ALL_GATHER), sequence_parallel=True)
    config, key = str(write_run(tmp_path)), "actor_rollout_ref.actor.megatron.cp_comm_type=all_gather"
    with pytest.raises(ValueError, match=r"actor.megatron.cp_comm_type needs context_parallel_size of 2 or more"):
        check_layouts(load_config(config, [key]))
    over_two = [key, "actor_rollout_ref.actor.megatron.context_parallel_size=2", "trainer.n_gpus_per_node=2"]
    check_layouts(load_config(config, over_two))
    with pytest.raises(ValueError, match=r"cp_comm_type = all_gather: padded sequences are not cut"):
        check_layouts(load_config(config, [*over_two, "actor_rollout_ref.model.use_remove_padding=false"]))


def test_losses_of_routers_want_experts_that_are_trained(tmp_path: Path) -> None:
    config = str(write_run(tmp_path))
    for role, key in (("actor_rollout_ref.actor", "moe_aux_loss_coeff"), ("critic", "moe_z_loss_coeff")):
        said = rf"{role.rpartition('.')[2]}.megatron.{key}: no experts are trained there; leave it out"
        with pytest.raises(ValueError, match=said):
            check_layouts(load_config(config, ["algorithm.adv_estimator=gae", f"{role}.megatron.{key}=0.1"]))


def test_a_layout_names_its_ranks_of_a_sequence() -> None:
    layout = TrainLayout(ranks=range(8), tp=2, cp=2)
    assert str(layout) == "TP2 x PP1 x CP2 x DP2" and str(replace(layout, cp=1)) == "TP2 x PP1 x DP4"


def test_every_way_of_sharing_sequences_is_described_and_done() -> None:
    from megarl.models.exchange import EXCHANGES

    names = get_args(MegatronConfig.model_fields["cp_comm_type"].annotation)
    assert set(names) == set(CONTEXT_KINDS) == set(EXCHANGES) and MegatronConfig().cp_comm_type == ALL_TO_ALL.name
