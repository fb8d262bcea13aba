"""What every benchmark of the trainer's ranks begins and ends with."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.config.load import with_values
from megarl.models.architecture import Architecture
from megarl.models.fill import Source
from megarl.models.tensors import Box, LogicalTensor
from megarl.parallel.world import World, init_distributed
from megarl.rewards import Reward
from megarl.rewards.parts import Part
from megarl.trainer.admission.checks import check_layouts, check_run
from megarl.trainer.inputs import Inputs
from megarl.trainer.memory import check_memory
from megarl.trainer.records.report import Report
from megarl.trainer.records.run_records import Callback
from megarl.trainer.resuming.resume import Start
from megarl.trainer.session.run import Run
from megarl.trainer.stop import StopRequest
from megarl.types import Prompt

Figures = TypeVar("Figures", bound=Any)
"""A dataclass of what was measured."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """What the words of every benchmark are: a configuration, keys that change it, and a file for the figures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--json", help="file for the figures")
    return parser


def start() -> World:
    """Join the other ranks."""
    init_distributed()
    return World()


class NoText:
    """A tokenizer for tokens that mean nothing."""

    bos_id = eos_id = pad_id = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def token(self, id: int) -> str:
        return ""


def inputs_of(config: Config) -> Inputs:
    """What the configuration's run reads, or synthetic inputs where it names no data.

    Raises:
        ValueError: it cannot run.
    """
    if config.data.train_files:
        return check_run(config)
    arch = check_layouts(config)
    check_memory(config, arch)
    return synthetic_inputs(config, arch)


def synthetic_inputs(config: Config, arch: Architecture) -> Inputs:
    """Random prompts, enough for several steps, and scores; nothing ends a response before it is full."""
    rng, data = random.Random(0), config.data
    prompts = [
        Prompt(index=i, token_ids=tuple(rng.choices(range(arch.vocab_size), k=data.max_prompt_length)), row={})
        for i in range(4 * data.train_batch_size)
    ]
    return Inputs(
        config=config,
        arch=arch,
        tokenizer=NoText(arch.vocab_size),
        stop_tokens=(),
        rewards=(Part(reward=Reward(name="random", function=lambda response, row: rng.random())),),
        train_prompts=prompts,
        val_prompts=[],
        demonstrations=[],
    )


def run_of(inputs: Inputs, world: World, callbacks: Sequence[Callback] = ()) -> Run:
    """A run from its beginning that leaves no records, whatever its folder holds."""
    inputs = replace(inputs, config=with_values(inputs.config, "trainer", logger=["console"], log_rollouts=0))
    report = Report(inputs, rank=world.rank, first_step=1)
    report.begin()
    return Run(inputs, world, report, StopRequest(world.rank), Start(), callbacks)


def finish(figures: Figures, print_table: Callable[[Figures], None], json_file: str | None) -> None:
    """Rank 0 shows the figures, for people and for programs; then all leave."""
    if dist.get_rank() == 0:
        print_table(figures)
        print(json.dumps(asdict(figures)))
        if json_file:
            with open(json_file, "w", encoding="utf-8") as f:
                json.dump(asdict(figures), f, indent=2)
    dist.destroy_process_group()


def random_weights(arch: Architecture, device: torch.device) -> Source:
    """Made on the device, which is faster. All ranks that hold a box have the same; other layouts have other boxes."""

    def source(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        shape = [stop - start for start, stop in box]
        if tensor.kind != "matrix":
            return torch.full(shape, 1.0 if tensor.kind == "norm" else 0.0, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{tensor.name} {box}".encode()))
        return torch.randn(shape, generator=generator, device=device) * arch.init_std

    return source


def milliseconds(world: World, job: Callable[[], object], rounds: int) -> float:
    """Median over the rounds of the slowest rank's time, from a barrier until its GPU is done."""
    taken = []
    for _ in range(rounds):
        _synchronise(world)
        if world.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            job()
            ended.record()
            torch.cuda.synchronize()
            taken.append(began.elapsed_time(ended))
        else:
            start = time.perf_counter()
            job()
            taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(max(ranks) for ranks in zip(*world.all_gather(taken), strict=True))


def _synchronise(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.barrier("a benchmark")
