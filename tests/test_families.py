"""Every registered family: its config, its weights' names, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import changed
from hugging_face import hugging_face, saved_shapes
from ranks import Ranks
from tiny_families import ARCHITECTURES, CONFIGS

import megarl.models.families
from megarl.models.families import FAMILIES, classifier_of, language_model_of, read_architecture
from megarl.models.parts.experts import MixtureOfExperts
from megarl.models.parts.gated_delta import GatedDelta
from megarl.models.rope import rope_frequencies, rope_table
from megarl.models.weights import logical_tensors
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout


def test_every_family_is_registered_and_in_the_test_table() -> None:
    """Fails with what the author of a new family still has to do."""
    folder = Path(megarl.models.families.__file__).parent
    files = {file.stem for file in folder.glob("*.py")} - {"__init__", "fields", "of_user"}
    registered = {function.__module__.rsplit(".", 1)[1] for function in FAMILIES.values()}
    assert files == registered, f"register {files - registered} in FAMILIES of megarl/models/families/__init__.py"
    tested = {config["architectures"][0] for config in CONFIGS.values()}
    assert set(FAMILIES) == tested, (
        f"add a tiny config of {set(FAMILIES) - tested} to CONFIGS in tests/tiny_families.py"
    )
    for name, arch in ARCHITECTURES.items():
        module = FAMILIES[CONFIGS[name]["architectures"][0]].__module__.rsplit(".", 1)[1]
        assert arch.family == module, f"{name}: Architecture.family is {arch.family!r}, its module is {module!r}"


def test_classifiers_are_named_as_in_transformers() -> None:
    for name in FAMILIES:
        classifier = classifier_of(name)
        assert language_model_of(classifier) == name
        without = ("Glm4Moe", "Glm4MoeLite", "MiniMaxM2", "Qwen3_5Moe")
        assert name.removesuffix("ForCausalLM") in without or hasattr(transformers, classifier)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_the_names_and_shapes_of_hugging_faces_files(name: str, tmp_path: Path) -> None:
    ours = {tensor.name: tensor.hf_shape for tensor in logical_tensors(ARCHITECTURES[name]).values()}
    theirs = saved_shapes(name, tmp_path)
    assert ours == theirs, f"only in ours: {set(ours) - set(theirs)}; only in theirs: {set(theirs) - set(ours)}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_transformers_wrote_describes_the_same_architecture(name: str, tmp_path: Path) -> None:
    """transformers 5 spells some fields differently from the configs of the table, which are as published."""
    config = hugging_face(name).config.to_dict() | {"architectures": CONFIGS[name]["architectures"]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    assert read_architecture(str(tmp_path)) == ARCHITECTURES[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_frequencies_are_hugging_faces(name: str) -> None:
    """Of each layer, where they differ by layer."""
    model = hugging_face(name)
    for number, layer in enumerate(ARCHITECTURES[name].each_layer):
        if isinstance(layer.attention, GatedDelta):  # rotates nothing
            continue
        kind = model.config.layer_types[number] if hasattr(model.config, "layer_types") else None
        of_kind = f"{kind}_inv_freq"
        theirs = getattr(model.model.rotary_emb, of_kind if hasattr(model.model.rotary_emb, of_kind) else "inv_freq")
        torch.testing.assert_close(rope_frequencies(layer.attention, "cpu"), theirs, rtol=1e-6, atol=0)


def _megatron_rotary_table(name: str) -> torch.Tensor:
    from megarl.parallel.cpu import enable_cpu_ranks

    enable_cpu_ranks()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    attention = ARCHITECTURES[name].layer(0).attention
    rotary = RotaryEmbedding(attention.head_dim, rotary_percent=1.0, cp_group=torch.distributed.group.WORLD)
    rotary.inv_freq = rope_frequencies(attention, "cpu")  # as `build_chunks` does for Transformer Engine
    angles = rotary(40)[:, 0, 0, : attention.head_dim // 2]
    return torch.stack((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("name", ["llama", "llama3", "llama_linear"])
def test_megatrons_rotary_module_takes_our_frequencies(ranks: Ranks, name: str) -> None:
    (table,) = ranks.run(1, _megatron_rotary_table, name)
    assert torch.equal(table, rope_table(ARCHITECTURES[name].layer(0).attention, 40, "cpu"))


_YARN = CONFIGS["deepseek_v3_yarn"]["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic"}},
            "llama: rope type 'dynamic' is not supported (only 'defa",
        ),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "field 'factor' is missing"),
        ("qwen2_yarn", {"rope_theta": 1}, "rope_theta = 1.0 must be above 1 with YaRN"),
        (
            "qwen2_yarn",
            {"rope_scaling": _YARN},
            "mscale and mscale_all_dim of rope type 'yarn' are not supported",
        ),
        ("llama", {"hidden_act": "gelu"}, "llama: hidden_act = 'gelu' is not supported (only 'silu')"),
        ("llama", {"partial_rotary_factor": 0.5}, "llama: partial_rotary_factor = 0.5 is not supported (only 1.0)"),
        ("mistral", {"sliding_window": 64}, "mistral: sliding_window = 64 is less than max_position_embeddings = 128"),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "mistral: sliding_window = 4096 is less"),
        ("mixtral", {"sliding_window": 64}, "mixtral: sliding_window = 64 is less than max_position_embeddings = 128"),
        (  # what transformers then takes
            "mistral",
            {"sliding_window": ..., "max_position_embeddings": 8192},
            "mistral: sliding_window = 4096 is less than max_position_embeddings = 8192",
        ),
        (  # as the README of Qwen2.5 says to write into a config.json, which transformers 5 has written
            "qwen2",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "qwen2: rope_parameters and rope_scaling say different things; leave one of them out",
        ),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
            "qwen3: rope_parameters of their own for each kind of layer are not supported",
        ),
        ("llama", {"rope_scaling": ["linear"]}, "a field has a value of another kind than it should have: "),
        ("llama", {"num_hidden_layers": "2"}, "num_layers must be a whole number from 1 to 10000, not '2'"),
        ("llama", {"rms_norm_eps": "x"}, "norm_eps must be a finite number from 0 on, not 'x'"),
        ("llama", {"rope_theta": -1}, "rope_theta must be a finite number above 0, not -1"),
        ("llama", {"num_hidden_layers": 2**31}, "num_layers must be a whole number from 1 to 10000, not 2147483648"),
        ("qwen3", {"head_dim": None}, "head_dim must be a whole number from 1 to 2147483647, not None"),
        ("qwen2", {"use_sliding_window": True}, "qwen2: use_sliding_window = true is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"]}, "qwen3: layer_types with 'sliding_attention' is not"),
        ("qwen3", {"head_dim": ...}, "field 'head_dim' is missing"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "qwen3_moe: decoder_sparse_step = 2 is not supported (only 1)"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "qwen3_moe: mlp_only_layers = [1] is not supported (only [])"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 experts per token of 6 experts"),
        ("mixtral", {"num_experts_per_tok": 1}, "norm_topk_prob with one expert per token makes every weight 1"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = False with sigmoid scores is not supported"),
        ("glm4_moe", {"n_group": 3, "topk_group": 2}, "2 of 3 groups of 8 experts: n_group must divide the experts"),
        ("glm4_moe", {"n_group": 2}, "4 experts per token of 1 groups: Megatron-Core would score a group by other"),
        ("glm4_moe", {"n_group": 4}, "4 experts per token of 1 groups of 2 experts: they hold too few"),
        ("glm4_moe", {"n_group": 8, "topk_group": 2}, "4 experts per token of 2 groups of 1 experts: they hold"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor = 0 is not supported: Megatron-Core"),
        ("glm4_moe", {"num_experts_per_tok": 4.0}, "experts_per_token must be a whole number from 1 to 10000, not 4.0"),
        ("glm4_moe", {"n_group": 4.0, "topk_group": 2}, "num_groups must be a whole number from 1 to 10000, not 4.0"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number from 0 on, not -1"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "x"}}, "factor must be a finite number above 0"),
        ("glm4_moe", {"partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1 rotates 0 of a head's 8 channels"),
        ("glm4_moe", {"hidden_act": "gelu"}, "glm4_moe: hidden_act = 'gelu' is not supported (only 'silu')"),
        ("gemma3_text", {"attention_bias": True}, "gemma3_text: attention_bias = True is not supported (only False)"),
        ("gemma3_text", {"hidden_activation": "silu"}, "gemma3_text: hidden_activation = 'silu' is not supported"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported (only"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma3_text", {"sliding_window": None}, "gemma3_text: sliding_window must be a number of tokens, not null"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number from 1 on, not"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a finite number above 0, not 0"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}, "layer_types must be 'sliding_attention' or 'full_"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "'full_attention' for each of the 4 layers"),
        ("gemma3_text", {"num_hidden_layers": 2**31}, "num_layers must be a whole number from 1 to 10000, not 2147483"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn"}}, "gemma3_text: rope type 'yarn' is not supported"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "gemma3_text: rope_parameters must be those of"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "gpt_oss: weights quantized by 'mxfp4' are not",
        ),
        ("gpt_oss", {"attention_bias": False}, "gpt_oss: attention_bias = False is not supported (only True)"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "gpt_oss: swiglu_alpha = 1.0 is not supported (only 1.702)"),
        ("gpt_oss", {"swiglu_limit": 0}, "limit must be a finite number above 0, not 0"),
        ("gpt_oss", {"sliding_window": None}, "gpt_oss: sliding_window must be a number of tokens, not null"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be 'sliding_attention' or 'full_attention'"),
        (
            "gpt_oss",
            {"rope_scaling": {"rope_type": "llama3"}},
            "gpt_oss: rope type 'llama3' is not supported (only 'de",
        ),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn"}}, "field 'factor' is missing"),
        (
            "deepseek_v3",
            {"rope_interleave": False},
            "deepseek_v3: rope_interleave = False is not supported (only True)",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported (only 'sigmoid')"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported (only 4)"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a whole number from 1 to 2147483647, not 0"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank must be a whole number from 1 to 2147483647, not 0"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3 must be even: channels turn in pairs"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "deepseek_v3: quantized weights are not"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope type 'linear' is not supported (only ",
        ),
        ("deepseek_v3_yarn", {"rope_scaling": _YARN | {"mscale": 0}}, "needs both of mscale and mscale_all_dim, or"),
        (
            "deepseek_v3_yarn",
            {"rope_scaling": _YARN | {"attention_factor": 2}},
            "attention_factor and truncate of rope",
        ),
        (
            "deepseek_v3_yarn",
            {"rope_scaling": _YARN | {"factor": "4"}},
            "factor must be a finite number above 0, not '4'",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, "glm4_moe_lite: mlp_layer_types other than"),
        ("deepseek_v3_yarn", {"rope_theta": 1}, "rope_theta = 1.0 must be above 1 with YaRN"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported (only 'sigmoid')"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list with another number than 1, full attention, is not"),
        ("minimax_m2", {"rotary_dim": 3}, "rotates 3 of a head's 8 channels, which must be an even number"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8"}}, "minimax_m2: quantized weights are not"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "qwen3_next: mlp_only_layers = [1] is not supported (only [])"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval must be a whole number from 1 on, not"),
        ("qwen3_next", {"full_attention_interval": 5}, "layer_types without 'full_attention' is not supported"),
        (
            "qwen3_next",
            {"linear_num_value_heads": 6},
            "linear_num_value_heads (6) must be a multiple of linear_num_key",
        ),
        ("qwen3_next", {"linear_conv_kernel_dim": 0}, "conv_kernel must be a whole number from 1 to 2147483647, not 0"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 3}, "layer_types must be 'linear_attention' or 'full_at"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 4}, "for each of the 4 layers"),
        (
            "qwen3_5_text",
            {"architectures": ["Qwen3_5ForConditionalGeneration"]},
            "has images; save its language model, Qwen3_5ForCausalLM, alone with transformers, as docs/howto",
        ),
        ("llama", {"architectures": ["BertModel"]}, "architecture BertModel is not supported; supported: Llama"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {key: value for key, value in (CONFIGS[name] | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        read_architecture(str(tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_transformers_takes_without_a_word() -> None:
    """It is taken here, too: YaRN for gpt-oss, weights of the chosen experts that add up to 1 for Qwen3.5."""
    config = {key: value for key, value in CONFIGS["gpt_oss"].items() if key != "rope_scaling"}
    rope = transformers.GptOssConfig().rope_parameters
    assert FAMILIES["GptOssForCausalLM"](config) == FAMILIES["GptOssForCausalLM"](config | {"rope_scaling": rope})
    unread = CONFIGS["qwen3_5_moe_text"] | {"norm_topk_prob": False}
    assert FAMILIES["Qwen3_5MoeForCausalLM"](unread) == ARCHITECTURES["qwen3_5_moe_text"]


def test_another_scale_is_no_fused_attention() -> None:
    """Transformer Engine's would take 1 / sqrt(head_dim) without a word."""
    kind = ARCHITECTURES["llama"].layer(0).with_attention(softmax_scale=0.1)
    assert kind.attention.transformer_engine and not kind.attention.fused_attention


def test_several_rotary_embeddings_are_no_fused_attention() -> None:
    """Megatron-Core's model has one for all layers."""
    arch = ARCHITECTURES["llama"]
    layer = arch.layer(0)
    assert arch.fused_attention
    assert not replace(arch, layers=((layer, 2), (layer.with_attention(rope_theta=1e6), 2))).fused_attention


def test_scaling_may_be_said_in_both_ways(tmp_path: Path) -> None:
    """In a config.json for transformers 4 and 5."""
    rope = CONFIGS["llama3"]["rope_parameters"]
    both = CONFIGS["llama3"] | {"rope_scaling": rope, "rope_theta": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(both))
    assert read_architecture(str(tmp_path)) == ARCHITECTURES["llama3"]


def test_every_sixth_layer_of_gemma_sees_everything() -> None:
    """As published: without layer_types, and with a pattern or none."""
    config = {key: value for key, value in CONFIGS["gemma3_text"].items() if key != "sliding_window_pattern"}
    for more in ({}, {"sliding_window_pattern": 6}):
        arch = FAMILIES["Gemma3ForCausalLM"](config | {"num_hidden_layers": 26} | more)
        windows = [layer.attention.sliding_window for layer in arch.each_layer]
        assert windows == [None if i % 6 == 5 else 4 for i in range(26)]
        assert [count for _, count in arch.layers] == [5, 1, 5, 1, 5, 1, 5, 1, 2] and len(arch.kinds) == 2


def test_experts_over_tensor_parallel_ranks_need_sequence_parallelism() -> None:
    arch = ARCHITECTURES["mixtral"]
    assert isinstance(arch.moe, MixtureOfExperts)
    arch.check_training(TrainLayout(ranks=range(4), tp=2, pp=2), sequence_parallel=True)
    arch.check_training(TrainLayout(ranks=range(2), tp=1, pp=2), sequence_parallel=False)
    with pytest.raises(
        ValueError, match=r"tensor_model_parallel_size = 2 needs actor\.megatron\.sequence_parallel=true"
    ):
        arch.check_training(TrainLayout(ranks=range(2), tp=2, pp=1), sequence_parallel=False)


def test_layers_that_only_torch_has() -> None:
    """Transformer Engine's here would leave sinks out without a word."""
    config = CONFIGS["gpt_oss"] | {"layer_types": ["full_attention"] * 4}
    assert FAMILIES["GptOssForCausalLM"](config).needs_torch_layers
    names = {name for name, arch in ARCHITECTURES.items() if arch.needs_torch_layers}
    linear = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    assert names == {"gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v3_yarn", "glm4_moe_lite", "olmo2"} | linear
    assert [name for name, arch in ARCHITECTURES.items() if not arch.fused_attention and name not in names] == [
        "qwen2_yarn",
        "minimax_m2",
    ]


def test_experts_with_biases_are_whole_on_a_rank() -> None:
    arch = ARCHITECTURES["gpt_oss"]
    arch.check_training(TrainLayout(ranks=range(2), tp=2, etp=1), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"set actor\.megatron\.expert_tensor_parallel_size=1, not 2"):
        arch.check_training(TrainLayout(ranks=range(2), tp=2), sequence_parallel=True)


def test_ranks_that_cut_a_narrow_vector_unevenly_are_refused() -> None:
    arch = ARCHITECTURES["deepseek_v3_yarn"]  # 20 rows, and 12 + 8
    arch.check_training(TrainLayout(ranks=range(4), tp=4), sequence_parallel=True)
    with pytest.raises(ValueError, match="tensor_model_parallel_size = 8 does not divide the 20 rows of a projection"):
        changed_heads = arch.layer(0).with_attention(num_attention_heads=8).attention
        changed_heads.check_training(TrainLayout(ranks=range(8), tp=8), sequence_parallel=True)


def test_ranks_that_cut_the_heads_of_linear_attention_are_refused() -> None:
    arch = ARCHITECTURES["qwen3_next"]
    with pytest.raises(
        ValueError, match="tensor_model_parallel_size = 3 does not divide the 4 key heads of the model's"
    ):
        arch.layer(0).attention.check_split(TensorSplit(tp=3), "tensor_model_parallel_size")


def test_ranks_that_cut_the_queries_keys_and_values_unevenly_are_refused() -> None:
    """Six heads over one KV head: Megatron-Core would cut 64 rows into three."""
    arch = changed(ARCHITECTURES["llama"], num_attention_heads=6, num_key_value_heads=1, head_dim=8, ffn_hidden_size=48)
    arch.check_training(TrainLayout(ranks=range(2), tp=2, pp=1), sequence_parallel=False)
    with pytest.raises(ValueError, match="= 3 does not divide the 64 rows of the model's queries, keys and values"):
        arch.check_training(TrainLayout(ranks=range(3), tp=3, pp=1), sequence_parallel=False)
