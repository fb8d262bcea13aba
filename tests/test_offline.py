"""Training on answers that the data holds: the same numbers in every layout, what is learnt, saved and refused."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_and_resume import tensors_of
from ranks import Ranks
from run_cases import run_here
from selection import quick
from tiny_run import megarl, metrics_of, numbers_of, write_run
from training_cases import SEQUENCES, Case, actor_in, fixed_batch

from megarl.config import load_config
from megarl.data.packing import pack_by_count, pack_by_tokens
from megarl.roles.passes import MiniBatch
from megarl.trainer.admission.checks import check_run

# ------------------------------------------------------------------------------------------------------- layouts

LOSSES = ["dpo", "ipo", "simpo", "orpo", "kto", "bradley_terry"]
LAYOUTS = {
    "one sequence fewer": (Case(), 2),
    "all in one": (Case(), 16),
    "by tokens": (Case(), 0),
    "padded": (Case(packed=False), 4),
    "DP2": (Case(dp=2), 4),
    "TP2 x PP2": (Case(tp=2, pp=2, sequence_parallel=True), 4),
    "CP2": (Case(cp=2), 4),
    "CP2 x DP2, padded": (Case(cp=2, dp=2, packed=False), 4),
    "PP2 x CP2, keys gathered": (Case(pp=2, cp=2, gathers=True), 2),
}


def _loss(name: str) -> Any:
    from megarl.algorithms.bradley_terry import BradleyTerry
    from megarl.algorithms.kto import kto
    from megarl.algorithms.registry import PREFERENCES
    from megarl.config.algorithm import PreferenceConfig

    if name == "bradley_terry":
        return BradleyTerry()
    preference = PreferenceConfig(beta=0.3, label_smoothing=0.1, sft_coef=0.2, undesirable_weight=0.7)
    return kto(preference) if name == "kto" else PREFERENCES.load(name)(preference)


def _train(case: Case, size: int) -> dict[str, list[dict[str, float]]]:
    """Metrics before three updates with each loss, and of those updates.

    Args:
        size: sequences in a micro-batch; 0 fills it with tokens.
    """
    found = {}
    for name in LOSSES:
        role = "RewardModel" if name == "bradley_terry" else "Actor"
        with actor_in(case, role=role, lr=3e-3) as model:
            batch = fixed_batch()
            lengths, dp = batch.lengths.tolist(), case.dp
            if size:
                plan = pack_by_count(lengths, [range(SEQUENCES)], dp=dp, micro_batch_size=size, together=2)
            else:
                plan = pack_by_tokens(lengths, [range(SEQUENCES)], dp=dp, max_tokens=64, together=2)
            layout = model.groups.layout
            (micro_batches,) = plan[layout.coords(model.groups.world.rank).dp]
            mini_batch = MiniBatch(layout=layout, sequences=range(SEQUENCES), micro_batches=micro_batches)
            batch = batch.with_(
                labels=(torch.arange(SEQUENCES) // 2 % 2).float(), reference_point=torch.full((SEQUENCES,), 0.5)
            )
            if role == "Actor":
                batch = batch.with_(ref_logp=1.05 * model.log_probs(batch, mini_batch))
            loss = _loss(name)
            found[name] = [model.evaluate(batch, mini_batch, loss)]
            for _ in range(3):
                metrics = model.update(batch, mini_batch, loss)
                found[name].append({key: float(metric.value) for key, metric in metrics.items()})
    return found


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, list[dict[str, float]]]:
    """One rank, four sequences at a time."""
    found: dict[str, list[dict[str, float]]] = ranks.run(1, _train, Case(), 4)[0]
    return found


def test_evaluation_is_what_an_update_reports(plain: dict[str, list[dict[str, float]]]) -> None:
    for name, (before, first, *_, last) in plain.items():
        assert before.keys() == first.keys() - {"grad_norm", "lr", "skipped"}
        assert before == pytest.approx({key: first[key] for key in before}, rel=1e-6, abs=1e-7), name
        assert last["loss"] < first["loss"] and first["grad_norm"] > 0


@pytest.mark.parametrize("layout", quick(LAYOUTS, 1, 4))
def test_training_agrees_in_every_layout(ranks: Ranks, plain: dict[str, list[dict[str, float]]], layout: str) -> None:
    case, size = LAYOUTS[layout]
    for found in ranks.run(case.world, _train, case, size):
        for name, steps in found.items():
            for ours, theirs in zip(steps[:2], plain[name], strict=False):
                assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), name
            for ours, theirs in zip(steps[2:], plain[name][2:], strict=True):  # Adam divides by small gradients
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), name


# ---------------------------------------------------------------------------------------------------------- runs


def offline_run(folder: Path, flow: str, rows: Callable[[list[dict[str, Any]]], None], **sections: Any) -> Path:
    """The tiny run's configuration with another flow; `rows` changes the rows of both files in place."""
    settings = {
        "trainer__flow": flow,
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 12,
        "trainer__logger": ["jsonl"],
        "trainer__save_freq": -1,
        "data__train_batch_size": 20,
        "actor_rollout_ref__actor__optim": {"lr": 3e-3, "weight_decay": 0.0},
        # what such a run does not read is not looked at
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 3,
        "actor_rollout_ref__rollout__name": "nothing",
        "actor_rollout_ref__actor__ppo_mini_batch_size": 7,
        "algorithm__adv_estimator": "nothing",
        "reward__name": "nothing",
        **sections,
    }
    config = write_run(folder, **settings)
    for name in ("train", "val"):
        read = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        rows(read)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in read))
    return config


def even_over_odd(rows: list[dict[str, Any]]) -> None:
    """Even digits are better than odd ones, whatever the prompt; of judged answers the even ones are desirable."""
    draw = random.Random(len(rows))
    for i, row in enumerate(rows):
        row["chosen"], row["rejected"] = (str(2 * draw.randrange(4) + odd) for odd in (0, 1))
        row |= {"answer": row["rejected" if i % 2 else "chosen"], "label": i % 2 == 0}


def run_on(ranks: Ranks, config: Path, *overrides: str, world: int = 2) -> None:
    ended, said = ranks.run(world, run_here, str(config), list(overrides))[0]
    assert ended == "", ended + said


@pytest.mark.parametrize("mode", quick(["dpo", "kto", "ipo", "simpo", "orpo"], 0, 1))
def test_a_margin_on_held_out_answers_grows(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    flow = {"trainer__flow": "kto"} if mode == "kto" else {"algorithm__preference__loss_mode": mode}
    config = offline_run(tmp_path, "preference", even_over_odd, **flow)
    run_on(ranks, config)
    first, *_, last = (row for row in metrics_of(tmp_path) if "val/margin" in row)
    assert first["step"] == 0 and last["step"] == 12
    if mode not in ("simpo", "orpo"):
        assert first["val/margin"] == 0  # the policy is its own reference
    assert last["val/loss"] < first["val/loss"]
    assert last["val/margin"] > first["val/margin"] + 0.02 and last["val/accuracy"] > 0.9


@pytest.mark.slow
def test_a_reward_model_ranks_and_is_exported(ranks: Ranks, tmp_path: Path) -> None:
    import transformers

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    config = offline_run(
        first,
        "reward_model",
        even_over_odd,
        checkpoint__save_contents=["model", "optimizer", "hf_model"],
        data__train_batch_size=40,
    )
    run_on(ranks, config, "trainer.total_training_steps=40")
    last = metrics_of(first)[-1]
    assert last["val/accuracy"] > 0.9 and last["train/accuracy"] > 0.9

    exported = first / "run" / "checkpoints" / "train_step_40" / "huggingface"
    name = json.loads((exported / "config.json").read_text())["architectures"][0]
    assert name == "Qwen2ForSequenceClassification"
    model, report = getattr(transformers, name).from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.num_labels == 1
    inputs = check_run(load_config(str(config), ["trainer.resume_mode=disable", "trainer.default_local_dir=x"]))
    chosen = [[token for turn in example.sequences[0] for token in turn] for example in inputs.val_examples]
    with torch.no_grad():
        scores = [float(model(torch.tensor([ids])).logits) for ids in chosen]
    assert sum(scores) / len(scores) == pytest.approx(last["val/chosen_reward"], abs=1e-4)

    again = offline_run(
        second,
        "reward_model",
        even_over_odd,
        actor_rollout_ref__model={"path": str(exported), "dtype": "float32"},
        trainer__total_training_steps=1,
    )
    run_on(ranks, again)
    assert metrics_of(second)[0]["val/loss"] == pytest.approx(last["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_a_reward_model_begins_at_0_where_the_folder_has_no_score(ranks: Ranks, tmp_path: Path) -> None:
    language, scores = tmp_path / "language", tmp_path / "scores"
    language.mkdir()
    scores.mkdir()
    config = offline_run(
        language,
        "sft",
        even_over_odd,
        checkpoint__save_contents=["model", "optimizer", "hf_model"],
        trainer__total_training_steps=1,
    )
    run_on(ranks, config)
    exported = str(language / "run" / "checkpoints" / "train_step_1" / "huggingface")
    model = {"path": exported, "dtype": "float32"}
    run_on(ranks, offline_run(scores, "reward_model", even_over_odd, actor_rollout_ref__model=model))
    first, *_, last = metrics_of(scores)
    assert first["val/loss"] == pytest.approx(math.log(2), abs=1e-7) and first["val/margin"] == 0
    assert last["val/loss"] < first["val/loss"]


SHARES = (4, 2, 1, 1)
ENTROPY = sum(n / 8 * math.log(8 / n) for n in SHARES)
"""nats of one answer, 1.2130; its end token has none, so that a token has half of it."""


@pytest.mark.slow
def test_supervised_training_comes_to_the_entropy_of_its_source(ranks: Ranks, tmp_path: Path) -> None:
    """Four prompts, each with its own four digits as answers, in shares of 4, 2, 1 and 1 of 8."""

    def draw(rows: list[dict[str, Any]]) -> None:
        rows[:] = [
            {"prompt": f"{p}+{p}=", "answer": (p + k) % 10}
            for p in range(4)
            for k, n in enumerate(SHARES)
            for _ in range(n)
        ]

    config = offline_run(tmp_path, "sft", draw, data__train_batch_size=32, data__shuffle=False)
    schedule = {"lr": 1e-2, "weight_decay": 0.0, "lr_decay_style": "cosine", "adam_beta2": 0.95}
    run_on(ranks, config, "trainer.total_training_steps=250", f"actor_rollout_ref.actor.optim={schedule}")
    last = metrics_of(tmp_path)[-1]
    assert pytest.approx(0.6065, abs=1e-4) == ENTROPY / 2
    assert last["val/loss"] == pytest.approx(ENTROPY / 2, abs=2e-3) and last["val/loss"] >= ENTROPY / 2 - 1e-5
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["preference", "kto"])
def test_a_run_that_ended_in_its_middle_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path, flow: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    settings = {"trainer__total_training_steps": 6, "trainer__save_freq": 1, "trainer__test_freq": 2}
    run_on(ranks, offline_run(whole, flow, even_over_odd, **settings))
    shutil.copytree(whole, cut)
    config = offline_run(cut, flow, even_over_odd, **settings)
    for step in (4, 5, 6):
        shutil.rmtree(cut / "run" / "checkpoints" / f"train_step_{step}")
    run_on(ranks, config)
    assert numbers_of(cut) == numbers_of(whole)
    ours, theirs = (tensors_of(str(at / "run" / "checkpoints" / "train_step_6")) for at in (whole, cut))
    assert ours.keys() == theirs.keys() and any(key.startswith("reference.") for key in ours)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    before = metrics_of(cut)
    run_on(ranks, config)  # nothing is left to do
    assert metrics_of(cut) == before
    with pytest.raises(ValueError, match=r"another algorithm \(algorithm.preference.beta 0.1 -> 0.2\)"):
        check_run(load_config(str(config), ["algorithm.preference.beta=0.2", "trainer.total_training_steps=9"]))


def test_epochs_and_layouts_of_a_run(ranks: Ranks, tmp_path: Path) -> None:
    """80 rows in batches of 20, twice over; two ranks' numbers are those of one."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, world in ((one, 1), (two, 2)):
        folder.mkdir()
        config = offline_run(
            folder, "preference", even_over_odd, trainer__total_training_steps=None, trainer__total_epochs=2
        )
        run_on(ranks, config, world=world)
    assert [row["step"] for row in metrics_of(one)] == list(range(9))
    for ours, theirs in zip(numbers_of(two), numbers_of(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert all(a["step"] < b["step"] for a, b in pairwise(metrics_of(two)))


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["preference", "reward_model"])
def test_the_command_trains(tmp_path: Path, flow: str) -> None:
    config = offline_run(tmp_path, flow, even_over_odd, trainer__logger=["console", "jsonl"])
    done = megarl("train", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training TP1 x PP1 x DP2 on 2 cpu ranks" in done.stdout and "generation" not in done.stdout
    assert "`megarl report` draws them" in done.stdout
    again = megarl("train", str(config))
    assert again.returncode == 0 and "nothing to do: " in again.stderr
    predicted = megarl("plan", str(config))
    assert predicted.returncode == 0 and "tokens per sequence" in predicted.stdout, predicted.stderr


# ------------------------------------------------------------------------------------------------------ refusals


def _set(**columns: Any) -> Callable[[list[dict[str, Any]]], None]:
    """The third row with other columns."""

    def change(rows: list[dict[str, Any]]) -> None:
        even_over_odd(rows)
        rows[2] |= columns

    return change


def _without(column: str) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        even_over_odd(rows)
        del rows[2][column]

    return change


CHAT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
REFUSED = [
    ("preference", _without("chosen"), [], "data.chosen_key = 'chosen': no such column in FILE:3; columns: prompt, "),
    ("preference", _without("rejected"), [], "data.rejected_key = 'rejected': no such column in FILE:3; columns: "),
    ("preference", _set(rejected=None), [], "FILE:3: the answer in column 'rejected' must be text or a number, not "),
    (
        "reward_model",
        _set(chosen="123456"),
        [],
        "FILE:3: the answer in column 'chosen' has 7 tokens with its end token",
    ),
    (
        "preference",
        _set(prompt="123456789"),
        [],
        "FILE:3: the prompt has 9 tokens, more than data.max_prompt_length = 8",
    ),
    ("preference", _set(prompt=""), [], "FILE:3: the prompt in column 'prompt' is empty"),
    ("preference", _set(rejected=CHAT), [], "FILE:3: column 'chosen' must hold a list of messages whose last is the a"),
    (
        "preference",
        _set(chosen=CHAT[1:], rejected=CHAT[1:]),
        [],
        "FILE:3: column 'chosen' holds the answer alone, so that column 'prompt' (data.prompt_key) must hold the mess",
    ),
    ("reward_model", _set(), ["data.margin_key=by"], "data.margin_key = 'by': no such column in FILE:1; columns: "),
    (
        "reward_model",
        _set(id="far"),
        ["data.margin_key=id"],
        "FILE:3: the margin in column 'id' must be a finite number, not 'far'",
    ),
    ("kto", _set(label="yes"), [], "FILE:3: the label in column 'label' must be true, false, 1 or 0, not 'yes'"),
    ("kto", _set(label=0.5), [], "FILE:3: the label in column 'label' must be true, false, 1 or 0, not 0.5"),
    ("kto", _without("label"), [], "data.label_key = 'label': no such column in FILE:3; columns: prompt, answer, id"),
    ("kto", _set(), ["data.train_batch_size=1"], "kto compares each answer with those to other prompts: data.train_"),
    ("sft", _set(answer=None), [], "FILE:3: the answer in column 'answer' must be text or a number, not null"),
    ("sft", _set(), ["data.messages_key=chat"], "data.messages_key = 'chat': no such column in FILE:1; columns: "),
    ("sft", _set(), ["data.messages_key=id"], "FILE:1: column 'id' must hold a list of messages with role and content"),
    ("sft", _set(), ["data.format=judged"], "data.format = judged: trainer.flow = sft reads demonstrations; leave the"),
    ("sft", _set(), ["data.train_batch_size=81"], "data.train_batch_size = 81 is more than the 80 rows of data.train_"),
    (
        "preference",
        _set(),
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=11", "data.max_prompt_length=4"],
        "FILE:1: the pair has 12 tokens",
    ),
    (
        "preference",
        _set(),
        ["actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
        "actor.ppo_micro_batch_size_per_gpu = 1 holds no pair; set it to 2 or more",
    ),
    ("preference", _set(), ["algorithm.preference.loss_mode=dop"], "algorithm.preference.loss_mode = 'dop' is not kno"),
    (
        "reward_model",
        _set(),
        ["actor_rollout_ref.model.checkpoint=x"],
        "actor_rollout_ref.model.checkpoint: a reward model begins as a Hugging Face folder",
    ),
]


@pytest.mark.parametrize(("flow", "rows", "overrides", "said"), REFUSED, ids=[said[:40] for *_, said in REFUSED])
def test_refusals(tmp_path: Path, flow: str, rows: Any, overrides: list[str], said: str) -> None:
    config = offline_run(tmp_path, flow, rows)
    with pytest.raises(ValueError) as refused:
        check_run(load_config(str(config), overrides))
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(said.replace("FILE", str(tmp_path / "train.jsonl")))


def test_rows_that_are_too_long_can_be_dropped(tmp_path: Path) -> None:
    config = str(offline_run(tmp_path, "preference", _set(chosen="123456")))
    inputs = check_run(load_config(config, ["data.filter_overlong_prompts=true"]))
    assert len(inputs.train_examples) == 79 and len(inputs.val_examples) == 19
    assert replace(inputs.train_examples[0]).tokens == 12
    with pytest.raises(ValueError, match=r"data.train_files: none of the 80 rows keeps to data.max_prompt_length = 1 "):
        check_run(load_config(config, ["data.filter_overlong_prompts=true", "data.max_prompt_length=1"]))
