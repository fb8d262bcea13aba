"""Kill a run at random moments, resume it each time, and compare its end with that of a run that was left alone.

    python tools/kill_and_resume.py --out runs/kills configs/quickstart.yaml trainer.total_training_steps=12 ...

Both runs save a checkpoint at every step and have trainer.resume_mode=auto. The moments take turns: while the engine
decodes, in the reshard, while log-probabilities are computed, in the update, while a checkpoint is copied, while it is
written behind the next steps, and between its manifest and its rename. So do the victims: a rank drawn at random, all
of them, the launcher. How long a process trains before its moment may come is drawn at random, and leaves steps for the
other kills.

Written to --out: straight/ and killed/, the two runs; kills.json, what was killed where; and a table on the console.
On GPUs the bits are the same with trainer.deterministic=true. A moment that a run never comes to (the reshard of one
rank, whose engine shares all weights) is left out by naming the others with --moment.
Exit code 1 unless the last checkpoints (weights, optimizer, schedule) are the same bits and the metrics the same
numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megarl.telemetry.metrics import TIMED

ROOT = Path(__file__).parents[1]
MOMENTS = {  # name -> file and function that a thread is in
    "generate": ("rollout/native/engine.py", "_decode"),
    "reshard": ("reshard/execute.py", "run"),
    "log-probabilities": ("roles/model.py", "forward"),
    "update": ("roles/trained.py", "accumulate_gradients"),
    "save": ("checkpoint/store.py", "take_snapshot"),
    "write": ("checkpoint/store.py", "_write"),
    "copy from the node's disk": ("checkpoint/local_disk.py", "copy_over"),  # with checkpoint.local_dir
    "between manifest and rename": ("os.rename", ".partial"),  # an event of the interpreter, not a function
}
VICTIMS = ("one rank", "all ranks", "launcher")
DECOY = """
import importlib.machinery, importlib.util, json, os, random, signal, sys, threading, time

own = os.path.dirname(os.path.abspath(__file__))
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != own])
if hidden is not None:  # tests/one_gpu has one, too
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))

def _kill(plan, where):
    with open(plan["note"], "w") as f:
        f.write(where)
    for pid in _victims(plan["victim"]):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL) if plan["victim"] != "launcher" else time.sleep(60)

def _victims(kind):
    if kind == "one rank":
        return []
    if kind == "launcher":
        return [os.getppid()]
    children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
    return [int(pid) for pid in children if int(pid) != os.getpid()]

def _within(file, function):
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
                return True
            frame = frame.f_back
    return False

def _newest(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(name[12:]) for name in names if name.startswith("global_step_")), default=0)

def _watch(plan):
    while not _within("roles/trained.py", "accumulate_gradients"):  # until it trains
        time.sleep(0.01)
    while _newest(plan["checkpoints"]) < plan["after"]:
        time.sleep(0.01)
    file, function = plan["moment"]
    if file == "os.rename":
        armed.append(plan)
        return
    while not _within(file, function):
        time.sleep(1e-4)
    time.sleep(plan["later"])
    _kill(plan, file)

armed = []

def _audit(event, arguments):
    if armed and event == "os.rename" and str(arguments[0]).endswith(".partial"):
        _kill(armed[0], "os.rename")

if os.environ.get("KILL_PLAN") and os.environ.get("RANK"):
    plan = json.loads(os.environ["KILL_PLAN"])
    if int(os.environ["RANK"]) == plan["rank"]:
        sys.addaudithook(_audit)
        threading.Thread(target=_watch, args=(plan,), daemon=True).start()
"""


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--kills", default=25, type=int)
    parser.add_argument("--seed", default=1, type=int, help="of the moments")
    parser.add_argument("--moment", action="append", choices=list(MOMENTS), help="only this one; may be repeated")
    parser.add_argument("config", help="YAML file")
    return parser.parse_known_args(argv)


def train(config: str, overrides: list[str], folder: Path, **environment: str) -> tuple[int, str]:
    """A run, to its end or its death; returns its exit code and what it printed."""
    command = [sys.executable, "-m", "megarl.cli.main", "train", config, *overrides]
    safe = ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.resume_mode=auto"]
    done = subprocess.run(
        [*command, *safe, f"trainer.default_local_dir={folder}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def most_steps(number: int, args: argparse.Namespace) -> int:
    """Steps after which a process may be killed at the latest, so that the others get steps, too."""
    steps = sum(row["step"] > 0 for row in rows(args.out / "straight"))
    left, kills = steps - progress(args)["newest"], args.kills - number
    return max(min(2 * left // kills - 2, left - 4 * kills), 0)  # it makes some before its moment comes


def kill_once(number: int, args: argparse.Namespace, overrides: list[str], ranks: int, decoy: Path) -> dict[str, Any]:
    """One process life of the killed run."""
    rng = random.Random(f"{args.seed}/{number}")
    moments = args.moment or [moment for moment in MOMENTS if not moment.startswith("copy")]
    moment = moments[number % len(moments)]
    victim = VICTIMS[number // len(moments) % len(VICTIMS)]
    note = args.out / "note"
    note.unlink(missing_ok=True)
    plan = {
        "rank": 0 if moment == "between manifest and rename" else rng.randrange(ranks),
        "checkpoints": str(args.out / "killed" / "checkpoints"),
        "after": progress(args)["newest"] + rng.randint(0, most_steps(number, args)),
        "later": rng.uniform(0.0, 0.05),
        "moment": MOMENTS[moment],
        "victim": victim,
        "note": str(note),
    }
    path = os.pathsep.join([str(decoy), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, said = train(args.config, overrides, args.out / "killed", KILL_PLAN=json.dumps(plan), PYTHONPATH=path)
    if not note.exists():
        raise SystemExit(
            f"kill {number + 1}: the run ended by itself with exit code {code}; more trainer.total_training_steps, or "
            f"fewer --kills, leave time for all:\n{said[-3000:]}"
        )
    left = still_there(args.out / "killed")
    return {"moment": moment, "victim": victim, "rank": plan["rank"], "code": code, "left": left, **progress(args)}


def still_there(folder: Path) -> int:
    """Processes of the run that outlive it by two seconds."""
    deadline = time.monotonic() + 2.0
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(left)


def processes_of(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(str(folder).encode()) for word in words):
                found.append(int(entry.name))
    return found


def progress(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.out / "killed" / "checkpoints"
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    steps = [int(name.rpartition("_")[2]) for name in names if name.startswith("global_step_")]
    return {"newest": max(steps, default=0), "partial": [name for name in names if name.startswith(".")]}


def tensors_of(checkpoint: Path | str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def last_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return tensors_of(newest)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what depends on the clock, or on what the process did before."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows(folder)]


def main(argv: list[str] | None = None) -> int:
    args, overrides = parse(argv)
    args.out = args.out.resolve()
    if args.out.exists():
        print(f"kill_and_resume: '{args.out}' is already there; delete it or give another name", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True)
    from megarl.config import load_config

    ranks = load_config(args.config, overrides).trainer.world_size
    console = Console()
    code, said = train(args.config, overrides, args.out / "straight")
    if code:
        raise SystemExit(f"the run that is left alone failed with exit code {code}:\n{said[-3000:]}")
    kills = []
    with tempfile.TemporaryDirectory() as decoy:
        Path(decoy, "sitecustomize.py").write_text(DECOY)
        for number in range(args.kills):
            kills.append(kill_once(number, args, overrides, ranks, Path(decoy)))
            (args.out / "kills.json").write_text(json.dumps(kills, indent=1) + "\n")
            kill = kills[-1]
            console.print(f"kill {number + 1}/{args.kills}: {kill['moment']}, {kill['victim']}; step {kill['newest']}")
    code, said = train(args.config, overrides, args.out / "killed")
    if code:
        raise SystemExit(f"the killed run did not end: exit code {code}:\n{said[-3000:]}")
    console.print(table(kills))
    return 0 if same(args.out, console) and not any(kill["left"] for kill in kills) else 1


def table(kills: list[dict[str, Any]]) -> Table:
    out = Table("killed", *VICTIMS, "processes left", title=f"{len(kills)} kills")
    for moment in MOMENTS:
        of = [kill for kill in kills if kill["moment"] == moment]
        counts = [str(sum(kill["victim"] == victim for kill in of)) for victim in VICTIMS]
        out.add_row(moment, *counts, str(sum(kill["left"] for kill in of)))
    return out


def same(out: Path, console: Console) -> bool:
    one, other = last_checkpoint(out / "straight"), last_checkpoint(out / "killed")
    differing = [name for name in one.keys() | other.keys() if name not in one or name not in other]
    differing += [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]
    equal = numbers(out / "straight") == numbers(out / "killed")
    size = sum(value.numel() for value in one.values())
    console.print(
        f"last checkpoints: {len(one)} tensors, {size} numbers, {len(differing)} tensors differ; metrics equal: {equal}"
    )
    return not differing and equal


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
