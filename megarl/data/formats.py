"""Names the formats that rows of the data have. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Format = Literal["prompts", "demonstrations", "preferences", "judged"]

SEQUENCES: Mapping[Format, int] = {"demonstrations": 1, "preferences": 2, "judged": 1}
"""Sequences of a row that comes with its answers."""
