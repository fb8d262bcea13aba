"""Names in the configuration for code, a user's too; what is said about those that name nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ranks import Ranks
from tiny_run import FINGERPRINT, metrics_of, numbers_of, train_in, write_run

from megarl.config import load_config
from megarl.registry import Registry
from megarl.rollout.kinds import ENGINES, engine_kind
from megarl.telemetry.sinks import SINKS
from megarl.trainer.admission.checks import check_layouts, check_run

MINE = """
from __future__ import annotations
from collections import OrderedDict
from dataclasses import dataclass

LIMIT = 5

@dataclass
class Pair:
    one: int

def double(x):
    return 2 * x

def _hidden(x):
    return x
"""


def registry() -> Registry[Any]:
    known: Registry[Any] = Registry("section.key", "function", lazy={"square_root": "math:sqrt"})

    @known.register("square")
    def square(x: float) -> float:
        return x * x

    assert square(3) == 9
    return known


def refusal(value: str) -> str:
    """The same for a check as for loading."""
    said = set()
    for call in (registry().load, registry().check):
        with pytest.raises(ValueError) as refused:
            call(value)
        said.add(str(refused.value))
    (line,) = said
    assert "\n" not in line
    return line


def test_names() -> None:
    known = registry()
    assert known.names() == ["square", "square_root"]
    assert known.load("square")(3) == 9 and known.load("square_root")(9) == 3
    with pytest.raises(AssertionError, match="'square' is registered twice"):
        known.register("square")(abs)


def test_a_registered_name_is_checked_without_its_import() -> None:
    known: Registry[Any] = Registry("section.key", "function", lazy={"absent": "no_such_module:thing"})
    known.check("absent")
    with pytest.raises(ModuleNotFoundError):
        known.load("absent")


@pytest.mark.parametrize(
    ("value", "known"),
    [
        ("sqare", "square, square_root"),
        ("square_rot", "square_root, square"),
        ("", "square, square_root"),
        ("file.txt:double", "square, square_root"),
        ("a\nb", "square, square_root"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_nearest_first(value: str, known: str) -> None:
    assert refusal(value) == f"section.key = {value!r} is not known; use {known}, or path/to/file.py:function"


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    known = registry()
    assert known.load(f"{file}:double")(4) == 8
    assert known.load(f"{file}:Pair")(one=1).one == 1
    known.check(f"{file}:Pair")
    assert known.load(f"{file}:Pair") is registry().load(f"{file}:Pair")
    assert refusal(f"{file}:dubble") == f"section.key: '{file}' has no function 'dubble'; it has Pair, double"
    assert refusal(f"{file}:LIMIT").endswith("has no function 'LIMIT'; it has Pair, double")
    file.write_text(MINE.replace("2 * x", "3 * x"))
    assert known.load(f"{file}:double")(4) == 12
    file.write_text("x = 1\n")
    assert refusal(f"{file}:double").endswith("has no function 'double'; it has none")
    file.write_text("import no_such_module\n")
    assert refusal(f"{file}:double") == (
        f"section.key: importing '{file}' failed: ModuleNotFoundError: No module named 'no_such_module'"
    )
    file.write_text("import sys\nsys.exit('not\\ntoday')\n")
    assert refusal(f"{file}:double") == f"section.key: importing '{file}' failed: SystemExit: not today"
    file.write_text("def double(x)\n")
    assert f"importing '{file}' failed: SyntaxError: " in refusal(f"{file}:double")
    assert refusal("no/such.py:double") == "section.key: no file at 'no/such.py'"
    assert refusal(f"{tmp_path / 'x.py'}:double") == f"section.key: no file at '{tmp_path / 'x.py'}'"


def test_what_comes_with_the_program_is_where_it_is_said_to_be() -> None:
    classes = {name: SINKS.load(name) for name in SINKS.names()}
    classes |= {name: engine_kind(name).load() for name in ENGINES.names()}
    for name, loaded in classes.items():
        assert isinstance(loaded, type), name


# ------------------------------------------------------------------------------------------------------- in a run


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "actor_rollout_ref.rollout.name=vlm",
            "rollout.name = 'vlm' is not known; use vllm, native, or path/to/file.py:class",
        ),
        (
            "trainer.logger=[console,jsonll]",
            "trainer.logger = 'jsonll' is not known; use jsonl, console, csv, mlflow, prometheus, tensorboard, wandb, "
            "or path/to/file.py:class",
        ),
        ("reward.name=exact", "reward.name = 'exact' is not known; use exact_match, regex, code, "),
        ("actor_rollout_ref.rollout.name=no/such.py:Mine", "rollout.name: no file at 'no/such.py'"),
        ("trainer.logger=[no/such.py:Mine]", "trainer.logger: no file at 'no/such.py'"),
        ("reward.name=no/such.py:mine", "reward.name: no file at 'no/such.py'"),
        (
            "algorithm.adv_estimator=grop",
            "algorithm.adv_estimator = 'grop' is not known; use grpo, ",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=vanila",
            "actor.policy_loss.loss_mode = 'vanila' is not known; use vanilla, ",
        ),
    ],
)
def test_a_run_is_refused_before_its_ranks_start(tmp_path: Path, override: str, said: str) -> None:
    config = load_config(str(write_run(tmp_path)), [override])
    for check in (check_run, check_layouts)[: 1 if "reward" in override else 2]:
        with pytest.raises(ValueError) as refused:
            check(config)
        assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


ENGINE = """
from megarl.rollout.native.engine import NativeEngine

class Counting(NativeEngine):
    def submit(self, requests):
        with open(FILE, "a") as f:
            f.write(f"{len(requests)}\\n")
        super().submit(requests)
"""
SINK = """
import json, os

class Lines:
    def __init__(self, run_dir, first_step, say):
        self.file = open(os.path.join(run_dir, "mine.txt"), "a")

    def log(self, step, metrics):
        self.file.write(json.dumps({"step": step, **metrics}) + "\\n")
        self.file.flush()

    def close(self):
        self.file.write("closed\\n")
        self.file.close()
"""


def test_a_run_with_an_engine_and_a_sink_of_the_users(tmp_path: Path, ranks: Ranks) -> None:
    sections: dict[str, Any] = {
        "trainer__n_gpus_per_node": 2,
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "trainer__logger": ["jsonl"],
    }
    (tmp_path / "engine.py").write_text(f"FILE = {str(tmp_path / 'calls')!r}\n{ENGINE}")
    (tmp_path / "sink.py").write_text(SINK)
    seen = {}
    for name in ("native", "mine"):
        folder = tmp_path / name
        folder.mkdir()
        of_mine = [
            f"actor_rollout_ref.rollout.name={tmp_path / 'engine.py'}:Counting",
            f"trainer.logger=[jsonl,{tmp_path / 'sink.py'}:Lines]",
        ]
        train_in(ranks, 2, write_run(folder, **sections), *(of_mine if name == "mine" else []))
        seen[name] = numbers_of(folder)
    assert seen["mine"] == seen["native"]
    calls = (tmp_path / "calls").read_text().split()
    assert calls.count("64") == 4  # two steps of 16 prompts x 4 samples, by both ranks of the replica
    *rows, last = (tmp_path / "mine" / "run" / "mine.txt").read_text().splitlines()
    assert last == "closed" and len(rows) == len(seen["mine"])


OWN = """
import torch
from megarl.algorithms.estimators.grpo import grpo
from megarl.algorithms.losses.vanilla import vanilla

def estimate(batch, config):
    return 2 * grpo(batch, config)

def half(actor):
    loss = vanilla(actor)
    def halved(x):
        out = loss(x)
        return type(out)(loss=out.loss / 2, metrics=out.metrics)
    halved.columns = loss.columns
    return halved
"""


@pytest.mark.slow
def test_a_users_estimator_and_loss_train(ranks: Ranks, tmp_path: Path) -> None:
    """Twice the advantages at half the loss are the same gradient."""
    (tmp_path / "own.py").write_text(OWN)
    norms = []
    for name, own in (("plain", []), ("own", ["algorithm.adv_estimator={}:estimate", "{}:half"])):
        folder = tmp_path / name
        folder.mkdir()
        reward = tmp_path / "reward.py"
        reward.write_text(FINGERPRINT)
        config = write_run(folder, reward__name=f"{reward}:score", trainer__test_freq=0)
        overrides = [text.format(tmp_path / "own.py") for text in own]
        overrides[1:] = [f"actor_rollout_ref.actor.policy_loss.loss_mode={text}" for text in overrides[1:]]
        train_in(ranks, 1, config, *overrides)
        norms.append([row["actor/grad_norm"] for row in metrics_of(folder) if "actor/grad_norm" in row])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and min(norms[0]) > 0


def test_files_find_their_neighbours(tmp_path: Path) -> None:
    """Whenever they import them; nobody else does, and the standard library stays what it is."""
    (tmp_path / "json.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "neighbour.py").write_text("import other\n\ndef late():\n    from other2 import two\n    return two\n")
    (tmp_path / "other.py").write_text("one = 1\n")
    (tmp_path / "other2.py").write_text("two = 2\n")
    (tmp_path / "mine.py").write_text(
        "import json, neighbour\nfrom other import one\n\n"
        "def reward(response, row):\n    return json.loads('[3]') + [one, neighbour.other.one, neighbour.late()]\n"
    )
    code = (
        "import sys; from megarl.registry import Registry; load = Registry('reward.name', 'function').load;"
        f"print(load({str(tmp_path / 'mine.py')!r} + ':reward')('', {{}}), 'neighbour' in sys.modules)\n"
        "try:\n    import neighbour\nexcept ModuleNotFoundError:\n    print('not found')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[3, 1, 1, 2] False\nnot found\n", done.stderr
    (tmp_path / "pydantic.py").write_text("from pydantic import BaseModel\nclass Mine(BaseModel): pass\n")
    assert issubclass(Registry("reward.name", "class").load(f"{tmp_path}/pydantic.py:Mine"), BaseModel)
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ValueError, match=r"broken\.py' failed: ModuleNotFoundError: No module"):
        Registry("reward.name", "function").load(f"{tmp_path}/broken.py:f")
