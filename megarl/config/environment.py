"""What answers the policy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.fields import Section, Size, Whole


class EnvironmentConfig(Section):
    """What answers the policy, so that a response has several turns."""

    name: str = Field("", description="a registered environment, or path/to/file.py:class; empty: nobody answers")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments that an environment is made with")
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
        description="seconds that a step of an environment, or a whole episode of an agent, takes",
    )
    max_observation_length: Whole = Field(256, ge=1, description="tokens of an observation; a longer one is cut")
    role: Literal["user", "tool"] = Field("user", description="whose message an observation is, in a chat")
    workers: Size = Field(
        8,
        ge=1,
        description="of each replica: threads in which steps run, or processes of agents, each with many episodes; at "
        "most rollout.max_num_seqs episodes are under way",
    )

    @property
    def answers(self) -> bool:
        """Whether responses have several turns."""
        return bool(self.name or self.agent)
