"""Whole runs with what stands beside the policy: critic, teacher, reward model, greedy responses, dynamic sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import SIZE, write_chat_tokenizer
from full_weights import random_weights
from kill_and_resume import tensors_of
from ranks import Ranks
from run_cases import run_here
from selection import quick
from tiny_run import FINGERPRINT, metrics_of, numbers_of, write_run

from megarl.config import load_config
from megarl.config.data import DataConfig
from megarl.data.example_set import load_examples
from megarl.data.tokenizer import load_tokenizer
from megarl.trainer.admission.checks import check_run

QUIET: dict[str, Any] = {"trainer__logger": ["jsonl"], "trainer__test_freq": 0, "trainer__val_before_train": False}
GAE = {"algorithm__adv_estimator": "gae", "algorithm__lam": 0.95, "critic__optim__lr": 1e-2}
ONES = "def score(response, row):\n    return response.count('1') / 4\n"
"""A reward that an untrained model's responses have little of."""


def _run(ranks: Ranks, folder: Path, world: int, reward: str = FINGERPRINT, **sections: Any) -> list[dict[str, Any]]:
    """The rows of a run that ends well."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(reward)
    sections = {**QUIET, "reward__name": f"{folder / 'reward.py'}:score", "trainer__save_freq": 1, **sections}
    ended, said = ranks.run(world, run_here, str(write_run(folder, **sections)))[0]
    assert ended == "", said
    return metrics_of(folder)


def _checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return tensors_of(str(folder / "run" / "checkpoints" / f"global_step_{step}"))


@pytest.mark.slow
def test_one_forward_pass_gives_the_same_bits_as_two(ranks: Ranks, tmp_path: Path) -> None:
    """With one optimizer step per batch the update's own pass gives the log-probabilities before it."""
    one_step = {"actor_rollout_ref__actor__ppo_mini_batch_size": 16, "trainer__total_training_steps": 3}
    rows = _run(ranks, tmp_path / "one", 2, **one_step)
    two = _run(ranks, tmp_path / "two", 2, **one_step, actor_rollout_ref__actor__fused_old_log_probs=False)
    assert all("timing/log_probs_s" not in row for row in rows) and all("timing/log_probs_s" in row for row in two)
    assert numbers_of(tmp_path / "one") == numbers_of(tmp_path / "two")
    assert all(0 < row["rollout/logp_gap_max"] < 1e-4 for row in rows)
    ours, theirs = (_checkpoint(tmp_path / name, 3) for name in ("one", "two"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_engine_that_is_wrong_is_seen_with_one_forward_pass_too(ranks: Ranks, tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    config = write_run(
        tmp_path,
        **QUIET,
        actor_rollout_ref__actor__ppo_mini_batch_size=16,
        actor_rollout_ref__actor__optim={"lr": 0.01},
        actor_rollout_ref__actor__megatron={"tensor_model_parallel_size": 2},
        actor_rollout_ref__rollout={"n": 4, "free_cache_engine": False},
        actor_rollout_ref__reshard={},
        trainer__agreement_freq=0,
        trainer__total_training_steps=5,
    )
    for ended, _ in ranks.run(2, run_here, str(config), [], "no_reshard_from_the_second_on"):
        assert "does not generate with the actor's weights" in ended


@pytest.fixture(scope="module")
def with_a_critic(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critic")
    reward = ONES.replace("return ", "return 0.5 + ")
    _run(ranks, folder, 2, reward, **GAE, trainer__total_training_steps=6, trainer__critic_warmup=2)
    return folder


@pytest.mark.slow
def test_a_critic_learns_and_its_first_steps_leave_the_policy_alone(with_a_critic: Path) -> None:
    rows = metrics_of(with_a_critic)
    assert ["actor/loss" in row for row in rows] == [False, False, True, True, True, True]
    assert rows[-1]["critic/vf_loss"] < 0.5 * rows[0]["critic/vf_loss"]
    assert rows[-1]["critic/explained_variance"] > rows[0]["critic/explained_variance"]
    first, second, third = (_checkpoint(with_a_critic, step) for step in (1, 2, 3))
    own = [name for name in first if not name.startswith("critic.") and "optimizer" not in name]
    assert own and all(torch.equal(first[name], second[name]) for name in own)
    assert not all(torch.equal(second[name], third[name]) for name in own)
    assert any(name.startswith("critic.") and "output_layer" in name for name in first)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_with_a_critic_goes_on_where_it_ended(
    ranks: Ranks, with_a_critic: Path, tmp_path: Path, world: int
) -> None:
    """With as many ranks to the same bits, with others to the same numbers."""
    from shutil import copytree

    copytree(with_a_critic / "run" / "checkpoints", tmp_path / "run" / "checkpoints")
    for step in (4, 5, 6):
        folder = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        folder.rmdir()
    (tmp_path / "run" / "checkpoints" / "latest").unlink(missing_ok=True)
    sections = {**GAE, "trainer__total_training_steps": 6, "trainer__critic_warmup": 2}
    if world == 4:
        sections |= {"actor_rollout_ref__actor__megatron": {"tensor_model_parallel_size": 2}}
    _run(ranks, tmp_path, world, ONES, **sections, reward__name=f"{with_a_critic / 'reward.py'}:score")
    rows, whole = numbers_of(tmp_path), numbers_of(with_a_critic)[3:]
    assert [row["step"] for row in rows] == [4, 5, 6]
    if world == 2:
        assert rows == whole
    else:
        for row, other in zip(rows, whole, strict=True):
            assert row["critic/vf_loss"] == pytest.approx(other["critic/vf_loss"], rel=1e-3)


@pytest.mark.slow
def test_a_critic_begins_as_the_policy_where_a_run_goes_on_in_its_warm_up(ranks: Ranks, tmp_path: Path) -> None:
    """The checkpoint is from before there was a critic."""
    from shutil import copytree

    warmup = {"total_training_steps": 2, "train_batch_size": 16}
    _run(ranks, tmp_path / "whole", 2, ONES, **GAE, warmup=warmup)
    (tmp_path / "again").mkdir()
    for part in ("warmup_step_1",):
        copytree(*(tmp_path / name / "run" / "checkpoints" / part for name in ("whole", "again")))
    _run(ranks, tmp_path / "again", 2, ONES, **GAE, warmup=warmup, reward__name=f"{tmp_path / 'whole/reward.py'}:score")
    assert numbers_of(tmp_path / "again") == numbers_of(tmp_path / "whole")[1:]


@pytest.mark.slow
def test_a_critic_in_a_layout_of_its_own_trains_alike(ranks: Ranks, tmp_path: Path) -> None:
    rows = {}
    for name, megatron in {"same": {}, "own": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}.items():
        sections = {**GAE, "critic__megatron": megatron, "trainer__total_training_steps": 3}
        rows[name] = _run(ranks, tmp_path / name, 2, ONES, **sections)
    for ours, theirs in zip(rows["own"], rows["same"], strict=True):
        for key in ("critic/vf_loss", "critic/grad_norm", "actor/grad_norm", "reward/mean"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mode", quick(["rloo", "reinforce_plus_plus", "remax", "opo", "raft"], 0))
def test_every_estimator_trains(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    rows = _run(ranks, tmp_path, 2, ONES, algorithm__adv_estimator=mode, trainer__total_training_steps=8)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.1
    assert ("reward/greedy" in rows[0]) == (mode == "remax")


def test_a_greedy_response_without_a_score_is_no_baseline_of_0(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever has a score has the same one, so that there is nothing to learn."""
    source = (
        "import random\ndef score(response, row):\n"
        "    if random.Random(response + row['prompt']).random() < 0.7: raise OSError('busy')\n    return 1.0\n"
    )
    sections = {"algorithm__adv_estimator": "remax", "reward__on_error": "drop", "trainer__total_training_steps": 2}
    for row in _run(ranks, tmp_path, 2, source, **sections):
        assert row["reward/failed"] > 16 and row["reward/greedy"] == row["reward/mean"] == 1.0
        assert row["actor/grad_norm"] == 0.0


FIRST_RIGHT = "def score(response, row):\n    return float(response[:1] == row['answer'][:1])\n"


@pytest.mark.slow
def test_dynamic_sampling_trains_on_groups_that_differ(ranks: Ranks, tmp_path: Path) -> None:
    sections = {
        "algorithm__filter_groups": {"enable": True, "max_num_gen_batches": 6},
        "data__gen_batch_size": 12,
        "trainer__total_training_steps": 4,
        "trainer__log_rollouts": 64,
    }
    rows = _run(ranks, tmp_path / "kept", 2, FIRST_RIGHT, **sections)
    assert any(1 < row["filter_groups/draws"] < 6 for row in rows)
    assert all(0 < row["filter_groups/kept"] <= 1 for row in rows)
    for step, row in enumerate(rows, 1):
        if row["filter_groups/draws"] == 6:
            continue
        lines = (tmp_path / "kept" / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        groups: dict[str, set[float]] = {}
        for sample in map(json.loads, lines):
            groups.setdefault(sample["prompt"], set()).add(sample["reward"])
        assert len(lines) == 64 and all(len(rewards) == 2 for rewards in groups.values())
    again = _run(ranks, tmp_path / "again", 1, FIRST_RIGHT, **sections)
    assert [row["filter_groups/draws"] for row in again] == [row["filter_groups/draws"] for row in rows]


@pytest.mark.slow
def test_a_run_with_dynamic_sampling_goes_on_with_the_prompts_that_come_next(ranks: Ranks, tmp_path: Path) -> None:
    sections = {"algorithm__filter_groups__enable": True, "data__gen_batch_size": 12}
    for name, totals in {"whole": [4], "halves": [2, 4]}.items():
        for total in totals:
            _run(ranks, tmp_path / name, 2, FIRST_RIGHT, **sections, trainer__total_training_steps=total)
    assert numbers_of(tmp_path / "whole") == numbers_of(tmp_path / "halves")


@pytest.mark.slow
def test_dynamic_sampling_fills_up_a_batch_where_nothing_differs(ranks: Ranks, tmp_path: Path) -> None:
    constant = "def score(response, row):\n    return 0.3\n"
    filtering = {"enable": True, "metric": "score", "max_num_gen_batches": 2}
    rows = _run(ranks, tmp_path, 2, constant, algorithm__filter_groups=filtering)
    assert [row["filter_groups/draws"] for row in rows] == [2, 2] and rows[0]["actor/grad_norm"] == 0


@pytest.mark.slow
def test_long_responses_lose_reward_and_cut_off_ones_are_not_trained_on(ranks: Ranks, tmp_path: Path) -> None:
    constant = "def score(response, row):\n    return 1.0\n"
    buffer = {"enable": True, "len": 3, "penalty_factor": 0.5}
    rows = _run(ranks, tmp_path / "soft", 2, constant, reward__overlong_buffer=buffer, trainer__total_training_steps=8)
    assert rows[0]["reward/mean"] == 1.0 and rows[0]["reward/overlong_penalty"] < -0.1
    assert rows[-1]["response/length_mean"] < rows[0]["response/length_mean"]
    whole = _run(ranks, tmp_path / "whole", 2, ONES, trainer__total_training_steps=1)
    rows = _run(
        ranks, tmp_path / "filtered", 2, ONES, trainer__total_training_steps=1, algorithm__overlong_filtering=True
    )
    assert rows[0]["response/truncated"] > 0.1 and rows[0]["actor/grad_norm"] != whole[0]["actor/grad_norm"]


def _model_folder(folder: Path, run: Path, *, scalar: bool) -> str:
    """The tiny run's architecture with random weights, as Hugging Face has them."""
    from safetensors.torch import save_file

    from megarl.models.families import read_architecture

    folder.mkdir()
    config = json.loads((run / "config.json").read_text())
    if scalar:
        config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    arch = read_architecture(str(folder))
    weights = random_weights(arch.with_scalar_output() if scalar else arch, 3)
    save_file({name: value.contiguous() for name, value in weights.items()}, str(folder / "model.safetensors"))
    return str(folder)


def test_a_reward_model_scores(ranks: Ranks, tmp_path: Path) -> None:
    """Of a Hugging Face folder, in two layouts, offloaded or not: the same scores, which the policy learns to get."""
    write_run(tmp_path)
    path = _model_folder(tmp_path / "judge", tmp_path, scalar=True)
    rows = {}
    for name, megatron in {"same": {}, "own": {"tensor_model_parallel_size": 2, "param_offload": True}}.items():
        sections = {"reward__name": "model", "reward_model": {"model": {"path": path}, "megatron": megatron}}
        rows[name] = _run(ranks, tmp_path / name, 2, **sections, trainer__total_training_steps=6, trainer__test_freq=6)
    assert rows["same"][-1]["reward/mean"] > rows["same"][0]["reward/mean"] + 0.1
    assert "val/reward" in rows["same"][-1]
    for ours, theirs in zip(rows["own"], rows["same"], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True])
def test_a_reward_model_is_a_part_of_the_score(ranks: Ranks, tmp_path: Path, filtered: bool) -> None:
    """Beside a rule, whose scores alone tell which groups are left out; of some data sources it is the whole score."""
    (tmp_path / "reward.py").write_text(FINGERPRINT)
    write_run(tmp_path)
    judge = {"model": {"path": _model_folder(tmp_path / "judge", tmp_path, scalar=True)}}
    rule = {"name": f"{tmp_path / 'reward.py'}:score", "weight": 2.0}
    parts = {"rule": rule if filtered else {**rule, "data_sources": ["sum"]}, "style": {"name": "model", "weight": 0.5}}
    keys: dict[str, Any] = {**QUIET, "reward__parts": parts, "reward_model": judge, "trainer__test_freq": 2}
    keys |= {"trainer__n_gpus_per_node": 2, "actor_rollout_ref__rollout__n": 4}
    if filtered:
        keys["algorithm__filter_groups"] = {"enable": True, "metric": "score", "max_num_gen_batches": 2}
    config = write_run(tmp_path, **keys)
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        sources = ("sum", "chat")
        rows = [row | {"data_source": sources[i % 2]} for i, row in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended, said = ranks.run(2, run_here, str(config))[0]
    assert ended == "", said
    rows = metrics_of(tmp_path)
    assert {"val/part/rule", "val/part/style"} <= rows[-1].keys()
    samples = [json.loads(line) for file in (tmp_path / "run" / "rollouts").iterdir() for line in file.open()]
    assert {len(sample["parts"]) for sample in samples} == ({2} if filtered else {1, 2})
    for sample in samples:
        found = sample["parts"]
        weighted = 2.0 * found.get("part/rule", 0) + 0.5 * found["part/style"]
        assert sample["reward"] == pytest.approx(weighted, abs=2e-4)  # parts are written with four digits
    if not filtered:
        for row in rows[1:]:
            means = [row[f"reward/source/{source}/mean"] for source in sources]
            assert row["reward/mean"] == pytest.approx(sum(means) / 2, abs=0.3) and row["reward/part/style"] != 0


def _other_tokenizer(folder: Path) -> Path:
    """One whose ids are in another order."""
    import sentencepiece

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(row["prompt"] + row["answer"] for row in rows),
        model_prefix=str(folder / "other"),
        model_type="char",
        vocab_size=18,
        hard_vocab_limit=False,
        pad_id=5,
        eos_id=4,
        unk_id=0,
        bos_id=-1,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    return folder / "other.model"


def _answers_encoded_anew(config: str, other: str) -> tuple[list[list[int]], list[list[int]]]:
    """Right answers, every second of them cut off: in the other tokenizer's ids by the run's code, and directly."""
    from megarl.parallel.world import World
    from megarl.trainer.experience.scores import encoded_anew
    from megarl.types import Rollout, Rollouts, Tokens

    inputs, theirs = check_run(load_config(config)), load_tokenizer(other)
    ours, prompts = inputs.tokenizer, inputs.val_prompts[:5]
    items = []
    for i, prompt in enumerate(prompts):
        ids = [*ours.encode(prompt.row["answer"]), *[ours.eos_id] * (i % 2)]
        finish: Any = "stop" if i % 2 else "length"
        items.append(Rollout(prompt=prompt, group=i, response=Tokens().drawn(ids, ids), finish_reason=finish))
    world = World()
    try:
        batch = encoded_anew(Rollouts(items=tuple(items)), inputs, world, theirs)
    finally:
        world.leave()
    wanted = [
        [*theirs.encode(prompt.row["prompt"] + prompt.row["answer"]), *[theirs.eos_id] * (i % 2)]
        for i, prompt in enumerate(prompts)
    ]
    return [x.tolist() for x in batch.tokens.split(batch.lengths.tolist())], wanted


def _replies_encoded_anew(config: str, other: str) -> list[list[int]]:
    """Two replies to each held-out conversation: one that ended, one that was cut off."""
    from megarl.parallel.world import World
    from megarl.trainer.experience.scores import encoded_anew
    from megarl.types import Rollout, Rollouts, Tokens

    inputs = check_run(load_config(config))
    ids, items = inputs.tokenizer.encode(REPLY), []
    whole, ended = (Tokens().drawn(tokens, [0.0] * len(tokens)) for tokens in (ids, [*ids, inputs.tokenizer.eos_id]))
    for i, prompt in enumerate(inputs.val_prompts[:3]):
        items.append(Rollout(prompt=prompt, group=i, response=ended, finish_reason="stop"))
        items.append(Rollout(prompt=prompt, group=i, sample=1, response=whole, finish_reason="length"))
    world = World()
    try:
        batch = encoded_anew(Rollouts(items=tuple(items)), inputs, world, load_tokenizer(other))
    finally:
        world.leave()
    return [x.tolist() for x in batch.tokens.split(batch.lengths.tolist())]


CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
REPLY = "so <= 5 . "


def test_a_reward_model_reads_a_reply_as_it_was_trained_to(ranks: Ranks, tmp_path: Path) -> None:
    """Up to the end token, and not what the template writes behind it; a reply that was cut off has none."""
    (tmp_path / "judge").mkdir()
    path = write_run(tmp_path, trainer__n_gpus_per_node=2, data__prompt_key="q.messages")
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"vocab_size": SIZE}))
    write_chat_tokenizer(tmp_path)
    write_chat_tokenizer(tmp_path / "judge", CHATML)
    reply = [{"role": "assistant", "content": REPLY}]
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            row["q"] = {"messages": [{"role": "user", "content": row.pop("prompt")}]}
            row |= {"chosen": reply, "rejected": reply}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(prompt_key="q.messages")
    trained = load_examples(data, "preferences", [f"{tmp_path}/val.jsonl"], load_tokenizer(f"{tmp_path}/judge"))
    for got in ranks.run(2, _replies_encoded_anew, str(path), f"{tmp_path}/judge"):
        for i in range(3):
            ((prompt, answer), _) = trained[i].sequences
            assert got[2 * i] == [*prompt, *answer] and got[2 * i + 1] == [*prompt, *answer[:-1]]


def test_a_reward_model_with_a_tokenizer_of_its_own_reads_the_text(ranks: Ranks, tmp_path: Path) -> None:
    config, other = str(write_run(tmp_path, trainer__n_gpus_per_node=2)), str(_other_tokenizer(tmp_path))
    for got, wanted in ranks.run(2, _answers_encoded_anew, config, other):
        assert got == wanted
    judge = {"path": _model_folder(tmp_path / "judge", tmp_path, scalar=True)}
    means = []
    for name, more in {"ids": {}, "text": {"tokenizer_path": other}}.items():
        sections = {"reward__name": "model", "reward_model": {"model": {**judge, **more}}, "trainer__save_freq": 0}
        means.append([row["reward/mean"] for row in _run(ranks, tmp_path / name, 2, **sections)])
    assert all(ours != theirs for ours, theirs in zip(*means, strict=True))


@pytest.mark.slow
def test_a_policy_becomes_like_its_teacher(ranks: Ranks, tmp_path: Path) -> None:
    write_run(tmp_path)
    path = _model_folder(tmp_path / "teacher", tmp_path, scalar=False)
    rows = _run(
        ranks,
        tmp_path / "run",
        2,
        algorithm__adv_estimator="on_policy_distillation",
        teacher={"model": {"path": path}},
        actor_rollout_ref__actor__optim={"lr": 1e-2},
        trainer__total_training_steps=20,
    )
    assert rows[-1]["teacher/kl"] < 0.5 * rows[0]["teacher/kl"]


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    config = str(write_run(tmp_path))
    path = _model_folder(tmp_path / "judge", tmp_path, scalar=False)
    with pytest.raises(ValueError, match=r"reward_model: .* has no score\.weight"):
        check_run(load_config(config, ["reward.name=model", f"reward_model.model.path={path}"]))


REFUSED = [
    (
        ["algorithm.adv_estimator=on_policy_distillation"],
        "teacher: set teacher.model.path to the folder of its weights",
    ),
    (["reward.name=model"], "reward_model: set reward_model.model.path to the folder of its weights"),
    (["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1"], "rollout.n = 1 leaves nothing to compare"),
    (["trainer.critic_warmup=2"], "trainer.critic_warmup = 2 trains only a critic, and grpo has none; set it to 0"),
    (["teacher.model.path=/x"], "teacher.model.path is set, but algorithm.adv_estimator = grpo needs none"),
    (
        ["reward_model.model.path=/x"],
        "reward_model.model.path is set, but reward.name = exact_match scores; set reward",
    ),
    (["data.gen_batch_size=8"], "data.gen_batch_size is the size of a draw with algorithm.filter_groups.enable=true"),
    (
        ["algorithm.filter_groups={enable: true, max_num_gen_batches: 1}", "data.gen_batch_size=8"],
        "1 draws of data.gen_batch_size = 8 prompts are fewer than data.train_batch_size = 16",
    ),
    (
        ["algorithm.filter_groups.enable=true", "data.gen_batch_size=99"],
        "data.gen_batch_size = 99 is more than the 80 rows of data.train_files",
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.megatron.overlap_param_gather=true"],
        "critic: overlap_param_gather needs use_distributed_optimizer=true and overlap_grad_reduce=true",
    ),
    (["reward.overlong_buffer.enable=true"], "reward.overlong_buffer.len = 0 must be between 1 and"),
    (
        ["algorithm.adv_estimator=gae", "critic.megatron.tensor_model_parallel_size=3"],
        "critic: 1 ranks cannot be split into tensor x pipeline x context = 3 x 1 x 1",
    ),
    (["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=8"], "critic: data.max_prompt_length + data"),
    (
        ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=5"],
        "data.train_batch_size = 16 is not a multiple",
    ),
    (["algorithm.adv_estimator=gae", "critic.model.path=/nowhere"], "critic: model.path: no config.json in '/nowhere'"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_is_refused_before_the_ranks_start(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        check_run(load_config(str(write_run(tmp_path)), overrides))
    assert str(refused.value).startswith(said)
