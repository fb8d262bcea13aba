"""A tiny `config.json` for every registered family, and one for each thing that a family's configs differ in."""

from __future__ import annotations

from typing import Any

from megarl.models.families import FAMILIES

VOCAB = 61
"""Divisible by no tensor-parallel size."""


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **fields,
    }


def _qwen3_moe(**fields: Any) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", **(experts | fields))


def _glm4_moe(**fields: Any) -> dict[str, Any]:
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    }
    return _config("Glm4MoeForCausalLM", "glm4_moe", **(experts | fields))


def _latent(
    architecture: str = "DeepseekV3ForCausalLM", model_type: str = "deepseek_v3", **fields: Any
) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "head_dim": ...,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }
    config = _config(architecture, model_type, **(sizes | fields))
    return {key: value for key, value in config.items() if value is not ...}


def _linear(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.25,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "rms_norm_eps": 1e-2,  # of heads whose output is near 0 a norm shows the rounding
    }
    config = _config(architecture, model_type, **(sizes | fields))
    return {key: value for key, value in config.items() if value is not ...}


# with a base of 100, one of the four frequencies is between those that stay and those that are stretched whole
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _config("LlamaForCausalLM", "llama", rope_theta=500_000.0),
    # a length of 16 puts some of the four frequencies on either side of Llama 3.1's two limits
    "llama3": _config(
        "LlamaForCausalLM",
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        tie_word_embeddings=True,
    ),
    "llama_linear": _config("LlamaForCausalLM", "llama", rope_scaling={"type": "linear", "factor": 2.5}),
    "mistral": _config("MistralForCausalLM", "mistral", sliding_window=128),
    "qwen2": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=16,
        max_window_layers=1,
    ),
    "qwen2_yarn": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        rope_theta=100.0,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4},
    ),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3", head_dim=16),
    "mixtral": _config("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _qwen3_moe(norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1),
    "glm4_moe": _glm4_moe(
        num_hidden_layers=4,
        attention_bias=True,
        use_qk_norm=True,
        routed_scaling_factor=2.5,
        n_shared_experts=2,
        rope_theta=1_000_000,
    ),
    "glm4_moe_groups": _glm4_moe(n_group=4, topk_group=2),
    # windows shorter than the tests' sequences, of which the first and the third layer see less than the second
    "gemma3_text": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_hidden_layers=4,
        num_key_value_heads=1,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=12,
        sliding_window=4,
        sliding_window_pattern=2,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
    ),
    "gpt_oss": _config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_hidden_layers=4,
        intermediate_size=24,
        num_local_experts=6,
        num_experts_per_tok=3,
        attention_bias=True,
        sliding_window=4,
        swiglu_limit=0.5,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_theta=150_000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
    # Moonlight's kind: no narrow queries, no groups, no YaRN
    "deepseek_v3": _latent(rope_theta=50_000.0),
    "deepseek_v3_yarn": _latent(
        q_lora_rank=20,
        qk_rope_head_dim=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        n_shared_experts=1,
        rope_theta=100.0,
        rope_scaling=_YARN,
    ),
    "glm4_moe_lite": _latent(
        *("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
        q_lora_rank=20,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        **dict.fromkeys(("first_k_dense_replace", "scoring_func", "topk_method", "num_nextn_predict_layers"), ...),
        n_shared_experts=1,
        routed_scaling_factor=1.8,
        rope_theta=1e6,
    ),
    "qwen3_next": _linear(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        rope_theta=1e7,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "qwen3_5_text": _linear(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        linear_num_key_heads=8,
        tie_word_embeddings=True,
        partial_rotary_factor=...,
        full_attention_interval=...,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), ...),
        shared_expert_intermediate_size=...,
    ),
    "qwen3_5_moe_text": _linear("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", rope_theta=1e7),
    "olmo2": _config("Olmo2ForCausalLM", "olmo2", rope_theta=500_000.0),
    "minimax_m2": _config(
        "MiniMaxM2ForCausalLM", "minimax_m2", num_local_experts=8, num_experts_per_tok=4, rotary_dim=4, rope_theta=5e6
    ),
    "qwen3_moe_plain": _qwen3_moe(norm_topk_prob=False, tie_word_embeddings=True),
}

ARCHITECTURES = {name: FAMILIES[config["architectures"][0]](config) for name, config in CONFIGS.items()}
EXPERTS = [name for name, arch in ARCHITECTURES.items() if arch.moe]
