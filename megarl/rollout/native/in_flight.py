"""Lets the host go on while the device draws tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.rollout.native.sampler import Sample
from megarl.rollout.native.slots import Rows


class InFlight:
    """Is a decode step that the device has been given; starts to copy what it draws to the host.

    Attributes:
        rows: of the step.
    """

    def __init__(self, rows: Rows, drawn: Sample) -> None:
        self.rows = rows
        both = torch.stack((drawn.token_ids.int(), drawn.logp.view(torch.int32)))
        self._on_host, self._copied = both, None
        if both.is_cuda:
            self._on_host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._on_host.copy_(both, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Wait for the step; returns each row's token and its log-probability."""
        if self._copied is not None:
            self._copied.synchronize()
        ids, logp = self._on_host.numpy()
        return ids, logp.view(np.float32)
