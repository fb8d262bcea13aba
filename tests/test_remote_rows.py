"""Rows in a store, over HTTP from a server on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from prompt_rows import read, write_rows, write_tokenizer
from pyarrow import fs, parquet

from megarl.config.data import DataConfig
from megarl.data.example_set import load_examples
from megarl.data.files import data_files
from megarl.data.json_lines import BLOCK
from megarl.data.tokenizer import load_tokenizer

pytest.importorskip("moto")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=500).close()
                break
            except OSError:
                assert time.monotonic() < end and server.poll() is None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fs.FileSystem:
    """A bucket of this test's own, and the variables that lead to it."""
    keys = {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    store = fs.S3FileSystem(
        endpoint_override=endpoint,
        access_key="ada",
        secret_key="secret",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    name = tmp_path.name.replace("_", "-").lower()
    store.create_dir(name)
    return fs.SubTreeFileSystem(name, store)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"s3://{tmp_path.name.replace('_', '-').lower()}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def put(bucket: fs.FileSystem, name: str, contents: bytes) -> None:
    with bucket.open_output_stream(name) as f:
        f.write(contents)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_of_a_bucket(bucket: fs.FileSystem, uri: str, tmp_path: Path, tokenizer: str) -> None:
    lines = b"".join(b'{"prompt": "%d", "answer": "1"}\n' % i for i in range(500))
    put(bucket, "data/a.jsonl", lines)
    with bucket.open_output_stream("data/b.parquet") as f:
        parquet.write_table(pa.table({"prompt": [str(i) for i in range(2000)]}), f, row_group_size=300)
    cache, files = str(tmp_path / "cache"), [f"{uri}/data/a.jsonl", f"{uri}/*/*.parquet"]
    found = read(tokenizer, files, cache_dir=cache)
    assert len(found) == 2500
    assert found[499].row == {"prompt": "499", "answer": "1"} and found[499].source == f"{uri}/data/a.jsonl:500"
    assert found[2499].source == f"{uri}/data/b.parquet row 2000" and found[2499].row == {"prompt": "1999"}
    assert (found[0].data_source, found[500].data_source) == ("a", "b")
    bucket.delete_file("data/b.parquet")
    with pytest.raises(ValueError, match="no file matches"):
        read(tokenizer, files, cache_dir=cache)


def test_examples_of_a_bucket(bucket: fs.FileSystem, uri: str, tokenizer: str) -> None:
    """Longer than what a store is asked for at a time, so that a line is cut in two."""
    lines = [b'{"prompt": "%d", "answer": "1"%s}\n' % (i, b" " * 200) for i in range(BLOCK // 200)]
    put(bucket, "a.jsonl", b"".join([b"\n", *lines]))
    with bucket.open_output_stream("b.parquet") as f:
        parquet.write_table(pa.table({"prompt": ["1"], "answer": ["2"]}), f)
    files = [f"{uri}/a.jsonl", f"{uri}/b.parquet"]
    found = load_examples(DataConfig(max_prompt_length=8), "demonstrations", files, load_tokenizer(tokenizer))
    assert len(found) == len(lines) + 1
    assert [found[i].source for i in (0, -2, -1)] == [
        f"{uri}/a.jsonl:2",
        f"{uri}/a.jsonl:{len(lines) + 1}",
        f"{uri}/b.parquet row 1",
    ]


@pytest.mark.slow
def test_a_file_that_changed_is_fetched_again(bucket: fs.FileSystem, uri: str, tmp_path: Path, tokenizer: str) -> None:
    put(bucket, "a.jsonl", b'{"prompt": "1"}\n')
    first = read(tokenizer, [f"{uri}/a.jsonl"], cache_dir=str(tmp_path / "cache"))
    time.sleep(1.1)  # S3 tells the time in seconds
    put(bucket, "a.jsonl", b'{"prompt": "2"}\n')
    second = read(tokenizer, [f"{uri}/a.jsonl"], cache_dir=str(tmp_path / "cache"))
    assert [first[0].row["prompt"], second[0].row["prompt"]] == ["1", "2"] and first.digest != second.digest


def test_broken_rows_are_named_by_their_uri(
    bucket: fs.FileSystem, uri: str, tmp_path: Path, tokenizer: str, endpoint: str
) -> None:
    put(bucket, "a.jsonl", b'{"prompt": "1"}\n\n{"prompt": \n')
    put(bucket, "b.parquet", b"PAR1 no")
    cache = str(tmp_path / "cache")
    said = refusal(lambda: read(tokenizer, [f"{uri}/a.jsonl"], cache_dir=cache))
    assert said.startswith(f"data.train_files: {uri}/a.jsonl:3 is not JSON")
    place = f"s3://ada:secret@{uri[5:]}/a.jsonl?region=us-east-1&endpoint_override={endpoint}"
    said = refusal(lambda: read(tokenizer, [place], cache_dir=cache))
    assert said.startswith(f"data.train_files: {uri}/a.jsonl:3 is not JSON") and "secret" not in said
    said = refusal(lambda: read(tokenizer, [f"{uri}/b.parquet"], cache_dir=cache))
    assert said.startswith(f"data.train_files: '{uri}/b.parquet' is not a readable parquet file: ")
    said = refusal(lambda: data_files([f"{uri}/c.jsonl"], "data.val_files"))
    assert said == f"data.val_files: '{uri}/c.jsonl' cannot be read: no such file"
    assert "NO_SUCH_BUCKET" in refusal(lambda: data_files(["s3://nobody/*.jsonl"], "data.val_files"))


def test_other_schemes(tmp_path: Path, tokenizer: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    assert [p.source for p in read(tokenizer, [f"file://{file}"])] == [f"{file}:1", f"{file}:2"]
    said = refusal(lambda: data_files(["nowhere://x/a.jsonl"], "data.val_files"))
    assert said.startswith("data.val_files: 'nowhere://x/a.jsonl' cannot be read: ")
