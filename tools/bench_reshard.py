#!/usr/bin/env python3
"""Time and extra memory of a reshard, with random weights, against the link's rate and other ways to do it.

    torchrun --nproc_per_node N tools/bench_reshard.py --model configs/models/llama3_8b
        --train TP2,PP2 TP4 --generation TP2 TP2           pairs of layouts, one after the other
        [--engine native|vllm] [--apart] [--rounds 10] [--without refit ...] [--sweep] [--json FILE] [--plot FILE]

Model, engine and their `WeightSync` are the trainer's, without optimizer. Measured for each pair of layouts:

    peer         ranks of a host pull out of each other's GPU memory (only on GPUs)
    collective   packed buckets over the process group
    copy engine  the same pulls, one `copy_` each on four streams (only on GPUs)
    gather       every tensor whole on every rank, as an export in Hugging Face's form does
    refit        Megatron-Core's `swap_model_weights` into a second GPTModel, which does not count as extra memory

Milliseconds are medians over the rounds of the slowest rank, by CUDA events after a barrier. The bound is what arrives
at (or leaves) the busiest rank at the link's rate, measured in the same run: one rank's pull of a GiB from a peer, all
ranks at once; on CPUs, their exchange in pairs. Extra memory is that of the rank with most, while it runs: as torch's
allocator counts it, and as the device does, where contexts and mappings of other processes show as well.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
from benchmark import finish, milliseconds, random_weights, run_of, synthetic_inputs
from extra_memory import ExtraMemory
from reshard_alternatives import CopyEngines, Refit, TensorGather
from reshard_figures import Figures, Reshard, Way, draw, print_table
from reshard_links import Links, measure_links

from megarl.config import Config, ConfigError
from megarl.config.load import build_config
from megarl.hybrid.weight_sync import WeightSync
from megarl.models.architecture import Architecture
from megarl.models.weights import EMBEDDING
from megarl.parallel.generation_groups import generation_groups
from megarl.parallel.train_groups import leave_groups
from megarl.parallel.world import World, init_distributed
from megarl.reshard.execute import Resharder
from megarl.reshard.shared import SharedParameters
from megarl.reshard.sides import engine_side
from megarl.reshard.transport import copies
from megarl.reshard.verify import verify
from megarl.roles.model import DTYPES, MegatronModel
from megarl.rollout.engine import EngineSettings
from megarl.rollout.kinds import engine_kind
from megarl.trainer.admission.checks import check_layouts
from megarl.trainer.layouts import generation_layout

WAYS = ("peer", "collective", "copy engine", "gather", "refit")
WARM_UP = 3
LONGEST = 32
"""Tokens of a sequence, of which there is none."""
MIB = 2**20


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--train", nargs="+", required=True, metavar="TP2,PP2", help="TP, PP and VPP sizes")
    parser.add_argument("--generation", nargs="+", required=True, metavar="TP2", help="one for each of --train")
    parser.add_argument("--engine", choices=["native", "vllm"], default="native")
    parser.add_argument("--apart", action="store_true", help="the engine shares no weights with the actor")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10, help=f"measured rounds, after {WARM_UP} that warm up")
    parser.add_argument("--without", nargs="+", choices=WAYS, default=[], help="ways to leave out")
    parser.add_argument("--sweep", action="store_true", help="sizes of the copy kernel's programs")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--plot", help="file for a picture, png")
    args = parser.parse_args(argv)
    try:
        if len(args.train) != len(args.generation):
            raise ValueError("--generation needs as many layouts as --train")
        pairs = list(zip(args.train, args.generation, strict=True))
        configs = [
            config_of(args.model, train, generation, engine=args.engine, dtype=args.dtype, apart=args.apart)
            for train, generation in pairs
        ]
        if args.engine == "vllm" and len(pairs) > 1:
            raise ValueError("--engine vllm takes one pair of layouts: a process has room for one vLLM")
        arch, *_ = [check_layouts(config) for config in configs]
    except (ConfigError, ValueError) as e:
        print(f"bench_reshard: error: {e}", file=sys.stderr)
        return 2
    init_distributed()
    figures = measure(
        configs, arch, rounds=args.rounds, ways=[w for w in WAYS if w not in args.without], sweep=args.sweep
    )
    if args.plot and dist.get_rank() == 0:
        draw(figures, args.plot)
    finish(figures, print_table, args.json)
    return 0


def config_of(model: str, train: str, generation: str, *, engine: str, dtype: str, apart: bool = False) -> Config:
    """A configuration with these layouts ("TP2,PP2"), on the ranks that the launcher has started."""
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    sizes, tp = parse_layout(train), parse_layout(generation)
    if set(tp) != {"TP"}:
        raise ValueError(f"generation layout '{generation}' is not of the form TP2")
    megatron = {
        "tensor_model_parallel_size": sizes.get("TP", 1),
        "pipeline_model_parallel_size": sizes.get("PP", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("VPP"),
        "param_offload": apart,
    }
    rollout = {"name": engine, "tensor_model_parallel_size": tp["TP"], "enforce_eager": True}
    return build_config(
        {
            "actor_rollout_ref": {
                "model": {"path": model, "dtype": dtype},
                "actor": {"megatron": megatron},
                "rollout": rollout,
            },
            "data": {"max_prompt_length": LONGEST // 2, "max_response_length": LONGEST // 2},
            "trainer": {"nnodes": world // local, "n_gpus_per_node": local},
        }
    )


def parse_layout(text: str) -> dict[str, int]:
    """ "TP2,PP4" -> {"TP": 2, "PP": 4}."""
    parts = [re.fullmatch(r"(TP|PP|VPP)(\d+)", part) for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"layout '{text}' is not of the form TP2,PP2 (TP, PP, VPP)")
    return {part[1]: int(part[2]) for part in parts if part}


def measure(configs: Sequence[Config], arch: Architecture, *, rounds: int, ways: Sequence[str], sweep: bool) -> Figures:
    """All pairs of layouts; every rank calls it, in an initialised world."""
    first = configs[0]
    figures: Figures | None = None
    for config in configs:
        world = World()
        if figures is None:
            on_gpu = world.device.type == "cuda"
            figures = Figures(
                model=first.actor_rollout_ref.model.path,
                engine=first.actor_rollout_ref.rollout.name,
                ranks=world.size,
                device=torch.cuda.get_device_name() if on_gpu else "cpu",
                links=measure_links(world, nbytes=1024 * MIB if on_gpu else MIB),
            )
        bench = Bench(config, arch, world, figures.links)
        figures.reshards.append(bench.measure(rounds, ways, sweep))
        bench.close()
        leave_groups(world)
        del bench
        gc.collect()  # models are full of cycles, and the next pair of layouts needs the room
    assert figures is not None
    return figures


class Bench:
    """One pair of layouts, with an actor and an engine."""

    def __init__(self, config: Config, arch: Architecture, world: World, links: Links) -> None:
        weights, ours = random_weights(arch, world.device), config.actor_rollout_ref
        self.world, self.links = world, links
        run = run_of(synthetic_inputs(config, arch), world)
        keys = ours.actor
        model = MegatronModel(arch, run.groups, model=ours.model, megatron=keys.megatron, batching=keys)
        self.model = run.add("actor", model)
        self.model.load(weights)
        leave = ours.actor.megatron.param_offload
        self.replica = generation_groups(world, generation_layout(config))
        layout = self.replica.layout
        shared = SharedParameters(self.model.side, layout, world.rank, self.model.parameters(), none=leave)
        settings = EngineSettings(
            arch=arch,
            groups=self.replica,
            rollout=ours.rollout,
            path=ours.model.path,
            dtype=self.model.dtype,
            max_model_len=LONGEST,
            decode=str,
            share=shared.tensors,
        )
        self.engine = engine_kind(ours.rollout.name).build(settings)
        self.engine.wake(weights_only=True)
        self.parameters = self.engine.parameters()
        target = engine_side(arch, layout, len(self.parameters[EMBEDDING]))
        self.sync = WeightSync(self.model, self.engine, target, shared, ours.reshard)
        self.sync.release()
        self.own = [parameter for name, parameter in self.parameters.items() if name not in shared.places]
        # training needs the group's communicator as well: it is no extra memory of a reshard
        dist.all_reduce(torch.zeros(1, device=world.device), group=self.sync.resharder.group)
        self.reshard_of = cache(self._resharder)

    def _resharder(self, transport: Literal["auto", "collective"]) -> Resharder:
        return Resharder(
            self.sync.resharder.plan,
            self.model.parameters(),
            self.parameters,
            self.sync.resharder.group,
            transport=transport,
            bucket_bytes=256 * MIB,
        )

    def measure(self, rounds: int, ways: Sequence[str], sweep: bool) -> Reshard:
        on_gpu = self.world.device.type == "cuda"
        builders: dict[str, Callable[[], Callable[[], object]]] = {
            "collective": lambda: self.reshard_of("collective").run,
            "peer": lambda: self._pulling().run,
            "copy engine": lambda: CopyEngines(self._pulling().peer.fused, self.world.device),
            "gather": lambda: TensorGather(self.model, self.parameters, self.replica.layout),
            "refit": lambda: Refit(self.model, self.replica.layout.tp),
        }
        moved = self.reshard_of("collective").statistics
        local, sent, received = (self._most(n) for n in (moved.local, moved.sent, moved.received))
        rate = self.links.best
        bound = 1e3 * max(sent, received) / rate if rate else None
        taken: dict[str, Way] = {}
        notes: dict[str, str] = {}
        for name, build in builders.items():
            if name in ways:
                try:
                    taken[name] = self._take(build, rounds, bound)
                except NotImplementedError as e:
                    notes[name] = str(e)
                self._say(f"{name}: {notes.get(name) or taken[name]}")
        pulling = on_gpu and "peer" in taken
        train, generation = self.model.groups.layout, self.replica.layout
        return Reshard(
            train=f"TP{train.tp} x PP{train.pp}" + (f" x {train.chunks} chunks" if train.chunks > 1 else ""),
            generation=f"TP{generation.tp} x {generation.replicas}",
            shared_bytes=self._most(sum(self.parameters[name].nbytes for name in self.sync.shared.places)),
            local_bytes=local,
            sent_bytes=sent,
            received_bytes=received,
            pulled_bytes=self._most(self.reshard_of("auto").statistics.pulled) if pulling else 0,
            bound_milliseconds=bound,
            ways=taken,
            notes=notes,
            sweep=self._sweep(rounds) if sweep and pulling else {},
        )

    def _pulling(self) -> Resharder:
        if self.world.device.type != "cuda":
            raise NotImplementedError("only GPUs read each other's memory")
        resharder = self.reshard_of("auto")
        if resharder.peer is None or resharder.peer.fused is None:
            raise NotImplementedError("needs Triton")
        return resharder

    def _take(self, build: Callable[[], Callable[[], object]], rounds: int, bound: float | None) -> Way:
        for parameter in self.own:
            parameter.zero_()
        memory = ExtraMemory(self.world.device)
        self.world.barrier("a benchmark")
        began = time.perf_counter()
        with torch.no_grad():
            job = build()
            job()
            memory.synchronise()
            first = 1e3 * (time.perf_counter() - began)
            for _ in range(WARM_UP):
                job()
            allocated, device = memory.during(job)
            own = job.own_bytes if isinstance(job, Refit) else 0
            exact = None if own else self._exact()
            taken = milliseconds(self.world, job, rounds)
        return Way(
            milliseconds=taken,
            of_bound=bound / taken if bound else None,
            first_milliseconds=self._most(first),
            extra_allocated_mib=self._most(allocated - own) / MIB,
            extra_device_mib=self._most(device - own) / MIB,
            exact=exact,
        )

    def _exact(self) -> bool:
        """Whether all ranks' engine parameters have the bits of the training parameters."""
        try:
            verify(self.reshard_of("collective"))
        except RuntimeError as e:
            print(f"rank {self.world.rank}: {e}", file=sys.stderr, flush=True)
            return not any(self.world.all_gather(True))
        return not any(self.world.all_gather(False))

    def _sweep(self, rounds: int) -> dict[str, float]:
        from megarl.reshard.transport import copy_kernel

        usual = copies.TILE_WORDS, copy_kernel.NUM_WARPS
        seen = {}
        for words, warps in product((256, 512, 1024, 2048, 4096), (2, 4, 8)):
            if words < 64 * warps:
                continue  # less than two loads under way for each thread
            copies.TILE_WORDS, copy_kernel.NUM_WARPS = words, warps
            resharder = self._resharder("auto")
            for _ in range(WARM_UP):
                resharder.run()
            seen[f"{words} x {warps}"] = milliseconds(self.world, resharder.run, rounds)
            resharder.release()
        copies.TILE_WORDS, copy_kernel.NUM_WARPS = usual
        return seen

    def _say(self, what: str) -> None:
        """As it comes: should the next way hang, what is known is not lost."""
        if self.world.rank == 0:
            print(what, file=sys.stderr, flush=True)

    def _most(self, value: float) -> Any:
        return max(self.world.all_gather(value))

    def close(self) -> None:
        if self.world.device.type == "cuda":
            self.reshard_of("auto").release()
        self.sync.release()
        self.engine.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
