"""Makes the records in which engines note the experts that tokens go to."""

from __future__ import annotations

from megarl.models.architecture import Architecture
from megarl.types import RoutedExperts


def empty_record(arch: Architecture) -> RoutedExperts | None:
    """Make the record of a sequence that begins; None: the model has no experts."""
    if arch.moe is None:
        return None
    return RoutedExperts(
        num_experts=arch.moe.num_experts,
        layers=len(arch.expert_layers),
        experts_per_token=arch.moe.experts_per_token,
    )
