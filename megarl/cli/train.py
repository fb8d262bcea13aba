"""Check a run in this process, then start its ranks on this machine.

With several nodes, start the command on each of them, with --nnodes, --node-rank, --master-addr and --master-port. The
first Ctrl-C saves a checkpoint after the current step, a second one ends the run at once. With --restarts, ranks that
were lost are started again from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.cli.nodes import add_nodes, node_rank_of
from megarl.cli.words import add_config
from megarl.config import Config, load_config
from megarl.config.load import check_nothing_hidden
from megarl.processes import module_command

if TYPE_CHECKING:  # imports torch
    from megarl.trainer.inputs import Inputs

EXAMPLE = "megarl train --nproc 4 configs/quickstart.yaml trainer.total_training_steps=20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl train`."""
    add_config(parser)
    parser.add_argument("--flow", help="the run's flow: a name, or path/to/file.py:function; default trainer.flow")
    parser.add_argument("--nproc", type=int, help="ranks to start here; default trainer.n_gpus_per_node")
    add_nodes(parser)
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start the ranks again when they are lost, up to N times without progress; default 0",
    )
    parser.add_argument(
        "--restart-wait",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="first wait, then twice as long; default 10",
    )
    parser.add_argument(
        "--min-nodes", type=_count, metavar="M", help="go on without nodes that fail while M are left; default all"
    )


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Check and start the run; returns the exit code of the ranks.

    Raises:
        ValueError: the run cannot work, in one line.
    """
    overrides = [*args.overrides, *rest]
    counts = {"trainer.n_gpus_per_node": args.nproc, "trainer.nnodes": args.nnodes}
    ranks = [f"{key}={count}" for key, count in counts.items() if count is not None]
    if args.flow is not None:
        overrides = [*overrides, f"trainer.flow={args.flow}"]
    config = load_config(args.config, [*overrides, *ranks])
    check_nothing_hidden(config)
    node_rank = node_rank_of(args, config.trainer.nnodes)
    least_nodes = args.min_nodes or config.trainer.nnodes
    if least_nodes > config.trainer.nnodes:
        raise ValueError(f"--min-nodes {least_nodes} is more than the {config.trainer.nnodes} nodes of the run")
    if lowered := _lowered(config):
        overrides = [*overrides, *lowered]
        config = load_config(args.config, [*overrides, *ranks])
    from megarl.telemetry.console import go_on_without

    go_on_without()
    inputs = _check(config, first=node_rank == 0)
    if inputs is None:
        return 0
    from megarl.nodes import Node
    from megarl.supervisor import Restarts, Supervisor
    from megarl.telemetry.log_file import LOG
    from megarl.trainer.hub_models import pinned_keys
    from megarl.trainer.resuming.identity import configuration_digest

    LOG.open_if_there(config.trainer.run_dir, f"node_{node_rank}")
    pins = pinned_keys(inputs.config)
    overrides = [*overrides, *pins]
    node = Node(nproc=config.trainer.n_gpus_per_node, nnodes=config.trainer.nnodes, node_rank=node_rank)
    if node.nnodes > 1:
        same = {
            "configuration": configuration_digest(config),
            "--restarts and --min-nodes": f"{args.restarts} {least_nodes}",
            "commits of the Hub's models": " ".join(pins),
        }
        node = replace(node, master_addr=args.master_addr, master_port=args.master_port, same=same)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-Core's order of kernels needs it
    command = [*module_command("megarl.train"), args.config, *overrides]
    if args.restarts and config.trainer.save_freq <= 0:
        print("megarl: --restarts goes on from checkpoints: set trainer.save_freq=20, say", file=sys.stderr)
    restarts = Restarts(limit=args.restarts, least_nodes=least_nodes, first_wait=args.restart_wait)
    return Supervisor(command, node, lambda more: load_config(args.config, [*overrides, *ranks, *more]), restarts).run()


def _check(config: Config, *, first: bool) -> Inputs | None:
    """Check the run without its ranks; None if it has nothing left to do, which is said.

    Args:
        first: this is the first node, which looks at the run's folder and tries the reward.

    Raises:
        ValueError: as `run`.
    """
    from megarl.flow_kinds import FLOWS
    from megarl.trainer.admission.checks import check_run  # imports torch: a misspelt key is refused sooner
    from megarl.trainer.resuming.resume import expected_start, finished
    from megarl.trainer.run_lock import check_free
    from megarl.trainer.scoring.trial import try_reward

    inputs = check_run(config)
    FLOWS.check(config.trainer.flow)
    if reason := finished(inputs, expected_start(inputs)):
        print(f"megarl: {reason}", file=sys.stderr)
        return None
    if first:  # on another node, the ranks of node 0 may hold the folder already
        check_free(config.trainer.run_dir)
        for line in try_reward(inputs):
            print(f"megarl: {line}", file=sys.stderr)
    say_how_to_profile(config)
    return inputs


def _lowered(config: Config) -> list[str]:
    """Return the keys that an earlier start in the run's folder lowered when GPU memory ran out, and say so."""
    from megarl.trainer.less_memory import FILE, as_overrides, remembered

    lowered = as_overrides(remembered(config.trainer.run_dir, config))
    if lowered:
        file = os.path.join(config.trainer.run_dir, FILE)
        print(f"megarl: {', '.join(lowered)}: memory ran out with more ({file})", file=sys.stderr)
    return lowered


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of restarts or nodes")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 3600")
    return seconds


def say_how_to_profile(config: Config) -> None:
    """Print the nsys command if the run is to be profiled with nsys and does not run under it yet."""
    keys = config.profiler
    if keys.tool != "nsight" or "NSYS_PROFILING_SESSION_ID" in os.environ:
        return
    from megarl.telemetry.profiler import nsight_command

    line = nsight_command(shlex.join(["megarl", *sys.argv[1:]]), len(keys.steps))
    print(f"megarl: profiler.tool=nsight only marks the steps; this records them: {line}", file=sys.stderr)
