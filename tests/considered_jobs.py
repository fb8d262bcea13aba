"""Jobs of real models' shapes, for what is computed before anything runs."""

from __future__ import annotations

from typing import Any

from architectures import alike

from megarl.config import build_config
from megarl.estimate.job import Job
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.parts.experts import MixtureOfExperts
from megarl.parallel.layout import GenerationLayout, TrainLayout

LLAMA_3_8B = alike(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_position_embeddings=8192,
)
QWEN3_235B = alike(
    family="qwen3_moe",
    num_layers=94,
    hidden_size=4096,
    ffn_hidden_size=1536,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    qk_norm=True,
    moe=MixtureOfExperts(num_experts=128, experts_per_token=8, norm_topk_prob=True),
)
GLM_45_AIR = FAMILIES["Glm4MoeForCausalLM"](
    {
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "vocab_size": 151_552,
        "max_position_embeddings": 131_072,
    }
)
GEMMA_3_1B = FAMILIES["Gemma3ForCausalLM"](
    {
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 262_144,
        "max_position_embeddings": 32_768,
    }
)
GPT_OSS_20B = FAMILIES["GptOssForCausalLM"](
    {
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 201_088,
    }
)
QWEN3_NEXT_80B = FAMILIES["Qwen3NextForCausalLM"](
    {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "vocab_size": 151_936,
        "max_position_embeddings": 262_144,
    }
)
_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V3 = FAMILIES["DeepseekV3ForCausalLM"](
    {
        **_DEEPSEEK,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
    }
)
MOONLIGHT = FAMILIES["DeepseekV3ForCausalLM"](
    {
        **_DEEPSEEK,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "intermediate_size": 11_264,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "vocab_size": 163_840,
        "max_position_embeddings": 8192,
    }
)


def job(
    arch: Architecture = LLAMA_3_8B,
    *,
    gpus: int = 8,
    tp: int = 2,
    pp: int = 2,
    chunks: int = 1,
    generation_tp: int = 2,
    generation_ep: int = 1,
    **changes: Any,
) -> Job:
    """8 x 64 sequences of 1024 + 3072 tokens in mini-batches of 256, micro-batches of 8192 tokens; bf16.

    Args:
        changes: configuration keys below `actor_rollout_ref`, with "__" for ".".
    """
    policy: dict[str, Any] = {
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_max_token_len_per_gpu": 8192,
            "megatron": {"sequence_parallel": True},
        },
        "rollout": {"n": 8, "name": "vllm", "gpu_memory_utilization": 0.5},
    }
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        at = policy
        for name in parents:
            at = at.setdefault(name, {})
        at[leaf] = value
    per_node = min(gpus, 8)
    config = build_config(
        {
            "data": {"train_batch_size": 64, "max_prompt_length": 1024, "max_response_length": 3072},
            "actor_rollout_ref": policy,
            "trainer": {"nnodes": gpus // per_node, "n_gpus_per_node": per_node},
        }
    )
    return Job(
        config=config,
        arch=arch,
        train=TrainLayout(ranks=range(gpus), tp=tp, pp=pp, chunks=chunks),
        generation=GenerationLayout(ranks=range(gpus), tp=generation_tp, ep=generation_ep),
        reference=config.needs_reference,
    )


def slowed(stages: list[float], micro_batches: int, chunks: int = 1) -> float:
    """How many times as long a pass takes as if no stage of a pipeline ever waited; `stages` is the work of each."""
    slowest = max(stages)
    whole = micro_batches * slowest + (sum(stages) - slowest) / chunks
    return whole / (micro_batches * sum(stages) / len(stages))


def with_output(pp: int, layers: float, output: float) -> list[float]:
    """The work of stages that share the layers equally, the last of which has the output as well."""
    return [*[layers / pp] * (pp - 1), layers / pp + output]
