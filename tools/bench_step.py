#!/usr/bin/env python3
"""The whole RL step in the trainer, phase by phase: time, tokens per second, and memory against its prediction.

    torchrun --nproc_per_node N tools/bench_step.py CONFIG [key=value ...] [--rounds 3] [--json FILE]
        [--alone [--without-plain]]

Random weights, `data.train_batch_size` random prompts of `data.max_prompt_length` tokens, responses that all have
`data.max_response_length` tokens, and scores that cost nothing: only shape, layouts, batch sizes, engine and memory
modes are taken from the configuration. The first steps warm up and do not count.

With `--alone`, beside the phases stands what does the same by itself, measured afterwards in the same processes as
`bench_train.py` and `bench_rollout.py` do: plain Megatron-Core's forward and backward pass (where there are no pipeline
stages), and plain vLLM (with rollout.name=vllm the same engine; with rollout.name=native on one GPU one of its own).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from bench_rollout import check_peer, peer_vllm, raw_vllm, replica_share, seconds
from bench_train import Phase, measure_training, model_flops, phase
from benchmark import command_line, finish, run_of, start, synthetic_inputs

from megarl.config import Config, ConfigError, load_run_config
from megarl.flows import ppo
from megarl.parallel.world import World
from megarl.roles.trained import Actor
from megarl.rollout.vllm.engine import VLLMEngine
from megarl.trainer.admission.checks import check_layouts
from megarl.trainer.inputs import Inputs
from megarl.trainer.memory import check_memory
from megarl.trainer.records.run_records import Metrics
from megarl.trainer.session.run import Run

WARM_UP = 2
SETTINGS = [
    "actor_rollout_ref.model.random_init=true",
    "warmup.total_training_steps=0",
    "trainer.save_freq=0",
    "trainer.test_freq=0",
    "trainer.resume_mode=disable",
    "trainer.logger=[console]",
    "trainer.log_rollouts=0",
]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run showed.

    Attributes:
        phases: by name; `step` is everything. Of generation the tokens of the responses count, of the other phases all,
            also those of prompts that are computed once; as FLOPs what is computed.
            Peaks are GiB in use on the fullest GPU, 0 on CPU ranks.
        predicted_gib: of the phases that the budget knows; empty on CPU ranks.
        alone: what does the work of a phase by itself.
        of_alone: tokens per second of the phase over those; of `update` without the optimizer.
    """

    what: str
    kernels: str
    ranks: int
    phases: dict[str, Phase]
    predicted_gib: dict[str, float]
    alone: dict[str, Phase]
    of_alone: dict[str, float]


class Record:
    """Keeps what a run reports of its steps."""

    def __init__(self) -> None:
        self.rows: list[Metrics] = []

    def __call__(self, loop: str, step: int, row: Metrics) -> None:
        self.rows.append(row)

    def medians(self) -> dict[str, float]:
        """Seconds by phase."""
        counted = [_named(row, "timing/", "_s") for row in self.rows[WARM_UP:]]
        return {name: statistics.median(taken[name] for taken in counted) for name in counted[0]}

    def peaks(self) -> dict[str, float]:
        """GiB by phase."""
        return _named(self.rows[-1], "memory/", "_gib")


def _named(row: Metrics, prefix: str, suffix: str) -> dict[str, float]:
    return {key.removeprefix(prefix).removesuffix(suffix): x for key, x in row.items() if key.startswith(prefix)}


def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help=f"measured steps, after {WARM_UP} that warm up")
    parser.add_argument("--alone", action="store_true", help="measure plain Megatron-Core and vLLM as well")
    parser.add_argument("--without-plain", action="store_true", help="with --alone: vLLM, not plain Megatron-Core")
    args = parser.parse_intermixed_args(argv)
    steps = f"trainer.total_training_steps={WARM_UP + args.rounds}"
    try:
        config = load_run_config(args.config, [*args.overrides, *SETTINGS, steps])
        arch = check_layouts(config)
        check_memory(config, arch)
        inputs = synthetic_inputs(config, arch)
        peer = args.alone and find_spec("vllm") is not None and native_on_one_gpu(config)
        if peer:
            check_peer(inputs)
    except (ConfigError, ValueError) as e:
        print(f"bench_step: error: {e}", file=sys.stderr)
        return 2
    world = start()
    figures = measure(inputs, world, args.rounds, alone=args.alone, plain=not args.without_plain, peer=peer)
    finish(figures, print_table, args.json)
    return 0


def native_on_one_gpu(config: Config) -> bool:
    one_gpu = config.trainer.world_size == 1 and torch.cuda.is_available()
    return one_gpu and config.actor_rollout_ref.rollout.name == "native"


def measure(inputs: Inputs, world: World, rounds: int, *, alone: bool, plain: bool, peer: bool) -> Figures:
    """
    Args:
        alone: what the phases are compared with is measured, too.
        plain: plain Megatron-Core is among that.
        peer: a vLLM of its own is, in place of the native engine.
    """
    config, ours = inputs.config, inputs.config.actor_rollout_ref
    record = Record()
    run = run_of(inputs, world, [record])
    ppo.flow(run)

    count = config.data.train_batch_size * ours.rollout.n
    lengths = [inputs.max_sequence_length] * count
    responses, tokens = count * config.data.max_response_length, sum(lengths)
    computed, epochs = model_flops(inputs.arch, lengths), ours.actor.ppo_epochs
    if ours.model.use_prefix_grouper:
        again = count - config.data.train_batch_size
        computed -= model_flops(inputs.arch, [config.data.max_prompt_length] * again)
    forward = computed / 3
    work: dict[str, tuple[int, float]] = {  # tokens and FLOPs
        "generate": (responses, 0.0),
        "log_probs": (tokens, forward),
        "ref": (tokens, forward),
        "update": (epochs * tokens, 3 * epochs * forward),
        "step": (tokens, 0.0),
    }
    taken, peaks = record.medians(), record.peaks()
    phases = {name: phase(world, s, peaks.get(name, 0.0), *work.get(name, (0, 0.0))) for name, s in taken.items()}
    predicted: dict[str, float] = {}
    for stage in run.records.memory.predicted:
        for name in stage.phases:
            predicted[name] = max(predicted.get(name, 0.0), stage.total(name) / 2**30)

    others: dict[str, Phase] = {}
    of_alone: dict[str, float] = {}
    if alone:
        if plain:
            others, of_alone = train_alone(run, lengths[: ours.actor.ppo_mini_batch_size * ours.rollout.n], rounds)
        if vllm := vllm_alone(run, rounds, peer=peer):
            others["generate"] = phase(world, vllm, 0.0, responses, 0.0)
            of_alone["generate"] = vllm / taken["generate"]
    run.close()
    return Figures(
        what=f"{count} sequences of {config.data.max_prompt_length} + {config.data.max_response_length} tokens, "
        f"{ours.rollout.name} engine",
        kernels=_actor(run).kernels,
        ranks=world.size,
        phases=phases,
        predicted_gib=predicted,
        alone=others,
        of_alone=of_alone,
    )


def _actor(run: Run) -> Actor:
    actor = run.checkpoints.models["actor"]
    assert isinstance(actor, Actor)
    return actor


def train_alone(run: Run, lengths: Sequence[int], rounds: int) -> tuple[dict[str, Phase], dict[str, float]]:
    """Plain Megatron-Core on a mini-batch of these lengths; nothing where there are pipeline stages."""
    figures = measure_training(_actor(run), run.config, lengths, rounds, None, plain=True)
    plain = [p for name, p in figures.phases.items() if name.startswith("plain")]
    if not plain:
        return {}, {}
    return {"update": min(plain, key=lambda p: p.seconds)}, {"update": figures.extra["of_plain_megatron"]}


def vllm_alone(run: Run, rounds: int, *, peer: bool) -> float | None:
    """Seconds in which vLLM by itself generates the step's responses; None where there is none."""
    inputs, world, (generation,) = run.inputs, run.world, run.records.generations
    n, length = inputs.config.actor_rollout_ref.rollout.n, inputs.config.data.max_response_length
    prompts = inputs.train_prompts[: inputs.config.data.train_batch_size]
    taken: list[float] = []
    if isinstance(generation.engine, VLLMEngine):
        mine = replica_share(generation.groups, prompts)
        with generation.phase():
            generate = partial(raw_vllm, generation.engine.llm, mine, n, length)
            taken = [seconds(world, generate) for _ in range(rounds + 1)]
    if peer:
        taken = peer_vllm(inputs, world, rounds, prompts)
    return statistics.median(taken[1:]) if taken else None


def print_table(figures: Figures) -> None:
    print(f"{figures.what}, {figures.ranks} ranks; {figures.kernels}")
    print(f"{'':12}{'ms':>12}{'tokens/s/rank':>16}{'MFU':>8}{'alone':>12}{'of alone':>10}{'GiB':>8}{'predicted':>11}")
    for name, p in figures.phases.items():
        beside: dict[str, Any] = {"alone": figures.alone.get(name), "share": figures.of_alone.get(name)}
        alone = f"{beside['alone'].tokens_per_second:,.0f}" if beside["alone"] else ""
        share = f"{beside['share']:.1%}" if beside["share"] else ""
        gib = f"{p.peak_gib:.2f}" if p.peak_gib else ""
        predicted = f"{figures.predicted_gib[name]:.2f}" if name in figures.predicted_gib else ""
        rate = f"{p.tokens_per_second:,.0f}" if p.tokens_per_second else ""
        mfu = f"{p.mfu:.1%}" if p.mfu else ""
        print(f"{name:12}{p.seconds * 1e3:>12.1f}{rate:>16}{mfu:>8}{alone:>12}{share:>10}{gib:>8}{predicted:>11}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
