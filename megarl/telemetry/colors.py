"""Phases have the same colours in every picture. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.phases import Phase

OTHER = "other"
"""What no phase accounts for."""

PHASE_COLORS: Mapping[str, str] = {  # in the order of a step
    Phase.OFFLOAD: "#ff8ab7",
    Phase.RESHARD: "#ff725c",
    Phase.GENERATE: "#4269d0",
    Phase.REWARD: "#efb118",
    Phase.LOG_PROBS: "#6cc5b0",
    Phase.REF: "#97bbf5",
    Phase.TEACHER: "#b3cde3",
    Phase.VALUES: "#f7c6a3",
    Phase.UPDATE_CRITIC: "#8cc26a",
    Phase.UPDATE: "#3ca951",
    Phase.VALIDATE: "#a463f2",
    Phase.SAVE: "#9c6b4e",
    OTHER: "#c4c4c4",
}
