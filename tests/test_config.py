"""Configuration files, overrides, and what is said about those that cannot work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import megarl
from megarl.config import Config, ConfigError, build_config, dump_config, load_config
from megarl.config.load import all_keys


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n  train_files: [a.jsonl]\n  train_batch_size: 8\ntrainer:\n  experiment_name: sums\n")
    return str(path)


def test_defaults_and_derived_values(file: str) -> None:
    config = load_config(file)
    assert (config.data.train_batch_size, config.data.prompt_key) == (8, "prompt")
    assert config.trainer.run_dir == "runs/megarl/sums"
    assert config.actor_rollout_ref.actor.clip_low == config.actor_rollout_ref.actor.clip_high == 0.2
    assert not config.needs_reference


def test_overrides_are_yaml_and_later_ones_win(file: str) -> None:
    config = load_config(
        file,
        [
            "data.train_batch_size=16",
            "data.train_batch_size=32",
            "data.val_files=[b.jsonl,c.jsonl]",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null",
            "trainer.default_local_dir=/tmp/x",
            "environment.name=calculator",
            "environment.args={digits: 3}",
            "environment.args={}",
            "environment.name=",
        ],
    )
    assert (config.environment.name, config.environment.args) == ("", {})
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size == 32 and config.data.val_files == ["b.jsonl", "c.jsonl"]
    assert (actor.clip_low, actor.clip_high) == (0.2, 0.28)
    assert actor.megatron.virtual_pipeline_model_parallel_size is None
    assert config.needs_reference and config.trainer.run_dir == "/tmp/x"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_batchsize=8", "unknown key 'data.train_batchsize'; did you mean 'data.train_batch_size'?"),
        ("data.ppo_epochs=2", "unknown key 'data.ppo_epochs'; did you mean 'actor_rollout_ref.actor.ppo_epochs'?"),
        ("actor.clip_ratio=0.1", "unknown key 'actor'; did you mean 'actor_rollout_ref.actor'?"),
        ("trainer.namespace=a", "unknown key 'trainer.namespace'"),
        (
            "algorithm.use_token_level_loss=true",
            "unknown key 'algorithm.use_token_level_loss'; did you mean 'actor_rollout_ref.actor.loss_agg_mode'?",
        ),
        (
            "algorithm.dynamic_sampling=true",
            "unknown key 'algorithm.dynamic_sampling'; did you mean 'algorithm.filter_groups'?",
        ),
        (
            "actor_rollout_ref.actor.megatron.hierarchical_context_parallel_sizes=2",
            "unknown key 'actor_rollout_ref.actor.megatron.hierarchical_context_parallel_sizes'",
        ),
        ("data.train_batch_size=many", "data.train_batch_size: input should be a valid integer"),
        ("data.train_batch_size=0", "data.train_batch_size: input should be greater than or equal to 1 (got 0)"),
        ("data.truncation=cut", "data.truncation: input should be 'error', 'left', 'right' or 'middle' (got 'cut')"),
        ("trainer.resume_allow=[sede]", "trainer.resume_allow.0: input should be"),
        ("data=3", "data: input should be a valid dictionary"),
        ("data.seed", "override 'data.seed' is not of the form key=value"),
    ],
)
def test_refusals_say_what_to_change(file: str, override: str, said: str) -> None:
    message = refusal(lambda: load_config(file, [override]))
    assert message.startswith(said)
    assert ("did you mean" in message) == ("did you mean" in said), "a key of what is not here has no other name"


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    assert refusal(lambda: load_config(str(tmp_path / "no.yaml"))) == f"no config file at '{tmp_path / 'no.yaml'}'"
    (tmp_path / "bad.yaml").write_text("data: [1\n")
    assert "is not valid YAML" in refusal(lambda: load_config(str(tmp_path / "bad.yaml")))
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "must hold sections" in refusal(lambda: load_config(str(tmp_path / "list.yaml")))


def test_dump_writes_every_key_and_reads_back(file: str, tmp_path: Path) -> None:
    config = load_config(file, ["data.seed=3"])
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "dumped.yaml")) == config
    text = dump_config(Config())
    for key in all_keys():
        assert f"{key.rsplit('.', 1)[-1]}:" in text


def test_sections_are_frozen() -> None:
    config = build_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.data.seed = 4  # type: ignore[misc]


def test_one_text_is_a_list_of_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: s3://bucket/a.jsonl}\nwarmup: {train_files: b.jsonl}\n")
    config = load_config(str(file), ["trainer.logger=csv", "trainer.resume_allow=data", "data.val_files='a b.jsonl'"])
    assert (config.data.train_files, config.warmup.train_files) == (["s3://bucket/a.jsonl"], ["b.jsonl"])
    assert (config.trainer.logger, config.trainer.resume_allow) == (["csv"], ["data"])
    assert config.data.val_files == ["a b.jsonl"]
    for wrong in ("data.weights=0.5", "data.train_files=3", "trainer.resume_allow=everything", "data.train_files="):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            load_config(str(file), [wrong])


def test_every_shipped_configuration_parses() -> None:
    for path in (Path(__file__).parents[1] / "configs").glob("**/*.yaml"):
        load_config(str(path))


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key, those of a list's items too."""
    for name, field in section.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type)]
        models = [a for a in inner if issubclass(a, BaseModel)]
        if not models or field.annotation not in models:
            yield prefix + name, field
        for model in models:
            yield from fields_of(model, f"{prefix}{name}.")


def test_every_key_is_described_and_used() -> None:
    program = {path: path.read_text() for path in Path(megarl.__file__).parent.rglob("*.py")}
    code = "\n".join(text for path, text in program.items() if path.parent.name not in ("config", "migration"))
    sections = "\n".join(text for path, text in program.items() if path.parent.name == "config")
    keys = dict(fields_of(Config))
    assert set(all_keys()) <= keys.keys()
    assert [key for key, field in keys.items() if not field.description] == []
    names = {key: key.rsplit(".", 1)[-1] for key in keys}
    uses = set(re.findall(r"\.(\w+)\b", code)) | set(re.findall(r"self\.(\w+)\b", sections))
    assert [key for key, name in names.items() if name not in uses] == []


def test_other_names_lead_to_keys() -> None:
    from megarl.config.load import _OTHER_NAMES

    keys = set(all_keys())
    for other, here in _OTHER_NAMES.items():
        assert other not in keys and (here in keys or any(key.startswith(f"{here}.") for key in keys)), other
