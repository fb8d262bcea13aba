"""The training layout's log-probabilities against `transformers`, from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from full_weights import random_weights
from ranks import Ranks
from tiny_engines import ARCHITECTURES
from training_cases import Case, actor_in

from megarl.types import Batch, batch_of

FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(61, (n,), generator=generator).tolist() for n in (7, 3, 12, 5)]
    return batch_of([row[:1] for row in rows], [row[1:] for row in rows], range(4))


def _hf_log_probs(family: str) -> torch.Tensor:
    import transformers

    arch = ARCHITECTURES[family]
    config: Any = getattr(transformers, f"{FAMILIES[family]}Config")(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.ffn_hidden_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        max_position_embeddings=arch.max_position_embeddings,
        rms_norm_eps=arch.norm_eps,
        rope_theta=arch.rope_theta,
        tie_word_embeddings=arch.tie_word_embeddings,
    )
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).float().eval()
    missing, unexpected = model.load_state_dict(random_weights(arch, 7), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    batch, out = _batch(), []
    for i in range(len(batch)):
        tokens = batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0], -1)
        out.append(torch.cat([torch.zeros(1), log_p[:-1].gather(-1, tokens[1:, None])[:, 0]]))
    return torch.cat(out)


def _megatron_log_probs(case: Case, family: str) -> torch.Tensor:
    arch = ARCHITECTURES[family]
    weights = random_weights(arch, 7)
    with actor_in(case, arch) as actor:
        actor.load(lambda tensor: weights[tensor.name].view(tensor.shape))
        return actor.log_probs(_batch(), [[0, 1], [2, 3]], 1.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", [Case(), Case(tp=2), Case(pp=2), Case(tp=2, pp=2), Case(tp=4)], ids=lambda c: c.name)
def test_log_probs(ranks: Ranks, family: str, case: Case) -> None:
    wanted = _hf_log_probs(family)
    assert wanted.std() > 0.5
    for got in ranks.run(case.world, _megatron_log_probs, case, family):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
