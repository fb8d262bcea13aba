"""Compares what the ranks read, right after they met, and what each of them computes for itself."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

from megarl.parallel.world import World
from megarl.trainer.digests import digest, file_digest
from megarl.trainer.inputs import Inputs
from megarl.trainer.resuming.identity import Identity, configuration_digest, examples_digest, rows_digest
from megarl.trainer.stopped import RunStopped
from megarl.trainer.surroundings import package_versions
from megarl.trainer.trust import user_files
from megarl.types import Batch

_REMEDY = {
    "configuration": "start every node with the same file and the same key=value arguments",
    "packages": "install the same versions on every node",
    "code of megarl": "install the same sources on every node",
}
_FILES = "put the files where every node sees the same ones, or copy them again"


def check_same_inputs(inputs: Inputs, identity: Identity, world: World) -> None:
    """Compare what the ranks read; every rank calls it, right after the groups are there.

    Raises:
        ValueError: on every rank; names the first part that differs, and one host on each side.
    """
    mine = {name: digest([text.encode()]) for name, text in _inputs(inputs, identity).items()}
    everyone = world.all_gather((socket.gethostname(), mine))
    host, first = everyone[0]
    for part, value in first.items():
        others = [rank for rank, (_, digests) in enumerate(everyone) if digests[part] != value]
        if others:
            raise ValueError(
                f"the ranks differ in their {part}: {_ranks(others)} on {everyone[others[0]][0]} and rank 0 on {host}; "
                f"{_REMEDY.get(part, _FILES)}"
            )


def check_same_values(batch: Batch, world: World, step: int) -> None:
    """Compare the batches of all ranks, and the tokens of those that have the same; every rank calls it.

    Advantages and importance weights are replicated arithmetic. Two CPUs may round `exp` differently and put a sequence
    on different sides of a threshold: tensor-parallel ranks would then train one model with two losses, for ever.

    Raises:
        RunStopped: on every rank; names what differs and where.
    """
    of_tokens = {"token ids": batch.tokens, "advantages": batch.advantages, "importance weights": batch.importance}
    of_tokens |= {"log-probabilities": batch.old_logp, "reference log-probabilities": batch.ref_logp}
    of_tokens |= {"log-probabilities of the engine": batch.rollout_logp}
    of_sequences = {"scores": batch.rewards, "lengths of responses": batch.response_lengths, "groups": batch.groups}
    of_sequences |= {"greedy scores": batch.greedy_rewards, "KL in the reward": batch.kl_in_reward}
    mine = {name: tensor_digest(x) for name, x in (of_sequences | of_tokens).items() if x is not None}
    everyone = world.all_gather((socket.gethostname(), torch.backends.cpu.get_cpu_capability(), mine))
    all_ranks = (tuple(range(world.size)),)
    blocks = all_ranks if batch.owners is None else batch.owners.blocks
    alike = [(name, ranks) for name in mine for ranks in (blocks if name in of_tokens else all_ranks)]
    for name, (first, *rest) in alike:
        host, cpu, digests = everyone[first]
        others = [rank for rank in rest if everyone[rank][2][name] != digests[name]]
        if others:
            there, other_cpu, _ = everyone[others[0]]
            raise RunStopped(
                f"step {step}: {_ranks(others)} computed other {name} than rank {first}, on {there} ({other_cpu}) and "
                f"{host} ({cpu}); use hosts with one kind of CPU, or set ATEN_CPU_CAPABILITY=default on all"
            )


def tensor_digest(x: Tensor) -> str:
    """Digest the bits of a tensor."""
    return digest([np.ascontiguousarray(x.numpy()).view(np.uint8).data])


def _inputs(inputs: Inputs, identity: Identity) -> Mapping[str, str]:
    return {
        "packages": f"{platform.python_version()} {package_versions()}",
        "code of megarl": _sources_digest(),
        "configuration": configuration_digest(inputs.config),
        **{f"file of {key}": str(file_digest(file)) for key, file in user_files(inputs.config.model_dump())},
        "architecture (config.json)": json.dumps(asdict(inputs.arch), default=str),
        "tokenizer": json.dumps(identity["tokenizer"]),
        "training prompts (data.train_files)": json.dumps(identity["data"]),
        "held-out prompts (data.val_files)": rows_digest(inputs.val_prompts) + examples_digest(inputs.val_examples),
        "demonstrations (warmup.train_files)": examples_digest(inputs.demonstrations),
        "reward": json.dumps(identity.get("reward")),
    }


def _sources_digest() -> str:
    """Digest the package's files. An installation from a working copy keeps its version number over every change."""
    place = files("megarl")
    with as_file(place) as folder:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return digest(part for path in paths for part in (str(path.relative_to(folder)).encode(), path.read_bytes()))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"ranks {', '.join(map(str, ranks[:4]))}{more}"
