"""Predict the memory, the traffic and the time of a run, without a GPU.

Reads the configuration and the models' config.json, but no weights, tokenizer or data files; of a model of the Hub it
fetches config.json alone. Exit code 0 if the run
fits, 1 if a GPU's memory is too small, 2 if `megarl train` would refuse the layout.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.table import Table

from megarl.cli.words import add_config
from megarl.config import load_config
from megarl.estimate.accelerator import ACCELERATORS, H200, Accelerator
from megarl.estimate.better_split import better_split
from megarl.estimate.budget import CacheRoom, StageBudget, budget, cache_room
from megarl.estimate.budget_table import predicted_table, size
from megarl.estimate.fit import RESERVE, what_does_not_fit, what_leaves_little, what_may_not_fit
from megarl.estimate.job import Job, parameter_count
from megarl.estimate.longest import longer_sequences, longest_sequence, most_looked_for
from megarl.estimate.prediction import (
    Lengths,
    between_nodes,
    layout_warnings,
    mfu_of,
    most_received,
    reshard_of_some_ranks,
    step_seconds,
)
from megarl.estimate.token_budget import largest_token_budget
from megarl.reshard.traffic import Traffic
from megarl.telemetry.console import plain_console
from megarl.telemetry.progress import print_table
from megarl.trainer.trust import unsafe_remarks

EXAMPLE = "megarl plan configs/quickstart.yaml --gpus 8 --accelerator H100"
UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl plan`. Their defaults are in `megarl.estimate.accelerator`."""
    add_config(parser)
    parser.add_argument("--gpus", type=int, help="ranks of the job; default those of the configuration")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="with --gpus; default 8")
    parser.add_argument(
        "--accelerator", choices=ACCELERATORS, default=H200.name, help=f"whose rates are assumed; default {H200.name}"
    )
    parser.add_argument("--gpu-memory", type=bytes_of, help="such as 80GB; default the accelerator's")
    parser.add_argument("--memory-rate", type=bytes_of, help="bytes/s from the GPU's memory, such as 4.2TB")
    parser.add_argument("--peer-rate", type=bytes_of, help="bytes/s from a GPU of the same node, such as 374GB")
    parser.add_argument("--network-rate", type=bytes_of, help="bytes/s per GPU from another node, such as 50GB")
    parser.add_argument("--tflops", type=positive, help="peak of dense matrix products in the model's dtype")
    reached = f"share of that peak which training reaches; default {H200.mfu}, of mixtures {H200.mixture_mfu}"
    parser.add_argument("--mfu", type=share, help=reached)
    parser.add_argument("--prompt-tokens", type=positive, help="mean; default data.max_prompt_length")
    parser.add_argument("--response-tokens", type=positive, help="mean; default data.max_response_length")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the prediction; returns the exit code.

    Raises:
        ValueError: the run cannot work; one line says what to change.
    """
    config = load_config(args.config, [*args.overrides, *rest, *_ranks(args.gpus, args.gpus_per_node)])
    from megarl.flow_kinds import trains

    if not trains(config):
        raise ValueError(f"megarl plan predicts steps of training, and trainer.flow = {config.trainer.flow} has none")
    from megarl.trainer.admission.checks import check_layouts  # imports torch: a misspelt key is refused sooner
    from megarl.trainer.hub_models import fetch_models
    from megarl.trainer.memory import job_of

    config = fetch_models(config, config_only=True, alone=True)
    arch = check_layouts(config)
    job = job_of(config, arch)
    accelerator = _accelerator(args, config.actor_rollout_ref.model.dtype)
    lengths = Lengths(
        prompt=args.prompt_tokens or config.data.max_prompt_length,
        response=args.response_tokens or config.data.max_response_length,
    )
    traffic = reshard_of_some_ranks(job)
    cache = cache_room(job, accelerator) if job.generates else None
    moved = most_received(job, traffic)
    stages = budget(job, accelerator, moved=moved)

    console = plain_console()
    console.print(_headline(job))
    print_table(predicted_table(job, stages, accelerator))
    if cache is not None:
        console.print(_cache_line(job, cache))
        print_table(_traffic_table(job, traffic))
    seconds = step_seconds(job, accelerator, lengths, cache, traffic)
    print_table(_time_table(seconds))
    lines = (
        *_run_lines(job, sum(seconds.values())),
        *_token_budget_lines(job, accelerator, stages),
        *_longest_lines(job, accelerator, stages, moved),
    )
    for line in lines:
        console.print(line)
    console.print(_assumptions(job, accelerator, lengths))
    for line in (*unsafe_remarks(config), *layout_warnings(job, lengths, cache)):
        console.print(f"warning: {line}")
    too_much = list(what_does_not_fit(job, accelerator, stages))
    for line in too_much:
        console.print(f"does not fit: {line}")
    for line in [] if too_much else what_may_not_fit(job, accelerator, stages):
        console.print(f"warning: if the estimates are right, {line}")
    if better := better_split(job, accelerator, lengths, stages, moved=moved):
        console.print(f"hint: {better}")
    for line in what_leaves_little(job, accelerator, stages):
        console.print(f"warning: {line}")
    return 1 if too_much else 0


def bytes_of(text: str) -> float:
    """Parse a size such as 141GiB or 80GB into bytes. Raises ArgumentTypeError for other texts."""
    match = re.fullmatch(r"([0-9.]+) *([a-zA-Z]*)", text)
    if not match or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write 80GB or 141GiB")
    return positive(match[1]) * UNITS[match[2].upper()]


def positive(text: str) -> float:
    """Parse a number above 0. Raises ArgumentTypeError for other texts."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")
    return number


def share(text: str) -> float:
    """Parse a number above 0 that is 1 at most. Raises ArgumentTypeError for other texts."""
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"'{text}' is more than 1; write 0.5 for 50 %")
    return number


def _ranks(gpus: int | None, per_node: int) -> list[str]:
    if gpus is None:
        return []
    if per_node < 1 or (gpus > per_node and gpus % per_node):
        raise ValueError(f"--gpus {gpus} is no multiple of {per_node}; set --gpus-per-node")
    return [f"trainer.nnodes={max(1, gpus // per_node)}", f"trainer.n_gpus_per_node={min(gpus, per_node)}"]


def _accelerator(args: argparse.Namespace, dtype: str) -> Accelerator:
    options = {
        "memory": args.gpu_memory,
        "memory_rate": args.memory_rate,
        "peer_rate": args.peer_rate,
        "network_rate": args.network_rate,
        "mfu": args.mfu,
        "mixture_mfu": args.mfu,
        "flops": {dtype: args.tflops * 1e12} if args.tflops else None,
    }
    values = {name: value for name, value in options.items() if value is not None}
    return replace(ACCELERATORS[args.accelerator], **values)


def _headline(job: Job) -> str:
    train, generation = job.train.with_layers(job.arch.num_layers), job.generation
    model = f"{job.arch.family}, {_count(parameter_count(job.arch))} parameters, on {job.ranks} GPUs"
    if not job.generates:
        return f"{model}: training {train}, {job.sequences} sequences a step"
    return f"{model}: training {train}, generation {generation} ({job.config.actor_rollout_ref.rollout.name})"


def _cache_line(job: Job, cache: CacheRoom) -> str:
    return (
        f"KV cache of a replica: {cache.tokens:,} tokens, {cache.sequences} sequences of {job.max_sequence_length} "
        f"tokens at a time"
    )


def _traffic_table(job: Job, traffic: dict[int, Traffic]) -> Table:
    table = Table(title=f"One reshard, bytes per rank (of {len(traffic)} ranks planned)")
    for name in ("", "mean", "max"):
        table.add_column(name, justify="right" if name else "left")
    rows = {
        "shared with training": [moved.shared for moved in traffic.values()],
        "copied within the rank": [moved.local for moved in traffic.values()],
        "received": [moved.received.total() for moved in traffic.values()],
        "… from other nodes": [between_nodes(job, rank, moved.received) for rank, moved in traffic.items()],
        "sent": [moved.sent.total() for moved in traffic.values()],
    }
    for name, elements in rows.items():
        mean, most = sum(elements) / len(elements), max(elements)
        table.add_row(name, size(job.itemsize * mean), size(job.itemsize * most))
    return table


def _time_table(seconds: dict[str, float]) -> Table:
    table = Table(title="One step")
    table.add_column("")
    table.add_column("time", justify="right")
    for phase, time in seconds.items():
        table.add_row(phase, _time(time))
    table.add_section()
    table.add_row("all", _time(sum(seconds.values())))
    return table


def _run_lines(job: Job, seconds: float) -> Iterator[str]:
    """Say what all steps cost, or one, where their number follows from rows that nobody reads here."""
    if math.isinf(seconds):
        return
    steps, gpus = job.config.trainer.total_training_steps, job.ranks
    seconds *= steps or 1
    cost = f"{_time(seconds)} on {gpus} GPUs, {_amount(gpus * seconds / 3600)} GPU-hours"
    if steps is None:
        yield f"One step: {cost}; trainer.total_training_steps, which says how many there are, is not set."
    else:
        yield f"{steps:,} steps: {cost}, without validation, checkpoints and waiting for rewards."


def _token_budget_lines(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget]) -> Iterator[str]:
    tokens = largest_token_budget(job, accelerator, stages)
    if tokens:
        yield (
            f"Largest actor.ppo_max_token_len_per_gpu that leaves {RESERVE:.0%} of the memory free: {tokens:,} "
            f"(here {job.actor.batching.ppo_max_token_len_per_gpu:,})."
        )


def _longest_lines(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget], moved: int) -> Iterator[str]:
    if tokens := longest_sequence(job, accelerator, stages):
        others = longer_sequences(job, accelerator, moved=moved)
        longer = "; ".join(f"{more:,} with {key}" for key, more in others if more > tokens)
        yield (
            f"Longest sequence with which training leaves {RESERVE:.0%} of the memory free: {tokens:,} tokens"
            f"{' or more' * (tokens == most_looked_for(job))}"
            f"{f'; {longer}' if longer else ''}. The model has {job.arch.max_position_embeddings:,} positions."
        )


def _assumptions(job: Job, accelerator: Accelerator, lengths: Lengths) -> str:
    flops = accelerator.flops[job.config.actor_rollout_ref.model.dtype]
    assumed = (
        f"Assumed: {lengths.prompt:g} + {lengths.response:g} tokens per sequence; {flops / 1e12:g} TFLOP/s, MFU "
        f"{mfu_of(job.arch, accelerator):g} without bubbles"
    )
    if not job.generates:
        return f"{assumed}."
    return (
        f"{assumed}; {accelerator.memory_rate / 1e9:,.0f} GB/s memory; {1e6 * accelerator.layer:g} us more for each "
        f"layer of a decode step, and {1e6 * job.engine.seconds_per_token:g} us for each of its tokens; "
        f"{accelerator.peer_rate / 1e9:.4g} GB/s from the node's GPUs, {accelerator.network_rate / 1e9:.4g} GB/s from "
        f"other nodes. reshard is a lower bound."
    )


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds >= 3600:
        return f"{_amount(seconds / 3600)} h"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _amount(n: float) -> str:
    return f"{n:,.0f}" if n >= 100 else f"{n:.3g}"


def _count(n: int) -> str:
    for unit in ("", " thousand", " million"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n = n / 1000  # type: ignore[assignment]
    return f"{n:.4g} billion"
