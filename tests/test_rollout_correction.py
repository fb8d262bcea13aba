"""Importance weights and rejection against plain loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from megarl.algorithms.aggregation import LossAggMode, token_weights
from megarl.algorithms.rollout_correction import correct_rollouts, gap_metrics
from megarl.config.algorithm import RolloutCorrectionConfig
from megarl.types import Batch, batch_of

LOG_RATIOS = [[0.1], [-0.2, 2.0, 0.3], [-3.0, 0.5], [0.0, 0.0, 0.0, 0.0]]


def _batch() -> Batch:
    batch = batch_of([[1, 2], [1, 2], [3], [3]], [[4], [5, 6, 7], [8, 9], [4, 4, 4, 4]], [0, 0, 1, 1])
    rollout, old = torch.zeros(16), torch.zeros(16)
    rollout[batch.response_mask] = -2.0
    old[batch.response_mask] = torch.tensor([x - 2.0 for row in LOG_RATIOS for x in row])
    return batch.with_(rollout_logp=rollout, old_logp=old)


def _weights(**config: Any) -> list[list[float]]:
    batch = correct_rollouts(_batch(), RolloutCorrectionConfig(**config))
    assert batch.importance is not None
    assert (batch.importance[~batch.response_mask] == 0).all()
    cuts = batch.cu_seqlens.tolist()
    rows = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    return [batch.importance[row][batch.response_mask[row]].tolist() for row in rows]


def _approx(rows: list[list[float]]) -> Any:
    return [pytest.approx(row, rel=1e-5) for row in rows]


def test_off_by_default() -> None:
    batch = _batch()
    assert correct_rollouts(batch, RolloutCorrectionConfig()) is batch


def test_token_level_truncation() -> None:
    wanted = [[min(math.exp(x), 2.0) for x in row] for row in LOG_RATIOS]
    assert _weights(rollout_is="token") == _approx(wanted)


def test_sequence_level_truncation() -> None:
    wanted = [[min(math.exp(sum(row)), 5.0)] * len(row) for row in LOG_RATIOS]
    assert _weights(rollout_is="sequence", rollout_is_threshold=5.0) == _approx(wanted)


def test_weights_divided_by_their_mean() -> None:
    token = [[min(math.exp(x), 2.0) for x in row] for row in LOG_RATIOS]
    mean = sum(map(sum, token)) / 10
    normalized = _weights(rollout_is="token", rollout_is_batch_normalize=True)
    assert normalized == _approx([[x / mean for x in row] for row in token])
    sequence = [min(math.exp(sum(row)), 5.0) for row in LOG_RATIOS]
    mean = sum(sequence) / 4
    wanted = [[x / mean] * len(row) for x, row in zip(sequence, LOG_RATIOS, strict=True)]
    own = {"rollout_is": "sequence", "rollout_is_threshold": 5.0, "rollout_is_batch_normalize": True}
    assert _weights(**own) == _approx(wanted)


def test_rejection() -> None:
    token = [[float(1 / 2 <= math.exp(x) <= 2) for x in row] for row in LOG_RATIOS]
    assert _weights(rollout_rs="token") == token
    lower = {"rollout_rs_threshold_lower": 0.9, "rollout_rs_threshold": 2.0}
    sequence = [[float(0.9 <= math.exp(sum(row)) <= 2)] * len(row) for row in LOG_RATIOS]
    assert _weights(rollout_rs="sequence", **lower) == sequence == [[1.0], [0.0] * 3, [0.0] * 2, [1.0] * 4]
    geometric = [[float(0.9 <= math.exp(sum(row) / len(row)) <= 2.1)] * len(row) for row in LOG_RATIOS]
    assert _weights(rollout_rs="geometric", **lower | {"rollout_rs_threshold": 2.1}) == geometric
    assert geometric[1] == [1.0] * 3


def test_veto_and_weights_together() -> None:
    got = _weights(rollout_is="token", rollout_token_veto_threshold=0.1)
    assert got[2] == [0.0, 0.0] and got[1] == pytest.approx([math.exp(-0.2), 2.0, math.exp(0.3)])


@pytest.mark.parametrize(
    "rejects",
    [
        {"rollout_token_veto_threshold": 1e-10},
        {"rollout_rs": "token", "rollout_rs_threshold_lower": 1e-10},
        {"rollout_rs": "sequence", "rollout_rs_threshold_lower": 1e-10, "rollout_rs_threshold": 1e10},
    ],
)
def test_a_threshold_may_be_of_any_size(rejects: dict[str, Any]) -> None:
    """e^-30 is below it, and what bounds a ratio that is multiplied with is not: e^-20."""
    batch = _batch()
    for gap in (-30.0, 30.0) if "rollout_rs_threshold" in rejects else (-30.0,):
        far = torch.where(batch.response_mask & (batch.tokens == 5), gap - 2.0, batch.old_logp)
        out = correct_rollouts(batch.with_(old_logp=far), RolloutCorrectionConfig(**rejects)).importance
        assert out is not None and out[batch.tokens == 5] == 0.0


def test_overflow_stays_finite() -> None:
    batch = _batch()
    batch = batch.with_(old_logp=torch.where(batch.response_mask, 500.0, 0.0))
    out = correct_rollouts(batch, RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="token")).importance
    assert out is not None and torch.isfinite(out).all()
    assert all(math.isfinite(value) for value in gap_metrics(batch).values())


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token-mean", lambda rows: sum(map(sum, rows)) / 6),
        ("seq-mean-token-sum", lambda rows: sum(map(sum, rows)) / 3),
        ("seq-mean-token-mean", lambda rows: sum(sum(r) / sum(x > 0 for x in r) for r in rows if sum(r)) / 3),
        ("seq-mean-token-sum-norm", lambda rows: sum(map(sum, rows)) / 3 / 7),
    ],
)
def test_rejected_tokens_count_in_no_denominator(mode: LossAggMode, wanted: Any) -> None:
    """Sequences 0, 1 and 3 stay, sequence 1 with one of its tokens: 1 + 1 + 4 tokens; weights multiply the loss."""
    batch, weights = _batch(), torch.tensor([2.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    per_token = torch.zeros(16)
    per_token[batch.response_mask] = weights
    got = float(token_weights(batch.with_(importance=per_token), range(4), mode, 7).sum())
    assert got == pytest.approx(wanted([[2.0], [0.0, 0.5, 0.0], [0.0, 0.0], [1.0] * 4]), rel=1e-6)


def test_gap_metrics() -> None:
    flat = [x for row in LOG_RATIOS for x in row]
    metrics = gap_metrics(correct_rollouts(_batch(), RolloutCorrectionConfig(rollout_rs="token")))
    assert metrics["logp_gap_mean"] == pytest.approx(sum(map(abs, flat)) / 10, rel=1e-5)
    assert metrics["logp_gap_max"] == pytest.approx(3.0)
    assert metrics["kl_k1"] == pytest.approx(-sum(flat) / 10, rel=1e-5)
    assert metrics["kl_k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in flat) / 10, rel=1e-5)
    assert metrics["ratio_p99"] == pytest.approx(math.exp(2.0))
    assert metrics["ratio_p01"] == pytest.approx(math.exp(-3.0))
    assert metrics["rejected"] == pytest.approx(2 / 10)
