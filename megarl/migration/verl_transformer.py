"""verl's overrides of Megatron-Core's TransformerConfig."""

from __future__ import annotations

from megarl.migration.entry import Entry, carried, met, met_by, refused

UNEVEN = "stages differ by one layer at most where they do not divide, and the last one has the fewer"


def overridden(section: str) -> list[Entry]:
    """Fields of Megatron-Core's TransformerConfig."""
    fused = "the program chooses the fused kernels that there are"
    return [
        met_by(f"{section}.gradient_accumulation_fusion", (True,), "always on", "it is always on"),
        met_by(
            f"{section}.moe_router_dtype", ("fp32",), "the router always computes in float32", "it computes in float32"
        ),
        met(f"{section}.apply_rope_fusion", fused),
        met(f"{section}.masked_softmax_fusion", fused),
        met(f"{section}.bias_activation_fusion", fused),
        met(f"{section}.bias_dropout_fusion", "there is no dropout"),
        met_by(f"{section}.deallocate_pipeline_outputs", (True,), "always, on GPUs", "they are always given back"),
        met(
            f"{section}.moe_token_dispatcher_type",
            "no expert-parallel ranks: tokens are not sent to other ranks' experts",
        ),
        met(f"{section}.moe_enable_deepep", "no expert-parallel ranks: tokens are not sent to other ranks' experts"),
        refused(f"{section}.moe_grouped_gemm", "experts are computed one after the other"),
        met_by(
            f"{section}.moe_aux_loss_coeff",
            (0, 0.0),
            "no loss but the one that is asked for",
            "no auxiliary loss is added",
        ),
        refused(f"{section}.moe_shared_expert_overlap", "the families here have no shared experts"),
        refused(f"{section}.attention_backend", "Transformer Engine chooses the attention kernels"),
        met(f"{section}.account_for_embedding_in_pipeline_split", UNEVEN),
        met(f"{section}.account_for_loss_in_pipeline_split", UNEVEN),
        met(f"{section}.num_layers_in_first_pipeline_stage", UNEVEN),
        met(f"{section}.num_layers_in_last_pipeline_stage", UNEVEN),
        *carried(
            f"{section}.*", why="as Megatron-Core has it; what the model or the layout decides is refused before a run"
        ),
    ]
