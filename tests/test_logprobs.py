"""Vocab-parallel log-probabilities against torch's own log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

TOKENS, HIDDEN, VOCAB = 37, 16, 61


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, labels, torch.randn(2, TOKENS, generator=generator)


def _reference(temperature: float) -> list[torch.Tensor]:
    hidden, weight, labels, pull = _inputs(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    log_p = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1)
    logp = log_p.gather(-1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logp * pull[0] + entropy * pull[1]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logp.detach().float(), entropy.detach().float(), hidden.grad, weight.grad]


def _parallel(temperature: float, chunk: int) -> list[torch.Tensor]:
    """The same from the vocabulary's shards; the weight's gradient put together again."""
    from megarl.models.logprobs import token_log_probs, vocab_shard

    hidden, weight, labels, pull = _inputs(torch.float32)
    group = dist.group.WORLD
    assert group is not None
    tp, rank = group.size(), group.rank()
    rows = -(-VOCAB // tp)
    shard = vocab_shard(VOCAB, rows * tp, group)
    padded = torch.cat([weight, torch.full((rows * tp - VOCAB, HIDDEN), 7.0)])  # padding that would change the result
    mine = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    logp, entropy = token_log_probs(hidden, mine, labels, shard, temperature=temperature, chunk_size=chunk)
    (logp * pull[0] + entropy * pull[1]).sum().backward()
    assert hidden.grad is not None and mine.grad is not None
    grads = [torch.empty_like(mine) for _ in range(tp)]
    dist.all_gather(grads, mine.grad)
    return [logp.detach(), entropy.detach(), hidden.grad, torch.cat(grads)[:VOCAB]]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 1000), (0.7, 5)])
def test_values_and_gradients(ranks: Ranks, tp: int, temperature: float, chunk: int) -> None:
    wanted = _reference(temperature)
    for got in ranks.run(tp, _parallel, temperature, chunk):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def _per_token(temperature: float, chunk: int, main_grad: bool, entropy: bool) -> list[list[torch.Tensor]]:
    """Loss and gradients of a loss that is a sum over tokens, taken chunk by chunk and all at once."""
    from megarl.models.logprobs import token_log_probs, token_loss, vocab_shard

    hidden, weight, labels, pull = _inputs(torch.float32)
    group = dist.group.WORLD
    assert group is not None
    rows = -(-VOCAB // group.size())
    shard = vocab_shard(VOCAB, rows * group.size(), group)
    padded = torch.cat([weight, torch.full((rows * group.size() - VOCAB, HIDDEN), 7.0)])

    def loss(logp: torch.Tensor, of_token: torch.Tensor, part: slice) -> torch.Tensor:
        value = (pull[0][part] * logp.exp()).sum()
        return value + (pull[1][part] * of_token).sum() if entropy else value

    results = []
    for chunked in (True, False):
        mine = padded[group.rank() * rows : (group.rank() + 1) * rows].clone().requires_grad_()
        states = hidden.clone().requires_grad_()
        head = states, mine, labels, shard
        if chunked:
            if main_grad:
                mine.main_grad = torch.ones_like(mine)
            value = token_loss(*head, loss, temperature=temperature, chunk_size=chunk)
        else:
            value = loss(*token_log_probs(*head, temperature=temperature, chunk_size=chunk), slice(None))
        (value if main_grad else value * 3).backward()
        assert states.grad is not None and mine.grad is not None
        grad = mine.grad + mine.main_grad - 1 if chunked and main_grad else mine.grad
        results.append([value.detach(), states.grad, grad])
    return results


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("chunk", "main_grad", "entropy"), [(1000, False, False), (5, False, True), (5, True, True)])
def test_per_token_loss_has_the_gradients_of_the_general_one(
    ranks: Ranks, tp: int, chunk: int, main_grad: bool, entropy: bool
) -> None:
    for chunked, whole in ranks.run(tp, _per_token, 0.7, chunk, main_grad, entropy):
        for a, b in zip(chunked, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def _arriving(dtype: torch.dtype, tied: bool) -> tuple[bool, bool]:
    """As Megatron-Core's hooks see an output weight: whether they are to add its gradient, and whether it is memory of
    its own."""
    from megarl.models.logprobs import token_log_probs, vocab_shard

    hidden, weight, labels, _ = _inputs(dtype)
    weight = weight.clone().requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    if tied:
        weight.zero_out_wgrad = True
    shard = vocab_shard(VOCAB, VOCAB, dist.group.WORLD)
    token_log_probs(hidden, weight, labels, shard, temperature=1.0, chunk_size=7)[0].sum().backward()
    assert weight.grad is not None and weight.main_grad.any()
    if tied:
        assert not weight.grad.any()
    own = weight.grad.untyped_storage().data_ptr() != weight.main_grad.untyped_storage().data_ptr()
    return not weight.grad_added_to_main_grad, own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_has_arrived_takes_no_memory(ranks: Ranks, dtype: torch.dtype) -> None:
    """Where the embedding has the same weight, autograd adds its gradient to this one, and the hooks add the sum."""
    assert ranks.run(1, _arriving, dtype, False) == [(False, False)]
    assert ranks.run(1, _arriving, dtype, True) == [(True, True)]


def _frozen(by_chunks: bool) -> bool:
    """Whether the hidden states' gradient has the same bits where the output weight has none."""
    from megarl.models import logprobs

    hidden, weight, labels, pull = _inputs(torch.float32)
    shard, gradients = logprobs.vocab_shard(VOCAB, VOCAB, dist.group.WORLD), []
    for trained in (True, False):
        states = hidden.clone().requires_grad_()
        head = states, weight.clone().requires_grad_(trained), labels, shard
        add = logprobs.add_weight_gradient
        if not trained:
            logprobs.add_weight_gradient = None  # type: ignore[assignment]
        try:
            if by_chunks:
                loss = lambda logp, entropy, part: logp.dot(pull[0][part])  # noqa: E731
                logprobs.token_loss(*head, loss, temperature=1.0, chunk_size=7).backward()
            else:
                logprobs.token_log_probs(*head, temperature=1.0, chunk_size=7)[0].dot(pull[0]).backward()
        finally:
            logprobs.add_weight_gradient = add
        assert states.grad is not None
        gradients.append(states.grad)
    return torch.equal(*gradients)


@pytest.mark.parametrize("by_chunks", [True, False])
def test_a_frozen_output_weight_takes_no_gradient(ranks: Ranks, by_chunks: bool) -> None:
    assert ranks.run(1, _frozen, by_chunks) == [True]


def _output_weight_errors(temperature: float) -> dict[str, float]:
    """The output weight's gradient over four micro-batches of bf16, as a share of its norm away from float64."""
    from megarl.models.logprobs import token_log_probs, token_loss, vocab_shard

    group = dist.group.WORLD
    assert group is not None
    rows = -(-VOCAB // group.size())
    shard = vocab_shard(VOCAB, rows * group.size(), group)
    own = slice(group.rank() * rows, min(VOCAB, (group.rank() + 1) * rows))
    _, weight, _, _ = _inputs(torch.bfloat16)
    generator = torch.Generator().manual_seed(11)
    batches = [
        (
            torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16(),
            torch.randint(VOCAB, (TOKENS,), generator=generator),
            torch.randn(TOKENS, generator=generator),
        )
        for _ in range(4)
    ]
    exact = weight.double().requires_grad_()
    for hidden, labels, pull in batches:
        log_p = torch.log_softmax(hidden.double() @ exact.t() / temperature, -1)
        (log_p.gather(-1, labels[:, None])[:, 0] * pull).sum().backward()
    assert exact.grad is not None
    errors = {}
    for name in ("by chunks", "whole", "whole without main_grad"):
        mine = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
        mine[: own.stop - own.start] = weight[own]
        mine.requires_grad_()
        if name != "whole without main_grad":
            mine.main_grad = torch.zeros(mine.shape)
        for hidden, labels, pull in batches:
            head = hidden.clone().requires_grad_(), mine, labels, shard
            if name == "by chunks":
                loss = lambda logp, entropy, part, pull=pull: logp.dot(pull[part])  # noqa: E731
                token_loss(*head, loss, temperature=temperature, chunk_size=10).backward()
            else:
                token_log_probs(*head, temperature=temperature, chunk_size=10)[0].dot(pull).backward()
        got = getattr(mine, "main_grad", mine.grad)[: own.stop - own.start]
        errors[name] = float((got.double() - exact.grad[own]).norm() / exact.grad[own].norm())
    return errors


@pytest.mark.parametrize("tp", [1, 2])
def test_the_output_weights_gradient_in_bf16(ranks: Ranks, tp: int) -> None:
    """A loss that sees whole sequences adds it to `main_grad` in fp32, as one that is a sum over tokens does."""
    for errors in ranks.run(tp, _output_weight_errors, 0.7):
        assert errors["whole"] <= errors["by chunks"] < 0.01
        assert errors["whole"] < errors["whole without main_grad"]


def _empty() -> tuple[float, float]:
    from megarl.models.logprobs import token_log_probs, vocab_shard

    group = dist.group.WORLD
    assert group is not None
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.zeros(VOCAB, HIDDEN, requires_grad=True)
    logp, entropy = token_log_probs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), vocab_shard(VOCAB, VOCAB, group), temperature=1.0
    )
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    return float(logp.sum()), float(weight.grad.abs().max())


def test_no_tokens_give_zero_gradients(ranks: Ranks) -> None:
    assert ranks.run(1, _empty) == [(0.0, 0.0)]
