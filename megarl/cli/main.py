"""`megarl train --nproc N CONFIG key=value...`: checks the run in this process, then hands it to torchrun."""

from __future__ import annotations

import argparse
import os
import sys

import megarl


def main(argv: list[str] | None = None) -> int:
    """Exit code 2 for a run that is refused; otherwise torchrun's."""
    parser = argparse.ArgumentParser(prog="megarl", description=megarl.__doc__)
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train on this machine", description=__doc__)
    train.add_argument("--nproc", type=int, help="ranks to start; default trainer.n_gpus_per_node")
    train.add_argument("config", help="YAML file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys to set")
    args = parser.parse_args(argv)
    return _train(args.config, args.overrides, args.nproc)


def _train(config_path: str, overrides: list[str], nproc: int | None) -> int:
    from megarl.config import load_config

    ranks = [] if nproc is None else ["trainer.nnodes=1", f"trainer.n_gpus_per_node={nproc}"]
    try:
        config = load_config(config_path, [*overrides, *ranks])
        from megarl.trainer.checks import check_run

        check_run(config)
    except ValueError as e:
        print(f"megarl: error: {e}", file=sys.stderr)
        return 2
    if config.trainer.nnodes > 1:
        print("megarl: error: megarl train starts one node; use slurm/train.sbatch for several", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core's order of kernels needs it
    launch = ["--standalone", f"--nproc_per_node={config.trainer.n_gpus_per_node}", "-m", "megarl.train"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, config_path, *overrides]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
