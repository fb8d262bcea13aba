"""Says whether a run fits into a rank's memory, and which key would help if it does not. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import StageBudget, cache_room, memory_modes
from megarl.estimate.job import Job, engine_elements, own_engine_elements
from megarl.phases import Phase

RESERVE = 0.2
"""Part of a GPU's memory that a run should leave free: estimates are none of measured memory, and blocks fragment."""

ESTIMATES = {
    "CUDA context, NCCL",
    "reshard buffers",
    "engine activations",
    "activations",
    "logits of a chunk",
}
"""Items that follow from assumptions and may turn out smaller. All others are certain."""


def what_does_not_fit(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget]) -> Iterator[str]:
    """Name what cannot fit, one line each, estimates left out: such a run would not get through its first step."""
    yield from _too_much(job, accelerator, [_certain(job, stage) for stage in stages])
    if not job.generates:
        return
    share = job.config.actor_rollout_ref.rollout.gpu_memory_utilization * accelerator.memory
    weights = job.itemsize * max(own_engine_elements(job, stage.stage) for stage in stages)
    if share < weights + _sequence(job):
        yield _no_sequence(job)


def what_may_not_fit(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget]) -> Iterator[str]:
    """Name what does not fit if the estimates are right, one line each."""
    yield from _too_much(job, accelerator, stages)
    if job.generates and cache_room(job, accelerator).sequences == 0:
        yield _no_sequence(job)


def what_leaves_little(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget]) -> Iterator[str]:
    """Name the phase that leaves less than `RESERVE` of the memory, if everything fits."""
    stage = max(stages, key=lambda stage: stage.peak)
    free = 1 - stage.peak / accelerator.memory
    if 0 <= free < RESERVE:
        phase = max(stage.phases, key=stage.total)
        yield (
            f"{phase} leaves {free:.1%} of the memory of a rank of pipeline stage {stage.stage + 1} free; less than "
            f"{RESERVE:.0%} may be too little in a long run: {_what_would_help(job, stage, phase, accelerator)}"
        )


def _too_much(job: Job, accelerator: Accelerator, stages: Sequence[StageBudget]) -> Iterator[str]:
    """Name the phase in which the fullest stage needs most, if that is more than a GPU has."""
    stage = max(stages, key=lambda stage: stage.peak)
    if stage.peak > accelerator.memory:
        phase = max(stage.phases, key=stage.total)
        yield (
            f"{phase} needs {(stage.peak - accelerator.memory) / 2**30:.2f} GiB more than the "
            f"{accelerator.memory / 2**30:.2f} GiB that a rank of pipeline stage {stage.stage + 1} has; "
            f"{_what_would_help(job, stage, phase, accelerator)}"
        )


def _what_would_help(job: Job, stage: StageBudget, phase: str, accelerator: Accelerator) -> str:
    """List the memory modes that are off and would free memory in the phase, the largest saving first."""
    if not accelerator.offloads:
        return "take a smaller model, or fewer ranks on a machine"
    items, off = stage.phases[phase], [mode for mode in memory_modes(job) if phase in mode.without and not mode.on]
    without_shared: dict[str, int] = {}
    if job.generates:  # without the training weights the engine needs a copy of the shared ones
        shared = engine_elements(job.arch, job.generation.split) - own_engine_elements(job, stage.stage)
        without_shared = {"training weights": job.itemsize * shared}
    saved: Counter[str] = Counter()  # a key may be of several models
    for mode in off:
        saved[mode.key] += items.get(mode.item, 0) - without_shared.get(mode.item, 0)
    advice = [f"{key}=true frees {n / 2**30:.2f} GiB" for key, n in sorted(saved.items(), key=lambda x: -x[1]) if n > 0]
    if phase == Phase.GENERATE and job.engine.fixed_cache:
        advice.append("a lower rollout.gpu_memory_utilization or rollout.max_num_seqs takes a smaller KV cache")
    return ", ".join(advice) or "split the model over more GPUs"


def _certain(job: Job, stage: StageBudget) -> StageBudget:
    """Leave the estimates out of a stage. A KV cache that takes what is left has at least a sequence."""

    def least(item: str, nbytes: int) -> int:
        return nbytes if job.engine.fixed_cache or item != "KV cache" else min(nbytes, _sequence(job))

    phases = {
        phase: {item: least(item, nbytes) for item, nbytes in items.items() if item not in ESTIMATES}
        for phase, items in stage.phases.items()
    }
    return StageBudget(stage=stage.stage, phases=phases)


def _sequence(job: Job) -> int:
    """Count the bytes of the longest sequence's keys and values."""
    return job.kv_bytes_per_token * job.max_sequence_length


def _no_sequence(job: Job) -> str:
    return (
        f"the KV cache has no room for one sequence of {job.max_sequence_length} tokens; raise "
        "rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size"
    )
