"""Run a configuration in its own layout on CPU ranks of this machine, with a small model, before GPUs are paid for.

The model has the same family and kinds of layers, but few and narrow ones, and sequences and batches are small. It
trains three steps with checkpoints and exports. Then the run begins again, loses a rank to SIGKILL, goes on from its
checkpoint, and must end with the same numbers and weights as the run that was left alone.

The model's folder needs no more than its config.json; what else is not here, tokenizer and rows, has stand-ins. Exit
code 0 if all went well, 1 if something did not, 2 if `megarl train` would refuse the configuration.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from rich.table import Table

from megarl.cli.plan import bytes_of
from megarl.cli.words import add_config
from megarl.config import Config, load_config
from megarl.config.load import check_nothing_hidden
from megarl.estimate.accelerator import ACCELERATORS, Accelerator
from megarl.private_folder import private_folder
from megarl.processes import signals_handled
from megarl.telemetry.console import plain_console
from megarl.telemetry.progress import print_table

if TYPE_CHECKING:
    from megarl.models.architecture import Architecture
    from megarl.rehearsal.acts import Act
    from megarl.rehearsal.small_run import SmallRun

EXAMPLE = (
    "megarl rehearse configs/recipes/math_grpo_llama3_70b.yaml actor_rollout_ref.model.path=configs/models/llama3_70b"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl rehearse`."""
    add_config(parser)
    parser.add_argument("--ranks", type=int, help="at most so many; default what the layout needs and memory holds")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="H200", help="the real run's; default H200")
    parser.add_argument("--gpu-memory", type=bytes_of, help="such as 80GB; default the accelerator's")
    parser.add_argument("--keep", metavar="FOLDER", help="folder to make and keep: the runs, what ranks printed")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Rehearse, and print what was rehearsed and what the real run needs; returns the exit code.

    Raises:
        ValueError: the run cannot work, or this machine cannot hold its rehearsal; one line.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported, here and in the ranks
    os.environ["OMP_NUM_THREADS"] = "1"
    config = load_config(args.config, [*args.overrides, *rest])
    check_nothing_hidden(config)
    from megarl.flow_kinds import FLOWS, trains
    from megarl.rehearsal.acts import Rehearsal, RehearsalFailed
    from megarl.rehearsal.ranks import ForkedRanks
    from megarl.trainer.admission.checks import check_layouts, check_run

    if not trains(config):
        raise ValueError(f"megarl rehearse plays runs that train, and trainer.flow = {config.trainer.flow} does not")
    _check_model(config)
    arch = check_layouts(config)
    FLOWS.check(config.trainer.flow)
    console = plain_console()
    with signals_handled([signal.SIGTERM], _leave), _folder(args.keep) as folder:
        small = _small_run(config, arch, folder, args.ranks)
        check_run(small.config)
        console.print(_headline(config, small))
        acts = []
        rehearsal = Rehearsal(small, ForkedRanks(small.config.trainer.world_size), folder)
        for name, act in rehearsal.acts():
            try:
                acts.append(rehearsal.play(name, act))
            except RehearsalFailed as e:
                print(f"megarl: {e}", file=sys.stderr)
                print(f"megarl: {_where(args.keep)}", file=sys.stderr)
                return 1
            console.print(f"{acts[-1].name}: {acts[-1].outcome} ({acts[-1].seconds:.0f} s)")
        print_table(_rehearsed_table(config, arch, small, acts))  # while the small model's folder is there
    for line in _not_rehearsed(config, small):
        console.print(f"not rehearsed: {line}")
    accelerator = ACCELERATORS[args.accelerator]
    memory = accelerator.memory if args.gpu_memory is None else args.gpu_memory
    return _print_needs(config, arch, replace(accelerator, memory=memory))


def _leave(number: int, frame: FrameType | None) -> None:
    """Leave by an exception, so that ranks and folders go first."""
    sys.exit(128 + number)


@contextmanager
def _folder(kept: str | None) -> Iterator[str]:
    if kept is None:
        with private_folder("megarl-rehearsal-") as folder:
            yield folder
        return
    try:
        os.makedirs(kept, mode=0o700)
    except FileExistsError as e:
        raise ValueError(f"--keep {kept}: it is there already; name another folder") from e
    except OSError as e:
        raise ValueError(f"--keep {kept} cannot be made: {e.strerror}") from e
    yield os.path.abspath(kept)


def _where(kept: str | None) -> str:
    if kept is None:
        return "--keep FOLDER keeps the runs and all that the ranks printed"
    return f"the runs, and all that the ranks printed, are in {kept}"


def _check_model(config: Config) -> None:
    path = config.actor_rollout_ref.model.path
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ValueError(
            f"no config.json in '{path}', and a rehearsal takes the model's shape from it; a folder with that file "
            "alone will do: actor_rollout_ref.model.path=configs/models/llama3_70b, say"
        )


def _small_run(config: Config, arch: Architecture, folder: str, most: int | None) -> SmallRun:
    """Make the small run on as many ranks as this machine holds. Raises ValueError if it holds too few."""
    from megarl.rehearsal.room import free_memory, layouts, memory_of
    from megarl.rehearsal.small_run import SmallRunMaker, refusal_of_engine
    from megarl.trainer.layouts import train_layout

    name, free, needed = config.actor_rollout_ref.rollout.name, free_memory(), 0
    engines = [name, "native"] if refusal_of_engine(name, config, arch) is None else ["native"]
    for layout in layouts(config, most):
        for engine in dict.fromkeys(engines):
            place = os.path.join(folder, f"{layout.trainer.world_size}-ranks-{len(os.listdir(folder))}")
            small = SmallRunMaker(layout, place, engine=engine).make()
            needed = memory_of(small.config)
            if needed <= free:
                return small
    least = train_layout(config).block_size
    if not needed:
        raise ValueError(f"--ranks {most} is too few: the layout needs {least} ranks at least")
    raise ValueError(
        f"{least} ranks take about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of this machine's memory are "
        "free; rehearse on a larger machine, or smaller tensor, pipeline and context sizes"
    )


def _headline(config: Config, small: SmallRun) -> str:
    from megarl.rehearsal.room import memory_of
    from megarl.trainer.layouts import train_layout

    ranks = small.config.trainer.world_size
    return (
        f"rehearsing {train_layout(small.config)} on {ranks} CPU ranks, about "
        f"{memory_of(small.config) / 2**30:.1f} GiB; the run has {train_layout(config)}"
    )


def _rehearsed_table(config: Config, arch: Architecture, small: SmallRun, acts: Sequence[Act]) -> Table:
    from megarl.flow_kinds import generates
    from megarl.models.families import read_architecture
    from megarl.trainer.layouts import generation_layout, train_layout

    table = Table(title="What was rehearsed")
    for column in ("", "the run", "rehearsed"):
        table.add_column(column)
    little = read_architecture(small.config.actor_rollout_ref.model.path)
    pairs = [(config, arch), (small.config, little)]
    rows = {
        "training": [train_layout(c).with_layers(a.num_layers) for c, a in pairs],
        "model": [f"{a.family}, {a.num_layers} layers of width {a.hidden_size}" for _, a in pairs],
        "vocabulary": [f"{a.vocab_size}" for _, a in pairs],
        "tokens": [f"{c.data.max_prompt_length} + {c.data.max_response_length}" for c, _ in pairs],
        "batch": [f"{c.data.train_batch_size} rows" for c, _ in pairs],
    }
    if generates(config):
        layouts = [generation_layout(c) for c, _ in pairs]
        engines = [c.actor_rollout_ref.rollout.name for c, _ in pairs]
        rows["generation"] = [f"{name}, {layout}" for name, layout in zip(engines, layouts, strict=True)]
        rows["batch"] = [f"{c.data.train_batch_size} x {c.actor_rollout_ref.rollout.n}" for c, _ in pairs]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    table.caption = f"in {sum(act.seconds for act in acts):.0f} s"
    return table


def _not_rehearsed(config: Config, small: SmallRun) -> Iterator[str]:
    from megarl.trainer.layouts import train_layout

    yield "GPU kernels and memory, NCCL, the network between nodes"
    if train_layout(config).dp > train_layout(small.config).dp == 1:
        yield "data parallelism: this machine, or --ranks, holds no second replica"
    yield from small.differences


def _print_needs(config: Config, arch: Architecture, accelerator: Accelerator) -> int:
    from megarl.estimate.budget_table import size
    from megarl.rehearsal.needs import needs_of_run
    from megarl.trainer.memory import job_of

    needs, gpus = needs_of_run(job_of(config, arch), accelerator), config.trainer.world_size
    hours = gpus * needs.step_seconds / 3600
    table = Table(title="What the run will need: predictions of megarl plan")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("memory of a GPU, at most", f"{size(needs.gpu_bytes)} of {size(accelerator.memory)}")
    table.add_row("disk, a checkpoint", size(needs.checkpoint_bytes))
    table.add_row("disk, its export (hf_model)", size(needs.export_bytes))
    table.add_row("a step", f"{needs.step_seconds:.0f} s, {hours:.2f} GPU-hours")
    steps = "unknown: its rows are not here" if needs.steps is None else f"{hours * needs.steps:,.0f} GPU-hours"
    table.add_row(f"{'all' if needs.steps is None else needs.steps} steps on {gpus} GPUs", steps)
    print_table(table)
    console = plain_console()
    for line in needs.too_much:
        console.print(f"does not fit: {line}")
    return 1 if needs.too_much else 0
