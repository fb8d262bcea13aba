"""The gated delta rule over packed sequences: against `transformers`, each sequence alone, and token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.delta_rule import Heads, Packing, convolve, convolve_next, delta_rule, delta_step
from megarl.models.parts.gated_delta import GatedDelta

KIND = GatedDelta(num_key_heads=2, num_value_heads=6, key_head_dim=5, value_head_dim=4, conv_kernel=4, joined=True)
LENGTHS = (130, 1, 64, 3, 200, 65, 2)
"""One, several and no whole chunks, in no order, and sequences shorter than the convolution."""


def _inputs() -> tuple[Tensor, ...]:
    """Channels [T, 2, conv_width], strengths and decays [T, 2, 6], the convolution, `A_log` and `dt_bias`."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens, width = sum(LENGTHS), KIND.conv_width
    return draw(tokens, 2, width), draw(tokens, 2, 6), draw(2 * width, 4), draw(6) - 2, draw(6)


def _computed(lengths: tuple[int, ...], *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the states of the heads, and those of the convolution."""
    channels, scalars, conv, A_log, dt_bias = inputs
    packing = Packing.of(lengths, KIND, torch.device("cpu"))
    convolved, last = convolve(channels.flatten(1), conv, packing)
    out, states = delta_rule(Heads.of(KIND, convolved.view(channels.shape), scalars, A_log, dt_bias), packing)
    return out, states, last


def test_packed_sequences_are_computed_as_each_alone() -> None:
    channels, scalars, *weights = _inputs()
    out, states, last = _computed(LENGTHS, channels, scalars, *weights)
    rows = zip(channels.split(LENGTHS), scalars.split(LENGTHS), strict=True)
    alone = [_computed((len(x),), x, y, *weights) for x, y in rows]
    for got, want in zip((out, states, last), map(torch.cat, zip(*alone, strict=True)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_nothing_of_a_sequence_reaches_another() -> None:
    """Neither its values, which may be anything, nor a gradient."""
    channels, scalars, *weights = (x.requires_grad_() for x in _inputs())
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    out, states, last = _computed(LENGTHS, channels, scalars, *weights)
    mine = rows == 4
    (out[mine].square().sum() + states[4].square().sum()).backward()
    for gradient in (channels.grad, scalars.grad):
        assert gradient is not None and gradient[mine].any() and not gradient[~mine].any()
    with torch.no_grad():
        other = torch.where(mine[:, None, None], 1e3, channels)
        changed = _computed(LENGTHS, other, scalars, *weights)
    others = [i for i in range(len(LENGTHS)) if i != 4]
    assert torch.equal(changed[0][~mine], out[~mine]) and not torch.equal(changed[0][mine], out[mine])
    assert torch.equal(changed[1][others], states[others]) and torch.equal(changed[2][others], last[others])


def test_token_by_token_and_in_chunks_are_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

    channels, scalars, conv, A_log, dt_bias = _inputs()
    out, states, _last = _computed(LENGTHS, channels, scalars, conv, A_log, dt_bias)
    first = 0
    for number, length in enumerate(LENGTHS):
        x, y = channels[first : first + length], scalars[first : first + length]
        rule = torch.zeros(1, 2, 3, 5, 4)
        tail = torch.zeros(1, 3, x[0].numel())
        steps = []
        for i in range(length):
            convolved, tail = convolve_next(x[i : i + 1].flatten(1), conv, tail)
            heads = Heads.of(KIND, convolved.view(1, 2, -1), y[i : i + 1], A_log, dt_bias)
            steps.append(delta_step(heads, rule))
        got = out[first : first + length]
        torch.testing.assert_close(torch.cat(steps), got, rtol=0, atol=1e-5)
        torch.testing.assert_close(rule[0], states[number], rtol=0, atol=1e-5)
        theirs = causal_conv1d_fn(x.flatten(1).T[None], conv, activation="silu")[0].T.view(x.shape)
        q, k, v = theirs.split([5, 5, 12], dim=-1)
        b, a = y.chunk(2, dim=-1)
        g = -A_log.exp() * torch.nn.functional.softplus(a.flatten(1) + dt_bias)
        v = v.reshape(length, 6, 4)
        wanted, state = torch_recurrent_gated_delta_rule(
            *(z[None] for z in (q, k, v, g, b.flatten(1).sigmoid())),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(got.flatten(1, 2), wanted[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(states[number].flatten(0, 1), state[0], rtol=0, atol=1e-5)
        first += length
