"""How fast a run starts on a large file of rows, and what that takes of the node's memory.

    python tools/bench_data.py --gb 2 --folder /tmp/bench_data              # prompts
    python tools/bench_data.py --gb 2 --folder /tmp/bench_data --flow sft   # prompts with answers

writes a jsonl file of that size once, and a model of 20,000 weights. Then it starts `megarl train` with two ranks for
one step, three times: on a file of 1,000 rows; on the large file, of which nothing is known; and on it again. Shown are
the seconds and the memory beyond those of the small file: the peak, over time, of the resident memory of all processes
together, launcher and helpers included, where pages that they share count once for each (RSS) and once (PSS).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import sentencepiece
import yaml

ROOT = Path(__file__).parents[1]
WORDS = [
    "how",
    "many",
    "apples",
    "are",
    "left",
    "of",
    "the",
    "twelve",
    "that",
    "Ada",
    "bought",
    "if",
    "she",
    "gives",
    "each",
    "of",
    "her",
    "friends",
    "one",
    "and",
    "a",
    "half",
]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one start: seconds to the end of the first step, and peaks in bytes."""

    seconds: float
    rss: int
    pss: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="10^9 bytes of the large file; default 2")
    parser.add_argument("--row-bytes", type=int, default=1000, help="mean bytes of a row; default 1000")
    parser.add_argument("--max-prompt-length", type=int, default=4096, help="tokens; default 4096")
    parser.add_argument("--flow", choices=("ppo", "sft"), default="ppo", help="that reads the rows; default ppo")
    parser.add_argument("--truncation", default="error", help="of data.truncation; default error")
    parser.add_argument("--folder", type=Path, required=True, help="to write to, with room for the file")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    name = f"{args.flow}_{args.row_bytes}.jsonl"
    small, large = args.folder / f"small_{name}", args.folder / f"{args.gb:g}GB_{name}"
    sizes = {small: 10**6, large: args.gb * 1e9}
    rows = {file: write_rows(file, size, args.row_bytes, args.flow) for file, size in sizes.items()}
    config = write_run(args.folder, args.max_prompt_length, args.truncation, args.flow)
    shutil.rmtree(args.folder / "cache", ignore_errors=True)

    base = start(config, small)
    print(f"small file: {base.seconds:.1f} s, {base.rss / 1e6:.0f} MB RSS, {base.pss / 1e6:.0f} MB PSS", flush=True)
    for name in ("cold", "warm"):
        found = start(config, large)
        more = found.seconds - base.seconds
        print(
            f"{name}: {more:.1f} s more ({rows[large]} rows, {rows[large] / max(more, 0.1):.0f} rows/s, "
            f"{large.stat().st_size / 1e6 / max(more, 0.1):.0f} MB/s), {(found.rss - base.rss) / 1e6:.0f} MB more RSS, "
            f"{(found.pss - base.pss) / 1e6:.0f} MB more PSS",
            flush=True,
        )
    return 0


def write_rows(file: Path, size: float, row_bytes: int, flow: str) -> int:
    """A jsonl file of so many bytes, unless it is there; returns its rows."""
    if not file.exists():
        rng, written = random.Random(0), 0
        texts = [" ".join(rng.choices(WORDS, k=max(1, (row_bytes - 60) // 5))) for _ in range(1000)]
        with open(f"{file}.part", "w") as f:
            for i in range(10**12):
                row = {"prompt": f"{i} {texts[i % 1000]}?", "answer": str(i), "data_source": "bench", "id": i}
                if flow == "sft":
                    row |= {"prompt": f"{i}?", "answer": texts[i % 1000]}
                written += f.write(json.dumps(row) + "\n")
                if written >= size:
                    break
        os.replace(f"{file}.part", file)
    with open(file, "rb") as f:
        return sum(block.count(b"\n") for block in iter(lambda: f.read(2**22), b""))


def write_run(folder: Path, max_prompt_length: int, truncation: str, flow: str) -> Path:
    """A model, a tokenizer and a configuration; returns its path. Answers are in words, prompts in characters."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS), "0123456789?"] * 9),
        model_writer=model,
        **{"model_type": "bpe" if flow == "sft" else "char", "vocab_size": 64 if flow == "ppo" else 200},
        **{"hard_vocab_limit": False, "minloglevel": 2},
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 2 * max_prompt_length}
    arch = {"architectures": ["Qwen2ForCausalLM"], **shape, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(arch))
    longest = max_prompt_length // 2 if flow == "sft" else 2
    data: dict[str, object] = {"train_batch_size": 4, "filter_overlong_prompts": flow == "sft"}
    data |= {"max_prompt_length": max_prompt_length, "max_response_length": longest}
    actor: dict[str, object] = {"ppo_max_token_len_per_gpu": max_prompt_length + longest}
    generation = {"ppo_mini_batch_size": 4} if flow == "ppo" else {}
    trainer = {"default_local_dir": str(folder / "run"), "total_training_steps": 1, "save_freq": 0}
    path = folder / "run.yaml"
    tree = {
        "data": {**data, "truncation": truncation, "cache_dir": str(folder / "cache")},
        "actor_rollout_ref": {
            "model": {"path": str(folder), "random_init": True, "dtype": "float32"},
            "actor": {**actor, **generation},
            **({"rollout": {"n": 2}} if flow == "ppo" else {}),
        },
        "trainer": {**trainer, "flow": flow, "n_gpus_per_node": 2, "val_before_train": False, "test_freq": 0},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def start(config: Path, file: Path) -> Figures:
    """One run of one step; its folder is removed first."""
    shutil.rmtree(config.parent / "run", ignore_errors=True)
    began = time.perf_counter()
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(config), f"data.train_files=[{file}]"]
    with open(config.parent / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    watched, peaks = psutil.Process(process.pid), [0, 0]
    while process.poll() is None:
        together = [0, 0]
        for one in (watched, *_children(watched)):
            try:
                memory = one.memory_full_info()
            except psutil.Error:
                continue
            together = [together[0] + memory.rss, together[1] + memory.pss]
        peaks = [max(pair) for pair in zip(peaks, together, strict=True)]
        time.sleep(1.0)  # reading the memory takes a part of a processor
    if process.returncode:
        sys.exit((config.parent / "log").read_text())
    return Figures(seconds=time.perf_counter() - began, rss=peaks[0], pss=peaks[1])


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


if __name__ == "__main__":
    sys.exit(main())
