"""The parts of a layer as the native engine computes them: one file here for each file of `megarl.models.parts`."""

from __future__ import annotations

from megarl.models.parts import experts, grouped_query, swiglu
from megarl.rollout.native.parts.experts import ExpertsWeights
from megarl.rollout.native.parts.grouped_query import GroupedQueryPasses, GroupedQueryWeights
from megarl.rollout.native.parts.part import Passes, Weights
from megarl.rollout.native.parts.swiglu import SwiGLUWeights

WEIGHTS: dict[type, type[Weights]] = {
    grouped_query.GroupedQuery: GroupedQueryWeights,
    swiglu.SwiGLU: SwiGLUWeights,
    experts.Experts: ExpertsWeights,
}
"""By part, the weights of a layer that compute it."""

PASSES: dict[type, type[Passes]] = {grouped_query.GroupedQuery: GroupedQueryPasses}
"""By kind of attention, what gives each forward pass its attention."""
