"""A run on one rank: join the others, train, leave."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from megarl.checkpoint.folder import read_state
from megarl.config import dump_config
from megarl.parallel.groups import Groups, build_groups, destroy_groups, init_distributed
from megarl.telemetry.earlier import set_aside_earlier_run
from megarl.trainer.inputs import Inputs, generation_layout, train_layout
from megarl.trainer.ppo import PPOTrainer
from megarl.trainer.report import Report


def run(inputs: Inputs) -> None:
    """Train with inputs that `checks.check_run` has passed."""
    config = inputs.config
    init_distributed()
    groups = build_groups(train_layout(config), generation_layout(config), config.data.seed)
    torch.manual_seed(config.data.seed)
    done = read_state(inputs.resume_from)["step"] if inputs.resume_from else None
    earlier = None
    if groups.rank == 0:
        earlier = set_aside_earlier_run(config.trainer.run_dir) if done is None else None
        os.makedirs(config.trainer.run_dir, exist_ok=True)
        with open(os.path.join(config.trainer.run_dir, "config.yaml"), "w", encoding="utf-8") as f:
            f.write(dump_config(config))
    report = Report(inputs, rank=groups.rank, first_step=done + 1 if done is not None else None)
    if earlier is not None:
        report.say(f"the records of an earlier run are in {earlier} now")
    trainer = PPOTrainer(inputs, groups, report)
    report.say(_start_line(inputs, groups, trainer))
    trainer.memory.predict()
    if inputs.resume_from:
        report.say(f"resuming from {inputs.resume_from}")
    trainer.fit()
    report.close()
    trainer.hybrid.close()
    destroy_groups()
    dist.destroy_process_group()


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
