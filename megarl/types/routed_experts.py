"""Holds the experts that a generation engine chose, to be chosen again in training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Choices = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """Holds the experts of tokens one after another, from the first token of a prompt on.

    Attributes:
        num_experts: experts of a layer; up to 256 their numbers take a byte each, more of them two bytes.
        layers: layers that have experts.
        experts_per_token: experts that a token goes to in each of them.
        data: the numbers, [tokens, layers, experts_per_token].
    """

    num_experts: int
    layers: int
    experts_per_token: int
    data: bytes = b""

    def __len__(self) -> int:
        return len(self.data) // self.bytes_per_token

    @property
    def dtype(self) -> np.dtype[Any]:
        """Choose the type of the numbers."""
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype(np.int16)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.experts_per_token * self.dtype.itemsize

    @property
    def choices(self) -> Choices:
        """Read the numbers: [tokens, layers, experts_per_token]."""
        return np.frombuffer(self.data, self.dtype).reshape(-1, self.layers, self.experts_per_token)

    def followed_by(self, choices: Choices) -> RoutedExperts:
        """Append the experts of further tokens."""
        assert choices.shape[1:] == (self.layers, self.experts_per_token) and choices.dtype == self.dtype
        return replace(self, data=self.data + choices.tobytes())
