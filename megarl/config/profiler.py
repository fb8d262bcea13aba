"""Defines the section of profiles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.fields import Section, Size, Whole


class ProfilerConfig(Section):
    """Chooses the steps and ranks to profile, into RUN/profiles. A profiler that fails never stops a run."""

    tool: Literal["none", "torch", "nsight", "memory"] = Field(
        "none",
        description="torch: a trace of CPU and GPU that Perfetto opens; nsight: NVTX ranges, and a start and a stop "
        "for nsys around the steps; memory: where memory was allocated, for https://pytorch.org/memory_viz",
    )
    steps: list[Annotated[Whole, Field(ge=1)]] = Field(
        default_factory=list, description="profiled steps, by their numbers in the metric files, from 1"
    )
    ranks: list[Annotated[Size, Field(ge=0)]] | Literal["all"] = Field(
        default=[0], description="profiled ranks, from 0, or all"
    )
    memory_snapshot: bool = Field(
        False,
        description="record on every rank, from the run's start, where GPU memory is allocated, which costs a little "
        "time, and write a snapshot when memory runs out",
    )

    def covers(self, rank: int) -> bool:
        """Tell whether a rank is profiled."""
        return self.tool != "none" and (self.ranks == "all" or rank in self.ranks)
