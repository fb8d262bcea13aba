"""Renames OpenRLHF's older options as 0.11 does: `--actor_learning_rate` is `--actor.adam.lr`."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.migration.listed import read

TRAINER = "trainer"
"""The setting that names a trainer: `train_ppo_ray`, say."""

_SINCE_0_11: Mapping[str, str] = read("openrlhf")["older"]
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "train": ("max_epochs", "num_episodes", "seed"),
    "rollout": ("temperature", "top_p"),
    "actor": ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm"),
    "data": (
        "max_len", "input_key", "output_key", "label_key", "prompt_key", "chosen_key", "rejected_key", "multiturn",
        "input_template", "apply_chat_template", "tokenizer_chat_template",
    ),
    "ds": (
        "zero_stage", "zpg", "bf16", "param_dtype", "adam_offload", "use_liger_kernel", "grad_accum_dtype",
        "overlap_comm", "packing_samples", "load_in_4bit", "deepcompile", "attn_implementation",
    ),
}  # fmt: skip
"""Options that only lacked their section."""

_ENTITIES = ("actor", "critic", "ref", "reward", "vllm")


def canonical(option: str) -> str:
    """Find an option's name in the table, also for trainers of one model and forks with another backend."""
    if option in _SINCE_0_11:
        return _SINCE_0_11[option]
    head, _, rest = option.partition(".")
    if not rest:
        section = next((section for section, options in _SECTIONS.items() if option in options), None)
        entity, _, name = option.partition("_")
        of_entity = entity in _ENTITIES and name and section is None
        return f"{section}.{option}" if section else f"{entity}.{name}" if of_entity else option
    if head == "fsdp":
        return f"ds.{rest}"
    if head in ("adam", "muon"):
        return f"actor.{option}"
    if head == "model" and (rest.startswith("gradient_") or rest in ("model_name_or_path", "aux_loss_coef")):
        return f"actor.{rest}"
    return option
