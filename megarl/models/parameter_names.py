"""Names the parameters of a layer in the training layout's model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.models.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """Names the parameters of a transformer layer, after the layer's prefix. The defaults are Megatron-Core's modules.

    Attributes:
        input_norm, mlp_norm: the norms before attention and MLP.
        qkv, projection: the matrices of attention, up to `weight` or `bias`.
        query_norm, key_norm: the norms over the dimension of a head.
        router: weight of the router of experts.
    """

    input_norm: str = "input_layernorm.weight"
    mlp_norm: str = "pre_mlp_layernorm.weight"
    qkv: str = "self_attention.linear_qkv."
    projection: str = "self_attention.linear_proj."
    query_norm: str = "self_attention.q_layernorm.weight"
    key_norm: str = "self_attention.k_layernorm.weight"
    router: str = "mlp.router.weight"

    def mlp(self, expert: int | None) -> tuple[str, str]:
        """Name gate and up together, and down, of the MLP or of one of its experts."""
        module = "mlp." if expert is None else f"mlp.experts.local_experts.{expert}."
        return f"{module}linear_fc1.weight", f"{module}linear_fc2.weight"


def transformer_engine_names(arch: Architecture) -> ParameterNames:
    """Name the parameters of Transformer Engine's layers, which keep a norm in the linear layer after it.

    The norm before a router stays a module of its own: the router needs the normalised input as well.
    """
    names = ParameterNames(input_norm="self_attention.linear_qkv.layer_norm_weight")
    return names if arch.moe else replace(names, mlp_norm="mlp.linear_fc1.layer_norm_weight")
