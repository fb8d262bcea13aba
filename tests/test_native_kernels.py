"""The Triton kernels against plain torch: on a GPU where there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from architectures import changed
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is not installed")

from typing import Any  # noqa: E402

import torch.nn.functional as F  # noqa: E402
from selection import quick  # noqa: E402
from tiny_engines import GROUPS, assert_same, engine_of  # noqa: E402
from tiny_families import ARCHITECTURES  # noqa: E402

from megarl.models import delta_rule  # noqa: E402
from megarl.models.activations import quick_gelu  # noqa: E402
from megarl.models.delta_rule import Heads  # noqa: E402
from megarl.models.rope import rope_table  # noqa: E402
from megarl.models.sizes import BLOCK_SIZE, blocks_for  # noqa: E402
from megarl.rollout.native import kernels  # noqa: E402
from megarl.rollout.native.kernels import draw as draw_kernel  # noqa: E402
from megarl.rollout.native.kernels.delta import delta_step  # noqa: E402
from megarl.rollout.native.kernels.draw import draw  # noqa: E402
from megarl.rollout.native.kernels.elementwise import add_and_norm, silu_and_mul  # noqa: E402
from megarl.rollout.native.kernels.experts import ClampedGLU, mixture  # noqa: E402
from megarl.rollout.native.kernels.paged_attention import attend  # noqa: E402
from megarl.rollout.native.kernels.rotate import rotate_and_store  # noqa: E402
from megarl.rollout.native.kv_cache import KVCache  # noqa: E402
from megarl.rollout.native.parts.grouped_query import GatheredAttention  # noqa: E402
from megarl.rollout.native.parts.tokens import NewTokens  # noqa: E402
from megarl.rollout.native.sampler import _inverse_cdf, uniform  # noqa: E402
from megarl.types import SamplingParams  # noqa: E402

DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]  # numpy, which interprets, has no bfloat16
LIMIT = 0.5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def loops_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter turns an array of one number into a loop bound as numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)


# --------------------------------------------------------------------------------------------------- between products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 96), (1, 1536)])
def test_elementwise(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    residual, x, weight = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1), noise(shape[1], dtype=dtype)
    total, normed = add_and_norm(residual, x, weight, 1e-5)
    assert torch.equal(total, residual + x)
    want = F.rms_norm((residual + x).float(), weight.shape, weight.float(), 1e-5)
    torch.testing.assert_close(normed.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    gate, up = x.chunk(2, dim=-1)
    want = F.silu(gate.float()) * up.float()
    torch.testing.assert_close(silu_and_mul(x).float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# ---------------------------------------------------------------------------------------------------------- attention


def filled_cache(heads: int, dim: int, positions: list[int], dtype: torch.dtype) -> KVCache:
    """A cache full of noise; sequence i is in slot len(positions) - i, its blocks in no order."""
    arch = changed(ARCHITECTURES["qwen2"], num_layers=1, num_key_value_heads=heads, num_attention_heads=heads)
    blocks = sum(blocks_for(p + 1) for p in positions) + 1
    cache = KVCache(
        changed(arch, head_dim=dim),
        tp=1,
        blocks=blocks,
        max_num_seqs=len(positions),
        max_model_len=max(positions) + 1,
        dtype=dtype,
        device=torch.device(DEVICE),
    )
    cache.layers[0].copy_(noise(*cache.layers[0].shape, dtype=dtype, seed=2))
    order = (torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(3)) + 1).tolist()
    for i, p in enumerate(positions):
        held = [order.pop() for _ in range(blocks_for(p + 1))]
        cache.tables[len(positions) - i, : len(held)] = torch.tensor(held)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1, 3, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "positions", "more"),
    [
        (4, 2, 8, [0, 15, 16, 200], {}),
        (4, 2, 16, [0, 15, 16, 200], {"partial_rotary_factor": 0.5}),
        (6, 1, 24, [64, 63], {}),
        (6, 1, 24, [64, 63], {"partial_rotary_factor": 0.25}),
        (3, 3, 16, [130], {}),
        (12, 2, 128, [300, 1, 90], {}),
        (4, 2, 8, [0, 6, 7, 300], {"sliding_window": 7, "softmax_scale": 0.3}),
        (4, 1, 16, [63, 64, 199, 200], {"sliding_window": 64}),
        (4, 4, 16, [63, 64, 300], {"sliding_window": 130}),
        (4, 2, 16, [0, 15, 16, 200], {"sinks": True}),
        (6, 2, 8, [0, 6, 7, 300], {"sinks": True, "sliding_window": 7}),
    ],
)
def test_attention_equals_torch(
    heads: int,
    kv_heads: int,
    dim: int,
    positions: list[int],
    more: dict[str, Any],
    splits: int,
    dtype: torch.dtype,
) -> None:
    rows = len(positions)
    cache, want_cache = (filled_cache(kv_heads, dim, positions, dtype) for _ in range(2))
    kind = changed(ARCHITECTURES["qwen2"], head_dim=dim, **more).layer(0).attention
    rope = rope_table(kind, 512, DEVICE).to(dtype)
    qkv = noise(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    at = torch.tensor(positions, device=DEVICE)
    slots = torch.arange(rows, 0, -1, device=DEVICE)
    blocks = cache.tables[slots, at // BLOCK_SIZE].long()

    sinks = 3 * noise(heads, dtype=dtype, seed=4) if kind.sinks else None
    longest = max(positions) + 1
    gathered = GatheredAttention(kind, want_cache, rope, slots=slots, positions=at, longest=longest)
    want = gathered(0, q, k, v, sinks)
    keys, values = cache.layers[0]
    rotated = rotate_and_store(q, k, v, rope, keys=keys, values=values, positions=at, blocks=blocks)
    rule = dict(window=kind.sliding_window, scale=kind.softmax_scale, sinks=sinks)
    got = attend(rotated, keys, values, tables=cache.tables, slots=slots, positions=at, splits=splits, **rule).flatten(
        1
    )
    torch.testing.assert_close(cache.layers[0], want_cache.layers[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_what_is_beyond_a_sequence_counts_for_nothing() -> None:
    positions = [20, 37]
    cache = filled_cache(2, 16, positions, torch.float32)
    slots, at = torch.arange(2, 0, -1, device=DEVICE), torch.tensor(positions, device=DEVICE)
    q = noise(2, 4, 16)
    keys, values = cache.layers[0]
    want = attend(q, keys, values, tables=cache.tables, slots=slots, positions=at)
    for i, p in enumerate(positions):
        last = int(cache.tables[len(positions) - i, p // BLOCK_SIZE])
        cache.layers[0][:, last, :, p % BLOCK_SIZE + 1 :] = torch.nan
    cache.layers[0][:, 0] = torch.nan
    assert torch.equal(attend(q, keys, values, tables=cache.tables, slots=slots, positions=at), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize(("heads", "rank", "turned"), [(4, 16, 8), (20, 24, 6), (40, 512, 64)])
def test_latent_attention_equals_torch(heads: int, rank: int, turned: int, splits: int, dtype: torch.dtype) -> None:
    """The values are the first channels of the keys, of which there is one head; a program takes part of the others."""
    positions = [0, 15, 16, 200]
    cache, slots = filled_cache(1, rank + turned, positions, dtype), torch.arange(4, 0, -1, device=DEVICE)
    at, q = torch.tensor(positions, device=DEVICE), noise(4, heads, rank + turned, dtype=dtype)
    keys, places = cache.layers[0][0], dict(slots=slots, positions=at)
    got = attend(q, keys, None, tables=cache.tables, value_dim=rank, scale=0.1, splits=splits, **places)
    tokens = NewTokens(cache, torch.zeros(512, 2, 1, device=DEVICE, dtype=dtype), longest=201, **places)
    latents = tokens.gather(0)[0]
    want = tokens.attend(q, latents, latents[..., :rank], scale=0.1)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# --------------------------------------------------------------------------------------------------------- delta rule


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("per_key", "key_dim", "value_dim"), [(1, 8, 4), (2, 6, 20), (2, 128, 128)])
def test_delta_step_equals_torch(per_key: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """The states of the sequences in other slots stay."""
    rows, n = 3, 2
    states, slots = (
        noise(5, n, per_key, key_dim, value_dim),
        torch.tensor([[4, 9], [0, 9], [3, 9]], device=DEVICE)[:, 0],
    )
    heads = Heads(
        query=noise(rows, n, key_dim, seed=1),
        key=noise(rows, n, key_dim, seed=2) * key_dim**-0.5,
        value=noise(rows, n, per_key * value_dim + 3, dtype=dtype, seed=3)[..., 3:].unflatten(-1, (per_key, value_dim)),
        decay=-noise(rows, n, per_key, seed=4).abs(),
        strength=noise(rows, n, per_key, seed=5).sigmoid(),
    )
    after = states[slots]
    want = delta_rule.delta_step(heads, after)
    want_states = states.index_copy(0, slots, after)
    got = delta_step(heads, states, slots)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(states, want_states, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "each", "experts", "parts", "hidden", "ffn"),
    [
        (1, 2, 4, 1, 32, 24),
        (7, 3, 6, 3, 70, 33),  # matrices that no tile divides, in both directions
        (50, 2, 3, 1, 32, 130),  # blocks of 64 rows, of which one is full
        (300, 4, 5, 1, 40, 16),  # blocks of 128, and pairs in several chunks
    ],
)
def test_experts_equal_torch(
    tokens: int, each: int, experts: int, parts: int, hidden: int, ffn: int, dtype: torch.dtype, clamped: bool
) -> None:
    """Parts of the experts add up to all; the last expert gets no token, and its weights are not numbers."""
    x, weights = noise(tokens, hidden, dtype=dtype), noise(tokens, each, seed=1).softmax(-1)
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, -1] = -1
    chosen = scores.topk(each).indices.to(DEVICE)
    gate_up = noise(experts, 2 * ffn, hidden, dtype=dtype, seed=3) * hidden**-0.5
    down = noise(experts, hidden, ffn, dtype=dtype, seed=4) * ffn**-0.5
    gate_up[-1] = torch.nan
    want = torch.zeros(tokens, hidden, device=DEVICE)
    biases = noise(experts, 2 * ffn, dtype=dtype, seed=5), noise(experts, hidden, dtype=dtype, seed=6)
    for i in range(each):
        gate_and_up = torch.einsum("th,tfh->tf", x.float(), gate_up[chosen[:, i]].float())
        if clamped:
            gate, up = (gate_and_up + biases[0][chosen[:, i]]).clamp(max=LIMIT).chunk(2, dim=-1)
            made = torch.einsum("tf,thf->th", quick_gelu(gate) * (up.clamp(min=-LIMIT) + 1), down[chosen[:, i]].float())
            made += biases[1][chosen[:, i]]
        else:
            gate, up = gate_and_up.chunk(2, dim=-1)
            made = torch.einsum("tf,thf->th", F.silu(gate) * up, down[chosen[:, i]].float())
        want += weights[:, i : i + 1] * made
    got = torch.zeros_like(want)
    for first in range(0, experts, experts // parts):
        mine = slice(first, first + experts // parts)
        glu = ClampedGLU(biases[0][mine], biases[1][mine], limit=LIMIT, share=1.0) if clamped else None
        part = mixture(x, weights, chosen, gate_up[mine], down[mine], first=first, num_experts=experts, clamped=glu)
        assert part.dtype == dtype
        got += part
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# ------------------------------------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [16, 4096])
def test_draw_equals_torch(monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float, dtype: torch.dtype) -> None:
    monkeypatch.setattr(draw_kernel, "CHUNK", chunk)
    rows, vocab = 64, 333
    logits = (2 * noise(rows, vocab + 7, dtype=dtype))[:, :vocab]  # rows are not dense
    logits[:, 40:70] = -torch.inf  # whole chunks of impossible tokens
    table = torch.stack((torch.arange(rows) * 7919 - 5, torch.arange(rows) % 5), dim=1).to(DEVICE)
    seeds, positions = table.unbind(1)
    token_ids, logp = draw(logits, temperature=temperature, seeds=seeds, positions=positions)
    scaled = logits.float() / temperature
    want = _inverse_cdf(scaled, uniform(seeds, positions))
    assert torch.equal(token_ids, want)
    torch.testing.assert_close(logp, scaled.log_softmax(-1).gather(1, want[:, None])[:, 0], atol=1e-5, rtol=0)


def test_draw_stays_exact_over_a_large_vocabulary() -> None:
    rows, vocab = 16 if DEVICE == "cpu" else 500, 150_000
    seeds, positions = torch.arange(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    token_ids, *_ = draw(torch.zeros(rows, vocab, device=DEVICE), temperature=1.0, seeds=seeds, positions=positions)
    assert torch.equal(token_ids, (uniform(seeds, positions) * vocab).long())


def test_draw_survives_nan() -> None:
    logits = torch.full((2, 10), torch.nan, device=DEVICE)
    where = torch.arange(2, device=DEVICE)
    token_ids, logp = draw(logits, temperature=1.0, seeds=where, positions=where)
    assert (token_ids < 10).all() and logp.isnan().all()


# --------------------------------------------------------------------------------------------------- the whole engine


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/test_native_cuda.py does it with compiled kernels")
@pytest.mark.parametrize(
    "family",
    quick(["qwen2", "qwen3", "mixtral", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "glm4_moe"], *range(7)),
)
def test_engine_with_kernels_equals_engine_without(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    how, prompts = SamplingParams(temperature=0.9, max_tokens=5), GROUPS[:: 8 if ARCHITECTURES[family].moe else 3]
    want = engine_of(ARCHITECTURES[family]).generate(prompts, how, seeds=range(len(prompts)))
    monkeypatch.setattr(kernels, "on", lambda device: True)
    engine = engine_of(ARCHITECTURES[family], enforce_eager=True)
    got = engine.generate(prompts, how, seeds=range(len(prompts)))
    assert_same(got, want)
