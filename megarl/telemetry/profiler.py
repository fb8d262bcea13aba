"""Writes profiles of chosen steps, and a message with a snapshot when a GPU's memory runs out.

RUN/profiles/step_12_rank_0.json.gz            a trace, with profiler.tool=torch: https://ui.perfetto.dev opens it
RUN/profiles/step_12_rank_0.pickle             allocations, with profiler.tool=memory: https://pytorch.org/memory_viz
RUN/profiles/out_of_memory_rank_0.pickle       the same, with profiler.memory_snapshot, when memory runs out
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from megarl.config.profiler import ProfilerConfig
from megarl.phases import Phase

MEMORY_ENTRIES = 100_000
"""Allocations and releases in a snapshot at most; they take some hundred MiB of host memory."""


class OutOfMemory(RuntimeError):
    """Says that GPU memory ran out: the message is one line with the phase, the snapshot's file and what to change.

    Attributes:
        phase: the phase in which it ran out; empty between phases.
    """

    def __init__(self, message: str, *, phase: str = "") -> None:
        super().__init__(message)
        self.phase = phase


class Recorder(Protocol):
    """Records a step."""

    ending: str

    def start(self) -> None:
        """Begin to record, at the beginning of a step."""

    def stop(self) -> None:
        """End recording, at the end of the step."""

    def write(self, file: str) -> None:
        """Write the stopped recording."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Name a part of the step in the recording."""


class TorchTrace:
    """Records the CPU's and the GPU's work with torch.profiler."""

    ending = ".json.gz"

    def __init__(self, device: torch.device) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, file: str) -> None:
        self._profile.export_chrome_trace(file)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)


class NsightMarks:
    """Tells nsys when to record, and names the parts of the step. nsys itself writes the file."""

    ending = ""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError("profiler.tool=nsight needs a GPU; use profiler.tool=torch")
        self._device = device

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.start()

    def stop(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.stop()

    def write(self, file: str) -> None:
        """Write nothing: nsys does."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)


class MemoryHistory:
    """Records where GPU memory is allocated and released.

    Args:
        always_on: the history is recorded all the time already, not only in profiled steps.
    """

    ending = ".pickle"

    def __init__(self, device: torch.device, *, always_on: bool) -> None:
        if device.type != "cuda":
            raise ValueError("profiler.tool=memory needs a GPU")
        self._always_on = always_on

    def start(self) -> None:
        if not self._always_on:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)

    def stop(self) -> None:
        """Do nothing: stopping would delete the history, so `write` stops."""

    def write(self, file: str) -> None:
        torch.cuda.memory._dump_snapshot(file)
        if not self._always_on:
            torch.cuda.memory._record_memory_history(enabled=None)

    def range(self, name: str) -> AbstractContextManager[Any]:
        del name
        return nullcontext()


class Profiler:
    """Records the chosen steps of one rank. After a failure it warns once and records no more."""

    def __init__(
        self, keys: ProfilerConfig, run_dir: str, *, rank: int, device: torch.device, warn: Callable[[str], None]
    ) -> None:
        """
        Args:
            warn: shows a line; used on rank 0, other ranks write to stderr.
        """
        self._keys, self._rank, self._device = keys, rank, device
        self._folder = os.path.join(run_dir, "profiles")
        self._warn = warn if rank == 0 else _to_stderr
        self._on = keys.covers(rank)
        self._recorder: Recorder | None = None  # of the step under way
        self._ran_out_in = ""
        self._snapshot = ""
        if keys.memory_snapshot and device.type == "cuda":
            with self._harmless():
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run a step. A chosen step is recorded; its profile is written only if the step does not raise."""
        if self._on and number in self._keys.steps:
            with self._harmless():
                recorder = self._new_recorder()
                recorder.start()
                self._recorder = recorder
        completed = False
        try:
            yield
            completed = True
        finally:
            current, self._recorder = self._recorder, None
            if current is not None:
                with self._harmless():
                    current.stop()
                    if completed:
                        self._write(current, number)

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Run a phase of a step, and name it in the recording."""
        open_range: AbstractContextManager[Any] | None = None
        if self._recorder is not None:
            with self._harmless():
                open_range = self._recorder.range(str(phase))
                open_range.__enter__()
        try:
            yield
        except torch.OutOfMemoryError:
            if not self._ran_out_in:  # keep the name of a phase within this one
                self._ran_out_in = str(phase)
                self._take_snapshot()
            raise
        finally:
            if open_range is not None:
                with self._harmless():
                    open_range.__exit__(None, None, None)

    def out_of_memory(self, error: torch.OutOfMemoryError) -> OutOfMemory:
        """Make the error for exhausted memory; with profiler.memory_snapshot also the snapshot's file."""
        self._take_snapshot()
        reason = " ".join(str(error).split()).partition(" If reserved but unallocated")[0][:300].rstrip(". ")
        place = f" in the phase {self._ran_out_in}" if self._ran_out_in else ""
        snapshot = self._snapshot or "profiler.memory_snapshot=true writes a snapshot of what holds it"
        text = f"memory ran out{place}: {reason}; {snapshot}; {_advice(self._ran_out_in)}"
        return OutOfMemory(text, phase=self._ran_out_in)

    def _new_recorder(self) -> Recorder:
        if self._keys.tool == "torch":
            return TorchTrace(self._device)
        if self._keys.tool == "nsight":
            return NsightMarks(self._device)
        return MemoryHistory(self._device, always_on=self._keys.memory_snapshot)

    def _write(self, recorder: Recorder, number: int) -> None:
        """Write a step's profile, and give the file its name when it is whole."""
        name = f"step_{number}_rank_{self._rank}{recorder.ending}"
        partial = os.path.join(self._folder, f".partial_{name}")
        if recorder.ending:
            os.makedirs(self._folder, exist_ok=True)
            recorder.write(partial)
            os.replace(partial, os.path.join(self._folder, name))

    def _take_snapshot(self) -> None:
        """Write a memory snapshot, the first time only. `_snapshot` then says where it is, or why there is none."""
        if not self._keys.memory_snapshot or self._snapshot:
            return
        file = os.path.join(self._folder, f"out_of_memory_rank_{self._rank}.pickle")
        try:
            os.makedirs(self._folder, exist_ok=True)
            torch.cuda.memory._dump_snapshot(file)
            self._snapshot = f"what held it is in {file} (open it at https://pytorch.org/memory_viz)"
        except Exception as e:  # torch's and the disk's: the run must end with the error of memory, not of a file
            self._snapshot = f"no snapshot could be written ({_one_line(e)})"

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Turn an exception in the block into a warning, and record no more."""
        try:
            yield
        except Exception as e:  # a profiler's own, CUPTI's, the disk's
            self._on, self._recorder = False, None
            self._warn(f"rank {self._rank} records no more profiles: {_one_line(e)}")


def nsight_command(command: str, steps: int) -> str:
    """Write the command with which nsys records a run's marked steps, into files in the current folder.

    Args:
        command: the command that starts the run.
        steps: number of marked steps.
    """
    options = f"-c cudaProfilerApi --capture-range-end=repeat:{steps} -t cuda,nvtx --trace-fork-before-exec=true"
    return f"nsys profile {options} -o megarl_%p {command}"


def _advice(phase: str) -> str:
    if phase in (Phase.OFFLOAD, Phase.RESHARD, Phase.GENERATE, Phase.VALIDATE):
        return (
            "lower rollout.gpu_memory_utilization or rollout.max_num_seqs, or let training's memory leave meanwhile "
            "(actor.megatron.param_offload, grad_offload, optimizer_offload)"
        )
    if phase in (Phase.UPDATE, Phase.UPDATE_CRITIC, Phase.LOG_PROBS, Phase.REF, Phase.VALUES, Phase.TEACHER):
        return (
            "lower ppo_max_token_len_per_gpu, or set model.enable_gradient_checkpointing=true, or split the model over "
            "more GPUs"
        )
    return "`megarl plan` shows what each phase holds"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _to_stderr(text: str) -> None:
    print(f"megarl: warning: {text}", file=sys.stderr, flush=True)
