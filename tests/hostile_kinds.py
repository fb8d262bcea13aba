"""The kinds of files that `hostile_cases` spoils: a whole one, how it is spoilt, and what reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile_cases import (
    EDITS,
    ODD,
    SPOILT_JSON,
    Case,
    as_json,
    command,
    refused,
    spoilt,
    spoilt_json,
)
from hypothesis import strategies as st

CHAT = [{"role": "user", "content": "What is <|im_end|> 3?"}, {"role": "assistant", "content": "5"}]


def safetensors(folder: Path) -> Case:
    from huggingface_cases import write_folder
    from tiny_families import ARCHITECTURES

    from megarl.checkpoint.huggingface_folder import check_weights

    file = write_folder(folder / "model", "qwen2") / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def use(drawn: Any) -> None:
        kind, how = drawn or ("bytes", [])
        if kind == "header":
            text = spoilt_json(header, how)
            file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        elif kind == "length":
            file.write_bytes(how.to_bytes(8, "little") + whole[8:])
        else:
            file.write_bytes(spoilt(whole, how))
        with refused():
            check_weights(str(folder / "model"), ARCHITECTURES["qwen2"])

    lengths = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 2 * length))
    return st.one_of(
        st.tuples(st.just("header"), SPOILT_JSON),
        st.tuples(st.just("bytes"), EDITS),
        st.tuples(st.just("length"), lengths),
    ), use


def model_folder(folder: Path) -> Case:
    from full_weights import random_weights
    from huggingface_cases import write_folder, write_weights
    from tiny_families import ARCHITECTURES

    from megarl.checkpoint.huggingface_folder import check_weights, end_tokens, refuse_remote_code
    from megarl.models.families import read_architecture

    model = write_folder(folder / "model", "qwen2")
    (model / "model.safetensors").unlink()
    write_weights(model, dict(random_weights(ARCHITECTURES["qwen2"], 1)), files=2)
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    names = ("config.json", "generation_config.json", "model.safetensors.index.json")
    whole = {name: json.loads((model / name).read_text()) for name in names}

    def use(drawn: Any) -> None:
        name, how = drawn or (names[0], ([], []))
        (model / name).write_bytes(spoilt_json(whole[name], how))
        with refused():
            arch = read_architecture(str(model))
            refuse_remote_code(str(model))
            end_tokens(str(model), arch.vocab_size)
            check_weights(str(model), arch)
        (model / name).write_text(json.dumps(whole[name]))

    return st.tuples(st.sampled_from(names), SPOILT_JSON), use


def tokenizer_folder(folder: Path) -> Case:
    from test_chat_rows import write_byte_tokenizer

    from megarl.data.tokenizer import load_tokenizer

    write_byte_tokenizer(folder / "tokenizer")
    names = ("tokenizer.json", "tokenizer_config.json")
    whole = {name: json.loads((folder / "tokenizer" / name).read_text()) for name in names}
    small = {**whole["tokenizer.json"]}
    small["model"] = {**small["model"], "merges": small["model"]["merges"][:5]}

    def use(drawn: Any) -> None:
        name, how = drawn or (names[0], ([], []))
        content = small if name == "tokenizer.json" and drawn else whole[name]
        (folder / "tokenizer" / name).write_bytes(spoilt_json(content, how))
        with refused():
            _use_tokenizer(load_tokenizer(str(folder / "tokenizer")))
        (folder / "tokenizer" / name).write_text(json.dumps(whole[name]))

    return st.tuples(st.sampled_from(names), SPOILT_JSON), use


def _use_tokenizer(tokenizer: Any) -> None:
    from megarl.data.encode import encode_messages, encode_text

    ids = encode_text("What is <|im_end|> 3 * 5?\n", "row 1", tokenizer)
    assert all(type(i) is int for i in ids)
    tokenizer.decode(ids)
    encode_messages(CHAT, "row 1", tokenizer)


def sentencepiece(folder: Path) -> Case:
    from prompt_rows import write_tokenizer

    from megarl.data.tokenizer import load_tokenizer

    file = Path(write_tokenizer(folder))
    whole = file.read_bytes()

    def use(drawn: Any) -> None:
        file.write_bytes(spoilt(whole, drawn or []))
        with refused():
            tokenizer = load_tokenizer(str(file))
            tokenizer.decode(tokenizer.encode("12 + 3 = é\n"))

    return EDITS, use


BLOCKS = st.sampled_from(
    ["{% for a in range(99999) %}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ 'a' * 10**9 }}",
     "{% set x = 'a' %}", "{% set x = x ~ x %}", "{{ x }}", "{% if m %}", "{% endif %}", "{% macro f(n) %}",
     "{% endmacro %}", "{{ f(1) }}", "{{ f }}", "{{ messages[0].__class__ }}", "{{ '%9999999999d' % 1 }}",
     "{{ raise_exception(1) }}",
     "{{ messages | tojson(indent=999999999) }}", "{{ 'x' | center(9999999999) }}", "{{ 'x'.ljust(9**12) }}",
     "{{ x * 99 }}",
     "{{ cycler }}", "{{ lipsum(n=99999) }}", "{{ range(99999) | list }}", "{% set ns = namespace(x='a') %}",
     "{% set ns.x = ns.x + ns.x %}", "{{ ns.x }}", "{{ namespace(**{'__init__': 1}) }}",
     "{{ '{0:>9999999999}'.format(1) }}",
     "{{ 9 ** 9 ** 9 }}", "{% generation %}", "{% endgeneration %}", "{{ strftime_now('%Y' * 9999) }}", "{% break %}",
     "{% include 'x' %}", "{% import 'os' as os %}", "{{ self }}", "{{ dict(a=1).update }}", "<|im_end|>", "\n"]
)  # fmt: skip


def template(folder: Path) -> Case:
    from test_chat_rows import CHATML, write_byte_tokenizer

    import megarl.data.template_process
    from megarl.data.encode import encode_messages
    from megarl.data.tokenizer import load_tokenizer

    write_byte_tokenizer(folder)
    tokenizer: Any = load_tokenizer(str(folder))
    megarl.data.template_process.SECONDS = 0.5

    def use(drawn: Any) -> None:
        written = drawn if isinstance(drawn, str) else spoilt(CHATML.encode(), drawn or []).decode(errors="replace")
        tokenizer._tokenizer.chat_template = written
        with refused():
            encode_messages(CHAT, "row 1", tokenizer)

    return st.one_of(EDITS, st.lists(BLOCKS, max_size=12).map("".join)), use


def yaml(folder: Path) -> Case:
    from report_runs import write_folder

    from megarl.cli.runs import read_run
    from megarl.config.load import load_config
    from megarl.report.runs import runs_at
    from megarl.report.settings import settings

    run = write_folder(folder / "run", steps=2)
    file = run / "config.yaml"
    whole = file.read_bytes()
    small = b"data:\n  train_files: [a.jsonl, b.jsonl]\n  train_batch_size: 8\ntrainer: {nnodes: 1, flow: sft}\n"
    laughs = b"a0: &a0 [x, x]\n" + b"".join(
        b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12)
    )
    merged = b"a0: &a0 {x: 1}\n" + b"".join(
        b"a%d: &a%d {<<: [*a%d, *a%d], y%d: *a%d}\n" % (i, i, i - 1, i - 1, i, i - 1) for i in range(1, 30)
    )

    def use(drawn: Any) -> None:
        base, edits = drawn or ("whole", [])
        file.write_bytes(spoilt({"whole": whole, "small": small, "laughs": laughs, "merged": merged}[base], edits))
        with refused():
            load_config(str(file))
        with refused():
            settings(runs_at([str(run)]))
            read_run(str(run))

    return st.tuples(st.sampled_from(["whole", "small", "small", "laughs", "merged"]), EDITS), use


def records(folder: Path) -> Case:
    from report_runs import write_folder

    from megarl.cli.runs import read_run
    from megarl.report.blocks import Blocks
    from megarl.report.runs import runs_at

    run = write_folder(folder / "run", steps=3)
    (run / "lock").write_text(json.dumps({"pid": 1, "host": "a", "ended": "stopped", "steps": 3}))
    (run / "memory.json").write_text(json.dumps({"bytes": 9, "phases": {"update": {"weights": 5}}}))
    files = sorted(path for path in run.rglob("*") if path.suffix in (".json", ".jsonl") or path.name == "lock")
    whole = {path: path.read_bytes() for path in files}
    evil = folder / "run" / "rollouts" / "step_000001.jsonl"

    def use(drawn: Any) -> None:
        which, how = drawn or (0, ([], []))
        path = files[which % len(files)]
        lines = whole[path].splitlines()
        lines[0] = spoilt_json(json.loads(lines[0]), how)
        path.write_bytes(b"\n".join(lines) + b"\n")
        with refused():
            read_run(str(run))
            Blocks(runs_at([str(run)])).refresh()
        path.write_bytes(whole[path])

    assert evil in files
    return st.tuples(st.integers(0, 100), SPOILT_JSON), use


ROW = {
    "prompt": CHAT[:1], "answer": "5", "messages": CHAT, "chosen": "5", "rejected": "6", "label": True, "margin": 0.5,
    "data_source": "sums", "extra": {"a": [1, 2]},
    "calls": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]}],
}  # fmt: skip
KEYS = st.sampled_from(["messages", "calls", ""])


def _read_rows(file: str, messages_key: str, tokenizer: Any) -> None:
    from megarl.config.data import DataConfig
    from megarl.data.example_set import load_examples
    from megarl.data.prompts import load_prompts

    data = DataConfig(
        messages_key=messages_key, prompt_key="calls" if messages_key == "calls" else "prompt", margin_key="margin"
    )
    with refused():
        list(load_prompts(data, [file], tokenizer))
    for format in ("demonstrations", "preferences", "judged"):
        with refused():
            load_examples(data, format, [file], tokenizer)  # type: ignore[arg-type]


def jsonl(folder: Path) -> Case:
    from test_chat_rows import write_byte_tokenizer
    from test_row_tools import TOOL, WITH_TOOLS

    from megarl.data.tokenizer import load_tokenizer

    write_byte_tokenizer(folder, WITH_TOOLS)
    tokenizer, file = load_tokenizer(str(folder)), folder / "rows.jsonl"
    row = {**ROW, "tools": [TOOL], "completion": CHAT[1:]}

    def use(drawn: Any) -> None:
        key, how = drawn or ("messages", ([], []))
        file.write_bytes(as_json(row) + b"\n" + spoilt_json(row, how) + b"\n")
        _read_rows(str(file), key, tokenizer)

    return st.tuples(KEYS, SPOILT_JSON), use


def texts(folder: Path) -> Case:
    """Files of text but .jsonl: spoilt as they lie there, or, if they are packed, before that."""
    import gzip

    import pyarrow as pa
    from prompt_rows import write_tokenizer

    from megarl.data.tokenizer import load_tokenizer

    def zst(content: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as f:
            f.write(content)
        return bytes(sink.getvalue())

    tokenizer, rows = load_tokenizer(write_tokenizer(folder)), [{"prompt": f"{i}\né", "answer": "5"} for i in range(9)]
    lines = b"".join(as_json(row) + b"\n" for row in rows)
    csv = "prompt,answer\n" + "".join(f'"{row["prompt"]}",5\n' for row in rows)
    whole = {
        "rows.json": as_json(rows), "rows.csv": csv.encode(), "rows.jsonl.gz": lines, "rows.json.zst": as_json(rows)
    }  # fmt: skip

    def use(drawn: Any) -> None:
        name, edits, before = drawn or ("rows.json", [], True)
        packs: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zst}
        pack = packs.get(Path(name).suffix, bytes)
        content = pack(spoilt(whole[name], edits)) if before else spoilt(pack(whole[name]), edits)
        (folder / name).write_bytes(content)
        _read_rows(str(folder / name), "", tokenizer)

    return st.tuples(st.sampled_from(sorted(whole)), EDITS, st.booleans()), use


def arrow(folder: Path) -> Case:
    from prompt_rows import write_tokenizer
    from test_row_forms import write_stream

    from megarl.data.tokenizer import load_tokenizer

    tokenizer, file = load_tokenizer(write_tokenizer(folder)), folder / "rows.arrow"
    write_stream(file, [{"prompt": "1", "answer": "2", "deep": {"a": [[1], [2, 3]], "b": [{"c": "é"}]}}] * 9)
    whole = file.read_bytes()

    def use(drawn: Any) -> None:
        file.write_bytes(spoilt(whole, drawn or []))
        _read_rows(str(file), "", tokenizer)

    return EDITS, use


def parquet(folder: Path) -> Case:
    import pyarrow as pa
    from pyarrow import parquet
    from test_chat_rows import CHATML, write_byte_tokenizer

    from megarl.data.tokenizer import load_tokenizer

    write_byte_tokenizer(folder, CHATML)
    tokenizer, file = load_tokenizer(str(folder)), folder / "rows.parquet"

    def write(rows: list[Any]) -> bytes:
        parquet.write_table(pa.Table.from_pylist(rows), file)
        return file.read_bytes()

    whole = write([ROW, ROW])

    def use(drawn: Any) -> None:
        key, odd, edits = drawn or ("messages", None, [])
        if isinstance(edits, str):
            try:
                write([{**ROW, edits: odd}])
            except (pa.ArrowException, OverflowError, UnicodeError, ValueError):
                return  # what Arrow does not write, nobody reads
        else:
            file.write_bytes(spoilt(whole, edits))
        _read_rows(str(file), key, tokenizer)

    return st.tuples(KEYS, ODD, st.one_of(EDITS, st.sampled_from(sorted(ROW)))), use


def manifest(folder: Path) -> Case:
    from megarl.checkpoint.folder import checkpoints
    from megarl.checkpoint.manifest import record_files, write_manifest

    place = folder / "run" / "checkpoints" / "global_step_2"
    place.mkdir(parents=True)
    state = {"format": 1, "step": 2, "loop": "rl", "order": 0, "row": 2, "models": ["actor"], "identity": {"seed": {}}}
    (place / "trainer.json").write_text(json.dumps(state))
    (place / "common.pt").write_bytes(b"x" * 10)
    write_manifest(str(place), record_files(str(place), ["trainer.json", "common.pt"]))
    names = ("manifest.json", "trainer.json")
    whole = {name: json.loads((place / name).read_text()) for name in names}

    def use(drawn: Any) -> None:
        name, how = drawn or (names[0], ([], []))
        (place / name).write_bytes(spoilt_json(whole[name], how))
        with refused():
            (found,) = checkpoints(str(folder / "run"))
            assert "\n" not in (found.problem or "")
        command("runs", str(folder))
        (place / name).write_bytes(as_json(whole[name]))

    return st.tuples(st.sampled_from(names), SPOILT_JSON), use


def cached(folder: Path) -> Case:
    """The index of rows in `data.cache_dir`."""
    import pyarrow as pa
    from prompt_rows import read, write_tokenizer
    from pyarrow import parquet

    import megarl.data.prompts

    megarl.data.prompts.SMALL_BYTES = 0
    tokenizer, source, cache = write_tokenizer(folder), folder / "rows.parquet", folder / "cache"
    parquet.write_table(pa.table({"prompt": [f"{i}é" for i in range(20)]}), source)
    wanted = [p.row["prompt"] for p in read(tokenizer, [str(source)], cache_dir=str(cache))]
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    shutil.copytree(entry, folder / "whole")
    names = sorted(path.name for path in entry.iterdir())

    def use(drawn: Any) -> None:
        name, edits = drawn or (names[0], [])
        (entry / name).write_bytes(spoilt((folder / "whole" / name).read_bytes(), edits))
        with refused():
            assert [p.row["prompt"] for p in read(tokenizer, [str(source)], cache_dir=str(cache))] == wanted
        shutil.rmtree(entry)
        shutil.copytree(folder / "whole", entry)

    return st.tuples(st.sampled_from(names), EDITS), use


KINDS: dict[str, Callable[[Path], Case]] = {
    kind.__name__: kind
    for kind in (
        safetensors, model_folder, tokenizer_folder, sentencepiece, template, yaml, records, jsonl, texts, arrow,
        parquet, manifest, cached,
    )
}  # fmt: skip
