"""Builds the training layout's model chunks: Megatron-Core's GPTModel, ending in hidden states."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import __version__ as MEGATRON_CORE
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from packaging.version import Version
from torch import Tensor

from megarl.models.activations import ACTIVATIONS
from megarl.models.architecture import Architecture
from megarl.models.layer_spec import LayerSpec, torch_layers
from megarl.models.parts.experts import Experts
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.rope import rope_frequencies
from megarl.models.weight_gradient import enable_gradient_accumulation_fusion
from megarl.parallel.layout import TrainLayout
from megarl.parallel.train_groups import TrainGroups

_WAITS_FOR_SENDS = Version(MEGATRON_CORE) >= Version("0.18")  # before it frees what interleaved stages send


class TransformerModel(GPTModel):
    """Is a GPTModel whose last stage returns hidden states instead of logits.

    A head (`megarl.models.heads`) computes from them; log-probabilities chunk by chunk, so that no rank ever
    holds [tokens, vocab] logits.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """Return the last stage's output weight, [vocab / tp, hidden], or [1, hidden] of a scalar output."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ScalarModel(TransformerModel):
    """Has one output instead of a vocabulary, whole on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.output_layer = _ScalarLayer(config)


class _ScalarLayer(torch.nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))


def transformer_config(
    arch: Architecture,
    groups: TrainGroups,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute: bool | Sequence[str] = False,
    transformer_engine: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Configure Megatron-Core for the training layout.

    Args:
        recompute: keep only each layer's input and recompute the rest in backward; or recompute these parts of a layer,
            `mlp` and `moe`.
        transformer_engine: the layers are Transformer Engine's.
        overrides: TransformerConfig fields set as they are, last.
    """
    enable_gradient_accumulation_fusion()
    fields = transformer_fields(
        arch,
        groups.layout,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        transformer_engine=transformer_engine,
        on_gpu=groups.world.device.type == "cuda",
    )
    chosen = {"deterministic_mode": torch.are_deterministic_algorithms_enabled()} | with_kernels_here(overrides or {})
    return config_class(arch)(**fields | chosen)


def config_class(arch: Architecture) -> type[TransformerConfig]:
    """Choose Megatron-Core's class of configurations, which has the fields of the model's attention."""
    latent = arch.kinds[0].attention.megatron_fields().get("multi_latent_attention", False)
    return MLATransformerConfig if latent else TransformerConfig


def with_kernels_here(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out a fused kernel that is not installed: plain torch computes the same, and a planner has no GPU."""
    absent = importlib.util.find_spec("transformer_engine") is None
    return {name: value for name, value in overrides.items() if not (absent and name == "moe_permute_fusion")}


def transformer_fields(
    arch: Architecture,
    layout: TrainLayout,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: bool | Sequence[str],
    transformer_engine: bool = False,
    on_gpu: bool,
) -> dict[str, Any]:
    """Set what the architecture, the layout and this program decide of a TransformerConfig, by field."""
    fields: dict[str, Any] = dict(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        layernorm_zero_centered_gamma=arch.zero_centered_norms,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        init_method=_keep,  # weights are filled from logical tensors; Megatron-Core's own start marks TP parameters
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        **layout.megatron_sizes,
        cp_comm_type=layout.context.name,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even without experts
        calculate_per_token_loss=True,  # gradients are summed: the loss carries its global denominator
        gradient_accumulation_fusion=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=transformer_engine,
        moe_grouped_gemm=transformer_engine and arch.moe is not None,
        # torch's kernel would round after each expert, in whatever order they come
        moe_permute_fusion=transformer_engine and arch.moe is not None,
        # gloo's sends read a tensor's memory after they have returned, and so do NCCL's between interleaved stages
        deallocate_pipeline_outputs=on_gpu and (layout.chunks == 1 or _WAITS_FOR_SENDS),
        # interleaved stages talk in both directions at once: a batch of sends and receives between the same two
        # ranks would be matched in the wrong order
        overlap_p2p_comm=layout.chunks > 1,
        batch_p2p_comm=layout.chunks == 1,
    )
    chunks = layout.all_layers(arch.num_layers)
    if len(set(map(len, chunks))) > 1:
        fields |= dict(pipeline_model_parallel_layout=_uneven_stages(chunks))
    fields |= _layer_fields(arch)
    fields |= _activation(fields.get("activation_func", "silu"), on_gpu, transformer_engine and arch.moe is None)
    return fields | _recomputed(recompute)


def _recomputed(recompute: bool | Sequence[str]) -> dict[str, Any]:
    if recompute is True:
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return dict(recompute_granularity="selective", recompute_modules=list(recompute)) if recompute else {}


def _layer_fields(arch: Architecture) -> dict[str, Any]:
    """Set what the kinds of layers decide."""
    fields: dict[str, Any] = {}
    for layer in arch.kinds:
        fields |= layer.megatron_fields()
    two_attentions = len({type(layer.attention) for layer in arch.kinds}) > 1
    if (arch.moe and len(arch.kinds) > 1) or two_attentions:
        # a list also makes Megatron-Core's checkpoints hold layers one by one, not stacked as if they had equal weights
        fields |= dict(moe_layer_freq=[int(isinstance(layer.mlp, Experts)) for layer in arch.each_layer])
    return fields


def _activation(name: str, on_gpu: bool, transformer_engine: bool) -> dict[str, Any]:
    """Choose who fuses SwiGLU: Transformer Engine, or torch.compile, which on CPUs takes longer than it saves."""
    fused = on_gpu and name == "silu"
    return dict(
        activation_func=ACTIVATIONS[name],
        use_te_activation_func=fused and transformer_engine,
        bias_activation_fusion=fused and not transformer_engine,
    )


def _uneven_stages(chunks: Sequence[range]) -> list[list[str]]:
    """List what each model chunk holds, as Megatron-Core spells it."""
    rows = [["decoder"] * len(layers) for layers in chunks]
    return [["embedding", *rows[0]], *rows[1:-1], [*rows[-1], "loss"]]


def _keep(weight: Tensor) -> Tensor:
    return weight


def build_chunks(
    arch: Architecture,
    config: TransformerConfig,
    groups: TrainGroups,
    layers: LayerSpec | None = None,
    *,
    model_class: type[GPTModel] | None = None,
) -> list[Any]:
    """Build this rank's model chunks, on its device, all weights zero.

    Args:
        layers: by default torch's.
        model_class: by default the one for the architecture's output.
    """
    layout, at = groups.layout, groups.layout.coords(groups.world.rank)
    layers = layers or torch_layers(arch)
    if model_class is None:
        model_class = ScalarModel if arch.output == "scalar" else TransformerModel
    chunks = []
    for chunk in range(layout.chunks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron-Core names every optional package that is not installed
            model = model_class(
                config,
                layers.block([arch.layer(i) for i in layout.layers(arch.num_layers, at.pp, chunk)]),
                vocab_size=arch.padded_vocab_size(layout.tp),
                max_sequence_length=arch.max_position_embeddings,
                pre_process=layout.is_first(at.pp, chunk),
                post_process=layout.is_last(at.pp, chunk),
                share_embeddings_and_output_weights=arch.tied,
                **({"position_embedding_type": "none"} if layers.rotates else _rotary_arguments(arch)),
                pg_collection=groups.pgs,
                vp_stage=chunk if layout.chunks > 1 else None,
            )
        if not layers.rotates:
            # Megatron-Core's own take an integer base, and only some of Llama's scaling
            assert isinstance(arch.attention, GroupedQuery)
            model.rotary_pos_emb.inv_freq = rope_frequencies(arch.attention, groups.world.device)
        if arch.embedding_scale != 1 and model.pre_process:
            model.embedding.register_forward_hook(_times(torch.tensor(arch.embedding_scale, dtype=config.params_dtype)))
        for name, parameter in model.named_parameters():
            parameter.data.zero_()  # nothing fills the vocabulary's padding, and 0 x NaN in its gradient is NaN
            if ".experts." in name and layout.expert_tp != layout.tp:
                # of other ranks than the rest, which Megatron-Core notices with expert parallelism alone
                parameter.allreduce = False
        chunks.append(model.to(groups.world.device))
    return chunks


def _rotary_arguments(arch: Architecture) -> dict[str, Any]:
    assert isinstance(arch.attention, GroupedQuery)
    return dict(position_embedding_type="rope", rotary_percent=arch.attention.partial_rotary_factor)


def _times(scale: Tensor) -> Callable[..., Tensor]:
    """Make a hook that multiplies a module's output by a number."""

    def multiply(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * scale

    return multiply


def named_parameters(chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
    """Name the parameters as `training_placements` uses: "{chunk}.{name in the chunk}".

    Among them are the correction biases of routers, which Megatron-Core has as buffers: they are no `Parameter`.
    """
    return {
        f"{i}.{name}": tensor
        for i, chunk in enumerate(chunks)
        for named in (chunk.named_parameters(), chunk.named_buffers())
        for name, tensor in named
        if isinstance(tensor, torch.nn.Parameter) or name.endswith(".expert_bias")
    }
