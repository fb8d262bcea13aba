"""The `megarl` command.

megarl train --nproc N CONFIG key=value...   checks the run in this process, then starts its ranks on this machine
megarl train --nnodes 4 --node-rank K --master-addr HOST --master-port P CONFIG ...   on each of four nodes
megarl plan --gpus N CONFIG key=value...     memory, traffic and time of a run, without any GPU
megarl algorithms [NAME]                     advantage estimators, losses and rewards, with what they need
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

import megarl
from megarl.cli import algorithms, plan
from megarl.config import load_config


def main(argv: list[str] | None = None) -> int:
    """Exit code 2 for a run that is refused; otherwise that of the command, for `train` of the ranks."""
    parser = argparse.ArgumentParser(prog="megarl", description=megarl.__doc__)
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train on this machine, or on several together")
    _add_launch_arguments(training)
    planning = commands.add_parser("plan", help="memory, traffic and time of a run, without any GPU")
    plan.add_arguments(planning)
    for command in (training, planning):
        command.add_argument("config", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys to set")
    listing = commands.add_parser("algorithms", help="advantage estimators, losses and rewards, with what they need")
    listing.add_argument("name", nargs="?", help="one of them; default all")
    args, after_options = parser.parse_known_args(argv)  # argparse leaves out overrides that follow an option
    takes_overrides = args.command != "algorithms"
    if unknown := [word for word in after_options if word.startswith("-") or not takes_overrides]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if not takes_overrides:
            return algorithms.algorithms(args.name)
        overrides = [*args.overrides, *after_options]
        if args.command == "plan":
            return plan.plan(args, overrides)
        return _train(args, overrides)
    except ValueError as e:
        print(f"megarl: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megarl: SIGINT: stopped before the ranks started", file=sys.stderr)
        return 130


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flow", help="what the run does: a name, or path/to/file.py:function; default trainer.flow")
    parser.add_argument("--nproc", type=int, help="ranks to start here; default trainer.n_gpus_per_node")
    parser.add_argument("--nnodes", type=int, help="machines, each with a command of its own; default trainer.nnodes")
    parser.add_argument("--node-rank", type=int, help="which of them this is, from 0; default SLURM_NODEID")
    parser.add_argument("--master-addr", help="with several nodes: the host of node 0")
    parser.add_argument("--master-port", type=int, help="with several nodes: a free port of that host")


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    counts = {"trainer.n_gpus_per_node": args.nproc, "trainer.nnodes": args.nnodes}
    ranks = [f"{key}={count}" for key, count in counts.items() if count is not None]
    if args.flow is not None:
        overrides = [*overrides, f"trainer.flow={args.flow}"]
    config = load_config(args.config, [*overrides, *ranks])
    node_rank = _node_rank(args, config.trainer.nnodes)
    from megarl.flows.registry import FLOWS
    from megarl.trainer.checks import check_run  # imports torch: a misspelt key is refused sooner
    from megarl.trainer.resume import expected_start, finished
    from megarl.trainer.run_lock import check_free

    inputs = check_run(config)
    FLOWS.check(config.trainer.flow)
    if done := finished(inputs, expected_start(inputs)):
        print(f"megarl: {done}", file=sys.stderr)
        return 0
    if node_rank == 0:  # the ranks of node 0 may hold it when another node comes here
        check_free(config.trainer.run_dir)
    from megarl.launcher import Node, launch

    node = Node(nproc=config.trainer.n_gpus_per_node, nnodes=config.trainer.nnodes, node_rank=node_rank)
    if node.nnodes > 1:
        node = replace(node, master_addr=args.master_addr, master_port=args.master_port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core's order of kernels needs it
    command = [sys.executable, "-m", "megarl.train", args.config, *overrides]
    return launch(command, node, timeout_minutes=config.trainer.timeout_minutes)


def _node_rank(args: argparse.Namespace, nnodes: int) -> int:
    """Which node this is; raises ValueError if several nodes could not find each other."""
    if nnodes == 1:
        return 0
    node_rank = args.node_rank
    if node_rank is None and "SLURM_NODEID" in os.environ:
        node_rank = int(os.environ["SLURM_NODEID"])
    needed = {"--node-rank": node_rank, "--master-addr": args.master_addr, "--master-port": args.master_port}
    if missing := [option for option, value in needed.items() if value is None]:
        raise ValueError(f"a job of {nnodes} nodes needs {', '.join(missing)} on each of them, or slurm/train.sbatch")
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank {node_rank} is not one of {nnodes} nodes: 0 to {nnodes - 1}")
    return node_rank


if __name__ == "__main__":
    sys.exit(main())
