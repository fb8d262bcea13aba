"""Folders of strangers: pipes in place of files, holes in tensors, lists that multiply, names that lead elsewhere."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_cases import write_folder
from report_runs import write_folder as write_run_folder
from torch.distributed.checkpoint import FileSystemReader

from megarl.checkpoint.folder import read_state
from megarl.checkpoint.manifest import checksum_problem, read_manifest
from megarl.checkpoint.stored_objects import CheckpointReader
from megarl.cli.main import main
from megarl.data.prompt_sampler import PromptSampler
from megarl.data.row_cache import entry
from megarl.processes import module_command
from megarl.registry import Registry
from megarl.telemetry.lines import LineFile, rewrite
from megarl.trainer.resuming.best import best_checkpoint
from megarl.trainer.trust import asked_hosts
from tools.convert import main as convert


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    assert convert(["hf-to-megatron", str(write_folder(folder / "source", "qwen2")), str(folder / "megatron")]) == 0
    return folder / "megatron"


def _no_chunks(metadata: Any) -> None:
    next(what for what in metadata.state_dict_metadata.values() if hasattr(what, "chunks")).chunks.clear()


def _the_same_chunk_twice(metadata: Any) -> None:
    chunks = next(what for what in metadata.state_dict_metadata.values() if len(getattr(what, "chunks", ())) > 1).chunks
    chunks[1] = chunks[0]


def _lists_that_multiply(metadata: Any) -> None:
    key, what = next((key, what) for key, what in metadata.state_dict_metadata.items() if hasattr(what, "chunks"))
    what.chunks = [what.chunks[0]] * 3000
    metadata.state_dict_metadata.update({f"{key}{i}": what for i in range(3000)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_chunks, "is described wrongly"),
        (_the_same_chunk_twice, "is described wrongly"),
        (_lists_that_multiply, "its tensors have more parts than it can name"),
    ],
)
def test_tensors_with_holes_are_refused(
    converted: Path, tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    """What lies in no file would be whatever the memory of the process holds."""
    metadata = FileSystemReader(converted).read_metadata()
    try:
        change(metadata)
    except StopIteration:
        pytest.skip("no tensor of it is in parts")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=rf"^\.metadata cannot be read: [^\n]*{said}"):
        CheckpointReader(str(tmp_path))


def test_a_description_of_any_size_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / ".metadata", "wb") as f:
        f.truncate(6 << 30)
    with pytest.raises(ValueError, match=r"^\.metadata cannot be read: it has more than \d+ bytes$"):
        CheckpointReader(str(tmp_path))


def test_pipes_are_no_files(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody waits for who never writes."""
    metadata = FileSystemReader(converted).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    name = next(iter(metadata.storage_data.values())).relative_path
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"^.metadata cannot be read: {name} is no file$"):
        CheckpointReader(str(tmp_path))
    os.mkfifo(tmp_path / "extra")
    (tmp_path / "manifest.json").write_text('{"format": 1, "files": {"extra": {"size": 0, "blake2b": "00"}}}')
    records = read_manifest(str(tmp_path))
    assert records is not None and checksum_problem(str(tmp_path), records, records) == "it is no file"
    run = write_run_folder(tmp_path / "run", steps=2)
    (run / "checkpoints").mkdir(exist_ok=True)
    os.mkfifo(run / "checkpoints" / "best.json")
    with pytest.raises(ValueError, match="names no best checkpoint"):
        best_checkpoint(str(run))
    os.mkfifo(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "step.jsonl.new")
    for write in (
        lambda: LineFile(str(tmp_path / "metrics.jsonl")),
        lambda: rewrite(str(tmp_path / "step.jsonl"), b"x"),
    ):
        with pytest.raises(OSError):
            write()
    os.mkfifo(tmp_path / "run.yaml")
    assert main(["config", "migrate", str(tmp_path / "run.yaml")]) == 2
    assert "run.yaml' cannot be read: it is no file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../../dev/zero", "/dev/zero", "a/../../b"])
def test_a_manifest_names_files_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "files": {name: {"size": 0, "blake2b": "00"}}}))
    with pytest.raises(ValueError, match="which is no file of the checkpoint"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("state", [{"step": 2, "row": "x"}, {"step": 2, "row": 10**30}, {"step": 2, "order": 10**30}])
def test_a_position_that_no_run_has(tmp_path: Path, state: dict[str, Any]) -> None:
    (tmp_path / "trainer.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"its trainer\.json does not record a step of a run"):
        read_state(str(tmp_path))


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 0, "position": -5}, {"epoch": 0, "position": "x"}, {"epoch": 10**30, "position": 0}]
)
def test_a_place_in_the_data_that_no_run_has(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not say where its data stood"):
        PromptSampler(10, batch_size=2, seed=1, shuffle=True).load_state(state)


def test_a_cache_leaves_folders_of_others_alone(tmp_path: Path) -> None:
    for name in ("thesis.tmp-2024", f"{'a' * 24}.tmp-x1"):
        (tmp_path / name).mkdir()
    entry(tmp_path, "b" * 24, "data.train_files", lambda folder, progress: {})
    assert {"thesis.tmp-2024"} <= set(os.listdir(tmp_path)) and f"{'a' * 24}.tmp-x1" not in os.listdir(tmp_path)


def test_a_host_is_one_however_it_is_written() -> None:
    values = {"reward": {"args": {"url": "HTTP://10.0.0.1/x", "other": "hTtPs://b"}}}
    assert [key for key, _ in asked_hosts(values)] == ["reward.args.url", "reward.args.other"]


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    """A run folder that somebody sent may hold a psutil.py."""
    for name in ("psutil", "megarl", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    command = [*module_command("megarl.train"), "no.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert (done.returncode, (tmp_path / "ran").exists()) == (2, False), done.stderr
    assert done.stderr == "megarl: error: no config file at 'no.yaml'\n"


def test_a_migration_shows_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2hunter2secret")
    text = "trainer: {experiment_name: '${oc.env:MY_API_TOKEN}', default_hdfs_dir: '${oc.env:MY_API_TOKEN}'}\n"
    (tmp_path / "env.yaml").write_text(text + "data: {train_files: '/data/${oc.env:MY_API_TOKEN}.parquet'}\n")
    assert main(["config", "migrate", str(tmp_path / "env.yaml")]) in (0, 1)  # a wish is refused
    said = "".join(capsys.readouterr())
    assert "hunter2" not in said and "/data/${oc.env:MY_API_TOKEN}.parquet" in said
    lines = [f"a0: {'x' * 1000}", *(f"a{i}: {f'${{a{i - 1}}}' * 10}" for i in range(1, 9))]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert main(["config", "migrate", str(tmp_path / "bomb.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_name_where_there_are_none() -> None:
    registry: Registry[Any] = Registry("data.filter", "function")
    with pytest.raises(ValueError, match=r"^data.filter = 'x' is not known; use path/to/file.py:function$"):
        registry.load("x")


def test_one_odd_run_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run_folder(tmp_path / "good", steps=2)
    odd = write_run_folder(tmp_path / "odd", steps=2)
    (odd / "config.yaml").write_text(f"trainer: {{total_training_steps: 0x{'F' * 4000}}}\n")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = map(json.loads, capsys.readouterr().out.splitlines())
    assert {Path(run["folder"]).name: run["steps"] for run in found}.keys() == {"good", "odd"}
