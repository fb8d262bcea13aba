#!/usr/bin/env python3
"""How far training's log-probabilities are from the engine's, with and without routing replay.

    torchrun --nproc_per_node N tools/bench_routing_replay.py CONFIG [key=value ...] [--json FILE]

The engine generates `rollout.n` responses to the first `data.train_batch_size` prompts (without `data.train_files`:
random ones of `data.max_prompt_length` tokens) and records its choices of experts. Training then computes the
log-probabilities of the same tokens twice, with the same weights: its routers choose by themselves, and they take the
recorded choices. What is left with these is the rounding of everything but the choice.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from benchmark import command_line, finish, inputs_of, run_of, start

from megarl.config import ConfigError, load_run_config
from megarl.parallel.world import World
from megarl.trainer.build import build_actor
from megarl.trainer.inputs import Inputs

KEY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The difference over the response tokens.

    Attributes:
        mean, most: of |log p_train - log p_engine|, nats.
        outside: share of the tokens whose ratio p_train / p_engine is outside 0.8 to 1.2.
    """

    mean: float
    most: float
    outside: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the run showed.

    Attributes:
        agreement: share of the recorded choices that training would have made as well.
    """

    dtype: str
    ranks: int
    tokens: int
    agreement: float
    without: Gap
    replayed: Gap


def main(argv: list[str]) -> int:
    args = command_line(__doc__).parse_intermixed_args(argv)
    try:
        inputs = inputs_of(load_run_config(args.config, [*args.overrides, f"{KEY}=true"]))
    except (ConfigError, ValueError) as e:
        print(f"bench_routing_replay: error: {e}", file=sys.stderr)
        return 2
    world = start()
    finish(measure(inputs, world), print_table, args.json)
    return 0


def measure(inputs: Inputs, world: World) -> Figures:
    config = inputs.config
    roles = config.actor_rollout_ref
    run = run_of(inputs, world)
    actor = run.add("actor", build_actor(inputs, run.groups, optim=roles.actor.optim, total_steps=1))
    generation = run.generation(actor)
    prompts, params = inputs.train_prompts[: config.data.train_batch_size], inputs.sampling(validation=False)
    with generation.phase():
        rollouts = generation.rollouts(prompts, roles.rollout.n, params, seed=1, round_=1)
    batch = rollouts.to_batch()
    plan = actor.plan(batch)
    assert batch.rollout_logp is not None and actor.replay is not None
    gaps = []
    for recorded in (batch.with_(routed_experts=None, routed=None), batch):
        log_ratio = batch.trained(actor.log_probs(recorded, plan) - batch.rollout_logp)
        gaps.append(gap_of(log_ratio))
    same, choices = world.sum_(actor.replay.counts(), "the routers' choices").tolist()
    run.close()
    without, replayed = gaps
    return Figures(
        dtype=roles.model.dtype,
        ranks=world.size,
        tokens=int(batch.response_mask.sum()),
        agreement=same / max(1, choices),
        without=without,
        replayed=replayed,
    )


def gap_of(log_ratio: torch.Tensor) -> Gap:
    outside = ((log_ratio.exp() - 1).abs() > 0.2).float().mean()
    return Gap(mean=float(log_ratio.abs().mean()), most=float(log_ratio.abs().max()), outside=float(outside))


def print_table(figures: Figures) -> None:
    print(f"{'routers':24}{'mean gap':>12}{'largest':>12}{'outside 1 +- 0.2':>20}")
    for name, gap in (("choose by themselves", figures.without), ("take what is recorded", figures.replayed)):
        print(f"{name:24}{gap.mean:>12.2e}{gap.most:>12.2e}{gap.outside:>20.2%}")
    print(
        f"{figures.tokens} response tokens, {figures.dtype}, {figures.ranks} ranks; training makes "
        f"{figures.agreement:.2%} of the engine's choices as well"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
