#!/usr/bin/env python3
"""What a decode step of the native engine takes on one GPU, and how much of it the GPU is busy.

    python tools/bench_decode.py MODEL [--sequences 1024] [--prompt 128] [--steps 200] [--profile FILE] [--json FILE]

MODEL is a folder with a config.json; the weights are random. All sequences decode together, after 20 steps that warm
up. The GPU's own time is the sum of its kernels' in as many steps again under torch's profiler. Beside them stands the
time in which the GPU reads every weight and every key and value that a step needs once, and reads and writes the states
of linear attention, at the speed of a copy in the same process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from zlib import crc32

import torch

from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.sizes import kv_bytes_per_token, sequence_state_bytes
from megarl.rollout.engine import Request
from megarl.rollout.native.engine import NativeEngine
from megarl.types import SamplingParams

WARM_UP, PROFILED = 20, 30
PROMPT_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured.

    Attributes:
        step_ms: of a decode step, on the host's clock.
        busy_ms: of it, in which the GPU computes; None on CPUs.
        bound_ms: reading everything once; None on CPUs.
        digest: checksum of all tokens, to compare versions by.
    """

    what: str
    sequences: int
    step_ms: float
    busy_ms: float | None
    bound_ms: float | None
    tokens_per_second: float
    digest: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200, help="that are measured")
    parser.add_argument("--profile", metavar="FILE", help="gets the time by kernel")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(argv)
    try:
        arch = read_architecture(args.model)
    except ValueError as e:
        print(f"bench_decode: error: {e}", file=sys.stderr)
        return 2
    figures = measure(arch, args.model, args.sequences, args.prompt, args.steps, args.profile)
    print_table(figures)
    print(json.dumps(asdict(figures)))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(asdict(figures), f, indent=2)
    return 0


def measure(arch: Architecture, what: str, sequences: int, prompt: int, steps: int, profile: str | None) -> Figures:
    on_gpu = torch.cuda.is_available()
    # prompts are computed in several steps, so that some sequences are ahead of others
    length = WARM_UP + steps + PROFILED + 2 * -(-sequences * prompt // PROMPT_TOKENS)
    engine = engine_of(arch, sequences=sequences, longest=prompt + length + 1, on_gpu=on_gpu)
    params = SamplingParams(max_tokens=length)
    rng = random.Random(0)
    prompts = [rng.choices(range(arch.vocab_size), k=prompt) for _ in range(sequences)]
    engine.submit([Request(key=i, prompt=tokens, params=params, seed=i) for i, tokens in enumerate(prompts)])
    while sum(len(ids) > WARM_UP for ids in engine.under_way().values()) < sequences:
        engine.step()
    step_seconds = seconds(engine, steps)
    token = kv_bytes_per_token(arch, tp=1, itemsize=2)
    read = sum(p.nbytes for p in engine.parameters().values())  # an embedding that is not tied is not read whole
    read += sequences * token * (prompt + WARM_UP + steps // 2)
    read += 2 * sequences * sequence_state_bytes(arch, tp=1)  # which are written, too
    busy = kernel_seconds(engine, profile) if on_gpu else None
    responses = {}
    while engine.busy:
        responses |= engine.step()
    ids = b"".join(responses[i].response.ids.tobytes() for i in range(sequences))
    return Figures(
        what=f"{what}, {sequences} sequences of {prompt} and then {length} tokens",
        sequences=sequences,
        step_ms=1e3 * step_seconds,
        busy_ms=None if busy is None else 1e3 * busy,
        bound_ms=1e3 * read / bytes_per_second() if on_gpu else None,
        tokens_per_second=sequences / step_seconds,
        digest=crc32(ids),
    )


def engine_of(arch: Architecture, *, sequences: int, longest: int, on_gpu: bool) -> NativeEngine:
    engine = NativeEngine(
        arch,
        tp_group=None,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        device="cuda" if on_gpu else "cpu",
        max_num_seqs=sequences,
        max_num_batched_tokens=PROMPT_TOKENS,
        max_model_len=longest,
        decode=lambda ids: "",
        gpu_memory_utilization=0.9,
        enforce_eager=False,
    )
    torch.manual_seed(0)
    for name, p in engine.parameters().items():
        if "norm" in name:
            p.fill_(1.0)
        else:
            p.normal_(std=arch.init_std)
    engine.wake()
    return engine


def seconds(engine: NativeEngine, steps: int) -> float:
    """Seconds of a step."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def kernel_seconds(engine: NativeEngine, profile: str | None) -> float:
    """Seconds of a step's kernels."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds(engine, PROFILED)
    by_kernel = profiler.key_averages()
    if profile:
        with open(profile, "w", encoding="utf-8") as f:
            f.write(by_kernel.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=90))
    return sum(kernel.self_device_time_total for kernel in by_kernel) / 1e6 / PROFILED


def bytes_per_second() -> float:
    """Bytes that the GPU's memory reads per second, as a copy of 4 GiB shows, which reads and writes as many."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first warms up
        began.record()
        target.copy_(source)
        ended.record()
    torch.cuda.synchronize()
    return 2 * source.nbytes / (1e-3 * began.elapsed_time(ended))


def print_table(figures: Figures) -> None:
    print(figures.what)
    print(f"{'a step':>14}{'GPU busy':>20}{'read once':>14}{'tokens/s':>14}{'if it never waited':>22}")
    busy, bound = figures.busy_ms, figures.bound_ms
    share = "" if busy is None else f"{busy:.2f} ms, {busy / figures.step_ms:.1%}"
    least = "" if bound is None else f"{bound:.2f} ms"
    never = "" if busy is None else f"{1e3 * figures.sequences / busy:,.0f}"
    print(f"{figures.step_ms:>11.2f} ms{share:>20}{least:>14}{figures.tokens_per_second:>14,.0f}{never:>22}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
