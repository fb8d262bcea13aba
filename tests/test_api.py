"""`import megarl`: training from Python, in a process of its own and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import ROOT, metrics_of, write_run

import megarl

ALONE = """
import gc, json, sys
import megarl
config, other = sys.argv[1:]
seen = []
length = lambda response, row: float(len(response))
try:  # a run that fails leaves room for the next one
    megarl.train(config, ["trainer.default_local_dir=" + other], reward=lambda response, row: float("nan"))
except Exception as e:
    seen.append(type(e).__name__)
config = megarl.load_config(config)
held = []
def tell(loop, step, row):
    seen.append((loop, step))
    held.append(sum(type(one) is dict and "reward/mean" in one for one in gc.get_objects()))
last = megarl.train(config, reward=length, callbacks=[tell])
assert held[2] <= held[1], f"rows of all steps are kept: {held}"
again = megarl.train(config, reward=length)  # nothing is left to do
print(json.dumps([seen, last["reward/mean"], again]))
"""

LAUNCHED = """
import os, sys
import megarl

def flow(run):
    actor = run.add("actor", megarl.build_actor(run.inputs, run.groups, optim=run.config.actor_rollout_ref.actor.optim,
                                                total_steps=2))
    megarl.sft(run, actor, "sft", total=2, batch_size=20)

def tell(loop, step, row):
    with open(f"{sys.argv[1]}.{os.environ['RANK']}", "a") as f:
        f.write(f"{loop} {step} {row['sft/loss']!r}\\n")

megarl.train(sys.argv[1], ["warmup.total_training_steps=2", "warmup.train_batch_size=20"], flow=flow, callbacks=[tell])
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_a_process_of_its_own_trains_several_times(tmp_path: Path) -> None:
    config = write_run(tmp_path, trainer__logger=["jsonl"], trainer__save_freq=1)
    done = _run("-c", ALONE, str(config), str(tmp_path / "other"))
    seen, reward, again = json.loads(done.stdout.splitlines()[-1])
    assert seen == ["RewardError", ["rl", 0], ["rl", 1], ["rl", 2]] and again == {}
    rows = metrics_of(tmp_path)
    assert rows[-1]["reward/mean"] == reward > 0 and len(rows) == 3


@pytest.mark.slow
def test_a_script_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAUNCHED)
    config = write_run(tmp_path, trainer__logger=["jsonl"])
    _run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "script.py"), str(config))
    first, second = (Path(f"{config}.{rank}").read_text().splitlines() for rank in range(2))
    assert first == second and [line.rsplit(" ", 1)[0] for line in first] == ["sft 1", "sft 2"]
    assert [row["sft/step"] for row in metrics_of(tmp_path)] == [1, 2]


def test_one_process_does_not_play_several_ranks(tmp_path: Path) -> None:
    config = megarl.load_config(str(write_run(tmp_path, trainer__n_gpus_per_node=4)))
    with pytest.raises(ValueError, match=r"asks for 4 ranks, .* torchrun --nproc_per_node 4, or set trainer"):
        megarl.train(config)


def test_the_face_is_whole() -> None:
    for name in megarl.__all__:
        assert getattr(megarl, name) is not None
    assert set(megarl.__all__) <= set(dir(megarl))
    with pytest.raises(AttributeError, match="module 'megarl' has no attribute 'trian'"):
        megarl.trian  # noqa: B018
    declared = Path(megarl.__file__).read_text().split("if TYPE_CHECKING:")[1].split("__version__")[0]
    assert {line.split(" as ")[-1] for line in declared.strip().splitlines()} == {*megarl.__all__} - {"__version__"}


def test_each_public_name_has_a_page() -> None:
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    shown = {line.removeprefix("::: ") for line in pages.splitlines() if line.startswith("::: ")}
    for name, place in megarl._PLACES.items():
        defined = getattr(getattr(megarl, name), "__module__", place)
        places = {f"megarl.{place}", f"megarl.{place}.{name}", defined, f"{defined}.{name}"}
        assert places & shown or f"`megarl.{name}`" in pages, f"docs/api has no page for megarl.{name}"
