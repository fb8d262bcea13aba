#!/usr/bin/env python3
"""Rollout tokens per second inside the trainer's hybrid engine, against vLLM alone on the same prompts.

    torchrun --nproc_per_node N tools/bench_rollout.py CONFIG [key=value ...] [--rounds 3] [--json FILE]

Everything a training run holds is there: the actor, its optimizer and the reshard. Each round measures two ways of
generating `rollout.n` responses to the first `data.train_batch_size` prompts with the same engine and weights:

    hybrid    as the trainer does it: a seed per sample, log-probabilities, everything on every rank
    raw       `LLM.generate` with vLLM's defaults: no seeds, no log-probabilities, nothing gathered (with vllm only)

Responses have no stop token, so all have `data.max_response_length` tokens. The first round warms up and does not
count. The reshard, waking and going to sleep are reported beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megarl.config import ConfigError
from megarl.hybrid.engine import HybridEngine
from megarl.parallel.groups import Groups, build_groups, destroy_groups, init_distributed
from megarl.rollout.vllm import internals
from megarl.rollout.vllm.engine import VLLMEngine
from megarl.telemetry.timers import PhaseTimers
from megarl.train import load_run_config
from megarl.trainer.build import build_actor
from megarl.trainer.checks import check_run
from megarl.trainer.inputs import Inputs, generation_layout, train_layout
from megarl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the run showed; seconds are medians over the rounds.

    Attributes:
        raw_tokens_per_second, ratio: None where there is no raw vLLM to compare with.
    """

    engine: str
    ranks: int
    tensor_model_parallel_size: int
    requests: int
    response_tokens: int
    seconds: float
    tokens_per_second: float
    raw_tokens_per_second: float | None
    ratio: float | None
    start_seconds: float
    reshard_seconds: float
    sleep_seconds: float


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(argv)
    try:
        inputs = check_run(load_run_config(args.config, args.overrides))
    except (ConfigError, ValueError) as e:
        print(f"bench_rollout: error: {e}", file=sys.stderr)
        return 2
    init_distributed()
    groups = build_groups(train_layout(inputs.config), generation_layout(inputs.config))
    figures = measure(inputs, groups, args.rounds)
    if groups.rank == 0:
        print_table(figures)
        print(json.dumps(asdict(figures)))
        if args.json:
            with open(args.json, "w", encoding="utf-8") as f:
                json.dump(asdict(figures), f, indent=2)
    destroy_groups()
    dist.destroy_process_group()
    return 0


def measure(inputs: Inputs, groups: Groups, rounds: int) -> Figures:
    config = inputs.config
    ours = config.actor_rollout_ref
    actor = build_actor(inputs, groups)
    actor.start_optimizer(ours.actor.optim, 1)
    timers = PhaseTimers(groups.device)
    began = time.perf_counter()
    hybrid = HybridEngine(
        ours, actor, timers, max_model_len=inputs.max_sequence_length, decode=inputs.tokenizer.decode
    )
    start = time.perf_counter() - began

    prompts = inputs.train_prompts[: config.data.train_batch_size]
    n = ours.rollout.n
    params = replace(inputs.sampling(validation=False), stop_token_ids=())
    tokens = len(prompts) * n * params.max_tokens
    through_trainer, alone, reshard, sleep = [], [], [], []
    for round_ in range(rounds + 1):
        timers.collect()
        with hybrid.generation():
            reshard.append(timers.collect()["reshard"])
            generate = partial(hybrid.generate, prompts, n, params, seed=1, round_=round_)
            through_trainer.append(seconds(groups, generate))
            if isinstance(hybrid.engine, VLLMEngine):
                alone.append(seconds(groups, partial(raw_vllm, hybrid.engine, groups, prompts, n, params.max_tokens)))
            leaving = time.perf_counter()
        sleep.append(time.perf_counter() - leaving)
    hybrid.close()

    taken, raw = statistics.median(through_trainer[1:]), statistics.median(alone[1:]) if alone else None
    return Figures(
        engine=ours.rollout.name,
        ranks=groups.train.world_size,
        tensor_model_parallel_size=groups.generation.tp,
        requests=len(prompts) * n,
        response_tokens=tokens,
        seconds=taken,
        tokens_per_second=tokens / taken,
        raw_tokens_per_second=tokens / raw if raw else None,
        ratio=raw / taken if raw else None,
        start_seconds=start,
        reshard_seconds=statistics.median(reshard[1:]),
        sleep_seconds=statistics.median(sleep[1:]),
    )


def seconds(groups: Groups, job: Callable[[], object]) -> float:
    """Wall-clock time until the job is done on all ranks."""
    dist.barrier(group=groups.control)
    began = time.perf_counter()
    job()
    if groups.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group=groups.control)
    return time.perf_counter() - began


def raw_vllm(engine: VLLMEngine, groups: Groups, prompts: Sequence[Prompt], n: int, max_tokens: int) -> None:
    """This replica's share with vLLM alone, without what the trainer adds."""
    import vllm

    at = groups.generation.coords(groups.rank)
    mine = [p for i, p in enumerate(prompts) if i % groups.generation.replicas == at.replica]
    sampling = vllm.SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    engine.llm.reset_prefix_cache()  # the trainer's generation just before had the same prompts
    with internals.undisturbed():
        # without seeds of their own the requests are drawn from these, which a replica's ranks must have in common
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        engine.llm.generate([{"prompt_token_ids": list(p.token_ids)} for p in mine], sampling, use_tqdm=False)


def print_table(figures: Figures) -> None:
    print(f"{'':10}{'tokens/s':>12}{'of raw vLLM':>14}")
    share = "" if figures.ratio is None else f"{figures.ratio:.1%}"
    print(f"{'hybrid':10}{figures.tokens_per_second:>12,.0f}{share:>14}")
    if figures.raw_tokens_per_second is not None:
        print(f"{'raw':10}{figures.raw_tokens_per_second:>12,.0f}{'100.0%':>14}")
    length = figures.response_tokens // figures.requests
    print(
        f"{figures.requests} responses of {length} tokens on {figures.ranks} ranks, "
        f"TP{figures.tensor_model_parallel_size}; engine start {figures.start_seconds:.1f} s, "
        f"reshard and waking {figures.reshard_seconds:.2f} s, going to sleep {figures.sleep_seconds:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
