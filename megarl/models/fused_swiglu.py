"""Fuses SwiGLU as Transformer Engine does, with nothing to save."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from transformer_engine.pytorch import ops


class FusedSwiGLU(ops.SwiGLU):
    """Is Transformer Engine's operation without its extra state, which is for FP8 alone.

    Megatron-Core cannot save that state: 0.16 misses a `sharded_state_dict`, and 0.19 takes all ranks of a
    tensor-parallel group for its first one.
    """

    get_extra_state, set_extra_state = Module.get_extra_state, Module.set_extra_state

    def __init__(self, config: object) -> None:
        """Take, as Megatron-Core's builder does, a configuration, and need nothing of it."""
        super().__init__()

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Describe what a checkpoint keeps: nothing."""
        return {}
