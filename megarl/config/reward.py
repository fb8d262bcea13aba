"""What scores a response."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.fields import NonEmpty, Section, Size, Whole

BY_MODEL = "model"
"""The name that leaves scoring, or a part of it, to a reward model."""


class OverlongBufferConfig(Section):
    """The soft penalty for long responses (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = Field(False, description="subtract a penalty near the greatest length from the score")
    len: Whole = Field(0, ge=0, description="tokens before max_response_length over which the penalty grows")
    penalty_factor: float = Field(1.0, ge=0, description="penalty at max_response_length")


class RewardPartConfig(Section):
    """A function with its weight in the score."""

    name: NonEmpty = Field(description="a registered verifier, path/to/file.py:function, or model")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="the score is the sum of weight x part")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    data_sources: list[str] = Field(
        default_factory=list, description="rows whose data.source_key is one of these; default all rows"
    )


class RewardConfig(Section):
    """How a response is scored."""

    name: str = Field(
        "exact_match",
        description="a registered verifier, path/to/file.py:function, or model for the scores of `reward_model`",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    parts: dict[str, RewardPartConfig] = Field(
        default_factory=dict,
        description="label -> a function with a weight: scores are sums of these, instead of reward.name",
    )
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    on_error: Literal["fail", "drop", "retry"] = Field(
        "fail",
        description="when scoring a response fails, takes too long or gives no finite number: fail ends the run, drop "
        "leaves the response out of its group and of the loss and counts it in reward/failed, retry tries again up to "
        "reward.retries times, and then drops it",
    )
    retries: Size = Field(
        3, ge=1, le=100, description="further tries with on_error=retry, after 1 s, 2 s, 4 s and so on, 60 s at most"
    )
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds that one call of a function may take")
    workers: Size | None = Field(
        None, ge=1, description="processes per node that score, at least 1 per rank that does; default one per CPU core"
    )
    batch_size: Size | None = Field(
        None, ge=1, description="the function takes lists of up to so many responses and rows, and returns their scores"
    )
    concurrency: Size = Field(
        64, ge=1, description="calls of an async def that a worker has under way, such as requests to a judge"
    )

    @property
    def names(self) -> list[str]:
        """Of all that scores: the parts, or what `reward.name` says."""
        return [part.name for part in self.parts.values()] or [self.name]
