"""Defines the section of environments and agents."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.fields import Section, Size, Whole


class EnvironmentConfig(Section):
    """Names the environment or agent that answers the policy, so that a response has several turns."""

    name: str = Field("", description="a registered environment, or path/to/file.py:class; empty: none")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment's class")
    agent: str = Field(
        "",
        description="path/to/file.py:function instead: an `async def agent(base_url, row)` that asks an "
        "OpenAI-compatible endpoint for the policy's responses",
    )
    max_turns: Whole = Field(8, ge=1, description="responses of the policy in an episode")
    timeout: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="seconds that a step of an environment, or a whole episode of an agent, may take",
    )
    max_observation_length: Whole = Field(256, ge=1, description="tokens of an observation; longer ones are cut")
    role: Literal["user", "tool"] = Field("user", description="role of an observation's message in a chat")
    workers: Size = Field(
        8,
        ge=1,
        description="per replica: threads that run an environment's steps, or processes of agents, each with many "
        "episodes; at most rollout.max_num_seqs episodes run at the same time",
    )

    @property
    def answers(self) -> bool:
        """Tell whether responses have several turns."""
        return bool(self.name or self.agent)
