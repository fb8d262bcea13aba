#!/usr/bin/env python3
"""Rollout tokens per second where a few responses are much longer than the rest: waited for, or carried over.

    torchrun --nproc_per_node N tools/bench_carry_over.py CONFIG [key=value ...] [--rounds 8] [--json FILE]

Everything a training run holds is there: the actor, its optimizer and the reshard; the weights do not change. One
response in twenty has `data.max_response_length` tokens, the others about an eighth of that. Each round makes the
responses of a step, `data.train_batch_size` x `rollout.n`:

    waiting      all are begun together, and the round ends with the last of them
    carry-over   as with rollout.carry_over: the round ends when enough groups are finished, the next one has the others
    even         as waiting, but all responses have the mean length: what there would be to gain with no tail at all

The first rounds, in which engines warm up and carry-over begins with more groups than it ends with, do not count.
Without `data.train_files` the prompts are random, of `data.max_prompt_length` tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from benchmark import command_line, finish, inputs_of, run_of, start

from megarl.config import ConfigError, load_run_config
from megarl.parallel.world import World
from megarl.rollout.engine import Engine, Request
from megarl.rollout.replicas import Quota
from megarl.trainer.build import build_actor
from megarl.trainer.experience.carry_over import CarryOver
from megarl.trainer.inputs import Inputs
from megarl.types import Completion, Rollout, Rollouts

LONG_ONE_IN, SHORTER = 20, 8
WARM_UP = {"waiting": 1, "carry-over": 4, "even": 1}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the run showed.

    Attributes:
        tokens_per_second: that were drawn, by way; with what a generation phase costs beside decoding.
        decode_steps: of a round, on the replica of rank 0.
        ratio: carry-over to waiting.
        longest_staleness: steps from a response's first token to the step that would train on it.
    """

    engine: str
    ranks: int
    sequences_per_step: int
    longest_response: int
    tokens_per_second: dict[str, float]
    seconds: dict[str, list[float]]
    decode_steps: dict[str, float]
    ratio: float
    longest_staleness: int


def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds")
    args = parser.parse_intermixed_args(argv)
    carrying = ["actor_rollout_ref.rollout.carry_over.enable=true", "algorithm.rollout_correction.rollout_is=token"]
    try:
        inputs = inputs_of(load_run_config(args.config, [*carrying, *args.overrides]))
    except (ConfigError, ValueError) as e:
        print(f"bench_carry_over: error: {e}", file=sys.stderr)
        return 2
    world = start()
    finish(measure(inputs, world, args.rounds), print_table, args.json)
    return 0


def measure(inputs: Inputs, world: World, rounds: int) -> Figures:
    config, run = inputs.config, run_of(inputs, world)
    actor = build_actor(inputs, run.groups, optim=config.actor_rollout_ref.actor.optim, total_steps=1)
    generation = run.generation(run.add("actor", actor))
    n, batch, longest = (
        config.actor_rollout_ref.rollout.n,
        config.data.train_batch_size,
        config.data.max_response_length,
    )
    params = replace(inputs.sampling(validation=False), stop_token_ids=(), stop=())
    submit: Callable[[Sequence[Request]], None] = generation.engine.submit
    decode, decoded = generation.engine.step, [0]

    def step() -> Mapping[int, Completion]:
        decoded[0] += 1
        return decode()

    generation.engine.step = step  # type: ignore[method-assign]
    prompts, carried = inputs.train_prompts, CarryOver(config, inputs.train_prompts)
    drawn, versions = count(), count(1)

    def draw() -> list[int]:
        first = next(drawn) * batch
        return [(first + i) % len(prompts) for i in range(batch)]

    def waiting() -> Rollouts:
        return generation.rollouts([prompts[i] for i in draw()], n, params, seed=1, round_=next(versions))

    def carrying() -> Rollouts:
        def go_on(begun: Sequence[Rollout], quota: Quota) -> Rollouts:
            return generation.go_on(begun, params, version=version, quota=quota)

        version = next(versions)
        return carried.next_batch(draw, go_on, version)

    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    steps: dict[str, float] = {}
    staleness, left = 0, 0.0
    for way, make in {"waiting": waiting, "carry-over": carrying, "even": waiting}.items():
        _set_lengths(generation.engine, submit, longest, even=way == "even")
        for round_ in range(WARM_UP[way] + rounds):
            if round_ == WARM_UP[way]:
                decoded[0] = 0
            world.barrier("a benchmark")
            began = time.perf_counter()
            with generation.phase():
                made = make()
            drawn_tokens = sum(len(rollout.response) for rollout in made)
            if way == "carry-over":
                left, before = carried.metrics()["tokens"], left
                drawn_tokens += int(left - before)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            world.barrier("a benchmark")
            if round_ >= WARM_UP[way]:
                seconds.setdefault(way, []).append(time.perf_counter() - began)
                tokens[way] = tokens.get(way, 0) + drawn_tokens
                assert made.version is not None
                staleness = max(staleness, *(made.version - rollout.response.versions[0][0] for rollout in made))
        steps[way] = decoded[0] / rounds
    run.close()
    rates = {way: tokens[way] / sum(taken) for way, taken in seconds.items()}
    return Figures(
        engine=config.actor_rollout_ref.rollout.name,
        ranks=world.size,
        sequences_per_step=batch * n,
        longest_response=longest,
        tokens_per_second=rates,
        seconds=seconds,
        decode_steps=steps,
        ratio=rates["carry-over"] / rates["waiting"],
        longest_staleness=staleness,
    )


def _set_lengths(engine: Engine, submit: Callable[[Sequence[Request]], None], longest: int, *, even: bool) -> None:
    """From now on a request ends at a length of its own, which its seed decides."""
    short = longest // SHORTER
    mean = (longest + (LONG_ONE_IN - 1) * short) // LONG_ONE_IN

    def length(seed: int) -> int:
        if even:
            return mean
        return longest if seed % LONG_ONE_IN == 0 else short + (seed >> 8) % max(short // 4, 1) - short // 8

    def submit_with_lengths(requests: Sequence[Request]) -> None:
        submit([replace(r, params=replace(r.params, max_tokens=length(r.seed))) for r in requests])

    engine.submit = submit_with_lengths  # type: ignore[method-assign]


def print_table(figures: Figures) -> None:
    print(f"{'':12}{'tokens/s':>10}{'of waiting':>12}{'s per step':>12}{'decode steps':>14}")
    for way, rate in figures.tokens_per_second.items():
        share = rate / figures.tokens_per_second["waiting"]
        print(
            f"{way:12}{rate:>10,.0f}{share:>12.2f}{statistics.mean(figures.seconds[way]):>12.2f}{figures.decode_steps[way]:>14.0f}"
        )
    longest = figures.longest_response
    print(
        f"{figures.sequences_per_step} responses a step, one in {LONG_ONE_IN} of {longest} tokens, the others of about "
        f"{longest // SHORTER}, on {figures.ranks} ranks through {figures.engine}; none was begun more than "
        f"{figures.longest_staleness} steps before"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
