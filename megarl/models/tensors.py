"""Lists logical tensors: every weight of the model once, whatever the layout. Torch-free.

A **logical tensor** is a weight of the model under its Hugging Face name, its rows and columns taken apart into axes:

    q_proj of a layer        (kv_group, query, head_dim, hidden)
    an expert's down_proj    (hidden, ffn)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.models.architecture import Architecture, MixtureOfExperts

Box = tuple[tuple[int, int], ...]
"""Half-open interval per logical axis."""


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """Describes a weight of the whole model.

    Attributes:
        name: its Hugging Face name.
        shape: size of each logical axis. Row-major, the elements come in the order of the Hugging Face tensor.
        hf_shape: shape of the Hugging Face tensor.
        kind: how it is initialised: "matrix", "bias" (zeros) or "norm" (ones).
    """

    name: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    kind: str

    @property
    def box(self) -> Box:
        return tuple((0, n) for n in self.shape)


def volume(box: Box) -> int:
    """Count the elements in a box."""
    return math.prod(hi - lo for lo, hi in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Find the common part of two boxes of the same tensor, or None."""
    out = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return out if all(lo < hi for lo, hi in out) else None


def even_share(box: Box, number: int, count: int) -> Box | None:
    """Cut out part `number` of `count` even parts of a box; None if there are not enough rows for it to get one."""
    if count == 1:
        return box
    axis = next((axis for axis, (lo, hi) in enumerate(box) if hi - lo >= count), 0)
    lo, hi = box[axis]
    first, last = (lo + (hi - lo) * i // count for i in (number, number + 1))
    return (*box[:axis], (first, last), *box[axis + 1 :]) if first < last else None


def relative(box: Box, outer: Box) -> Box:
    """Move a box into the coordinates of another that contains it."""
    return tuple((lo - base, hi - base) for (lo, hi), (base, _) in zip(box, outer, strict=True))


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
SCORE = "score.weight"


def layer_name(layer: int, leaf: str) -> str:
    return f"model.layers.{layer}.{leaf}"


def logical_tensors(arch: Architecture) -> dict[str, LogicalTensor]:
    """List every weight of the model once, by name."""
    out = [_table(EMBEDDING, "matrix", vocab=arch.vocab_size, hidden=arch.hidden_size)]
    for layer in range(arch.num_layers):
        out += _layer_tensors(arch, layer)
    out.append(_table(FINAL_NORM, "norm", hidden=arch.hidden_size))
    if arch.output == "lm":
        out.append(_table(OUTPUT, "matrix", vocab=arch.vocab_size, hidden=arch.hidden_size))
    elif arch.output == "scalar":
        out.append(_table(SCORE, "matrix", label=1, hidden=arch.hidden_size))
    return {t.name: t for t in out}


def _table(name: str, kind: str, *, out_axes: int = 1, **axes: int) -> LogicalTensor:
    """Make a logical tensor whose first `out_axes` axes are the Hugging Face tensor's rows, the rest its columns."""
    shape = tuple(axes.values())
    hf_shape = (math.prod(shape[:out_axes]), *((math.prod(shape[out_axes:]),) if shape[out_axes:] else ()))
    return LogicalTensor(name=name, shape=shape, hf_shape=hf_shape, kind=kind)


def _layer_tensors(arch: Architecture, layer: int) -> list[LogicalTensor]:
    groups, per_group, dim, hidden = arch.num_key_value_heads, arch.queries_per_group, arch.head_dim, arch.hidden_size

    def name(leaf: str) -> str:
        return layer_name(layer, leaf)

    out = [_table(name("input_layernorm.weight"), "norm", hidden=hidden)]
    for proj, query in (("q", per_group), ("k", 1), ("v", 1)):
        heads = dict(kv_group=groups, query=query, head_dim=dim)
        out.append(_table(name(f"self_attn.{proj}_proj.weight"), "matrix", out_axes=3, **heads, hidden=hidden))
        if arch.qkv_bias:
            out.append(_table(name(f"self_attn.{proj}_proj.bias"), "bias", out_axes=3, **heads))
    if arch.qk_norm:
        out += [_table(name(f"self_attn.{qk}_norm.weight"), "norm", head_dim=dim) for qk in ("q", "k")]
    out += [
        _table(
            name("self_attn.o_proj.weight"), "matrix", hidden=hidden, kv_group=groups, query=per_group, head_dim=dim
        ),
        _table(name("post_attention_layernorm.weight"), "norm", hidden=hidden),
    ]
    if arch.moe:
        out.append(_table(name(router_leaf(arch.moe)), "matrix", expert=arch.moe.num_experts, hidden=hidden))
    for expert in range(arch.moe.num_experts) if arch.moe else (None,):
        gate, up, down = (name(leaf) for leaf in mlp_leaves(arch, expert))
        out += [_table(leaf, "matrix", ffn=arch.ffn_hidden_size, hidden=hidden) for leaf in (gate, up)]
        out.append(_table(down, "matrix", hidden=hidden, ffn=arch.ffn_hidden_size))
    return out


def router_leaf(moe: MixtureOfExperts) -> str:
    """Name the router's weight within a layer, in Hugging Face files and in the engines."""
    return f"{moe.module}.gate.weight"


def mlp_leaves(arch: Architecture, expert: int | None) -> tuple[str, str, str]:
    """Name the gate, up and down matrices of the MLP, or of an expert, within a layer of Hugging Face files."""
    moe = arch.moe
    if moe is None:
        return "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"
    prefix = f"{moe.module}.experts.{expert}."
    return f"{prefix}{moe.gate_proj}.weight", f"{prefix}{moe.up_proj}.weight", f"{prefix}{moe.down_proj}.weight"
