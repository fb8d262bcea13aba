"""Checkpoints of strangers: nothing that is pickled in them runs, and damage is one line."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_peak import forget_peak, memory_peak
from ranks import Ranks
from run_cases import run_here
from selection import quick
from tiny_run import TrainedRun, megarl
from torch.distributed.checkpoint import FileSystemReader

from megarl.checkpoint.manifest import files_of, record_files, write_manifest
from megarl.checkpoint.stored_objects import CheckpointReader, read_metadata, read_object
from tools.convert import main


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def in_metadata(folder: Path, payload: Any) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = payload
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_an_object(folder: Path, payload: Any) -> None:
    """Behind the other parts of a file, where the description says that the random numbers are."""
    metadata, stream = FileSystemReader(folder).read_metadata(), io.BytesIO()
    torch.save([payload], stream)
    for index, place in metadata.storage_data.items():
        if index.fqn.startswith("rng/"):
            file = folder / place.relative_path
            place.offset, place.length = file.stat().st_size, len(stream.getvalue())
            file.write_bytes(file.read_bytes() + stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_an_extra_state(folder: Path, payload: Any) -> None:
    """Transformer Engine's layers would unpickle it; it is not even looked at."""
    metadata, stream = FileSystemReader(folder).read_metadata(), io.BytesIO()
    torch.save([payload], stream)
    for index, place in metadata.storage_data.items():
        if "_extra_state" in index.fqn:
            file = folder / place.relative_path
            place.offset, place.length = file.stat().st_size, len(stream.getvalue())
            file.write_bytes(file.read_bytes() + stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(folder: Path, payload: Any) -> None:
    torch.save({"payload": payload}, folder / "common.pt")


def stranger_s(small: TrainedRun, folder: Path, put: Callable[[Path, Any], None]) -> Path:
    """A whole checkpoint with a payload, which makes the folder `ran`."""
    copy = folder / "global_step_2"
    shutil.copytree(small.checkpoint(2), copy)
    put(copy, Runs(str(folder / "ran")))
    write_manifest(str(copy), record_files(str(copy), files_of(str(copy))))
    return copy


PUT = [
    (in_metadata, ".metadata would run code: it names posix.mkdir, which is no part of a checkpoint"),
    (in_an_object, "rng/shard_0_2 would run code: it names posix.mkdir, which is no plain value"),
    (in_common, "common.pt would run code: it names posix.mkdir, which is no plain value"),
]


@pytest.mark.parametrize(("put", "said"), quick(PUT, 2), ids=["metadata", "object", "common"])
def test_a_resumed_checkpoint_runs_no_code(
    ranks: Ranks, small: TrainedRun, tmp_path: Path, put: Callable[[Path, Any], None], said: str
) -> None:
    folder = stranger_s(small, tmp_path, put)
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
    run_dir = f"trainer.default_local_dir={tmp_path}/run"
    overrides = [*resume, run_dir, "trainer.total_training_steps=3"]
    (ended, _), _ = ranks.run(2, run_here, str(small.config), overrides)
    assert ended == f"RunRefused: checkpoint '{folder}': {said}" and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("put", "said"), [PUT[0], PUT[2]], ids=["metadata", "common"])
def test_a_run_that_begins_with_a_stranger_s_weights_runs_no_code(
    ranks: Ranks, small: TrainedRun, tmp_path: Path, put: Callable[[Path, Any], None], said: str
) -> None:
    folder = stranger_s(small, tmp_path, put)
    begins = [f"actor_rollout_ref.model.checkpoint={folder}", "actor_rollout_ref.model.random_init=false"]
    (ended, _), _ = ranks.run(2, run_here, str(small.config), [*begins, f"trainer.default_local_dir={tmp_path}/run"])
    assert ended == f"RunRefused: actor_rollout_ref.model.checkpoint: checkpoint '{folder}': {said}"
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_layers_would_unpickle_is_not_read(ranks: Ranks, small: TrainedRun, tmp_path: Path) -> None:
    folder = stranger_s(small, tmp_path, in_an_extra_state)
    begins = [f"actor_rollout_ref.model.checkpoint={folder}", "actor_rollout_ref.model.random_init=false"]
    overrides = [*begins, f"trainer.default_local_dir={tmp_path}/run", "trainer.total_training_steps=1"]
    (ended, _), _ = ranks.run(2, run_here, str(small.config), overrides)
    assert ended == "" and not (tmp_path / "ran").exists()


def test_a_checkpoint_that_is_converted_runs_no_code(
    small: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for put, said in (PUT[0], (in_an_object, ""), (in_common, "")):
        folder = stranger_s(small, tmp_path / put.__name__, put)
        code = main(["megatron-to-hf", str(folder), str(tmp_path / put.__name__ / "out")])
        printed = capsys.readouterr().err.splitlines()
        assert not (tmp_path / put.__name__ / "ran").exists()
        if said:
            assert code == 2 and printed[-1] == f"megarl: error: '{folder}': {said}"
        else:  # weights are converted, and nothing else is read
            assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "eval"])
def test_commands_that_answer_prompts_run_no_code(small: TrainedRun, tmp_path: Path, command: str) -> None:
    folder = stranger_s(small, tmp_path, in_metadata)
    asked = {"generate": ["--prompt", "1+1="], "eval": [str(small.config)]}[command]
    done = megarl(command, str(folder), *asked)
    assert done.returncode == 2 and PUT[0][1] in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp_path / "ran").exists()


def named(module: bytes, name: bytes) -> bytes:
    """Opcodes that look a name up."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text for text in (module, name)) + b"\x93"


MULTIPLIES = b")" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(1, 41))
SETS = b"}(\x8c\x01aK\x01ub."
ATTACKS = {
    "a function by a path": named(b"torch", b"Size.__new__") + b".",
    "attributes of a class": named(b"torch.distributed.checkpoint.metadata", b"Metadata") + SETS,
    "attributes of a function": named(b"torch.serialization", b"_get_layout") + SETS,
    "an attribute of a module": b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
    "places for 4 billion objects": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "8 GiB of bytes": b"\x80\x05\x96\x00\x00\x00\x00\x02\x00\x00\x00.",
    "an attribute": named(b"builtins", b"getattr") + named(b"torch", b"Size")[2:] + b"\x8c\x07__new__\x86R.",
    "nothing": b"",
    "tuples that multiply": b"\x80\x04}" + MULTIPLIES + b"Ns.",
    "tuples that multiply on the stack": b"\x80\x04})" + b"2\x86" * 40 + b"Ns.",
    "tuples that multiply in a set": b"\x80\x04\x8f(" + MULTIPLIES + b"\x90.",
    "tuples that multiply in an ordered dictionary": (
        named(b"collections", b"OrderedDict") + b"]" + MULTIPLIES + b"N\x86a\x85R."
    ),
    "tuples that multiply in a part's name": (
        b"\x80\x04}"
        + named(b"torch.distributed.checkpoint.metadata", b"MetadataIndex")[2:]
        + b"("
        + MULTIPLIES
        + b"NNtRNs."
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_description_can_do_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(ATTACKS[name])
    before = forget_peak()
    with pytest.raises(ValueError, match=r"^\.metadata (would run code|cannot be read): [^\n]+$"):
        read_metadata(str(tmp_path))
    assert memory_peak() - before < 2**28


@pytest.mark.parametrize("compressed", [False, True])
def test_an_object_asks_for_no_memory(tmp_path: Path, compressed: bool) -> None:
    stream = io.BytesIO()
    torch.save({"x": torch.zeros(4)}, stream)
    made = io.BytesIO()
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl") and not compressed:
                data = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x01\x85R."  # bytearray(1 << 32)
            target.writestr(name, data, zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED)
    before = forget_peak()
    with pytest.raises(ValueError, match=r"^common\.pt cannot be read: it (asks for memory|is compressed)"):
        read_object(io.BytesIO(made.getvalue()), "common.pt")
    assert memory_peak() - before < 2**28
    assert set(read_object(io.BytesIO(stream.getvalue()), "common.pt")) == {"x"}


@pytest.mark.parametrize(
    "pickled", [b"}" + MULTIPLIES + b"Ns.", b"}\x8c\x01a" + MULTIPLIES + b"s."], ids=["key", "value"]
)
def test_an_object_asks_for_no_time(pickled: bytes) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as target:
        target.writestr("archive/data.pkl", b"\x80\x02" + pickled)
        target.writestr("archive/version", b"3")
    with pytest.raises(ValueError, match=r"^common\.pt cannot be read: it has tuples that multiply"):
        read_object(io.BytesIO(made.getvalue()), "common.pt")


def test_an_object_is_an_archive() -> None:
    """What torch wrote before has pickles that nobody has looked at."""
    stream = io.BytesIO()
    torch.save({"x": 1}, stream, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"^common\.pt cannot be read: it is no archive"):
        read_object(io.BytesIO(stream.getvalue()), "common.pt")


def test_a_place_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "megatron"
    assert main(["hf-to-megatron", str(write_folder(tmp_path / "source", "qwen2")), str(folder)]) == 0
    whole = pickle.dumps(FileSystemReader(folder).read_metadata())
    changes: list[Callable[[Any], Any]] = [
        lambda metadata: setattr(next(iter(metadata.storage_data.values())), "relative_path", "/dev/zero"),
        lambda metadata: setattr(next(iter(metadata.storage_data.values())), "relative_path", "../other"),
        lambda metadata: setattr(next(iter(metadata.storage_data.values())), "offset", -1),
        lambda metadata: metadata.state_dict_metadata.update(x=3),
        lambda metadata: setattr(metadata, "storage_data", None),
    ]
    for change in changes:
        metadata = pickle.loads(whole)
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=r"^\.metadata cannot be read: [^\n]+$"):
            CheckpointReader(str(folder))


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("described")
    assert main(["hf-to-megatron", str(write_folder(folder / "source", "qwen2")), str(folder / "megatron")]) == 0
    return folder, (folder / "megatron" / ".metadata").read_bytes()


class _ByName(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_members_of_enumerations_by_name(description: tuple[Path, bytes], tmp_path: Path) -> None:
    stream = io.BytesIO()
    _ByName(stream, protocol=4).dump(pickle.loads(description[1]))
    assert b"getattr" in stream.getvalue()
    (tmp_path / ".metadata").write_bytes(stream.getvalue())
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / ".metadata").write_bytes(description[1])
    assert read_metadata(str(tmp_path)) == read_metadata(str(tmp_path / "whole"))


def test_a_name_with_lines_in_it_is_told_in_one(description: tuple[Path, bytes]) -> None:
    folder, whole = description
    (folder / "megatron" / ".metadata").write_bytes(whole.replace(b"torch.distributed", b"\nor\x1b[.distributed", 1))
    with pytest.raises(ValueError, match=r"^\.metadata would run code: it names \\nor\\x1b\[\.distributed"):
        read_metadata(str(folder / "megatron"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_description_is_one_line_or_works(description: tuple[Path, bytes], data: st.DataObject) -> None:
    from megarl.checkpoint.megatron_folder import MegatronWeights
    from megarl.models.families import read_architecture

    folder, whole = description
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    places = st.lists(st.tuples(st.integers(0, max(0, len(damaged) - 1)), st.integers(0, 255)), max_size=4)
    for at, byte in data.draw(places):
        damaged[at : at + 1] = bytes([byte])
    (folder / "megatron" / ".metadata").write_bytes(bytes(damaged))
    before = forget_peak()
    try:
        weights = MegatronWeights(str(folder / "megatron"), read_architecture(str(folder / "source")))
        for name in weights.parameters:
            weights.parameter(name)
    except ValueError as e:
        assert "\n" not in str(e)
    assert memory_peak() - before < 2**28
