"""A run on one rank: join the others, train, leave."""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial

import torch
import torch.distributed as dist

from megarl.checkpoint.folder import Phase
from megarl.config import dump_config
from megarl.parallel.groups import Groups, build_groups, destroy_groups, init_distributed
from megarl.trainer.agreement import check_same_inputs
from megarl.trainer.inputs import Inputs, generation_layout, train_layout
from megarl.trainer.ppo import PPOTrainer
from megarl.trainer.report import Report
from megarl.trainer.resume import Start, check_seen, choose_start, finished
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunRefused

CONFIG_FILE = "config.yaml"


def run(inputs: Inputs, stop: StopRequest) -> signal.Signals | None:
    """Join the job's ranks and `take_part`."""
    config = inputs.config
    init_distributed(config.trainer.timeout_minutes)
    groups = build_groups(train_layout(config), generation_layout(config), config.data.seed)
    stopped_by = take_part(inputs, groups, stop)
    destroy_groups(groups)
    dist.destroy_process_group()
    return stopped_by


def take_part(inputs: Inputs, groups: Groups, stop: StopRequest) -> signal.Signals | None:
    """Train with inputs that `checks.check_run` has passed; returns the signal that stopped the run, if one did.

    Raises:
        RunRefused: on every rank, if the ranks differ in what they read, or no checkpoint is fit to go on from.
        RunStopped: on every rank, if something went wrong that more steps would not mend.
    """
    config = inputs.config
    torch.manual_seed(config.data.seed)
    hosts = groups.all_gather(socket.gethostname(), "all ranks")
    watch = partial(groups.watch.active, rank=groups.rank, hosts=hosts, minutes=config.trainer.timeout_minutes)
    with watch(phase=lambda: "the start"):
        start = _agree(inputs, groups)
    if done := finished(inputs, start):
        _say(groups, done)
        return None
    trainer = _build(inputs, groups, stop, start)
    with watch(phase=lambda: trainer.timers.phase):
        stopped_by = trainer.fit()
    trainer.report.close()
    trainer.hybrid.close()
    if stopped_by is not None and groups.rank == 0:
        print(_stop_line(trainer, stopped_by), file=sys.stderr, flush=True)
    return stopped_by


def _agree(inputs: Inputs, groups: Groups) -> Start:
    """Whether all ranks read the same, where they begin, and whether all see the run's folder."""
    run_dir = inputs.config.trainer.run_dir
    try:
        check_same_inputs(inputs, groups)
        start = choose_start(inputs, groups, lambda text: _say(groups, text))
        if finished(inputs, start) is None:
            if groups.rank == 0:
                _write_config(inputs)
            groups.barrier("the run's folder")
            check_seen(os.path.join(run_dir, CONFIG_FILE), groups)
    except ValueError as e:
        raise RunRefused(str(e)) from e
    return start


def _write_config(inputs: Inputs) -> None:
    run_dir = inputs.config.trainer.run_dir
    os.makedirs(run_dir, exist_ok=True)
    with open(os.path.join(run_dir, CONFIG_FILE), "w", encoding="utf-8") as f:
        f.write(dump_config(inputs.config))


def _build(inputs: Inputs, groups: Groups, stop: StopRequest, start: Start) -> PPOTrainer:
    config, step = inputs.config, start.position.step
    if start.position.phase is Phase.WARMUP:
        step -= config.warmup.total_training_steps  # the warm-up's steps count up to 0
    report = Report(inputs, rank=groups.rank, first_step=step + 1 if start.folder else None)
    trainer = PPOTrainer(inputs, groups, report, stop, start)
    report.say(_start_line(inputs, groups, trainer))
    for remark in inputs.remarks:
        report.say(remark)
    trainer.memory.predict()
    if start.folder:
        report.say(f"resuming from {start.folder}")
    return trainer


def _say(groups: Groups, text: str) -> None:
    if groups.rank == 0:
        print(f"megarl: {text}", file=sys.stderr, flush=True)


def _stop_line(trainer: PPOTrainer, stopped_by: signal.Signals) -> str:
    position, settings = trainer.position, trainer.config.trainer
    warming = "warm-up " if position.phase is Phase.WARMUP else ""
    stopped = f"megarl: stopped by {stopped_by.name} after {warming}step {position.step}"
    if trainer.checkpoints.position != position:
        return f"{stopped}; no checkpoint of it (trainer.save_freq = {settings.save_freq})"
    again = "the same command" if settings.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"{stopped}; checkpoint {trainer.checkpoints.latest}; {again} goes on from it"


def _start_line(inputs: Inputs, groups: Groups, trainer: PPOTrainer) -> str:
    train, generation = groups.train, groups.generation
    chunks = f" x {train.chunks} chunks" if train.chunks > 1 else ""
    engine = trainer.hybrid.engine.parameters()
    moved = trainer.hybrid.resharder.statistics
    shared = sum(engine[name].nbytes for name in trainer.hybrid.aliases)
    pulled = f", {moved.pulled / 2**20:.1f} MiB of it straight out of their GPU memory" if moved.pulled else ""
    strings = "".join(f", {text!r}" for text in inputs.config.actor_rollout_ref.rollout.stop)
    return (
        f"training TP{train.tp} x PP{train.pp}{chunks} x DP{train.dp}, generation TP{generation.tp} x "
        f"{generation.replicas} replicas on {train.world_size} {groups.device.type} ranks; {inputs.arch.family} with "
        f"{trainer.actor.kernels}, {inputs.config.actor_rollout_ref.rollout.name} engine, which "
        f"shares {shared / 2**20:.1f} MiB of weights per rank with training; a reshard moves "
        f"{(moved.local + moved.received) / 2**20:.1f} MiB per rank, {moved.received / 2**20:.1f} MiB from others"
        f"{pulled}; responses end with {inputs.describe_stop_tokens()}{strings}"
    )
