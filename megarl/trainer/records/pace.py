"""Computes metrics of speed: how fast a step went, how well the GPUs were used, and which rank held the others up."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from megarl.estimate.accelerator import peak_flops
from megarl.estimate.job import active_parameter_count
from megarl.estimate.prediction import flops_of_sequences
from megarl.models.architecture import Architecture
from megarl.parallel.watch import Wait
from megarl.parallel.world import World
from megarl.phases import Phase
from megarl.roles.passes import StepPlan
from megarl.rollout.speed import Speed
from megarl.telemetry.gpu import GpuReading, GpuSampler, gpu_metrics
from megarl.trainer.records.step_metrics import quantile
from megarl.types import Batch

_OF_MFU = (Phase.LOG_PROBS, Phase.UPDATE)


class OfRank(NamedTuple):
    """Holds a rank's measurements of a step: its host; seconds of work by phase, without those that it waited for
    others; seconds until responses were finished; its GPU's counters."""

    host: str
    work: dict[str, float]
    latencies: list[float]
    gpu: list[GpuReading]


class Pace:
    """Turns the measurements of all ranks into metrics."""

    def __init__(self, arch: Architecture, world: World, dtype: str) -> None:
        """
        Args:
            dtype: of the actor's matrix products.
        """
        self._arch, self._host = arch, socket.gethostname()
        self._peak: float | None = None
        self._gpu: GpuSampler | None = None
        if world.device.type == "cuda":
            properties = torch.cuda.get_device_properties(world.device)
            self._peak = peak_flops(properties.name, dtype)
            self._gpu = GpuSampler(str(properties.uuid))
        self._parameters = active_parameter_count(arch) if self._peak else 0
        self._flops, self._sequences, self._tokens, self._saved = 0.0, 0, 0, 0
        self._ranks, self._shares = 0, False

    def passed(self, batch: Batch, passes: float, plan: StepPlan) -> None:
        """Count a batch that the actor's model computed with.

        Args:
            passes: over all of it, a forward one being 1 and a forward and backward one 3. Recomputation is none.
            plan: of the batch.
        """
        self._sequences, self._ranks = self._sequences + len(batch), plan.layout.size
        self._shares |= plan.saved is not None
        saved = plan.saved or (0, 0)
        self._tokens, self._saved = self._tokens + int(batch.lengths.sum()), self._saved + saved[0]
        if self._peak:
            tokens = float(batch.lengths.sum() - saved[0])
            squares = float(batch.lengths.square().sum() - saved[1])
            self._flops += passes * flops_of_sequences(self._arch, self._parameters, tokens, squares)

    def own(self, seconds: Mapping[str, float], waits: Sequence[Wait], speed: Speed | None) -> OfRank:
        """Return this rank's measurements of a step, to be gathered.

        Args:
            seconds, waits: by phase, and among them those for other ranks, on this rank.
            speed: of generation on this rank, if there was any.
        """
        waited: defaultdict[str, float] = defaultdict(float)
        for wait in waits:
            waited[wait.phase] += wait.seconds
        return OfRank(
            host=self._host,
            work={phase: max(0.0, s - waited[phase]) for phase, s in seconds.items()},
            latencies=speed.latencies if speed else [],
            gpu=self._gpu.collect() if self._gpu else [],
        )

    def collect(
        self, ranks: Sequence[OfRank], seconds: Mapping[str, float], speed: Speed | None
    ) -> tuple[dict[str, float], int]:
        """Return the metrics of a step, and how many sequences it trained on; counting begins anew.

        Args:
            ranks: the measurements of all ranks.
            seconds, speed: as of `own`.
        """
        metrics = {
            **self._mfu(seconds),
            **({"perf/shared_prompt_tokens": self._saved / self._tokens} if self._shares and self._tokens else {}),
            **(_speed_metrics(speed) if speed else {}),
            **_latencies([seconds for rank in ranks for seconds in rank.latencies]),
            **stragglers([rank.work for rank in ranks]),
            **gpu_metrics([rank.gpu for rank in ranks]),
        }
        sequences, self._sequences, self._flops, self._tokens, self._saved = self._sequences, 0, 0.0, 0, 0
        return metrics, sequences

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()

    def _mfu(self, seconds: Mapping[str, float]) -> dict[str, float]:
        taken = sum(seconds.get(phase, 0.0) for phase in _OF_MFU)
        if not self._peak or not self._flops or not taken:
            return {}
        return {"perf/mfu": self._flops / (taken * self._ranks * self._peak)}


def stragglers(work: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the slowest rank of the step and of each phase, and its seconds beyond the median rank's; nothing of one
    rank.

    Args:
        work: seconds by phase of each rank, without what it waited for others.
    """
    if len(work) < 2:
        return {}
    whole = [sum(of_rank.values()) for of_rank in work]
    metrics = {"straggler/rank": float(whole.index(max(whole))), "straggler/excess_s": max(whole) - median(whole)}
    for phase in dict.fromkeys(phase for of_rank in work for phase in of_rank):
        seconds = [of_rank.get(phase, 0.0) for of_rank in work]
        metrics[f"straggler/{phase}_rank"] = float(seconds.index(max(seconds)))
        metrics[f"straggler/{phase}_excess_s"] = max(seconds) - median(seconds)
    return metrics


def _speed_metrics(speed: Speed) -> dict[str, float]:
    if not speed.seconds:
        return {}
    rate = speed.tokens / speed.seconds
    return {"perf/generated_tokens_per_s": rate, "perf/generated_tokens_per_s_per_gpu": rate / speed.ranks}


def _latencies(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    in_order = sorted(seconds)
    return {
        "response/latency_p50_s": quantile(in_order, 0.5),
        "response/latency_p95_s": quantile(in_order, 0.95),
        "response/latency_max_s": in_order[-1],
    }
