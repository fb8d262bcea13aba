"""A run on one rank: join the others, train, leave."""

from __future__ import annotations

import os
import signal
import socket
import sys

import torch
import torch.distributed as dist

from megarl.checkpoint.folder import checkpoint_folder, read_state
from megarl.config import dump_config
from megarl.parallel.groups import Groups, build_groups, destroy_groups, init_distributed
from megarl.trainer.inputs import Inputs, generation_layout, train_layout
from megarl.trainer.ppo import PPOTrainer
from megarl.trainer.report import Report
from megarl.trainer.stop import StopRequest


def run(inputs: Inputs, stop: StopRequest) -> signal.Signals | None:
    """Train with inputs that `checks.check_run` has passed; returns the signal that stopped the run, if one did."""
    config = inputs.config
    init_distributed(config.trainer.timeout_minutes)
    groups = build_groups(train_layout(config), generation_layout(config), config.data.seed)
    torch.manual_seed(config.data.seed)
    done = read_state(inputs.resume_from)["step"] if inputs.resume_from else None
    if groups.rank == 0:
        os.makedirs(config.trainer.run_dir, exist_ok=True)
        with open(os.path.join(config.trainer.run_dir, "config.yaml"), "w", encoding="utf-8") as f:
            f.write(dump_config(config))
    # a fresh run starts its metric files anew: the warm-up's steps count up to 0
    first_step = done + 1 if done is not None else -config.warmup.total_training_steps
    report = Report(inputs, rank=groups.rank, first_step=first_step)
    trainer = PPOTrainer(inputs, groups, report, stop)
    report.say(_start_line(inputs, groups, trainer))
    trainer.memory.predict()
    if inputs.resume_from:
        report.say(f"resuming from {inputs.resume_from}")
    hosts = groups.all_gather(socket.gethostname(), "all ranks' models")
    minutes = config.trainer.timeout_minutes
    with groups.watch.active(rank=groups.rank, hosts=hosts, minutes=minutes, phase=lambda: trainer.timers.phase):
        stopped_by = trainer.fit()
    report.close()
    trainer.hybrid.close()
    destroy_groups(groups)
    dist.destroy_process_group()
    if stopped_by is not None and groups.rank == 0:
        print(_stop_line(inputs, trainer, stopped_by), file=sys.stderr, flush=True)
    return stopped_by


def _stop_line(inputs: Inputs, trainer: PPOTrainer, stopped_by: signal.Signals) -> str:
    stopped = f"megarl: stopped by {stopped_by.name} after step {trainer.step}"
    settings = inputs.config.trainer
    if trainer.saved_step != trainer.step:
        return f"{stopped}; no checkpoint (trainer.save_freq=0)"
    again = "the same command" if settings.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"{stopped}; checkpoint {checkpoint_folder(settings.run_dir, trainer.step)}; {again} goes on from it"


def _start_line(inputs: Inputs, groups: Groups, trainer: PPOTrainer) -> str:
    train, generation = groups.train, groups.generation
    chunks = f" x {train.chunks} chunks" if train.chunks > 1 else ""
    engine = trainer.hybrid.engine.parameters()
    moved = trainer.hybrid.resharder.statistics
    shared = sum(engine[name].nbytes for name in trainer.hybrid.aliases)
    pulled = f", {moved.pulled / 2**20:.1f} MiB of it straight out of their GPU memory" if moved.pulled else ""
    return (
        f"training TP{train.tp} x PP{train.pp}{chunks} x DP{train.dp}, generation TP{generation.tp} x "
        f"{generation.replicas} replicas on {train.world_size} {groups.device.type} ranks; {inputs.arch.family} with "
        f"{trainer.actor.kernels}, {inputs.config.actor_rollout_ref.rollout.name} engine, which "
        f"shares {shared / 2**20:.1f} MiB of weights per rank with training; a reshard moves "
        f"{(moved.local + moved.received) / 2**20:.1f} MiB per rank, {moved.received / 2**20:.1f} MiB from others"
        f"{pulled}"
    )
