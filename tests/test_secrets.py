"""What the environment, URLs and keys hold in secret stands in no file, page or message of a run."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from ranks import Ranks
from tiny_run import megarl, write_run

from megarl.cli.main import main
from megarl.config import Config, ConfigError, build_config, dump_config, load_config, load_run_config, secrets
from megarl.config.load import all_keys
from megarl.config.secrets import HIDDEN, hand_over, hide, names_secret, without_secrets
from megarl.report.runs import runs_at
from megarl.report.settings import settings

ENVIRONMENT = {"JUDGE_TOKEN": "from-the-environment-1", "STORE": "s3://AKIA77:sEcReT88@bucket/rows", "SEED": "7"}
WORDS = ("from-the-environment-1", "AKIA77", "sEcReT88", "typed-into-the-file-2", "pw-in-the-url-3")
"""None of which may be seen."""


def written(folder: Path, **sections: Any) -> Path:
    """A run's configuration with secrets in all the places where they may be."""
    secret: dict[str, Any] = {
        "reward__args": {"api_key": "typed-into-the-file-2", "other": "${oc.env:JUDGE_TOKEN}", "max_token": "9"},
        "data__seed": "${oc.env:SEED}",
        "data__cache_dir": "${oc.env:STORE}",
        "telemetry__prometheus__gateway": "http://somebody:pw-in-the-url-3@host:9091",
        "telemetry__wandb__tags": "${oc.env:JUDGE_TOKEN}",
    }
    return write_run(folder, **{**secret, **sections})


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables; what this process learns of secrets here is no other file's."""
    monkeypatch.setattr(secrets, "_written", {})
    monkeypatch.setattr(secrets, "_known", set())
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_a_record_is_written_as_the_file_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(str(written(tmp_path)))
    text = dump_config(build_config(config.model_dump()))  # it may be built again on the way
    assert not [word for word in WORDS if word in text]
    tree = yaml.safe_load(text)
    assert tree["data"]["seed"] == "${oc.env:SEED}" and tree["data"]["cache_dir"] == "${oc.env:STORE}"
    assert tree["reward"]["args"] == {"api_key": HIDDEN, "other": "${oc.env:JUDGE_TOKEN}", "max_token": "9"}
    assert tree["telemetry"]["wandb"]["tags"] == ["${oc.env:JUDGE_TOKEN}"]
    assert tree["telemetry"]["prometheus"]["gateway"] == f"http://{HIDDEN}@host:9091"
    record = tmp_path / "record.yaml"
    record.write_text(text)
    with pytest.raises(ConfigError, match=r"^reward\.args\.api_key: records do not show its value; give it as"):
        load_run_config(str(record))
    given = ["reward.args.api_key=x", "telemetry.prometheus.gateway=y"]
    monkeypatch.setenv("SEED", "8")
    assert load_run_config(str(record), given).data.seed == 8  # the environment's then
    handed: dict[str, str] = {}
    hand_over(config.model_dump(), handed)
    for name, value in handed.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SEED", "7")
    assert load_run_config(str(record)) == config
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(ConfigError, match="JUDGE_TOKEN"):
        load_config(str(record))


def test_what_makes_a_run_that_run_holds_no_value_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints record it, and are given to others."""
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/hooks/T024-in-the-path")
    (tmp_path / "run.yaml").write_text("reward: {name: http, args: {url: '${oc.env:HOOK}'}}\n")
    args = load_config(str(tmp_path / "run.yaml")).reward.args
    assert args["url"].endswith("T024-in-the-path")
    assert without_secrets({"reward.args.url": args["url"]}) == {"reward.args.url": "${oc.env:HOOK}"}


def test_which_keys_name_a_secret() -> None:
    for key in (
        "api_key",
        "reward.args.apikey",
        "hf_token",
        "a.token",
        "PASSWORD",
        "headers.Authorization",
        "db.passwd",
        "AWS_SECRET_ACCESS_KEY",
    ):
        assert names_secret(key), key
    for key in (
        "max_tokens",
        "eos_token",
        "prompt_key",
        "stop_token_ids",
        "tokenizer_path",
        "monkey",
        "passwords_file",
    ):
        assert not names_secret(key), key
    assert not [key for key in all_keys() if names_secret(key)]
    assert dump_config(Config()).count(HIDDEN) == 0
    assert hide("Authorization: Bearer abc.def, x?token=abc&b=c") == (
        f"Authorization: Bearer {HIDDEN} x?token={HIDDEN}&b=c"
    )
    assert hide("GET https://me:pw@host/x and s3://K:S@b") == f"GET https://{HIDDEN}@host/x and s3://{HIDDEN}@b"


def test_pages_and_messages_show_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path)
    assert main(["config", "print", str(config)]) == 0
    assert main(["config", "diff", str(config)]) == 0
    (tmp_path / "old").mkdir()
    tree = load_config(str(config)).model_dump()
    (tmp_path / "old" / "config.yaml").write_text(yaml.safe_dump(tree))  # as an older version wrote it
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1}\n')
    print(settings(runs_at([str(tmp_path / "old")])))
    for word in (
        "reward.args.api_key={typed-into-the-file-2",
        "reward.workers=typed-into-the-file-2",
        "data.seed=http://a:pw-in-the-url-3@host",
        "trainer.api_key=typed-into-the-file-2",
        "data.train_files=s3://AKIA77:sEcReT88@bucket/none.jsonl",
    ):
        assert main(["train", str(config), word]) == 2
    said = "".join(capsys.readouterr())
    assert said.count("megarl: error: ") == 5
    assert not [word for word in WORDS if word in said], said


def test_a_run_leaves_none_in_its_files_and_goes_on(tmp_path: Path, ranks: Ranks) -> None:
    """Also with another password: it is no other run."""
    (tmp_path / "reward.py").write_text(
        "def score(response, row, api_key, other, max_token):\n    return len(response)\n"
    )
    sections = {"data__cache_dir": "", "trainer__save_freq": 1, "trainer__val_before_train": False}
    config = written(tmp_path, reward__name=f"{tmp_path}/reward.py:score", **sections)
    said: str = ranks.launch(1, _train, str(config), ["trainer.total_training_steps=1"])[0]
    run = tmp_path / "run"
    changed = ["trainer.total_training_steps=2", "reward.args.api_key=changed-since-4"]
    said += ranks.launch(1, _train, str(config), changed)[0]
    assert "resuming from" in said
    for parent, _, names in os.walk(run):
        for name in names:
            content = (Path(parent) / name).read_bytes()
            assert not [word for word in (*WORDS, "changed-since-4") if word.encode() in content], (parent, name)
    assert not [word for word in WORDS if word in said]
    assert stat.S_IMODE((run / "config.yaml").stat().st_mode) == 0o600


def _train(config: str, overrides: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:  # the pool's ranks may be older than this test's environment
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        return tiny_run.train(config, overrides)


@pytest.mark.slow
def test_an_evaluation_of_a_run_has_the_secrets_that_its_record_has_not(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "reward.py").write_text(
        "def score(response, row, api_key, other, max_token):\n"
        "    assert other == 'from-the-environment-1' and api_key == 'given-again-5'\n    return 1.0\n"
    )
    sections = {"data__cache_dir": "", "trainer__save_freq": 1, "trainer__total_training_steps": 1}
    config = written(tmp_path, reward__name=f"{tmp_path}/reward.py:score", trainer__val_before_train=False, **sections)
    ranks.launch(1, _train, str(config), ["reward.args.api_key=given-again-5", "trainer.test_freq=0"])
    refused = megarl("eval", str(tmp_path / "run"), "--trust")
    assert refused.returncode == 2 and "reward.args.api_key: records do not show its value" in refused.stderr
    given = ["reward.args.api_key=given-again-5", "telemetry.prometheus.gateway=''"]
    done = megarl("eval", str(tmp_path / "run"), "--trust", *given)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "run" / "eval").iterdir()
    assert (
        json.loads((folder / "eval.json").read_text()) and "given-again-5" not in (folder / "config.yaml").read_text()
    )
