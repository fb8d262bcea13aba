"""Writes the first line of a run: layouts, model, kernels, engine, and what a reshard moves."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.hybrid.generation import Generation
from megarl.parallel.world import World
from megarl.roles.trained import TrainedModel
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import generation_layout, train_layout


def start_line(inputs: Inputs, world: World, trained: Sequence[TrainedModel], generations: Sequence[Generation]) -> str:
    """Write the first line of a run, when everything is built that the first loop needs."""
    train, engine = train_layout(inputs.config), generation_layout(inputs.config)
    layouts = f"training {train.with_layers(inputs.arch.num_layers)}"
    if generations:
        layouts += f", generation {engine}"
    parts = [f"{layouts} on {world.size} {world.device.type} ranks"]
    if trained:
        engines = "".join(_engine(inputs, generation) for generation in generations)
        parts.append(f"{inputs.arch.family} with {trained[0].kernels}{engines}")
    if generations:
        strings = "".join(f", {text!r}" for text in inputs.config.actor_rollout_ref.rollout.stop)
        parts.append(f"responses end with {inputs.describe_stop_tokens()}{strings}")
    return "; ".join(parts)


def _engine(inputs: Inputs, generation: Generation) -> str:
    engine = generation.engine.parameters()
    moved = generation.sync.statistics
    shared = sum(engine[name].nbytes for name in generation.sync.shared.places)
    pulled = f", {moved.pulled / 2**20:.1f} MiB of it straight out of their GPU memory" if moved.pulled else ""
    return (
        f", {inputs.config.actor_rollout_ref.rollout.name} engine, which shares {shared / 2**20:.1f} MiB of weights "
        f"per rank with training; a reshard moves {(moved.local + moved.received) / 2**20:.1f} MiB per rank, "
        f"{moved.received / 2**20:.1f} MiB from others{pulled}"
    )
