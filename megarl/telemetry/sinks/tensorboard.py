"""`tensorboard/`: event files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """One scalar per metric. What an earlier run wrote from `first_step` on stays in its file, marked as void."""

    def __init__(self, run_dir: str, first_step: int) -> None:
        self._writer = SummaryWriter(os.path.join(run_dir, "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
