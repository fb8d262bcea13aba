"""Hugging Face folders for tests, and jobs inside the pool's ranks that import and export them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from full_weights import random_weights
from ranks import Ranks
from safetensors.torch import load_file, save_file
from small_state import STATE, rl_step
from tiny_families import CONFIGS
from torch import Tensor
from training_cases import Case, save_checkpoint

from megarl.checkpoint.folder import checkpoint_folder
from megarl.models.families import read_architecture
from megarl.models.fill import dtype_of
from megarl.models.weights import logical_tensors
from megarl.types import Batch, batch_of


def write_folder(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, files: int = 1, seed: int = 1, **config: Any
) -> Path:
    """A tiny model's folder with `random_weights`, in one or several files; `config`: fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | config))
    arch = read_architecture(str(folder))
    kinds = logical_tensors(arch)
    weights = {key: value.to(dtype_of(kinds[key], dtype)) for key, value in random_weights(arch, seed).items()}
    write_weights(folder, weights, files)
    return folder


def write_with_further_layer(folder: Path, name: str, **config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A tiny model's folder with a layer for multi-token prediction; returns the model's weights, and the layer's."""
    write_folder(folder, name, **config, num_nextn_predict_layers=1)
    weights, arch = read_weights(folder), read_architecture(str(folder))
    last, prefix = f"model.layers.{arch.num_layers - 1}.", f"model.layers.{arch.num_layers}."
    further = {key.replace(last, prefix): value + 1 for key, value in weights.items() if key.startswith(last)}
    width = arch.hidden_size
    further |= {f"{prefix}eh_proj.weight": torch.randn(width, 2 * width), f"{prefix}enorm.weight": torch.ones(width)}
    further |= {f"{prefix}shared_head.head.weight": weights["model.embed_tokens.weight"] + 1}
    write_weights(folder, weights | further)
    return weights, further


def write_weights(folder: Path, weights: dict[str, Tensor], files: int = 1) -> None:
    """Save tensors as `model.safetensors`, or dealt out over several files with an index."""
    if files == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(weights.items())[i::files])
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor in a folder's safetensors files."""
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """The same names, types and bits."""
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@contextmanager
def policy_in(case: Case, folder: str, dtype: str) -> Iterator[Any]:
    """A policy in some layout with weights that are still to be read."""
    from megarl.config.policy import ActorRolloutRefConfig
    from megarl.parallel.layout import TrainLayout
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World
    from megarl.roles.model import MegatronModel

    world = World()
    arch = read_architecture(folder)
    etp = 1 if arch.whole_experts else None
    layout = TrainLayout(ranks=range(world.size), tp=case.tp, pp=case.pp, chunks=case.chunks, etp=etp)
    groups = train_groups(world, layout)
    megatron = {"sequence_parallel": case.tp > 1}
    config = ActorRolloutRefConfig.model_validate({"model": {"dtype": dtype}, "actor": {"megatron": megatron}})
    try:
        keys = config.actor
        yield MegatronModel(arch, groups, model=config.model, megatron=keys.megatron, batching=keys)
    finally:
        leave_groups(world)


def import_and_export(
    ranks: Ranks, case: Case, folders: list[tuple[str, str]], dtype: str, max_shard_bytes: int
) -> None:
    """Read every source in a layout, save a checkpoint from it, and write the target from that."""
    from megarl.checkpoint.export_huggingface import write_weights as export
    from megarl.checkpoint.megatron_folder import MegatronWeights

    ranks.run(case.world, _import_and_save, case, folders, dtype)
    for source, target in folders:
        arch = read_architecture(source)
        weights = MegatronWeights(checkpoint_folder(f"{target}-run", rl_step(1)), arch)
        export(weights, target, arch, max_shard_bytes=max_shard_bytes, advance=lambda done, total: None)


def _import_and_save(case: Case, folders: list[tuple[str, str]], dtype: str) -> None:
    from megarl.checkpoint.import_huggingface import HuggingFaceWeights

    for source, target in folders:
        with policy_in(case, source, dtype) as policy:
            for parameter in policy.parameters().values():
                parameter.data.fill_(torch.nan)
            policy.load(HuggingFaceWeights(source, policy.arch).box)
            assert all(parameter.isfinite().all() for parameter in policy.parameters().values())
            state, at = {"actor": policy.sharded_state(loading=False)}, rl_step(1)
            world = policy.groups.world
            save_checkpoint(f"{target}-run", at, state, STATE, model_files=lambda folder: None, world=world)


def text_batch() -> Batch:
    """Three sequences of ordinary token ids; every token but the first is scored."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(49_152, (n,), generator=generator).tolist() for n in (40, 7, 23)]
    return batch_of([row[:1] for row in rows], [row[1:] for row in rows], range(3))


def log_probs(case: Case, folder: str, checkpoint: str | None = None) -> Tensor:
    """Log-probabilities of `text_batch` in float32, with the weights of a folder or of a Megatron checkpoint."""
    from megarl.checkpoint.import_huggingface import HuggingFaceWeights
    from megarl.checkpoint.store import load_checkpoint

    with policy_in(case, folder, "float32") as policy:
        if checkpoint is None:
            policy.load(HuggingFaceWeights(folder, policy.arch).box)
        else:
            policy.load_weights(
                load_checkpoint(checkpoint, policy.sharded_weights(), rng=False, world=policy.groups.world)
            )
        result: Tensor = policy.forward(text_batch(), policy.plan(text_batch()))
        return result
