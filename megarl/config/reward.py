"""Defines the section of rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.fields import NonEmpty, Section, Size, Whole

BY_MODEL = "model"
"""The value of reward.name, or of a part's name, with which a reward model scores."""


class OverlongBufferConfig(Section):
    """Sets the soft penalty for long responses (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = Field(False, description="subtract a penalty near the greatest length from the score")
    len: Whole = Field(0, ge=0, description="tokens before max_response_length over which the penalty grows")
    penalty_factor: float = Field(1.0, ge=0, description="penalty at max_response_length")


class RewardPartConfig(Section):
    """Names a function with its weight in the score."""

    name: NonEmpty = Field(description="a registered verifier, path/to/file.py:function, or model")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="the score is the sum of weight x part")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    data_sources: list[str] = Field(
        default_factory=list, description="rows whose data.source_key is one of these; default all rows"
    )


class RewardConfig(Section):
    """Sets how responses are scored."""

    name: str = Field(
        "exact_match",
        description="a registered verifier, path/to/file.py:function, or `model` for the scores of `reward_model`",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    parts: dict[str, RewardPartConfig] = Field(
        default_factory=dict,
        description="label -> a function with a weight, instead of reward.name: a score is the weighted sum",
    )
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    on_error: Literal["fail", "drop", "retry"] = Field(
        "fail",
        description="reaction when scoring a response fails, takes too long or gives no finite number: fail ends the "
        "run, drop leaves the response out of its group and of the loss and counts it in reward/failed, retry tries "
        "again up to reward.retries times and then drops it",
    )
    retries: Size = Field(
        3, ge=1, le=100, description="further tries with on_error=retry, after 1 s, 2 s, 4 s ..., at most 60 s"
    )
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds that one call of a function may take")
    trial: Whole = Field(
        4,
        ge=0,
        le=64,
        description="training rows whose reference answers are scored before the ranks start, to see that the reward "
        "works; 0: none",
    )
    workers: Size | None = Field(
        None, ge=1, description="scoring processes per node, at least 1 per rank that scores; default one per CPU core"
    )
    batch_size: Size | None = Field(
        None,
        ge=1,
        description="the function takes lists of up to this many responses and rows, and returns their scores; "
        "default: one response at a time",
    )
    concurrency: Size = Field(
        64, ge=1, description="concurrent calls of an async function in a worker, such as requests to a judge"
    )

    @property
    def names(self) -> list[str]:
        """Return the names of all reward functions: those of the parts, or `reward.name`."""
        return [part.name for part in self.parts.values()] or [self.name]
