"""Where a run goes on: from the newest whole checkpoint of the same run, and what it says of all others."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kill_and_resume import tensors_of
from ranks import Ranks
from run_cases import run_here
from tiny_families import CONFIGS, EXPERTS
from tiny_run import FINGERPRINT, metrics_of, numbers_of, write_run

from megarl.checkpoint.manifest import files_of, record_files, write_manifest
from megarl.config import load_config
from megarl.trainer.admission.checks import check_run
from megarl.trainer.build import prompt_sampler
from megarl.trainer.resuming.resume import expected_start, finished

RUN: dict[str, Any] = {
    "trainer__val_before_train": False,
    "trainer__test_freq": 0,
    "trainer__logger": ["console", "jsonl"],
    "trainer__save_freq": 1,
    "trainer__total_training_steps": 3,
    "warmup": {"total_training_steps": 2, "train_batch_size": 20},
}


@pytest.fixture(scope="module")
def first_run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two warm-up steps and three RL steps, each of them saved."""
    folder = tmp_path_factory.mktemp("first")
    assert ranks.run(1, run_here, str(write_run(folder, **RUN)))[0][0] == ""
    return folder


@pytest.fixture
def folder(first_run: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed, and its configuration."""
    shutil.copytree(first_run, tmp_path, dirs_exist_ok=True)
    write_run(tmp_path, **RUN)
    return tmp_path


def checkpoint(folder: Path, name: str) -> Path:
    return folder / "run" / "checkpoints" / name


def refusal(folder: Path, *overrides: str) -> str:
    """What the check before any group says."""
    with pytest.raises(ValueError) as refused:
        check_run(load_config(str(folder / "run.yaml"), overrides))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def same(one: Path, other: Path) -> bool:
    a, b = tensors_of(str(one)), tensors_of(str(other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["warmup_step_1", "warmup_step_2", "global_step_1"])
def test_a_run_that_ended_anywhere_ends_with_the_same_bits(
    ranks: Ranks, first_run: Path, folder: Path, name: str
) -> None:
    kept = [checkpoint(folder, name)]
    for other in checkpoint(folder, "").iterdir():
        if other not in kept:
            shutil.rmtree(other)
    ((ended, said),) = ranks.run(1, run_here, str(folder / "run.yaml"))
    assert ended == "" and f"resuming from {kept[0]}" in said
    assert same(checkpoint(folder, "global_step_3"), checkpoint(first_run, "global_step_3"))
    assert numbers_of(folder) == numbers_of(first_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text"),
        *("gpt_oss", "gemma3_text", "olmo2", "minimax_m2"),
    ],
)
def test_a_run_of_any_family_goes_on_to_the_same_bits(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """Over two ranks, which have experts of their own where there are any."""
    (tmp_path / "reward.py").write_text(FINGERPRINT)
    keys = RUN | {"trainer__total_training_steps": 2, "reward__name": f"{tmp_path / 'reward.py'}:score"}
    del keys["warmup"]
    if family in EXPERTS:
        keys["actor_rollout_ref__actor__megatron"] = {"expert_model_parallel_size": 2}
    config, whole = write_run(tmp_path, **keys), tmp_path / "whole"
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family] | {"vocab_size": 18, "initializer_range": 0.1}))
    ended, said = ranks.run(2, run_here, str(config))[0]
    assert ended == "", said
    history = numbers_of(tmp_path)
    assert all(row["actor/grad_norm"] > 0 for row in history) and len(history) == 2
    checkpoint(tmp_path, "global_step_2").rename(whole)
    assert not same(whole, checkpoint(tmp_path, "global_step_1"))
    ended, said = ranks.run(2, run_here, str(config))[0]
    assert ended == "" and "resuming from" in said
    assert same(whole, checkpoint(tmp_path, "global_step_2")) and numbers_of(tmp_path) == history


CHANGES = [
    (["data.seed=2"], "seed", "data.seed 1 -> 2"),
    (["data.shuffle=false"], "seed", "data.shuffle true -> false"),
    (["actor_rollout_ref.rollout.n=8"], "batch", "rollout.n 4 -> 8"),
    (["data.train_batch_size=8"], "batch", "data.train_batch_size 16 -> 8"),
    (["actor_rollout_ref.actor.clip_ratio=0.3"], "algorithm", "actor.clip_low 0.2 -> 0.3, actor.clip_high 0.2 -> 0.3"),
    (["algorithm.norm_adv_by_std_in_grpo=false"], "algorithm", "algorithm.norm_adv_by_std_in_grpo true -> false"),
    (["actor_rollout_ref.model.dtype=bfloat16"], "model", 'dtype "float32" -> "bfloat16"'),
    (["algorithm.use_kl_in_reward=true"], "roles", "reference false -> true"),
]


@pytest.mark.parametrize(("overrides", "part", "how"), CHANGES, ids=[part for _, part, _ in CHANGES])
def test_another_run_is_refused_by_name(first_run: Path, overrides: list[str], part: str, how: str) -> None:
    more = ["trainer.total_training_steps=5", *overrides]
    said = refusal(first_run, *more)
    assert f"global_step_3 is of a run with another {part} ({how})" in said or f"another {part} ({how})" in said
    allow = re.search(r"set trainer\.resume_allow=\[(.*)\]$", said)
    assert allow is not None and part in allow[1].split(",")
    inputs = check_run(load_config(str(first_run / "run.yaml"), [*more, f"trainer.resume_allow=[{allow[1]}]"]))
    start = expected_start(inputs)
    assert start.folder is not None and start.differs == set(allow[1].split(","))
    prompt_sampler(inputs).load_state(start.state["sampler"])  # what that allows is enough for the order of the prompts


def test_another_size_of_a_draw_is_refused_by_its_key(first_run: Path) -> None:
    draws = ["algorithm.filter_groups.enable=true", "data.gen_batch_size=32", "trainer.total_training_steps=5"]
    assert "another batch (data.gen_batch_size null -> 32)" in refusal(first_run, *draws)
    inputs = check_run(load_config(str(first_run / "run.yaml"), [*draws, "trainer.resume_allow=[batch,algorithm]"]))
    state, sampler = expected_start(inputs).state, prompt_sampler(inputs)
    sampler.load_state(state["sampler"])
    strict = check_run(load_config(str(first_run / "run.yaml"), [*draws, f"trainer.default_local_dir={first_run}/no"]))
    with pytest.raises(ValueError, match=r"data.gen_batch_size = 16, now it is 32"):
        prompt_sampler(strict).load_state(state["sampler"])


def test_a_run_goes_on_with_other_settings_of_a_warm_up_that_is_over(ranks: Ranks, folder: Path) -> None:
    more = ["warmup.train_batch_size=10", "trainer.total_training_steps=4"]
    ended, said = ranks.run(1, run_here, str(folder / "run.yaml"), more)[0]
    assert ended == "" and "resuming from" in said and len(metrics_of(folder)) == 6


@pytest.mark.slow
def test_a_run_goes_on_with_whole_experts_in_the_engine(ranks: Ranks, tmp_path: Path) -> None:
    """Sums are in another order, and what is drawn is the same."""
    keys = RUN | {
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 2,
        "reward__name": f"{tmp_path / 'reward.py'}:score",
    }
    (tmp_path / "reward.py").write_text(FINGERPRINT)
    config = write_run(tmp_path, **keys)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    model = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen3MoeForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(model))
    whole = "actor_rollout_ref.rollout.enable_expert_parallel=true"
    other = f"trainer.default_local_dir={tmp_path}/other/run"
    assert ranks.run(2, run_here, str(config))[0][0] == ""
    ended, said = ranks.run(2, run_here, str(config), [other, whole, "trainer.total_training_steps=1"])[0]
    assert ended == "" and "generation TP2 x 1 replicas, experts EP2" in said
    ended, said = ranks.run(2, run_here, str(config), [other])[0]
    assert ended == "" and "resuming from" in said
    histories = [metrics_of(folder) for folder in (tmp_path, tmp_path / "other")]
    rewards = [[row["reward/mean"] for row in rows if "reward/mean" in row] for rows in histories]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2


def test_other_files_are_refused_by_name(folder: Path) -> None:
    """Equal shapes all the same: heads cut otherwise, another rotary base, rows in another order, another tokenizer."""
    steps = "trainer.total_training_steps=5"
    config = json.loads((folder / "config.json").read_text())
    for key, value, said in (
        ("num_attention_heads", 8, "num_attention_heads 4 -> 8, num_key_value_heads 2 -> 4, head_dim 8 -> 4"),
        ("rope_theta", 5e5, "rope_theta 10000.0 -> 500000.0"),
        ("rms_norm_eps", 1e-5, "norm_eps 1e-06 -> 1e-05"),
    ):
        changed = config | {key: value} | ({"num_key_value_heads": 4} if key == "num_attention_heads" else {})
        (folder / "config.json").write_text(json.dumps(changed))
        assert f"another model ({said})" in refusal(folder, steps)
    (folder / "config.json").write_text(json.dumps(config))
    rows = (folder / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    assert "another data (other contents)" in refusal(folder, steps)
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text("def f(response, row):\n    return 0.5\n")
    name = f"{folder}/reward.py:f"
    said = refusal(folder, steps, f"reward.name={name}")
    assert f'another reward (reward.name "exact_match" -> "{name}", other file)' in said
    with open(folder / "tokenizer.model", "ab") as f:
        f.write(b"\xc2\x3e\x01a")  # a field that SentencePiece passes over
    assert "another tokenizer (other files)" in refusal(folder, steps)


def test_after_the_warm_up_its_settings_are_free(first_run: Path, folder: Path) -> None:
    check_run(load_config(str(first_run / "run.yaml"), ["warmup.optim.lr=1e-4", "trainer.total_training_steps=5"]))
    for name in ("global_step_1", "global_step_2", "global_step_3"):
        shutil.rmtree(checkpoint(folder, name))
    assert "another warmup (warmup.optim.lr 1e-05 -> 0.0001)" in refusal(folder, "warmup.optim.lr=1e-4")


def test_a_finished_run_says_so(ranks: Ranks, first_run: Path) -> None:
    config = str(first_run / "run.yaml")
    line = (
        f"nothing to do: {checkpoint(first_run, 'global_step_3')} has step 3, and the run ends with step 3; raise "
        "trainer.total_training_steps or trainer.total_epochs to train on"
    )
    inputs = check_run(load_config(config))
    assert finished(inputs, expected_start(inputs)) == line
    before = (first_run / "run" / "metrics.jsonl").read_bytes()
    assert ranks.run(1, run_here, config)[0] == ("", f"megarl: {line}\n")
    assert (first_run / "run" / "metrics.jsonl").read_bytes() == before
    fewer = check_run(load_config(config, ["trainer.total_training_steps=1"]))
    assert "and the run ends with step 1" in str(finished(fewer, expected_start(fewer)))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def test_auto_goes_back_to_the_newest_whole_checkpoint(ranks: Ranks, first_run: Path, folder: Path) -> None:
    """One bit of the newest is another, and the second newest lacks a file. Both are set aside, and made anew."""
    flip(next(checkpoint(folder, "global_step_3").glob("*.distcp")))
    os.unlink(checkpoint(folder, "global_step_2") / "common.pt")
    os.mkdir(checkpoint(folder, ".global_step_4.partial"))
    ((ended, said),) = ranks.run(1, run_here, str(folder / "run.yaml"), ["trainer.total_training_steps=3"])
    assert ended == ""
    for number, problem in ((3, r"\S+\.distcp .*"), (2, "common.pt is missing")):
        name = re.escape(str(checkpoint(folder, f"global_step_{number}")))
        assert re.search(rf"skipped {name}: {problem}; it is now {name}\.damaged\n", said), said
    assert f"resuming from {checkpoint(folder, 'global_step_1')}" in said
    assert "removed .global_step_4.partial" in said and not checkpoint(folder, ".global_step_4.partial").exists()
    assert same(checkpoint(folder, "global_step_3"), checkpoint(first_run, "global_step_3"))
    assert checkpoint(folder, "global_step_3.damaged").is_dir()


def test_no_whole_checkpoint_is_refused(folder: Path) -> None:
    for found in checkpoint(folder, "").iterdir():
        (found / "trainer.json").write_text("[]")
    said = refusal(folder, "trainer.total_training_steps=5")
    assert f"{folder}/run has checkpoints, but none is whole (global_step_3: " in said


def test_a_named_checkpoint_is_never_replaced_by_another(ranks: Ranks, folder: Path) -> None:
    newest = checkpoint(folder, "global_step_3")
    flip(next(newest.glob("*.distcp")))
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}", "trainer.total_training_steps=5"]
    ((ended, _),) = ranks.run(1, run_here, str(folder / "run.yaml"), named)
    assert ended.startswith(f"RunRefused: trainer.resume_from_path = '{newest}' is damaged: ")
    assert newest.is_dir()


def test_one_that_was_never_named_is_later_than_a_named_one(ranks: Ranks, folder: Path) -> None:
    """A job died before it gave the third its name: it gets it, and is as much in the way as any."""
    checkpoint(folder, "global_step_3").rename(checkpoint(folder, ".global_step_3.partial"))
    second = checkpoint(folder, "global_step_2")
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={second}"]
    ((ended, _),) = ranks.run(1, run_here, str(folder / "run.yaml"), named)
    assert ended.startswith(f"RunRefused: {folder}/run holds global_step_3, which is later than global_step_2 of train")
    checkpoint(folder, "global_step_3").rename(folder / "away")
    ((ended, said),) = ranks.run(1, run_here, str(folder / "run.yaml"), named)
    assert ended == "" and f"resuming from {second}" in said


def _refused(config: str, overrides: list[str]) -> str:
    from megarl.parallel.world import World
    from megarl.trainer.resuming.resume import choose_start

    inputs: Any = SimpleNamespace(config=load_config(config, overrides))
    with pytest.raises(ValueError) as refusal:
        choose_start(inputs, {}, World())
    return str(refusal.value)


def test_a_named_checkpoint_that_has_gone_is_refused_on_every_rank(ranks: Ranks, folder: Path) -> None:
    """It was there when the run was checked; only the first rank looks again."""
    gone = folder / "run" / "checkpoints" / "global_step_9"
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={gone}", "trainer.n_gpus_per_node=2"]
    refusals = ranks.run(2, _refused, str(folder / "run.yaml"), named)
    assert len(set(refusals)) == 1 and str(gone) in refusals[0]


def test_a_schedule_is_the_configuration_s(ranks: Ranks, tmp_path: Path) -> None:
    """Three steps of a linear decay, made five: the rate goes on from where it is in the longer one."""
    decay = {"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_steps": 0}
    config = write_run(tmp_path, **RUN | {"warmup": {}}, actor_rollout_ref__actor__optim=decay)
    assert ranks.run(1, run_here, str(config))[0][0] == ""
    assert ranks.run(1, run_here, str(config), ["trainer.total_training_steps=5"])[0][0] == ""
    last_of_step = [1e-3 * (1 - (2 * step - 0.5) / 10) for step in (4, 5)]  # two updates a step, ten in all
    assert [row["actor/lr"] for row in metrics_of(tmp_path)[3:]] == pytest.approx(last_of_step, rel=1e-6)


def test_a_reference_can_join_at_a_checkpoint(ranks: Ranks, folder: Path) -> None:
    """It is then the actor as it is there, so the first update finds no distance."""
    joins = ["actor_rollout_ref.actor.use_kl_loss=true", "trainer.resume_allow=[algorithm,roles]"]
    ((ended, _),) = ranks.run(1, run_here, str(folder / "run.yaml"), [*joins, "trainer.total_training_steps=4"])
    assert ended == ""
    assert metrics_of(folder)[-1]["step"] == 4 and metrics_of(folder)[-1]["actor/ref_kl"] < 1e-3


def test_a_run_goes_back_after_a_reference_has_joined(ranks: Ranks, folder: Path) -> None:
    """To a checkpoint that has none: the reference stays as it joined, and so does the schedule's position."""
    more = ["actor_rollout_ref.actor.use_kl_loss=true", "trainer.resume_allow=[algorithm,roles]"]
    more += ["trainer.on_nonfinite=rollback", "trainer.save_freq=5", "trainer.total_training_steps=6"]
    ((ended, said),) = ranks.run(1, run_here, str(folder / "run.yaml"), more, "nan_in_the_second_step")
    assert ended == "" and "rolled back to" in said and metrics_of(folder)[-1]["step"] == 6


def test_a_fixed_coefficient_is_the_configuration_s(ranks: Ranks, folder: Path) -> None:
    more = ["algorithm.use_kl_in_reward=true", "trainer.resume_allow=[algorithm,roles]"]
    for coef, total in (("0.001", 4), ("0.5", 5)):
        now = [*more, f"algorithm.kl_ctrl.kl_coef={coef}", f"trainer.total_training_steps={total}"]
        assert ranks.run(1, run_here, str(folder / "run.yaml"), now)[0][0] == ""
    assert [row["reward/kl_coef"] for row in metrics_of(folder)[-2:]] == [0.001, 0.5]


def test_records_of_a_run_without_a_checkpoint_are_kept(ranks: Ranks, folder: Path) -> None:
    """As after a death before the first save: the run begins again, and nothing of the first is lost."""
    shutil.rmtree(checkpoint(folder, ""))
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    ((ended, said),) = ranks.run(1, run_here, str(folder / "run.yaml"))
    earlier = folder / "run" / "earlier" / "1"
    assert ended == "" and f"its records are now in {earlier}" in said
    assert (earlier / "metrics.jsonl").read_bytes() == before and (earlier / "rollouts").is_dir()
    assert len(metrics_of(folder)) == 5


@pytest.mark.parametrize("name", ["*.distcp", "common.pt"])
def test_a_run_does_not_begin_with_damaged_weights(ranks: Ranks, folder: Path, name: str) -> None:
    weights = checkpoint(folder, "global_step_3")
    file = next(weights.glob(name))
    flip(file)
    begins = [f"actor_rollout_ref.model.checkpoint={weights}", "actor_rollout_ref.model.random_init=false"]
    begins += [f"trainer.default_local_dir={folder}/new", "warmup.total_training_steps=0"]
    ((ended, _),) = ranks.run(1, run_here, str(folder / "run.yaml"), begins)
    assert re.fullmatch(
        rf"(RunRefused|refused): actor_rollout_ref\.model\.checkpoint(:| =) '{weights}' is damaged: {file.name} is not "
        r"what was written: its checksum differs; give another checkpoint",
        ended,
    )


def test_a_flipped_byte_in_the_record_of_the_run_is_damage(ranks: Ranks, folder: Path) -> None:
    """Not another run: which run it was is compared when it is known to be what was written."""
    file = checkpoint(folder, "global_step_3") / "trainer.json"
    text = file.read_text()
    file.write_text(text.replace('"dtype"', '"dtypf"'))
    assert len(text) == file.stat().st_size and '"dtypf"' in file.read_text()
    ((ended, said),) = ranks.run(1, run_here, str(folder / "run.yaml"))
    assert ended == "" and f"resuming from {checkpoint(folder, 'global_step_2')}" in said
    assert f"global_step_3: trainer.json is not what was written: its checksum differs; it is now {file.parent}" in said


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_auto_passes_over_converted_weights(ranks: Ranks, first_run: Path, folder: Path) -> None:
    """Which somebody has put beside the checkpoints under the name of one; they stay where they are."""
    weights = checkpoint(folder, "global_step_9")
    shutil.copytree(checkpoint(folder, "global_step_3"), weights)
    (weights / "trainer.json").write_text('{"step": 0, "weights_only": true, "format": 1}')
    write_manifest(str(weights), record_files(str(weights), files_of(str(weights))))
    shutil.rmtree(checkpoint(folder, "global_step_3"))
    before = contents(weights)
    ((ended, said),) = ranks.run(1, run_here, str(folder / "run.yaml"))
    assert ended == "" and f"resuming from {checkpoint(folder, 'global_step_2')}" in said
    assert f"skipped {weights}: it holds converted weights, and no run to go on from\n" in said
    assert contents(weights) == before and numbers_of(folder) == numbers_of(first_run)


def test_a_resume_that_is_refused_changes_nothing(ranks: Ranks, folder: Path) -> None:
    """Another model that `trainer.resume_allow` lets pass: its tensors do not fit, and a newer one was damaged."""
    flip(next(checkpoint(folder, "global_step_3").glob("*.distcp")))
    os.mkdir(checkpoint(folder, ".global_step_4.partial"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    before = contents(folder / "run")
    others = ["trainer.resume_allow=[model]", "trainer.total_training_steps=5"]
    ((ended, _),) = ranks.run(1, run_here, str(folder / "run.yaml"), others)
    assert re.fullmatch(rf"RunRefused: checkpoint '{checkpoint(folder, 'global_step_2')}': its \S+ has shape .*", ended)
    assert contents(folder / "run") == before and checkpoint(folder, ".global_step_4.partial").is_dir()


SCORES = """
import os, zlib
def score(response, row):
    if os.path.exists({there!r}) and row["id"] == {bad}:
        raise OSError("the judge is out")
    return zlib.crc32(response.encode()) / 2**32
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["two ranks", "carried over", "held out"])
def test_a_step_that_cannot_be_scored_loses_no_other(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """The steps before it are saved, as they were when it began, and the run goes on from there with the same bits."""
    world = 2 if way == "two ranks" else 1
    settings = {**RUN, "warmup": {}, "trainer__save_freq": -1, "trainer__n_gpus_per_node": world}
    if way == "carried over":
        settings |= {
            "data__max_response_length": 20,
            "algorithm__rollout_correction": {"rollout_is": "token"},
            "actor_rollout_ref__rollout__stop_token_ids": [3],
            "actor_rollout_ref__rollout__carry_over": {"enable": True, "max_staleness": 2},
        }
    if way == "held out":
        settings |= {"trainer__test_freq": 2}
    there = tmp_path / "judge_is_out"
    for name in ("left alone", "fails"):
        folder = tmp_path / name
        folder.mkdir()
        config = write_run(folder, **settings)
        if way == "held out":
            bad = json.loads((folder / "val.jsonl").read_text().splitlines()[0])["id"]
            rows = [json.loads(line) | {"id": -1} for line in (folder / "train.jsonl").read_text().splitlines()]
            (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            sampler = prompt_sampler(check_run(load_config(str(config))))
            bad = [sampler.next() for _ in range(4 if way == "carried over" else 3)][-1][0]
        (tmp_path / "reward.py").write_text(SCORES.format(there=str(there), bad=bad))
        reward = f"reward.name={tmp_path / 'reward.py'}:score"
        if name == "fails":
            there.touch()
            ends, failed = zip(*ranks.run(world, run_here, str(config), [reward]), strict=True)
            assert len(set(ends)) == 1 and "raised OSError: the judge is out" in ends[0]
            there.unlink()
            last = metrics_of(folder)[-1]["step"]
            assert 1 <= last < 3
            saved = checkpoint(folder, f"global_step_{last}")
            assert f"could not be scored; checkpoint {saved}; the same command goes on from it" in failed[0]
            assert sorted(path.name for path in checkpoint(folder, "").iterdir()) == [saved.name]
        ended, said = ranks.run(world, run_here, str(config), [reward])[0]
        assert ended == "", said
    one, two = (tmp_path / name for name in ("left alone", "fails"))
    assert same(checkpoint(one, "global_step_3"), checkpoint(two, "global_step_3"))
    if way == "held out":  # after the step's updates, so that its row lacks the validation alone
        assert all(whole | row == whole for whole, row in zip(numbers_of(one), numbers_of(two), strict=True))
    else:
        assert numbers_of(one) == numbers_of(two)
