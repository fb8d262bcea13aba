"""Checkpoints as Megatron-LM's `save_checkpoint` writes them: Megatron-Core's own model, optimizer and saver.

`megatron.training` is in no package. Its `generate_state_dict` and `save_checkpoint` are these calls.
"""

from __future__ import annotations

import multiprocessing
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ITERATION = 100


def _named_as_by_transformer_engine(sharded: dict[str, Any]) -> dict[str, Any]:
    """Rename the norms before experts, which torch's layers save as if they were fused with a linear layer."""
    tensors = [x for x in sharded.values() if hasattr(x, "key")]
    names = {x.key for x in tensors}
    for x in tensors:
        layer, fused, leaf = x.key.partition("mlp.linear_fc1.layer_norm_")
        if fused and f"{layer}mlp.router.weight" in names:
            x.key = f"{layer}pre_mlp_layernorm.{leaf}"
    return sharded


def save_megatron_lm(
    root: str, model_folder: str, source: str, tp: int = 1, pp: int = 1, changes: dict[str, Any] | None = None
) -> torch.Tensor | None:
    """Save a model in a layout. Every rank calls it.

    Args:
        source: checkpoint in Megatron-Core's format whose weights the model has; empty: random ones.
        changes: keys "args", "model" (rename keys), "config" and "vocab_size".

    Returns:
        for one rank the logits of `TOKENS`.
    """
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megarl.models.families import read_architecture

    changes, arch = changes or {}, read_architecture(model_folder)
    mpu.initialize_model_parallel(tp, pp)
    if tp * pp == 1:
        tensor_parallel.get_cuda_rng_tracker().states_["model-parallel-rng"] = torch.get_rng_state()
    try:
        model = _model(arch, tp, changes)
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        metadata |= changes.get("metadata", {})
        if source:
            plain = _model(arch, tp, {})
            wanted = _named_as_by_transformer_engine(plain.sharded_state_dict())
            model.load_state_dict(dist_checkpointing.load(wanted, source, strict="ignore_all"))
        sharded = model.sharded_state_dict(metadata=metadata)
        wrapped, optimizer = _optimizer(model)
        state = {
            "args": arguments(arch, tp, pp, changes.get("args", {})),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "model": sharded,
            "optimizer": optimizer.sharded_state_dict(sharded, is_loading=False, metadata=metadata),
            "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 3200},
            "rng_state": ShardedObject(
                "rng_state",
                [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}],
                (pp, tp),
                (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()),
                replica_id=mpu.get_data_parallel_rank(with_context_parallel=True),
            ),
            "num_floating_point_operations_so_far": 1e9,
        }
        del wrapped
        folder = Path(root, f"iter_{ITERATION:07d}")
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it starts a process
        dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": False})
        filesystem_async._results_queue = None  # ends the process that it started, which would outlive this one
        dist.barrier()
        Path(root, "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        return _logits(model) if dist.get_world_size() == 1 else None
    finally:
        mpu.destroy_model_parallel()


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def _model(arch: Any, tp: int, changes: dict[str, Any]) -> Any:
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    kind = arch.kinds[0]
    fields = _fields(arch) | changes.get("config", {})
    config = TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fields,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=fields.get("num_moe_experts"), qk_layernorm=fields["qk_layernorm"], normalization="RMSNorm"
    )
    if len(arch.kinds) > 1:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if changes.get("unmapped_norms"):  # as checkpoints of layers that Megatron-Core's map of names does not know
        spec.submodules.sharded_state_dict_keys_map = {}
    padded = -(-arch.vocab_size // (128 * tp)) * 128 * tp
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded,
        max_sequence_length=arch.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=kind.attention.rope_theta,
        rotary_percent=kind.attention.partial_rotary_factor,
    )


def _fields(arch: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for kind in arch.kinds:
        fields |= kind.megatron_fields()
    freq = [int(hasattr(kind.mlp, "moe")) for kind in arch.each_layer]
    return fields | ({"moe_layer_freq": freq} if len(arch.kinds) > 1 else {})


def _optimizer(model: Any) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=False), model, disable_bucketing=True
    )
    return wrapped, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [wrapped])


def arguments(arch: Any, tp: int, pp: int, changes: dict[str, Any]) -> Namespace:
    from megatron.core.transformer.enums import AttnBackend

    attention, mlp, fields = arch.attention, arch.kinds[0].mlp, _fields(arch)
    values: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": mlp.ffn_hidden_size,
        "num_attention_heads": attention.num_attention_heads,
        "group_query_attention": attention.num_key_value_heads != attention.num_attention_heads,
        "num_query_groups": attention.num_key_value_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm,
        "normalization": "RMSNorm",
        "norm_epsilon": arch.norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": int(attention.rope_theta),
        "rotary_percent": attention.partial_rotary_factor,
        "untie_embeddings_and_output_weights": not arch.tied,
        "apply_layernorm_1p": False,
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
        "multi_latent_attention": False,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "attention_backend": AttnBackend.auto,
        "params_dtype": torch.bfloat16,
        "activation_func": torch.nn.functional.silu,
        "data_path": ["a", "b"],
        "save": Path("/somewhere"),
        "moe_layer_freq": fields.get("moe_layer_freq", 1),
    }
    if arch.moe is not None:
        values |= {"num_experts": arch.moe.num_experts, "moe_shared_expert_overlap": False}
        values |= {name: value for name, value in fields.items() if name.startswith("moe_")}
    return Namespace(**{**values, **changes})


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    model.eval()
    tokens = torch.tensor([TOKENS])
    mask = torch.triu(torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool), 1)[None, None]
    logits: torch.Tensor = model(tokens, torch.arange(len(TOKENS))[None], mask)
    return logits[0].float()
