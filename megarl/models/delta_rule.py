"""Computes the gated delta rule (arXiv 2412.06464) over sequences that lie one after another, and token by token.

A value head keeps a matrix S [key_dim, value_dim] of a sequence, which begins at 0. Each token with query q, key k,
value v, decay g and strength b does

    S = exp(g) S
    S = S + k (b (v - S^T k))^T
    out = S^T q

A chunk of tokens does the same in a few products of matrices: the corrections of its tokens are the solution of a
triangular system (section 3.2 there; arXiv 2406.06484).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.parts.gated_delta import CHUNK, GatedDelta
from megarl.models.rms_norm import rms_norm

FLA = importlib.util.find_spec("fla") is not None
"""Whether flash-linear-attention is installed, whose kernels compute in half precision on GPUs."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Says where tokens of sequences, one after another, stand in chunks, and in a row with zeros before each sequence.

    Chunks are ordered by their number within their sequence, and then by sequence, the one with the most chunks first:
    those that are computed together lie together.

    Attributes:
        cu_seqlens: int32 [S + 1], where each sequence begins, and the end of the last.
        in_chunks: int64 [T].
        steps: half-open range of the chunks with each number.
        rank: int64 [S], each sequence's place among those in that order.
        in_row: int64 [T].
        ends: int64 [S, zeros], the last places of each sequence in the row.
        zeros: how many there are before each sequence.
    """

    cu_seqlens: Tensor
    in_chunks: Tensor
    steps: tuple[tuple[int, int], ...]
    rank: Tensor
    in_row: Tensor
    ends: Tensor
    zeros: int

    @staticmethod
    def of(lengths: Sequence[int], kind: GatedDelta, device: torch.device) -> Packing:
        """Describe sequences of these lengths, none of them 0."""
        tokens = torch.tensor(lengths)
        chunks = -(-tokens // CHUNK)
        order = chunks.argsort(descending=True, stable=True)
        rank = torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))
        together = torch.tensor([int((chunks > number).sum()) for number in range(int(chunks.max()))])
        last = together.cumsum(0)
        sequence = torch.repeat_interleave(torch.arange(len(tokens)), tokens)
        position = torch.cat([torch.arange(length) for length in lengths])
        chunk = (last - together)[position // CHUNK] + rank[sequence]
        zeros = kind.conv_kernel - 1
        in_row = torch.arange(len(sequence)) + zeros * (sequence + 1)
        ends = tokens.cumsum(0) + zeros * torch.arange(1, len(tokens) + 1)
        return Packing(
            cu_seqlens=F.pad(tokens.cumsum(0, dtype=torch.int32), (1, 0)).to(device),
            in_chunks=(chunk * CHUNK + position % CHUNK).to(device),
            steps=tuple(zip((last - together).tolist(), last.tolist(), strict=True)),
            rank=rank.to(device),
            in_row=in_row.to(device),
            ends=(ends[:, None] + torch.arange(-zeros, 0)).to(device),
            zeros=zeros,
        )


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Holds what a token does to the states of n key heads with r value heads each.

    Attributes:
        query, key: [T, n, key_dim], of length 1, the query divided by sqrt(key_dim); float32.
        value: [T, n, r, value_dim].
        decay, strength: float32 [T, n, r].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor

    @staticmethod
    def of(kind: GatedDelta, convolved: Tensor, scalars: Tensor, A_log: Tensor, dt_bias: Tensor) -> Heads:
        """Make the heads of the convolved channels [T, n, conv_width], and of strengths and decays [T, n, 2 r]."""
        widths = [kind.widths[part] for part in ("query", "key", "value")]
        query, key, value = convolved.split(widths, dim=-1)
        strength, decay = scalars.float().chunk(2, dim=-1)
        A_log, dt_bias = (x.float().view(decay.shape[1:]) for x in (A_log, dt_bias))
        return Heads(
            query=_unit(query) * kind.key_head_dim**-0.5,
            key=_unit(key),
            value=value.unflatten(-1, (kind.values_per_key, kind.value_head_dim)),
            decay=-A_log.exp() * F.softplus(decay + dt_bias),
            strength=strength.sigmoid(),
        )


def projected(kind: GatedDelta, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take apart what the in-projection computes of each key head, [T, n, width].

    Returns: channels to convolve [T, n, conv_width], output gates [T, n, r * value_dim], and strengths and decays
    [T, n, 2 r].
    """
    values = kind.values_per_key * kind.value_head_dim
    channels, gates, scalars = heads.split((kind.conv_width, values, 2 * kind.values_per_key), dim=-1)
    return channels, gates, scalars


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def convolve(x: Tensor, weight: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its last tokens, and apply silu.

    Args:
        x: [T, channels].
        weight: [channels, conv_kernel].

    Returns: [T, channels], and of each sequence the last tokens [S, conv_kernel - 1, channels], zeros before them.
    """
    row = x.new_zeros(len(x) + packing.zeros * len(packing.rank), x.shape[1]).index_copy(0, packing.in_row, x)
    out = F.conv1d(row.T.unsqueeze(0), weight.unsqueeze(1), groups=len(weight))[0].T
    return F.silu(out[packing.in_row - packing.zeros]), row[packing.ends]


def convolve_next(x: Tensor, weight: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve one token of each sequence, [T, channels], after the last ones [T, conv_kernel - 1, channels]."""
    window = torch.cat((last.to(x.dtype), x.unsqueeze(1)), dim=1)
    out = F.conv1d(window.transpose(1, 2), weight.unsqueeze(1), groups=len(weight)).squeeze(-1)
    return F.silu(out), window[:, 1:]


def delta_rule(heads: Heads, packing: Packing) -> tuple[Tensor, Tensor]:
    """Compute whole sequences, from states of 0.

    Returns: [T, n, r, value_dim] in the type of the values, and float32 states [S, n, r, key_dim, value_dim].
    """
    deterministic = torch.are_deterministic_algorithms_enabled()  # which those kernels are not
    if FLA and heads.value.is_cuda and heads.value.dtype != torch.float32 and not deterministic:
        return _flash_linear_attention(heads, packing)
    count = packing.steps[-1][1]

    def in_chunks(x: Tensor) -> Tensor:
        """Lay out [T, n, r, width] as float32 [chunks, n, r, CHUNK, width]; what no token fills changes nothing."""
        padded = x.new_zeros(count * CHUNK, *x.shape[1:], dtype=torch.float32)
        return padded.index_copy(0, packing.in_chunks, x.float()).unflatten(0, (count, CHUNK)).movedim(1, -2)

    q, k, v = in_chunks(heads.query.unsqueeze(2)), in_chunks(heads.key.unsqueeze(2)), in_chunks(heads.value)
    decay, strength = in_chunks(heads.decay.unsqueeze(-1)), in_chunks(heads.strength.unsqueeze(-1))
    since = decay.cumsum(-2)  # log of the decay from before the chunk up to each token
    whole = since[..., -1:, :]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (since - since.mT).masked_fill(later, float("-inf")).exp()
    system = k @ k.mT * between * strength
    asked = torch.cat((v * strength, k * (strength * since.exp())), dim=-1)
    solved = torch.linalg.solve_triangular(system, asked, upper=False, unitriangular=True)
    corrections, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    out, states = _over_chunks(
        corrections,
        of_state,
        attended=q @ k.mT * between,
        read=q * since.exp(),
        written=k * (whole - since).exp(),
        kept=whole.exp(),
        steps=packing.steps,
    )
    return out.movedim(-2, 1).flatten(0, 1)[packing.in_chunks].to(heads.value.dtype), states[packing.rank]


def _over_chunks(
    corrections: Tensor,
    of_state: Tensor,
    *,
    attended: Tensor,
    read: Tensor,
    written: Tensor,
    kept: Tensor,
    steps: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk, in all sequences together.

    Args:
        corrections, of_state: of the tokens of a chunk, from a state of 0, and what a state takes off them.
        attended: how far each token reads the corrections of those before it.
        read, written, kept: how far each token reads the state before the chunk, its correction reaches the state after
            it, and the state itself does.

    Returns: the outputs, and the last states in the order of the first step's chunks.
    """
    first, last = steps[0]
    state = corrections.new_zeros(last - first, *corrections.shape[1:3], written.shape[-1], corrections.shape[-1])
    outputs, ended = [], []
    for first, last in steps:
        ended.append(state[last - first :])
        state = state[: last - first]
        new = corrections[first:last] - of_state[first:last] @ state
        outputs.append(read[first:last] @ state + attended[first:last] @ new)
        state = kept[first:last] * state + written[first:last].mT @ new
    return torch.cat(outputs), torch.cat((state, *ended[::-1]))


def _flash_linear_attention(heads: Heads, packing: Packing) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    dtype, per_key = heads.value.dtype, heads.value.shape[2]
    q, k = (x.to(dtype).repeat_interleave(per_key, 1).unsqueeze(0) for x in (heads.query, heads.key))
    v, g, beta = (x.flatten(1, 2).unsqueeze(0) for x in (heads.value, heads.decay, heads.strength.to(dtype)))
    out, states = chunk_gated_delta_rule(
        q, k, v.contiguous(), g, beta, scale=1.0, output_final_state=True, cu_seqlens=packing.cu_seqlens.long()
    )
    return out[0].unflatten(1, heads.value.shape[1:3]), states.unflatten(1, heads.value.shape[1:3])


def delta_step(heads: Heads, states: Tensor) -> Tensor:
    """Compute one token of each sequence, and change the states [T, n, r, key_dim, value_dim] in place.

    Returns: [T, n, r, value_dim] in the type of the values.
    """
    states *= heads.decay.exp()[..., None, None]
    k, q = (x[:, :, None, :, None].expand(*states.shape[:-1], 1) for x in (heads.key, heads.query))
    known = (k.mT @ states).squeeze(-2)
    correction = heads.strength.unsqueeze(-1) * (heads.value.float() - known)
    states.view(-1, *states.shape[3:]).baddbmm_(k.flatten(0, 2), correction.flatten(0, 2).unsqueeze(1))
    return (q.mT @ states).squeeze(-2).to(heads.value.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise heads [..., value_dim], and multiply them by silu of their gates in float32."""
    return (rms_norm(x, weight, eps, zero_centered=False).float() * F.silu(gate.float())).to(x.dtype)
