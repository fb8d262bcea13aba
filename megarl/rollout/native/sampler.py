"""Draws tokens. The randomness of a token is a function of (seed, position in the response) and nothing else.

So a completion does not depend on the sequences in its batch, on the order of the requests, on the replica or on the
layout, as far as the logits do not: their rounding does, which changes a draw only where the random number
falls on the edge between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.sizes import ROWS_SORTED
from megarl.rollout.native import kernels
from megarl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Holds drawn tokens, one per row, with log-probabilities as in `megarl.types.Completion`.

    Attributes:
        token_ids: int64 [B].
        logp: float32 [B], nats.
    """

    token_ids: Tensor
    logp: Tensor


def sample(logits: Tensor, params: SamplingParams, *, seeds: Tensor, positions: Tensor) -> Sample:
    """Draw one token per row, or take the likeliest at temperature 0.

    Args:
        logits: float32 or bfloat16 [B, V]; computed with in float32.
        seeds: int64 [B], of each row's request.
        positions: int64 [B], number of tokens in each row's response so far.
    """
    filtered = 0 < params.top_k < logits.shape[-1] or params.top_p < 1
    if params.temperature > 0 and not filtered and kernels.on(logits.device):
        from megarl.rollout.native.kernels.draw import draw

        token_ids, logp = draw(logits, temperature=params.temperature, seeds=seeds, positions=positions)
        return Sample(token_ids=token_ids, logp=logp)
    if filtered and len(logits) > ROWS_SORTED:
        chunks = zip(*(x.split(ROWS_SORTED) for x in (logits, seeds, positions)), strict=True)
        parts = [sample(rows, params, seeds=s, positions=p) for rows, s, p in chunks]
        return Sample(token_ids=torch.cat([x.token_ids for x in parts]), logp=torch.cat([x.logp for x in parts]))
    logits = logits.float()
    if params.temperature == 0:
        token_ids = logits.argmax(-1)
        return Sample(token_ids=token_ids, logp=_logp_at(logits, token_ids))
    scaled = logits / params.temperature
    u = uniform(seeds, positions)
    if filtered:
        kept, order = keep_likeliest(scaled, top_k=params.top_k, top_p=params.top_p)
        place = _inverse_cdf(kept, u)
        token_ids = order.gather(-1, place[:, None]).squeeze(-1)
        logp = _logp_at(kept, place)
    else:
        token_ids = _inverse_cdf(scaled, u)
        logp = _logp_at(scaled, token_ids)
    return Sample(token_ids=token_ids, logp=logp)


def keep_likeliest(logits: Tensor, *, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Apply top-k, then top-p (nucleus sampling, arXiv 1904.09751) to the rest, as vLLM and Hugging Face do.

    Top-k keeps all logits equal to the k-th largest; top-p keeps the fewest tokens whose probability reaches `top_p`,
    the token that crosses it included.

    Returns:
        the logits in descending order with the others at -inf, float32 [B, V]; the token each belongs to, int64 [B, V].
    """
    # stable: equal logits stay in the order of the vocabulary on every device
    kept, order = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < logits.shape[-1]:
        kept = kept.masked_fill(kept < kept[:, top_k - 1 : top_k], float("-inf"))
    if top_p < 1:
        probs = kept.softmax(-1, dtype=torch.float64)
        likelier = probs.cumsum(-1) - probs
        kept = kept.masked_fill(likelier >= top_p, float("-inf"))
    return kept, order


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute a number in [0, 1) per (seed, position), equal on every device: splitmix64 (Steele et al., OOPSLA 2014).

    Args:
        seeds, positions: int64 [B].

    Returns:
        float64 [B], multiples of 2^-52.
    """
    bits = _mix(_mix(seeds) + positions * _GOLDEN_GAMMA)
    # 52 bits, not 53: u * total then rounds to less than total, so that the inverse CDF never runs past the end
    return _shift_right(bits, 12).double() * 2.0**-52


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's step and finaliser to int64 [B], whose products wrap around as uint64's do."""
    x = x + _GOLDEN_GAMMA
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 as if unsigned: torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    """Find the first column at which the cumulated probability exceeds u: float32 [B, V], float64 [B] -> int64 [B]."""
    # float64: over 10^5 tokens a float32 sum is off by more than the probability of most of them
    cdf = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    # NaN logits run past the end: let them come out as NaN log-probs, not as a device-side assert that kills the job
    return place.clamp_(max=logits.shape[-1] - 1)


def _logp_at(logits: Tensor, columns: Tensor) -> Tensor:
    """Compute log softmax of [B, V] at one column per row: float32 [B]."""
    return logits.gather(-1, columns[:, None]).squeeze(-1) - logits.logsumexp(-1)
