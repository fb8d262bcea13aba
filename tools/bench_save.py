#!/usr/bin/env python3
"""What checkpoints cost a run: how long training stops for each, and how long steps take beside one that is written.

    torchrun --nproc_per_node N tools/bench_save.py CONFIG [key=value ...] [--saves 4] [--every 6] [--json FILE]

Random weights, prompts and responses, as in bench_step.py. Beside the time that a save stops training stands a copy of
as many bytes from the GPU into pinned memory in the same process, which is as fast as the link is.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from bench_step import SETTINGS
from benchmark import command_line, finish, run_of, start, synthetic_inputs

from megarl.config import ConfigError, load_run_config
from megarl.flows import ppo
from megarl.parallel.world import World
from megarl.trainer.admission.checks import check_layouts
from megarl.trainer.inputs import Inputs

WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run showed, on the first rank.

    Attributes:
        what: the case.
        stops: seconds that each save stopped training.
        steps, steps_beside: median seconds of steps with nothing to write, and of those beside a checkpoint that is
            written or an earlier one that is deleted; without the seconds of `stops`.
        written: seconds from each save to its checkpoint's name.
        gib: that each save wrote, over all ranks.
        link_s: seconds of a copy of the rank's part into pinned memory.
        host_gib: memory of the process after each save.
        device_gib: memory of the GPU that torch holds tensors in after each save.
    """

    what: str
    stops: list[float]
    steps: float
    steps_beside: float
    written: list[float]
    gib: float
    link_s: float
    host_gib: list[float]
    device_gib: list[float]


def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--every", type=int, default=6, help="steps from a save to the next")
    args = parser.parse_intermixed_args(argv)
    steps = WARM_UP + args.saves * args.every
    saving = [f"trainer.save_freq={args.every}", f"trainer.total_training_steps={steps}", "trainer.max_ckpt_to_keep=1"]
    try:
        config = load_run_config(
            args.config, [*args.overrides, *(s for s in SETTINGS if not s.startswith("trainer.save_freq")), *saving]
        )
        inputs = synthetic_inputs(config, check_layouts(config))
    except (ConfigError, ValueError) as e:
        print(f"bench_save: error: {e}", file=sys.stderr)
        return 2
    world = start()
    finish(measure(inputs, world), print_table, args.json)
    return 0


class Watch:
    """Notes when checkpoints begin and when they have their names."""

    def __init__(self, run: Any) -> None:
        self.stops: list[float] = []
        self.written: list[float] = []
        self.host: list[float] = []
        self.device: list[float] = []
        self.rows: list[tuple[bool, float]] = []
        self._checkpoints, self._began, self._was_busy = run.checkpoints, 0.0, False
        self._save, self._after = run.checkpoints.save, run.checkpoints._after
        run.checkpoints.save, run.checkpoints._after = self.save, self.after

    def save(self, *args: Any, **more: Any) -> None:
        self._began = time.monotonic()
        self._save(*args, **more)
        self.stops.append(time.monotonic() - self._began)
        self.host.append(psutil.Process().memory_info().rss / 2**30)
        self.device.append(torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0)
        memory = f"host {self.host[-1]:.2f} GiB, device {self.device[-1]:.2f} GiB"
        print(f"save {len(self.stops)}: {self.stops[-1]:.2f} s, {memory}")

    def after(self, *args: Any) -> None:
        self._after(*args)
        self.written.append(time.monotonic() - self._began)

    def row(self, loop: str, step: int, row: Mapping[str, float]) -> None:
        work = [*(writing.work for writing in self._checkpoints._writing), *self._checkpoints._pruned]
        busy = any(not each.done() for each in work)
        self.rows.append((busy or self._was_busy, row["timing/step_s"] - row.get("timing/save_s", 0.0)))
        self._was_busy = busy


def measure(inputs: Inputs, world: World) -> Figures:
    """Run the flow, and time a plain copy of the same size."""
    watches: list[Watch] = []
    run = run_of(inputs, world, [lambda *row: watches[0].row(*row)])
    watches.append(watch := Watch(run))
    ppo.flow(run)
    run.finish()
    folder = run.checkpoints.latest
    assert folder is not None
    size = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)
    link = _link_seconds(size // world.size) if torch.cuda.is_available() else 0.0
    counted = watch.rows[WARM_UP:]
    return Figures(
        what=f"{size / 2**30:.1f} GiB, {world.size} ranks",
        stops=watch.stops,
        steps=statistics.median([seconds for writes, seconds in counted if not writes] or [0.0]),
        steps_beside=statistics.median([seconds for writes, seconds in counted if writes] or [0.0]),
        written=watch.written,
        gib=size / 2**30,
        link_s=link,
        host_gib=watch.host,
        device_gib=watch.device,
    )


def _link_seconds(size: int) -> float:
    """Time a copy from the GPU into pinned memory, a GiB at a time."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.monotonic()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return statistics.median(times) * size / 2**30


def print_table(figures: Figures) -> None:
    print(f"{figures.what}; the link takes {figures.link_s:.2f} s for a rank's part")
    print(f"stops    {' '.join(f'{s:.2f}' for s in figures.stops)} s")
    print(f"written  {' '.join(f'{s:.1f}' for s in figures.written)} s after the save began")
    print(f"steps    {figures.steps:.3f} s, beside a write {figures.steps_beside:.3f} s")
    print(f"host     {' '.join(f'{s:.2f}' for s in figures.host_gib)} GiB")
    print(f"device   {' '.join(f'{s:.2f}' for s in figures.device_gib)} GiB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
