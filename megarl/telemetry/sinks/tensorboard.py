"""Writes event files for TensorBoard in `tensorboard/`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from megarl.telemetry.lines import Say


class TensorBoardSink:
    """Writes one scalar per metric. Events of an earlier run from `first_step` on stay in its file, marked as void.

    After a failed write the waiting rows go into a new file.
    """

    def __init__(self, run_dir: str, first_step: int, say: Say) -> None:
        del say
        self._folder = os.path.join(run_dir, "tensorboard")
        self._writer: SummaryWriter | None = SummaryWriter(self._folder, purge_step=first_step)
        self._waiting: list[tuple[int, Mapping[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._waiting.append((step, metrics))
        self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        if self._writer is not None:
            self._writer.close()

    def _write(self) -> None:
        try:
            if self._writer is None:
                # mark rows that the half-written file may hold as void
                self._writer = SummaryWriter(self._folder, purge_step=self._waiting[0][0])
            for step, metrics in self._waiting:
                # one event a row: `add_scalar` would hand one of each metric to the thread that writes
                scalars = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
                self._writer._get_file_writer().add_summary(Summary(value=scalars), step)
            self._writer.flush()
        except OSError:
            broken, self._writer = self._writer, None  # the writer's thread has ended
            with suppress(OSError):
                if broken is not None:
                    broken.close()
            raise
        self._waiting = []
