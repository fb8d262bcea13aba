"""Checks keys that a configuration sets and a training run would not read."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Config
from megarl.config.algorithm import PreferenceConfig
from megarl.flow_kinds import FlowKind, flow_kind


def check_unread(config: Config) -> None:
    """Raise ValueError, in one line, for the first key that is set and would not be read."""
    trainer = config.trainer
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        raise ValueError(
            f"trainer.resume_from_path is not read with trainer.resume_mode={trainer.resume_mode}; set "
            "trainer.resume_mode=resume_path, or leave the path out"
        )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        raise ValueError("trainer.resume_mode=resume_path goes on from no checkpoint: set trainer.resume_from_path")
    kind = flow_kind(config)
    if kind.reads not in (None, "prompts"):
        _check_preference(config, kind)


def unread(config: Config) -> Iterator[str]:
    """Yield remarks on keys without effect that may be switched off on purpose, for a while."""
    if config.checkpoint.exports and config.trainer.save_freq == 0:
        yield "remark: checkpoint.save_contents names hf_model, and trainer.save_freq=0 saves no checkpoints"
    if config.warmup.train_files and not config.warmup.total_training_steps:
        yield "remark: warmup.train_files are not read: warmup.total_training_steps = 0, so there is no warm-up"


def _check_preference(config: Config, kind: FlowKind) -> None:
    """Refuse keys of `algorithm.preference` that the loss does not declare to read."""
    section, preference, usual = "algorithm.preference", config.algorithm.preference, PreferenceConfig()
    by, read = f"trainer.flow={config.trainer.flow}", {kind.loss_key}
    if kind.loss is not None:
        declared = getattr(kind.loss(config), "about", None)
        if declared is None:  # a user's, which may read all of it
            return
        read |= {*declared.keys}
    if kind.loss_key == f"{section}.loss_mode":
        by = f"{kind.loss_key}={preference.loss_mode}"
    for name in type(preference).model_fields:
        value = getattr(preference, name)
        if value != getattr(usual, name) and f"{section}.{name}" not in read:
            raise ValueError(f"{section}.{name} = {value} has no effect with {by}; leave it out")
