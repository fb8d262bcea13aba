"""Shows the memory of a run as a table: predicted, and measured beside it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from megarl.estimate.accelerator import Accelerator
from megarl.estimate.budget import StageBudget, copy_bytes, host_bytes
from megarl.estimate.job import Job


def predicted_table(job: Job, stages: Sequence[StageBudget], accelerator: Accelerator) -> Table:
    """Show the fullest stage item by item, and the totals of the first, the middle and the last stage."""
    fullest = max(stages, key=lambda stage: stage.peak)
    phases = list(fullest.phases)
    table = Table(title=f"Bytes per GPU, pipeline stage {fullest.stage + 1} of {len(stages)}")
    table.add_column("")
    for phase in phases:
        table.add_column(phase, justify="right")
    for item in dict.fromkeys(item for items in fullest.phases.values() for item in items):
        numbers = (fullest.phases[phase].get(item) for phase in phases)
        table.add_row(item, *(size(n) if n else "" for n in numbers))
    table.add_section()
    for stage in sorted({fullest.stage, 0, len(stages) // 2, len(stages) - 1}):
        table.add_row(f"stage {stage + 1}, total", *(size(stages[stage].total(phase)) for phase in phases))
    table.add_row(
        f"of {size(accelerator.memory)}, free", *(signed(accelerator.memory - fullest.total(p)) for p in phases)
    )
    on_host = {
        "for what leaves the GPU": max(host_bytes(job, stage.stage) for stage in stages),
        "for a checkpoint that is being written": max(copy_bytes(job, stage.stage) for stage in stages),
    }
    if any(on_host.values()):
        parts = [f"{size(nbytes)} {purpose}" for purpose, nbytes in on_host.items() if nbytes]
        table.caption = f"Pinned host memory per GPU: {', '.join(parts)}"
    return table


def measured_table(stages: Sequence[StageBudget], measured: Mapping[str, int], accelerator: Accelerator) -> Table:
    """Show the peak of each measured phase beside the fullest stage's prediction, if there is one for the phase.

    Args:
        measured: bytes in use on the fullest GPU, by phase.
    """
    table = Table(title=f"Peak of GPU memory in the second step, of {size(accelerator.memory)}")
    table.add_column("")
    for name in ("predicted", "measured", "measured - predicted"):
        table.add_column(name, justify="right")
    for phase, nbytes in measured.items():
        totals = [stage.total(phase) for stage in stages if phase in stage.phases]
        predicted = (
            [size(max(totals)), size(nbytes), signed(nbytes - max(totals))] if totals else ["", size(nbytes), ""]
        )
        table.add_row(phase, *predicted)
    return table


def size(n: float) -> str:
    """Write bytes with a unit in which they are at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def signed(n: float) -> str:
    """Write bytes that may be negative, as `size` does."""
    return size(n) if n >= 0 else f"-{size(-n)}"
