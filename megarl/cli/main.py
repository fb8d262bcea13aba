"""The `megarl` command.

megarl train --nproc N CONFIG key=value...   checks the run in this process, then hands it to torchrun
megarl plan --gpus N CONFIG key=value...     memory, traffic and time of a run, without any GPU
"""

from __future__ import annotations

import argparse
import os
import sys

import megarl
from megarl.cli import plan
from megarl.config import load_config


def main(argv: list[str] | None = None) -> int:
    """Exit code 2 for a run that is refused; otherwise that of the command, for `train` torchrun's."""
    parser = argparse.ArgumentParser(prog="megarl", description=megarl.__doc__)
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train on this machine")
    training.add_argument("--nproc", type=int, help="ranks to start; default trainer.n_gpus_per_node")
    planning = commands.add_parser("plan", help="memory, traffic and time of a run, without any GPU")
    plan.add_arguments(planning)
    for command in (training, planning):
        command.add_argument("config", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys to set")
    args, after_options = parser.parse_known_args(argv)  # argparse leaves out overrides that follow an option
    if unknown := [word for word in after_options if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    overrides = [*args.overrides, *after_options]
    try:
        if args.command == "plan":
            return plan.plan(args, overrides)
        return _train(args.config, overrides, args.nproc)
    except ValueError as e:
        print(f"megarl: error: {e}", file=sys.stderr)
        return 2


def _train(config_path: str, overrides: list[str], nproc: int | None) -> int:
    ranks = [] if nproc is None else ["trainer.nnodes=1", f"trainer.n_gpus_per_node={nproc}"]
    config = load_config(config_path, [*overrides, *ranks])
    from megarl.trainer.checks import check_run  # imports torch: a misspelt key is refused sooner

    check_run(config)
    if config.trainer.nnodes > 1:
        raise ValueError("megarl train starts one node; use slurm/train.sbatch for several")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core's order of kernels needs it
    launch = ["--standalone", f"--nproc_per_node={config.trainer.n_gpus_per_node}", "-m", "megarl.train"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, config_path, *overrides]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
