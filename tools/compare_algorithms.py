#!/usr/bin/env python3
"""How the algorithms learn the quickstart's task from the same start: held-out accuracy by seed, and a picture.

    python tools/compare_algorithms.py --out runs/compare [--jobs 2] [--seeds 1 2 3] [--only rloo gspo] [key=value ...]

The first run is the quickstart's supervised warm-up; every algorithm then goes on from its checkpoint, each on one CPU
rank. The teacher of the distillation is what a GRPO run of another seed ended with. `launch/quickstart.sh` or
`tools/prepare_reasoning_gym.py` makes the data first. Runs that are in the folder already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIG = "configs/quickstart.yaml"
FINISHED = "finished"
"""In the folder of a run that reached its last step: the run is not repeated."""
MEGATRON = "actor_rollout_ref.actor.megatron"
ONE_RANK = [
    f"{MEGATRON}.tensor_model_parallel_size=1",
    f"{MEGATRON}.pipeline_model_parallel_size=1",
    f"{MEGATRON}.sequence_parallel=false",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[jsonl]",
]
ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode"
ALGORITHMS: dict[str, list[str]] = {
    "GRPO": [],
    "PPO": ["algorithm.adv_estimator=gae", "algorithm.lam=0.95", "critic.optim.lr=3e-4", "trainer.critic_warmup=5"],
    "RLOO": ["algorithm.adv_estimator=rloo"],
    "REINFORCE++": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "ReMax": ["algorithm.adv_estimator=remax"],
    "DAPO": [
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=48",
        f"{ACTOR}.clip_ratio_high=0.28",
        "reward.overlong_buffer={enable: true, len: 2, penalty_factor: 0.5}",
    ],
    "GSPO": [f"{LOSS}=gspo", f"{ACTOR}.clip_ratio=0.02", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
    "CISPO": [f"{LOSS}=cispo"],
    "SAPO": [f"{LOSS}=sapo"],
    "carry-over": [
        "actor_rollout_ref.rollout.carry_over.enable=true",
        "algorithm.rollout_correction.rollout_is=token",
    ],
    "distillation": ["algorithm.adv_estimator=on_policy_distillation", "teacher.model.path={teacher}"],
}
"""Name -> what it changes of the quickstart's GRPO."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, the table and the picture")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=[name.lower() for name in ALGORITHMS], help="some of them")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    start = args.out / "start" / "checkpoints" / "warmup_step_500"
    if not start.is_dir():
        train(args.out / "start", ["trainer.total_training_steps=1", "trainer.save_freq=500", "trainer.test_freq=0"])
    begun = [f"actor_rollout_ref.model.checkpoint={start}", "warmup.total_training_steps=0"]
    teacher = args.out / "teacher" / "checkpoints" / "global_step_60" / "huggingface"
    if not teacher.is_dir():
        train(
            args.out / "teacher",
            [*begun, "data.seed=9", "trainer.save_freq=-1", "checkpoint.save_contents=[model,optimizer,hf_model]"],
        )
    runs = {
        (name, seed): args.out / f"{name.lower()}-{seed}"
        for name in ALGORITHMS
        for seed in args.seeds
        if args.only is None or name.lower() in args.only
    }

    def learn(run: tuple[str, int]) -> None:
        name, seed = run
        own = [override.replace("{teacher}", str(teacher)) for override in ALGORITHMS[name]]
        if not (runs[run] / FINISHED).exists():
            train(runs[run], [*begun, f"data.seed={seed}", "trainer.save_freq=0", *own, *args.overrides])
            print(f"{name}, seed {seed}: done", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(learn, runs))
    curves = {run: accuracies(folder) for run, folder in runs.items()}
    show(curves)
    draw(curves, args.out / "algorithms.png")
    return 0


def train(folder: Path, overrides: list[str]) -> None:
    """A run on one CPU rank; raises RuntimeError with its last lines if it fails."""
    command = [sys.executable, "-m", "megarl.cli.main", "train", CONFIG, *ONE_RANK, *overrides]
    command.append(f"trainer.default_local_dir={folder}")
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{folder}: {done.stderr[-1000:]}")
    (folder / FINISHED).touch()


def accuracies(folder: Path) -> dict[int, float]:
    """Held-out accuracy by RL step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["val/accuracy"] for row in rows if "val/accuracy" in row}


def show(curves: dict[tuple[str, int], dict[int, float]]) -> None:
    """The table: before, after, and the seeds apart."""
    table = Table("algorithm", "before", "after (mean)", "each seed")
    for name in dict.fromkeys(name for name, _ in curves):
        seeds = [curve for (of, _), curve in curves.items() if of == name]
        last = [curve[max(curve)] for curve in seeds]
        each = ", ".join(f"{accuracy:.1%}" for accuracy in last)
        table.add_row(name, f"{seeds[0][min(seeds[0])]:.1%}", f"{statistics.mean(last):.1%}", each)
    Console().print(table)


def draw(curves: dict[tuple[str, int], dict[int, float]], picture: Path) -> None:
    """Mean over the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for name in dict.fromkeys(name for name, _ in curves):
        seeds = [curve for (of, _), curve in curves.items() if of == name]
        steps = sorted(seeds[0])
        columns = [[curve[step] for curve in seeds] for step in steps]
        (line,) = axes.plot(steps, [statistics.mean(column) for column in columns], label=name)
        axes.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12, color=line.get_color()
        )
    axes.set(xlabel="RL step", ylabel="held-out accuracy", ylim=(0, 1))
    axes.legend(loc="lower right", ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
