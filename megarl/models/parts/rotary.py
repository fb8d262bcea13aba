"""Describes rotary position embeddings (arXiv 2104.09864), and how they are slowed down for longer sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from megarl.models.parts.part import check_counts, check_numbers


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slows rotary frequencies down, for sequences longer than those of the pretraining.

    Attributes:
        factor: the frequencies are divided by it.
        low_freq_factor, high_freq_factor: with original_max_position_embeddings, Llama 3.1's rule: only waves longer
            than original_max_position_embeddings / low_freq_factor are stretched whole, those shorter than
            original_max_position_embeddings / high_freq_factor not at all, and those between in part.
        original_max_position_embeddings: sequence length of the pretraining, tokens; None stretches all frequencies
            alike (linear interpolation, arXiv 2306.15595).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "factor", "low_freq_factor", "high_freq_factor", positive=True)
        if self.original_max_position_embeddings is not None:
            check_counts(self, "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Slows long waves down, and sharpens the softmax (YaRN, arXiv 2309.00071), as DeepSeek-V3 does.

    Attributes:
        factor: the frequencies of long waves are divided by it.
        original_max_position_embeddings: sequence length of the pretraining, tokens.
        beta_fast, beta_slow: waves that turn more often than beta_fast within that length stay, those that turn less
            often than beta_slow are stretched whole, and those between in part.
        mscale, mscale_all_dim: see `rotation_factor` and `softmax_factor`.
        truncate: whether `stretched_channels` are whole numbers.
        attention_factor: `rotation_factor`, if given.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "factor", "beta_fast", "beta_slow", positive=True)
        check_numbers(self, "mscale", "mscale_all_dim")
        check_counts(self, "original_max_position_embeddings")
        if self.attention_factor is not None:
            check_numbers(self, "attention_factor", positive=True)

    @property
    def rotation_factor(self) -> float:
        """Compute the factor that scales rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self._grown(self.mscale) / self._grown(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Compute what the attention's logits are multiplied by."""
        return self._grown(self.mscale_all_dim) ** 2

    def _grown(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def stretched_channels(self, rotary_dim: int, rope_theta: float) -> tuple[float, float]:
        """Find the pair of channels up to which waves stay as they are, and that from which all are stretched whole."""

        def pair(turns: float) -> float:
            wave = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return rotary_dim * math.log(wave) / (2 * math.log(rope_theta))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        return max(first, 0), min(last, rotary_dim - 1)


class Rotary(Protocol):
    """Describes attention that rotates channels of queries and keys.

    Attributes:
        rotary_dim: channels of a head that are rotated.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how those frequencies are changed; None leaves them.
    """

    @property
    def rotary_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> RopeScaling | Yarn | None: ...


def check_base(rotary: Rotary) -> None:
    """Raise ValueError for a base of which YaRN's `stretched_channels` would divide by 0, or by less."""
    if isinstance(rotary.rope_scaling, Yarn) and rotary.rope_theta <= 1:
        raise ValueError(f"rope_theta = {rotary.rope_theta} must be above 1 with YaRN")
