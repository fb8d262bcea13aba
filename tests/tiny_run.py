"""A complete run in a temporary folder: model config, tokenizer, data and YAML, small enough for seconds."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import yaml
from ranks import Ranks

from megarl.telemetry.metrics import METRICS, TIMED, find

ROOT = Path(__file__).parents[1]

FINGERPRINT = "import zlib\ndef score(response, row):\n    return zlib.crc32(response.encode()) / 2**32\n"
"""A reward whose mean is the same for the same responses only."""


FOUR_RANKS: dict[str, Any] = {
    "actor_rollout_ref__actor__megatron": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
    "trainer__n_gpus_per_node": 4,
}


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run that is over.

    Attributes:
        config: its YAML.
        folder: holds the model, the data, and what the run left under run/.
        out: what it printed.
    """

    config: Path
    folder: Path
    out: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return metrics_of(self.folder)

    @property
    def reward(self) -> str:
        """Its `reward.name`."""
        return f"{self.folder / 'reward.py'}:score"

    def checkpoint(self, step: int) -> Path:
        return self.folder / "run" / "checkpoints" / f"global_step_{step}"


def write_run(folder: Path, **sections: Any) -> Path:
    """Write a runnable configuration (one rank, unless `sections` say otherwise); returns the YAML's path.

    Args:
        sections: values merged into the configuration, by dotted key with "__" for ".".
    """
    rng = random.Random(0)
    rows = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    rng.shuffle(rows)
    for name, part in (("train", rows[:80]), ("val", rows[80:])):
        lines = [json.dumps({"prompt": p, "answer": a, "id": i}) for i, (p, a) in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(p + a for p, a in rows),
        model_writer=model,
        model_type="char",
        vocab_size=16,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 18,
                "max_position_embeddings": 32,
                "tie_word_embeddings": True,
                "initializer_range": 0.1,
            }
        )
    )
    config: dict[str, Any] = {
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "val.jsonl")],
            "train_batch_size": 16,
            "max_prompt_length": 8,
            "max_response_length": 4,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder), "random_init": True, "dtype": "float32"},
            "actor": {"optim": {"lr": 1e-3}, "ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 256},
            "rollout": {"n": 4},
            "reshard": {"verify": True},
        },
        "trainer": {"default_local_dir": str(folder / "run"), "total_training_steps": 2, "save_freq": 0},
    }
    for key, value in sections.items():
        *parents, leaf = key.split("__")
        at = config
        for name in parents:
            at = at.setdefault(name, {})
        at[leaf] = value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def default_interrupt() -> None:
    """What a shell's job in the foreground has; one in the background, as these tests may be, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def megarl(*args: str, timeout: float = 400, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the `megarl` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "megarl.cli.main", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train_in(ranks: Ranks, world: int, config: Path, *overrides: str) -> str:
    """A whole run in the pool's ranks, which have imported everything; returns what its first rank said."""
    said: str = ranks.launch(world, train, str(config), list(overrides))[0]
    return said


def train(config: str, overrides: list[str]) -> str:
    from megarl.config import load_run_config
    from megarl.flow_kinds import FLOWS
    from megarl.trainer.admission.checks import check_run
    from megarl.trainer.session.take_part import run
    from megarl.trainer.stop import StopRequest

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        inputs = check_run(load_run_config(config, overrides))
        stopped_by = run(inputs, FLOWS.load(inputs.config.trainer.flow), StopRequest(int(os.environ["RANK"])))
    assert stopped_by is None
    return said.getvalue()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, all of whose metrics are documented but those of a flow of one's own."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = {spec.name.partition("/")[0] for spec in METRICS}
    unknown = {name for row in rows for name in row if find(name) is None and name.partition("/")[0] in ours}
    assert not unknown, f"not in megarl/telemetry/metrics.py: {sorted(unknown)}"
    return rows


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """The same without what a clock decides."""
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in metrics_of(folder)]
