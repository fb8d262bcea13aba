"""`tensorboard/`: event files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Two TensorBoard runs side by side: `rl` over RL steps, `warmup` over the warm-up's own steps.

    Apart, because a resumed run purges the later steps of the whole TensorBoard run that it writes to: warm-up points
    past the resumed RL step would vanish with them.
    """

    def __init__(self, run_dir: str, first_step: int) -> None:
        self._folder = os.path.join(run_dir, "tensorboard")
        self._first_step = first_step
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "warmup/step" in metrics:
            run, x, first = "warmup", int(metrics["warmup/step"]), 0
        else:
            run, x, first = "rl", step, self._first_step
        if run not in self._writers:
            self._writers[run] = SummaryWriter(os.path.join(self._folder, run), purge_step=first)
        for key, value in metrics.items():
            self._writers[run].add_scalar(key, value, x)
        self._writers[run].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
