"""Names of flows, and loading one from a user's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.data.formats import EVAL, OF_FLOWS
from megarl.registry import Registry

if TYPE_CHECKING:  # a launcher looks a flow's name up without Megatron-Core
    from megarl.trainer.run import Flow

FLOWS: Registry[Flow] = Registry(
    "trainer.flow", "flow", lazy={name: f"megarl.flows.{name}:flow" for name in ("ppo", EVAL, *OF_FLOWS)}
)
"""What `trainer.flow` can name."""
