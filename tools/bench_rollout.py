#!/usr/bin/env python3
"""Rollout tokens per second inside the trainer's hybrid engine, against vLLM alone on the same prompts.

    torchrun --nproc_per_node N tools/bench_rollout.py CONFIG [key=value ...] [--rounds 3] [--peer vllm] [--json FILE]

Everything a training run holds is there: the actor, its optimizer and the reshard. Each round measures two ways of
generating `rollout.n` responses to the first `data.train_batch_size` prompts (without `data.train_files`: random ones
of `data.max_prompt_length` tokens):

    hybrid    as the trainer does it: a seed per sample, log-probabilities, everything on every rank
    raw       `LLM.generate` with vLLM's defaults: no seeds, no log-probabilities, nothing gathered

With rollout.name=vllm, raw is the same engine with the same weights. With rollout.name=native on one GPU, `--peer vllm`
starts a `vllm.LLM` of its own for it, with random weights and in a process of its own as vLLM has it by default, after
the native engine has given its memory back.

Responses have no stop token, so all have `data.max_response_length` tokens. The first round warms up and does not
count. The reshard, waking and going to sleep are reported beside them.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmark import command_line, finish, inputs_of, run_of, start

from megarl.config import ConfigError, load_run_config
from megarl.parallel.generation_groups import GenerationGroups
from megarl.parallel.world import World
from megarl.rollout.vllm import internals
from megarl.rollout.vllm.checks import check_vllm
from megarl.rollout.vllm.engine import VLLMEngine
from megarl.trainer.build import build_actor
from megarl.trainer.inputs import Inputs
from megarl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the run showed; seconds are medians over the rounds.

    Attributes:
        rounds, raw_rounds: seconds of each measured round.
        raw_tokens_per_second, ratio: None where there is no raw vLLM to compare with.
        peer: whether the raw vLLM is an engine of its own.
    """

    engine: str
    ranks: int
    tensor_model_parallel_size: int
    requests: int
    response_tokens: int
    seconds: float
    rounds: list[float]
    raw_rounds: list[float]
    tokens_per_second: float
    raw_tokens_per_second: float | None
    ratio: float | None
    peer: bool
    start_seconds: float
    reshard_seconds: float
    sleep_seconds: float


def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--peer", choices=["vllm"], help="engine to compare the native one with, on one GPU")
    args = parser.parse_intermixed_args(argv)
    try:
        inputs = inputs_of(load_run_config(args.config, args.overrides))
        if args.peer:
            check_peer(inputs)
    except (ConfigError, ValueError) as e:
        print(f"bench_rollout: error: {e}", file=sys.stderr)
        return 2
    world = start()
    finish(measure(inputs, world, args.rounds, peer=bool(args.peer)), print_table, args.json)
    return 0


def check_peer(inputs: Inputs) -> None:
    """Raises ValueError with what to change if there is nothing to compare."""
    config = inputs.config
    if config.actor_rollout_ref.rollout.name != "native" or config.trainer.world_size > 1:
        raise ValueError("--peer vllm needs rollout.name=native and one rank; rollout.name=vllm is compared without it")
    check_vllm(inputs.arch, path=config.actor_rollout_ref.model.path, tp=1, on_gpu=torch.cuda.is_available())


def measure(inputs: Inputs, world: World, rounds: int, *, peer: bool) -> Figures:
    config = inputs.config
    ours = config.actor_rollout_ref
    run = run_of(inputs, world)
    actor = run.add("actor", build_actor(inputs, run.groups, optim=ours.actor.optim, total_steps=1))
    began = time.perf_counter()
    generation = run.generation(actor)
    start = time.perf_counter() - began

    prompts = inputs.train_prompts[: config.data.train_batch_size]
    n = ours.rollout.n
    params = replace(inputs.sampling(validation=False), stop_token_ids=())
    tokens = len(prompts) * n * params.max_tokens
    through_trainer, alone, reshard, sleep = [], [], [], []
    for round_ in range(rounds + 1):
        run.timers.collect()
        with generation.phase():
            reshard.append(run.timers.collect()["reshard"])
            generate = partial(generation.rollouts, prompts, n, params, seed=1, round_=round_)
            through_trainer.append(seconds(world, generate))
            if isinstance(generation.engine, VLLMEngine):
                mine = replica_share(generation.groups, prompts)
                alone.append(seconds(world, partial(raw_vllm, generation.engine.llm, mine, n, params.max_tokens)))
            leaving = time.perf_counter()
        sleep.append(time.perf_counter() - leaving)
    run.close()
    if peer:
        alone = peer_vllm(inputs, world, rounds, prompts)

    taken, raw = statistics.median(through_trainer[1:]), statistics.median(alone[1:]) if alone else None
    return Figures(
        engine=ours.rollout.name,
        ranks=world.size,
        tensor_model_parallel_size=generation.groups.layout.tp,
        requests=len(prompts) * n,
        response_tokens=tokens,
        seconds=taken,
        rounds=through_trainer[1:],
        raw_rounds=alone[1:],
        tokens_per_second=tokens / taken,
        raw_tokens_per_second=tokens / raw if raw else None,
        ratio=raw / taken if raw else None,
        peer=peer,
        start_seconds=start,
        reshard_seconds=statistics.median(reshard[1:]),
        sleep_seconds=statistics.median(sleep[1:]),
    )


def seconds(world: World, job: Callable[[], object]) -> float:
    """Wall-clock time until the job is done on all ranks."""
    world.barrier("a benchmark")
    began = time.perf_counter()
    job()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.barrier("a benchmark")
    return time.perf_counter() - began


def replica_share(groups: GenerationGroups, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [p for i, p in enumerate(prompts) if i % groups.layout.replicas == groups.replica]


def raw_vllm(llm: Any, prompts: Sequence[Prompt], n: int, max_tokens: int) -> None:
    """vLLM alone, without what the trainer adds."""
    import vllm

    sampling = vllm.SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()  # the generation just before had the same prompts
    with internals.undisturbed():
        # without seeds of their own the requests are drawn from these, which a replica's ranks must have in common
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        llm.generate([{"prompt_token_ids": list(p.token_ids)} for p in prompts], sampling, use_tqdm=False)


def peer_vllm(inputs: Inputs, world: World, rounds: int, prompts: Sequence[Prompt]) -> list[float]:
    """Seconds of each round with a plain vLLM, the first to warm up, in the memory that the configuration allows."""
    config = inputs.config
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    torch.cuda.empty_cache()
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]  # the process that vLLM starts would look for its own ranks in torchrun's store
    from vllm import LLM

    llm = LLM(
        model=model.path,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=model.dtype,
        load_format="dummy",
        seed=0,
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=inputs.max_sequence_length,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
    )
    generate = partial(raw_vllm, llm, prompts, rollout.n, config.data.max_response_length)
    return [seconds(world, generate) for _ in range(rounds + 1)]


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
