"""The GPU's kernels against torch's own operators, and that a policy equals itself bit by bit through them."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from training_cases import Case, actor_in, fixed_batch, mini_batch_of, update

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, COLUMNS = 33, 9000  # more than two of the kernels' blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("valid", "temperature", "entropy"), [(9000, 1.0, False), (8999, 0.7, True), (0, 1.0, False)])
def test_softmax(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, valid: int, temperature: float, entropy: bool
) -> None:
    from megarl.models import softmax

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    logits = (draw(ROWS, COLUMNS) * 5).to(dtype)
    labels = torch.randint(-1000, 10_000, (ROWS,), generator=generator, device="cuda")
    normaliser = (logits[:, :valid].float() / temperature).logsumexp(-1).nan_to_num(neginf=0.0)
    pulls = draw(ROWS), draw(ROWS) if entropy else None
    results = []
    for triton in (True, False):
        monkeypatch.setattr(softmax, "TRITON", triton)
        statistics = softmax.statistics(logits, labels, valid, temperature)
        gradient = softmax.gradient_(
            logits.clone(), labels, valid, temperature, normaliser, draw(ROWS) * 0 + 2, pulls[0], pulls[1]
        )
        results.append((*statistics, gradient))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("half", [12, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, half: int) -> None:
    """Of whole heads of 24 channels, and of half of each."""
    from megarl.models import rope

    states = torch.randn(50, 14, 24, device="cuda", dtype=dtype)[:, 2:].requires_grad_()  # heads within a wider tensor
    angles = torch.rand(50, half, device="cuda") * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    results = []
    for triton in (True, False):
        monkeypatch.setattr(rope, "TRITON", triton)
        turned = rope.apply_rope(states, cos_sin)
        results.append((turned, *torch.autograd.grad(turned, states, torch.ones_like(turned))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)


def test_weight_gradients_are_added_in_fp32() -> None:
    from megarl.models.weight_gradient import add_weight_gradient

    grad, inputs = (torch.randn(100, n, device="cuda", dtype=torch.bfloat16) for n in (48, 32))
    main_grad = torch.full((48, 32), 1e-3, device="cuda")
    add_weight_gradient(main_grad, grad, inputs)
    add_weight_gradient(main_grad, grad, inputs)
    torch.testing.assert_close(main_grad, 2 * grad.float().t() @ inputs.float() + 1e-3, rtol=1e-4, atol=1e-4)


def test_packed_attention_with_fewer_key_heads() -> None:
    from megarl.models.attention import packed_sequences
    from megarl.models.packed_attention import packed_attention, padded_attention

    lengths = [70, 1, 130]
    packed = packed_sequences(lengths, torch.device("cuda"))
    assert packed.slots is not None
    tensors = [torch.randn(sum(lengths), h, 64, device="cuda", dtype=torch.bfloat16) for h in (6, 2, 2)]
    query, key, value = (x.requires_grad_() for x in tensors)
    where = dict(cu_seqlens=packed.cu_seqlens_q, longest=packed.max_seqlen_q, slots=packed.slots)
    out = packed_attention(query, key, value, **where)
    rows = zip(*(_rows(x, lengths) for x in tensors), strict=True)
    alone = torch.cat([padded_attention(*parts)[0] for parts in rows])
    torch.testing.assert_close(out, alone, rtol=2e-2, atol=2e-2)
    pull = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(y, tensors, pull) for y in (out, alone)), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


def _rows(x: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return [part.unsqueeze(0) for part in x.split(lengths)]


def _deviation(which: str) -> tuple[float, float]:
    """Largest |ratio - 1| of the first and of the second of two equal updates, in bf16."""
    from megarl.algorithms.losses.vanilla import PolicyClip

    case = Case(config={"actor": {"megatron": {"transformer_engine": which}}})
    with actor_in(case, dtype="bfloat16", lr=1e-2) as actor:
        batch = fixed_batch().with_(temperature=0.8)
        old = actor.log_probs(batch, mini_batch_of(actor, 3))
        batch = batch.with_(old_logp=old, advantages=torch.ones_like(old))
        loss = PolicyClip(clip_low=0.2, clip_high=0.2)
        first, second = (update(actor, batch, loss, size=3) for _ in range(2))
        return first["ratio_max_deviation"], second["ratio_max_deviation"]


@pytest.mark.parametrize("which", ["auto", "none"])
def test_first_ratio_is_exactly_one(ranks: Ranks, which: str) -> None:
    first, second = ranks.run(1, _deviation, which)[0]
    assert first == 0.0 and second > 0.0
