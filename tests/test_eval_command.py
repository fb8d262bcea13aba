"""A checkpoint's evaluation: the scores that the run saw, in any layout, from any folder; and two of them compared."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import Ranks
from run_cases import run_here
from tiny_run import FINGERPRINT, megarl, metrics_of, write_run

from megarl.cli.compare import compare
from megarl.cli.evaluate import Request, evaluate
from megarl.cli.main import main
from megarl.config import dump_config, load_config
from megarl.endings import ExitCode
from megarl.evaluation.comparison import COMPARE_FILE
from megarl.evaluation.folder import Finished, read_evaluation
from megarl.evaluation.records import read_records
from megarl.evaluation.statistics import estimate, majority_at_k, pass_at_k
from megarl.trainer.layouts import generation_layout, train_layout
from megarl.trainer.subject import answering_config, evaluation_config, find_subject
from megarl.trainer.trust import unsafe_remarks

N = "actor_rollout_ref.rollout.val_kwargs.n"
TRAINING_TP = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
GENERATION_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.fixture(scope="module")
def folder(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, each of them validated with four samples per prompt, and saved; two data sources."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "reward.py").write_text(
        FINGERPRINT.replace("return", "return 1.0 if zlib.crc32(response.encode()) % 7 == 0 else")  # some are right
        + "def first_letter(response):\n    return response[:1] or None\nscore.answer_of = first_letter\n"
    )
    config = write_run(
        folder,
        reward__name=f"{folder / 'reward.py'}:score",
        actor_rollout_ref__rollout__val_kwargs={"n": 4, "temperature": 1.0},
        trainer__save_freq=1,
        trainer__test_freq=1,
        trainer__logger=["jsonl"],
        checkpoint__save_contents=["model", "optimizer", "hf_model"],
    )
    rows = [json.loads(line) for line in (folder / "val.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "data_source": "odd" if i % 2 else "even/[b]"}) for i, row in enumerate(rows)]
    (folder / "val.jsonl").write_text("\n".join(lines) + "\n")
    ended, said = ranks.run(1, run_here, str(config))[0]
    assert ended == "", said
    return folder


def evaluation(ranks: Ranks, world: int, path: Path, out: Path, *overrides: str, file: Path | None = None) -> Finished:
    """`megarl eval` in the pool's ranks."""
    subject = find_subject(str(path))
    chosen = str(file) if file else subject.recorded
    config = evaluation_config(subject, chosen, overrides, str(out), world)
    given = out.with_suffix(".yaml")
    given.write_text(dump_config(config))
    ended, said = ranks.run(world, run_here, str(given))[0]
    assert ended == "", said
    return read_evaluation(str(out))


def validated(folder: Path, step: int) -> Path:
    return folder / "run" / "validation" / f"step_{step:06d}.jsonl"


def test_a_validation_reports_each_source(folder: Path) -> None:
    """Its metrics from its samples, by hand."""
    records, row = read_records(str(validated(folder, 2))), metrics_of(folder)[-1]
    assert row["step"] == 2 and len(records) == 80 and {one.source for one in records} == {"odd", "even/[b]"}
    assert {one.vote for one in records} <= {one.response[:1] or None for one in records}  # the reward says how to read
    for source in ("odd", "even/[b]", ""):
        own = [one for one in records if source in ("", one.source)]
        prompts = [[one for one in own if one.index == index] for index in dict.fromkeys(one.index for one in own)]
        prefix, mean = f"val/{source}/" if source else "val/", estimate([sum(_scores(p)) / 4 for p in prompts])
        assert mean is not None
        assert row[f"{prefix}mean" if source else "val/reward"] == pytest.approx(mean.mean, rel=1e-12)
        assert row[f"{prefix}mean_ci95" if source else "val/reward_ci95"] == mean.ci95
        for k in (2, 4):
            right = [sum(score >= 1 for score in _scores(p)) for p in prompts]
            passed = sum(pass_at_k(4, c, k) for c in right) / len(prompts)
            votes = [majority_at_k([o.vote for o in p], [float(s >= 1) for s in _scores(p)], k) for p in prompts]
            assert row[f"{prefix}pass@{k}"] == pytest.approx(passed) and 0 < passed < 1
            assert row[f"{prefix}maj@{k}"] == pytest.approx(sum(votes) / len(votes))
    assert "val/pass@1" not in row and row["val/pass@2"] < row["val/pass@4"]


def _scores(records: list[Any]) -> list[float]:
    return [one.score for one in records]


@pytest.mark.parametrize("step", [1, 2])
def test_an_evaluation_gives_what_the_run_saw(ranks: Ranks, folder: Path, tmp_path: Path, step: int) -> None:
    """Bit for bit: every response and every score of the validation after that step."""
    path = folder / "run" / "checkpoints" / f"global_step_{step}"
    found = evaluation(ranks, 1, path, tmp_path / "out")
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == validated(folder, step).read_bytes()
    assert validated(folder, 1).read_bytes() != validated(folder, 2).read_bytes()
    values, row = json.loads((tmp_path / "out" / "eval.json").read_text()), metrics_of(folder)[step]
    assert values["model"] == str(path) and values["n"] == 4
    assert values["all"]["mean"]["mean"] == pytest.approx(row["val/reward"], rel=1e-12)
    assert values["sources"]["odd"]["pass@2"]["mean"] == row["val/odd/pass@2"]
    assert values["all"]["pass@1"]["mean"] == pytest.approx(row["val/accuracy"]) and found.settings["seed"] == 1
    assert not (folder / "run" / "eval").exists() and not (tmp_path / "out" / "earlier").exists()


@pytest.mark.slow
def test_other_layouts_give_the_same_responses(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Generation in TP=2, from weights in TP=1, TP=2 (which the engine shares) and PP=2 (which leave meanwhile)."""
    here = [(one.response, one.score) for one in read_records(str(validated(folder, 2)))]
    layouts = {
        "tp1": [f"{GENERATION_TP}=2"],
        "tp2": [f"{GENERATION_TP}=2", f"{TRAINING_TP}=2", "actor_rollout_ref.actor.megatron.param_offload=true"],
        "pp2": [
            f"{GENERATION_TP}=2",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.param_offload=true",
        ],
        "dp2": [],
    }
    for name, overrides in layouts.items():
        found = evaluation(ranks, 2, folder / "run", tmp_path / name, *overrides)
        assert [(one.response, one.score) for one in found.records] == here, name


def test_a_hugging_face_folder_is_evaluated_by_keys_alone(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Somewhere else, without any configuration file; and as part of the run, with the run's."""
    alone = tmp_path / "model"
    shutil.copytree(folder / "run" / "checkpoints" / "global_step_2" / "huggingface", alone)
    assert find_subject(str(alone)).recorded is None and find_subject(str(alone)).place == f"{alone}.eval"
    keys = [f"data.val_files=[{folder / 'val.jsonl'}]", f"reward.name={folder / 'reward.py'}:score", f"{N}=4"]
    keys += ["data.max_prompt_length=8", "data.max_response_length=4", "actor_rollout_ref.model.dtype=float32"]
    keys += ["actor_rollout_ref.rollout.val_kwargs.temperature=1"]
    evaluation(ranks, 1, alone, tmp_path / "out", *keys)
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == validated(folder, 2).read_bytes()


@pytest.mark.slow
def test_one_rank_answers_for_a_run_whose_experts_were_dealt_out(tmp_path: Path) -> None:
    roles = "actor_rollout_ref"
    overrides = [f"{roles}.actor.megatron.{kind}_parallel_size=2" for kind in ("expert_model", "context")]
    overrides += [f"{roles}.rollout.enable_expert_parallel=true"]
    config = load_config(str(write_run(tmp_path)), [*overrides, f"{roles}.rollout.tensor_model_parallel_size=2"])
    settings: dict[str, Any] = dict(requests=1, max_tokens=None, context=None, keep_engine=False)
    answering = answering_config(config, positions=32, **settings)
    assert (train_layout(answering).ep, train_layout(answering).cp, generation_layout(answering).ep) == (1, 1, 1)


@pytest.mark.slow
def test_the_eval_command(folder: Path) -> None:
    """In a process of its own, on two ranks; a second one takes a folder of its own, and fails cleanly if it must."""
    run = folder / "run"
    done = megarl("eval", str(run), "--trust", "--nproc", "2", f"{N}=2", f"{GENERATION_TP}=2")
    assert done.returncode == 0 and "megarl report" not in done.stdout + done.stderr, done.stderr
    out = run / "eval" / "global_step_2"
    assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "eval.json", "lock", "samples.jsonl"]
    assert "responses 40/40" in done.stdout and "even/[b]" in done.stdout and "pass@2" in done.stdout
    assert f"eval.json and samples.jsonl are in {out}" in done.stdout
    first_two = [one for one in read_records(str(validated(folder, 2))) if one.sample < 2]
    assert list(read_evaluation(str(out)).records) == first_two  # a response's seed depends on nothing else
    (folder / "raises.py").write_text("def score(response, row):\n    raise KeyError('gold')\n")
    failed = megarl("eval", str(run), f"reward.name={folder / 'raises.py'}:score")
    assert failed.returncode == ExitCode.INPUT and "KeyError: 'gold'" in failed.stderr
    assert not (run / "eval" / "global_step_2-2").exists()


@pytest.mark.slow
def test_the_compare_command(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Of a finished evaluation and a checkpoint, which is asked as the other one was."""
    one = evaluation(ranks, 1, folder / "run" / "checkpoints" / "global_step_1", tmp_path / "one", f"{N}=2")
    out = tmp_path / "out"
    done = megarl("compare", one.folder, str(folder / "run"), "--trust", "--out", str(out))
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert "A higher" in done.stdout and "even/[b]" in done.stdout
    values = json.loads((out / COMPARE_FILE).read_text())
    a, b = one.records, read_evaluation(str(out / "b")).records
    assert [record for record in read_records(str(validated(folder, 2))) if record.sample < 2] == list(b)
    difference = sum(_scores(list(a))) / 40 - sum(_scores(list(b))) / 40
    assert values["all"]["mean"]["difference"]["mean"] == pytest.approx(difference, abs=1e-12)
    assert values["sources"]["odd"]["prompts"] == 10 and 0 < values["all"]["mean"]["p"] <= 1
    changes = [json.loads(line) for line in (out / "changes.jsonl").read_text().splitlines()]
    sizes = [abs(change["difference"]) for change in changes]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    assert len(changes) == values["all"]["mean"]["a_only"] + values["all"]["mean"]["b_only"]


def request(*overrides: str, **more: Any) -> Request:
    plain: dict[str, Any] = {"file": None, "out": None, "nproc": None, "best": False, "trust": True}
    return Request(overrides=overrides, **{**plain, **more})


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_code_that_a_folder_names_runs_only_if_the_caller_trusts_it(
    folder: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder may be somebody else's, with a file of his beside it."""
    run, ran = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(folder / "run", run)
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\ndef score(response, row):\n    return 1.0\n")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["reward"]["name"] = f"{tmp_path}/theirs.py:score"
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    words = [command, str(run), *([str(run)] if command == "compare" else [])]
    assert main([*words, "--nproc", "3", f"{TRAINING_TP}=2"]) == 2
    said = capsys.readouterr().err
    assert f"recorded imports {tmp_path}/theirs.py (reward.name); if you trust that folder, give --trust" in said
    assert said.count("\n") == 1 and not ran.exists()
    for trusting in (["--trust"], [f"reward.name={tmp_path}/theirs.py:score"], [str(run / "config.yaml")]):
        ran.unlink(missing_ok=True)
        here = [*words, *trusting] if trusting[0] != str(run / "config.yaml") else [*words, trusting[0]]
        assert main([*here, "--nproc", "3", f"{TRAINING_TP}=2"]) == 2  # no ranks can be split so
        assert "--trust" not in capsys.readouterr().err
    tree["reward"] = {"name": "code", "args": {"isolation": "process"}}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main(words) == 2
    assert "runs what the model writes without sandbox (reward.args.isolation); if you" in capsys.readouterr().err
    tree["reward"] = {"name": "http", "args": {"url": "http://me:pw@there.example/x?token=abc123", "token_env": "HOME"}}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert (
        "recorded sends responses to http://[hidden]@there.example/x?token=[hidden] (reward.args.url); if you" in said
    )


def test_a_run_without_sandbox_says_so_at_its_start_and_in_its_plan(tmp_path: Path) -> None:
    config = write_run(tmp_path, reward={"name": "code", "args": {"isolation": "process"}})
    line = "reward.args.isolation = process: programs that the model writes run without sandbox, with your files and"
    assert list(unsafe_remarks(load_config(str(config)))) == [f"{line} your network"]
    planned = megarl("plan", str(config))
    assert f"warning: {line}" in planned.stdout.replace("\n", " "), planned.stdout + planned.stderr
    assert not list(unsafe_remarks(load_config(str(config), ["reward.args.isolation=namespaces"])))


REFUSED = [
    ("run", request(f"{N}=0"), r"rollout\.val_kwargs\.n: input should be greater than or equal to 1"),
    ("run", request("actor_rollout_ref.rollout.val_kwargs.k=[2,8]"), r"k asks for 8 samples per prompt, .* raise n$"),
    ("run", request("actor_rollout_ref.rollout.val_kwargs.temperature=0"), r"4 greedy responses to a prompt are all"),
    ("run", request("data.val_files=[]"), r"an evaluation needs held-out prompts: name their files in data"),
    ("run", request("data.val_files=[no.jsonl]"), r"data\.val_files: no file matches 'no\.jsonl'$"),
    ("run", request(file="no.yaml"), r"no config file at 'no\.yaml'$"),
    ("run", request(out="OUT"), r"'.*OUT' holds something already, and nothing is overwritten: name a new folder$"),
    ("run", request(best=True), r"names no best checkpoint: it has no checkpoints/best\.json$"),
    ("run", request(f"{TRAINING_TP}=2", nproc=3), r"3 ranks cannot be split"),
    ("run/checkpoints/global_step_2", request(best=True), r"--best chooses among the checkpoints of a run"),
    ("run/checkpoints/global_step_9", request(), r"^no folder at '.*global_step_9'$"),
    ("run/validation", request(), r"is neither a checkpoint .* nor a run's folder .* nor a Hugging Face folder"),
    ("run/checkpoints", request(), r"is neither a checkpoint .* nor a run's folder .* nor a Hugging Face folder"),
]


@pytest.mark.parametrize(("path", "asked", "said"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_what_cannot_be_evaluated_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, asked: Request, said: str
) -> None:
    """In one line, before any rank starts, and without a folder that is left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "OUT").mkdir()
    (tmp_path / "OUT" / "mine").write_text("")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=said) as refused:
        evaluate(str(folder / path), asked)
    assert "\n" not in str(refused.value) and sorted(folder.rglob("*")) == before


def test_a_damaged_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "global_step_2"
    (newest / "common.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"global_step_2' is damaged: common\.pt"):
        find_subject(str(newest))
    assert find_subject(str(tmp_path / "run")).name == "global_step_1"
    (newest.parent / "global_step_1" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has no whole checkpoint; global_step_2: common\.pt"):
        find_subject(str(tmp_path / "run"))


def test_comparisons_that_mean_nothing_are_refused(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Other files, or a configuration that nothing would read."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join((folder / "val.jsonl").read_text().splitlines(keepends=True)[1:]))
    a = evaluation(ranks, 1, folder / "run", tmp_path / "a", f"{N}=1")
    b = evaluation(ranks, 1, folder / "run", tmp_path / "b", f"{N}=1", f"data.val_files=[{other}]")
    with pytest.raises(ValueError, match=r"^prompt 0 has another text in '.*a' than in '.*b': evaluate both on the"):
        compare(a.folder, b.folder, request())
    with pytest.raises(ValueError, match=r"^both are evaluations already: nothing is generated"):
        compare(a.folder, a.folder, request(f"{N}=2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.yaml", "b", "b.yaml", "other.jsonl"]
    assert compare(a.folder, a.folder, request()) == 0
    values = json.loads((tmp_path / "a-vs-a" / COMPARE_FILE).read_text())
    assert values["all"]["mean"]["p"] == 1.0 and values["all"]["mean"]["difference"]["mean"] == 0.0
    assert (tmp_path / "a-vs-a" / "changes.jsonl").read_text() == ""


def test_an_evaluation_is_never_written_over(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """As a flow of `megarl train`, too, which is how one runs on several nodes."""
    found = evaluation(ranks, 1, folder / "run", tmp_path / "out", f"{N}=1")
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    ended, _ = ranks.run(1, run_here, str(tmp_path / "out.yaml"))[0]
    assert re.search(r"^refused: .*out holds an evaluation already; set another trainer\.default_local_dir$", ended)
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before and len(found.records) == 20
