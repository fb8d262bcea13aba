"""Checkpoints under bad luck: damaged files, full disks, foreign shapes, non-finite state; and who writes what."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import changed
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from ranks import Ranks
from selection import quick
from small_disk import fill, small_disk
from small_state import STATE, rl_step, state_at, warmup_step
from training_cases import (
    ARCH,
    LATENT,
    LINEAR,
    LINEAR_APART,
    NORMS_AND_EXPERTS,
    NORMS_BEHIND,
    SINKS,
    SOME_WITH_EXPERTS,
    WINDOWS,
    WITH_EXPERTS,
    Case,
    actor_in,
    fixed_batch,
    save_checkpoint,
    update,
)

from megarl.checkpoint.folder import (
    Position,
    check_resumable,
    checkpoint_folder,
    checkpoints,
    problem_with,
    prune_checkpoints,
    remove_partials,
    set_aside,
    take_place,
    whole_checkpoints,
    write_state,
)
from megarl.checkpoint.manifest import FORMAT, files_of, record_files, write_manifest
from megarl.models.architecture import Architecture
from megarl.models.kernels import transformer_engine_available
from megarl.models.parameter_names import ParameterNames
from megarl.parallel.deterministic import deterministic


def fake(run_dir: Path, step: int, at: Callable[[int], Position] = rl_step) -> Path:
    """A checkpoint as far as its small files tell."""
    folder = Path(checkpoint_folder(str(run_dir), at(step)))
    folder.mkdir(parents=True)
    write_state(str(folder), {**state_at(at(step)), "format": FORMAT})
    for name in ("common.pt", "metadata.json", ".metadata", "__0_0.distcp"):
        (folder / name).write_text('{"sharded_backend": "torch_dist"}')
    write_manifest(str(folder), record_files(str(folder), files_of(str(folder)), sync=True))
    return folder


def damage_state(text: str) -> Any:
    return lambda folder: (folder / "trainer.json").write_text(text)


DAMAGES: list[tuple[Any, str]] = [
    (damage_state(""), "its trainer.json is not JSON (Expecting value: line 1 column 1 (char 0))"),
    (damage_state("[]"), "its trainer.json does not record a step of a run"),
    (damage_state('{"step": true}'), "its trainer.json does not record a step of a run"),
    (damage_state('{"step": 9}'), "its trainer.json does not record a step of a run"),
    (damage_state(json.dumps(state_at(rl_step(3)))), "its trainer.json says step 3, its name step 9"),
    (lambda folder: (folder / "trainer.json").unlink(), "trainer.json is missing"),
    (
        lambda folder: ((folder / "manifest.json").unlink(), os.mkfifo(folder / "manifest.json")),
        "manifest.json cannot be read: it is no file",
    ),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda folder: (folder / "common.pt").unlink(), "common.pt is missing"),
    (lambda folder: (folder / "metadata.json").write_text(""), "metadata.json has 0 bytes instead of 33"),
    (lambda folder: os.truncate(folder / "__0_0.distcp", 5), "__0_0.distcp has 5 bytes instead of 33"),
    (
        lambda folder: (folder / "manifest.json").write_text('{"format": 7, "files": {}}'),
        "manifest.json cannot be read: its format is 7, and this MegaRL reads up to 1: use a newer one",
    ),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=[problem[:40] for _, problem in DAMAGES])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: Any, problem: str) -> None:
    whole, damaged = fake(tmp_path, 3), fake(tmp_path, 9)
    damage(damaged)
    assert [(found.position.step, found.problem) for found in checkpoints(str(tmp_path))] == [(9, problem), (3, None)]
    assert whole_checkpoints(str(tmp_path)) == [str(whole)]
    with pytest.raises(ValueError, match=r"^'.*global_step_9' is (damaged|not a checkpoint): [^\n]+$"):
        check_resumable(str(damaged))


def test_names_and_their_order(tmp_path: Path) -> None:
    for step, at in ((2, rl_step), (300, warmup_step), (10, rl_step), (40, warmup_step)):
        fake(tmp_path, step, at)
    (tmp_path / "checkpoints" / "global_step_11").write_text("a file")
    (tmp_path / "checkpoints" / "global_step_012").mkdir()
    names = [(os.path.basename(found.folder), found.problem) for found in checkpoints(str(tmp_path))]
    assert names == [
        ("global_step_11", "it is no folder"),
        ("global_step_10", None),
        ("global_step_2", None),
        ("warmup_step_300", None),
        ("warmup_step_40", None),
    ]
    assert checkpoints(str(tmp_path / "nowhere")) == []


def test_a_damaged_checkpoint_steps_aside(tmp_path: Path) -> None:
    for end in (".damaged", ".damaged-2"):
        folder = fake(tmp_path, 4)
        assert set_aside(str(folder)) == f"{folder}{end}"
    assert checkpoints(str(tmp_path)) == []
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["global_step_4.damaged", "global_step_4.damaged-2"]


def test_a_new_checkpoint_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    old, parent = fake(tmp_path, 4), tmp_path / "checkpoints"
    (old / "old").write_text("")
    partial = parent / ".global_step_4.partial"
    fake(tmp_path / "other", 4).rename(partial)
    take_place(str(partial), str(old))
    assert os.listdir(parent) == ["global_step_4"] and not (old / "old").exists()
    # one that was damaged is kept
    (old / "common.pt").unlink()
    fake(tmp_path / "another", 4).rename(partial)
    take_place(str(partial), str(old))
    assert sorted(os.listdir(parent)) == ["global_step_4", "global_step_4.damaged"]
    # one whose rename fails is whole again
    with pytest.raises(FileNotFoundError):
        take_place(str(partial), str(old))
    assert problem_with(str(old)) is None


def test_what_dead_jobs_left_is_removed(tmp_path: Path) -> None:
    fake(tmp_path, 2)
    parent = tmp_path / "checkpoints"
    fake(tmp_path, 3).rename(parent / ".global_step_3.replaced")  # the job died between two renames
    fake(tmp_path, 4).rename(parent / ".global_step_2.replaced")
    for name in (".global_step_8.partial", ".warmup_step_8.partial", ".mine.partial"):
        (parent / name / "huggingface").mkdir(parents=True)
    removed = remove_partials(str(tmp_path))
    assert removed == [".global_step_2.replaced", ".global_step_8.partial", ".warmup_step_8.partial"]
    assert sorted(os.listdir(parent)) == [".mine.partial", "global_step_2", "global_step_3"]


def test_pruning_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    folders = {step: fake(tmp_path, step) for step in (1, 2, 3, 60, 61)}
    (folders[61] / "common.pt").unlink()
    prune_checkpoints(str(tmp_path), 1, str(folders[2]))  # the run writes step 2 into a folder with an older 60
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["global_step_2", "global_step_60", "global_step_61"]
    prune_checkpoints(str(tmp_path), None, str(folders[2]))
    assert len(checkpoints(str(tmp_path))) == 3


def test_what_cannot_be_deleted_stays_and_is_said(tmp_path: Path) -> None:
    """A checkpoint that someone has mounted elsewhere, for one; the run that saves goes on."""
    fake(tmp_path, 1), fake(tmp_path, 3)
    with small_disk(Path(checkpoint_folder(str(tmp_path), rl_step(2))), 64) as mounted:
        shutil.copytree(fake(tmp_path / "other", 2), mounted, dirs_exist_ok=True)
        (said,) = prune_checkpoints(str(tmp_path), 1, checkpoint_folder(str(tmp_path), rl_step(3)))
        assert said.startswith(f"{mounted} cannot be deleted: [Errno 16] ")
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["global_step_2", "global_step_3"]


# ---------------------------------------------------------------------------------------------------- on real ranks

FIVE_LAYERS = changed(ARCH, num_layers=5)
"""No stages of equal size."""


def _save(actor: Any, run_dir: str, step: int) -> str:
    state = {"actor": actor.sharded_state(loading=False)}
    at, world = rl_step(step), actor.groups.world
    return save_checkpoint(run_dir, at, state, {"mark": 7, **STATE}, model_files=lambda folder: None, world=world)


def _save_in_turns(actor: Any, run_dir: str, step: int) -> str:
    """The same; a rank writes on a thread while the others are idle: it waits for none of them."""
    from megarl.checkpoint.store import Save, take_snapshot

    world = actor.groups.world
    state = {"actor": actor.sharded_state(loading=False)}
    settings: dict[str, Any] = {"model_files": lambda folder: None, "world": world}
    snapshot = take_snapshot(run_dir, rl_step(step), state, {"mark": 7, **STATE}, **settings)
    save, saved = Save(snapshot, world), None
    with ThreadPoolExecutor(1) as pool:
        while saved is None:
            for rank in range(world.size):
                if rank == world.rank:
                    future = pool.submit(save.work)
                    future.exception()
                world.barrier("the test")
            saved = save.go_on(future.result)
    return saved.folder


def _load(actor: Any, folder: str) -> None:
    from megarl.checkpoint.store import load_checkpoint

    wanted = {"actor": actor.sharded_state(loading=True)}
    loaded = load_checkpoint(folder, wanted, rng=True, world=actor.groups.world)
    actor.load_sharded(loaded["actor"])


def _step(actor: Any) -> None:
    update(actor, fixed_batch())


def folders_of(run_dir: Path, *steps: int) -> list[Path]:
    return [Path(checkpoint_folder(str(run_dir), rl_step(step))) for step in steps]


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, as Megatron-Core reads it."""
    from megatron.core import dist_checkpointing

    loaded: dict[str, torch.Tensor] = dist_checkpointing.load_plain_tensors(folder)
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def _layouts(run_dir: str, cases: list[Case], arch: Architecture = FIVE_LAYERS) -> list[Any]:
    """Trained and saved in the first layout, then read and saved again in each; the last word of each on this rank."""
    written, before, there = [], "", _children()  # other tests of these ranks may have left some
    with deterministic(True):
        torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN
        for step, case in enumerate(cases, 1):
            with actor_in(case, arch, lr=1e-2) as actor:
                if before:
                    _load(actor, before)
                else:
                    _step(actor)
                    for bias in actor.parameters().values():
                        if not isinstance(bias, torch.nn.Parameter):  # no step changes it
                            bias.add_(1)
                before = _save_in_turns(actor, run_dir, step)
    first, *others = [_tensors(checkpoint_folder(run_dir, rl_step(i + 1))) for i in range(len(cases))]
    for other in others:
        assert first.keys() == other.keys()
        # the vocabulary is padded to a multiple of the tensor-parallel size
        rows = {key: min(len(first[key]), len(other[key])) for key in first}
        written.append(all(torch.equal(first[key][:n], other[key][:n]) for key, n in rows.items()))
    return [written, sorted(_children() - there)]


def _children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def _bytes_per_rank(folder: str, world: int) -> list[int]:
    """Of tensors, without their files' headers."""
    from torch.distributed.checkpoint import FileSystemReader

    from megarl.checkpoint.sharded_files import FILES_PER_RANK

    metadata = FileSystemReader(folder).read_metadata()
    shares = [0] * world
    for index, stored in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        for chunk in getattr(tensor, "chunks", []):
            if chunk.offsets == index.offset:
                file = int(stored.relative_path.split("_")[2])
                shares[file // FILES_PER_RANK] += chunk.sizes.numel() * tensor.properties.dtype.itemsize
    return shares


def _written_later(run_dir: str, memory: bool) -> tuple[bool, bool]:
    """Whether parts were copied; and whether what is written after two more steps is what it was before them."""
    from megarl.checkpoint import staging
    from megarl.checkpoint.store import Save, take_snapshot

    def no_memory(nbytes: int) -> torch.Tensor:
        raise MemoryError

    with actor_in(Case(dp=2), lr=1e-2) as actor, pytest.MonkeyPatch.context() as patch:
        if not memory:
            patch.setattr(staging, "_slab", no_memory)
        world, kept = actor.groups.world, staging.Staging()
        _step(actor)
        _save_in_turns(actor, run_dir, 1)
        for step in (2, 3):  # the second time into the same memory
            state = {"actor": actor.sharded_state(loading=False)}
            settings: dict[str, Any] = {"model_files": lambda folder: None, "world": world, "staging": kept}
            snapshot = take_snapshot(run_dir, rl_step(step), state, STATE, **settings)
            if snapshot.parts.copied:
                _step(actor)
            Save(snapshot, world).finish()
    first, second, third = (_tensors(checkpoint_folder(run_dir, rl_step(step))) for step in (1, 2, 3))
    same = all(torch.equal(first[key], second[key]) for key in first)
    moved = any(not torch.equal(second[key], third[key]) for key in first)
    return snapshot.parts.copied, same and moved == memory


def test_a_copy_is_a_storage_of_its_own() -> None:
    """Else torch's writer copies each tensor once more: it takes a storage that is larger for a view's."""
    from megarl.checkpoint.staging import Staging

    tensors = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.zeros(0, 4), torch.tensor(2.5)]
    staging = Staging()
    copies = staging.copy(tensors)
    staging.wait()
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor) and copy.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("memory", [True, False])
def test_a_copy_is_written_as_it_was(ranks: Ranks, tmp_path: Path, memory: bool) -> None:
    """Without memory for a copy nothing is copied, and the rank writes before it goes on."""
    assert ranks.run(2, _written_later, str(tmp_path), memory) == [(memory, True)] * 2


def _saved_twice(run_dir: str, case: Case, stale: bool) -> str:
    """What a checkpoint is read with that was saved from a copy, after one of the step before; "" if it is read.

    Args:
        stale: the second copy is the first one, as where its tensors had moved and nobody noticed.
    """
    from megarl.checkpoint.staging import Staging

    with actor_in(case, lr=1e-2) as actor:
        staging, copies, world = Staging(), list[Any](), actor.groups.world
        copy = staging.copy

        def first_copy(tensors: Any) -> Any:
            copies.append([tensor.clone() for tensor in copy(tensors)])
            return copies[0] if stale else copies[-1]

        staging.copy = first_copy  # type: ignore[method-assign]
        for step in (1, 2):
            _step(actor)
            state = {"actor": actor.sharded_state(loading=False)}
            settings: dict[str, Any] = {"model_files": lambda folder: None, "world": world, "staging": staging}
            folder = save_checkpoint(run_dir, rl_step(step), state, STATE, **settings)
        try:
            _load(actor, folder)
        except ValueError as e:
            return str(e)
        return ""


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize("case", [Case(), Case(dp=2)], ids=lambda case: case.name)
def test_what_is_read_is_what_was_live(ranks: Ranks, tmp_path: Path, case: Case, stale: bool) -> None:
    """The manifest is right: the files are what was written, and not what the model had."""
    said = ranks.run(case.world, _saved_twice, str(tmp_path), case, stale)
    bits = [json.loads((found / "trainer.json").read_text())["bits"] for found in folders_of(tmp_path, 1, 2)]
    assert bits[0].keys() == bits[1].keys() and len(bits[0]) > 20
    assert not [key for key in bits[0] if bits[0][key] == bits[1][key]]
    wrong = rf"checkpoint '{tmp_path}/checkpoints/global_step_2': \S+ is not what was saved: its bits have another sum"
    assert all(re.fullmatch(wrong if stale else "", line) for line in said)


def _bits_read(folder: str, case: Case) -> dict[str, int]:
    from megarl.checkpoint.bit_sums import total_of
    from megarl.checkpoint.sharded_files import read_sharded
    from megarl.checkpoint.stored_objects import CheckpointReader

    with actor_in(case) as actor:
        read = read_sharded(folder, CheckpointReader(folder), {"actor": actor.sharded_state(loading=True)})
        return total_of(actor.groups.world.all_gather(read[1], "the test"))


@pytest.mark.slow
def test_sums_are_those_of_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    """A layout that pads the vocabulary otherwise does not compare the embedding."""
    ranks.run(2, _saved_twice, str(tmp_path), Case(dp=2), False)
    (folder,) = folders_of(tmp_path, 2)
    recorded = json.loads((folder / "trainer.json").read_text())["bits"]
    for case in (Case(), Case(tp=2, pp=2)):
        read = ranks.run(case.world, _bits_read, str(folder), case)[0]
        assert {key: f"{value:016x}" for key, value in read.items()} == {key: recorded[key] for key in read}
        assert len(recorded) - len(read) in (0, 4, 8)


def test_any_stages_are_read_in_any_other(ranks: Ranks, tmp_path: Path) -> None:
    cases = [Case(pp=4, split="E|t*3|t|L"), Case(pp=2, dp=2, split="Et|t*3L"), Case(pp=2, dp=2, chunks=2), Case(dp=4)]
    assert ranks.run(4, _layouts, str(tmp_path), cases, ARCH)[0][0] == [True] * 3


@pytest.mark.slow
def test_experts_over_ranks_are_read_in_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    over = Case(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True)
    cases = [
        Case(dp=4, ep=2),
        over,
        Case(dp=4),
        Case(pp=2, dp=2, ep=2),
        Case(dp=4, ep=2, etp=2),
        Case(cp=2, dp=2, ep=2),
    ]
    assert ranks.run(4, _layouts, str(tmp_path), cases, WITH_EXPERTS)[0][0] == [True] * 5


@pytest.mark.parametrize(
    "arch",
    quick([WITH_EXPERTS, SOME_WITH_EXPERTS, LATENT, LINEAR, NORMS_AND_EXPERTS], 0, 1, 2, 3),
    ids=lambda arch: arch.family,
)
def test_norms_are_stored_by_the_names_of_transformer_engine(ranks: Ranks, arch: Architecture) -> None:
    names = ParameterNames(fused_norms=True)
    norms = {
        f"decoder.layers.{i}.{name(layer)}"
        for i, layer in enumerate(arch.each_layer)
        for name in (names.input_norm, names.mlp_norm)
    }
    others = {
        f"decoder.layers.{i}.{name}"
        for i, layer in enumerate(arch.each_layer)
        for part in (layer.attention, layer.mlp)
        for name in (part.fused_norm, "input_layernorm.weight", "pre_mlp_layernorm.weight")
    }
    stored = set(ranks.run(1, _stored_names, arch)[0])
    assert norms <= stored, sorted(norms - stored)
    assert not stored & (others - norms), sorted(stored & (others - norms))


def _stored_names(arch: Architecture) -> list[str]:
    with actor_in(Case(config={"actor": {"megatron": {"transformer_engine": "none"}}}), arch) as actor:
        states = actor.sharded_weights()
    tensors = [x for state in states.values() for x in state.values() if isinstance(x, ShardedTensor)]
    # layers that are alike are one tensor, whose first axis is the layer
    return [
        x.key.replace("layers.", f"layers.{x.global_offset[0]}.", 1) if x.prepend_axis_num else x.key for x in tensors
    ]


@pytest.mark.skipif(not transformer_engine_available(), reason="needs a GPU and Transformer Engine")
@pytest.mark.parametrize("arch", [WITH_EXPERTS, SOME_WITH_EXPERTS], ids=lambda arch: arch.family)
def test_experts_are_read_grouped_or_one_by_one(ranks: Ranks, tmp_path: Path, arch: Architecture) -> None:
    one_by_one = Case(config={"actor": {"megatron": {"transformer_engine": "none"}}})
    assert ranks.run(1, _layouts, str(tmp_path), [Case(), one_by_one, Case()], arch)[0][0] == [True] * 2


@pytest.mark.parametrize(
    "arch",
    quick([SOME_WITH_EXPERTS, LATENT, LINEAR, LINEAR_APART, NORMS_AND_EXPERTS]),
    ids=lambda arch: arch.family,
)
def test_layers_of_two_kinds_are_read_in_any_layout(ranks: Ranks, tmp_path: Path, arch: Architecture) -> None:
    cases = [Case(dp=4, ep=2), Case(tp=2, pp=2, sequence_parallel=True), Case(pp=2, dp=2, ep=2, chunks=2)]
    assert ranks.run(4, _layouts, str(tmp_path), cases, arch)[0][0] == [True] * 2


@pytest.mark.parametrize("arch", quick([WINDOWS, NORMS_BEHIND]), ids=lambda arch: arch.family)
def test_dense_layers_of_other_kinds_are_read_in_any_layout(ranks: Ranks, tmp_path: Path, arch: Architecture) -> None:
    cases = [Case(tp=2, pp=2, sequence_parallel=True), Case(tp=4), Case(pp=2, dp=2, chunks=2)]
    assert ranks.run(4, _layouts, str(tmp_path), cases, arch)[0][0] == [True] * 2


@pytest.mark.slow
def test_layers_with_sinks_are_read_in_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    cases = [Case(dp=4, ep=2), Case(tp=2, pp=2, etp=1, sequence_parallel=True), Case(pp=2, dp=2, ep=2, chunks=2)]
    assert ranks.run(4, _layouts, str(tmp_path), cases, SINKS)[0][0] == [True] * 2


def _under_earlier_names(folder: str) -> bool:
    """Whether weights, optimizer and bits are read that are stored as torch's layers named the norm before experts."""
    from megarl.checkpoint.store import load_checkpoint

    config = {"actor": {"megatron": {"transformer_engine": "none"}}}
    with actor_in(Case(config=config), WITH_EXPERTS, lr=1e-2) as actor:
        update(actor, fixed_batch())
        before = {name: p.clone() for name, p in actor.parameters().items()}
        state, world = actor.sharded_state(loading=False), actor.groups.world
        for x in nested_values(state):
            if isinstance(x, ShardedTensor):
                x.key = x.key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        settings: dict[str, Any] = dict(model_files=lambda folder: None, world=world)
        saved = save_checkpoint(folder, rl_step(1), {"actor": state}, STATE, **settings)
        update(actor, fixed_batch())
        loaded = load_checkpoint(saved, {"actor": actor.sharded_state(loading=True)}, rng=False, world=world)
        actor.load_sharded(loaded["actor"])
        return all(torch.equal(p, before[name]) for name, p in actor.parameters().items())


def test_norms_are_read_under_earlier_names(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, _under_earlier_names, str(tmp_path)) == [True]


def _same_element_twice(folder: str) -> str:
    with actor_in(Case(dp=2)) as actor:
        state = actor.sharded_state(loading=False)
        tensor = next(x for x in state["model0"].values() if isinstance(x, ShardedTensor) and x.replica_id != 0)
        tensor.replica_id = 0
        settings: dict[str, Any] = dict(model_files=lambda folder: None, world=actor.groups.world)
        with pytest.raises(RuntimeError) as e:
            save_checkpoint(folder, rl_step(1), {"actor": state}, STATE, **settings)
        return str(e.value)


def test_what_no_ranks_have_between_them_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, _same_element_twice, str(tmp_path))
    later = r"(Invalid sharding pattern validation\. Errors: )?"  # than Megatron-Core 0.16
    assert first == second
    assert re.match(rf"the ranks do not have a checkpoint between them: {later}Invalid access pattern", first)


@pytest.mark.slow
def test_each_rank_writes_its_share(ranks: Ranks, tmp_path: Path) -> None:
    """The same bits from every layout; bytes per rank differ by less than one parameter with its state."""
    from megarl.checkpoint.stored_objects import CheckpointReader

    plain = {"actor": {"megatron": {"use_distributed_optimizer": False}}}
    cases = [Case(dp=4), Case(tp=2, dp=2, sequence_parallel=True), Case(dp=4, config=plain), Case(pp=2, tp=2)]
    results = ranks.run(4, _layouts, str(tmp_path), cases)
    assert results[0][0] == [True, True, True]
    assert all(started == [] for _, started in results)  # saving starts no process, which would outlive a failed rank
    largest = 16 * ARCH.hidden_size * (ARCH.vocab_size + 3)  # weight, fp32 weight and two moments of the embedding
    for step in (1, 2, 3):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        shares = _bytes_per_rank(str(folder), 4)
        assert min(shares) > 0 and max(shares) - min(shares) <= largest, shares
        manifest = json.loads((folder / "manifest.json").read_text())["files"]
        assert set(manifest) == set(files_of(str(folder))) and "trainer.json" in manifest
        state = json.loads((folder / "trainer.json").read_text())
        stored = CheckpointReader(str(folder)).stored
        assert state.pop("bits").keys() == {key for key, value in stored.items() if hasattr(value, "chunks")}
        assert state == {"mark": 7, **STATE, "format": 1, "loop": "rl", "order": 1, "step": step, "world_size": 4}


def _bad_luck(run_dir: str) -> dict[str, Any]:
    """What each rank says of damage, foreign shapes and NaN."""
    from megarl.checkpoint.store import verify_checkpoint

    said: dict[str, Any] = {}

    def message(what: Any) -> str:
        with pytest.raises(ValueError) as caught:
            what()
        return str(caught.value)

    wider = changed(ARCH, ffn_hidden_size=64)
    with actor_in(Case(dp=2), lr=1e-2) as actor:
        world, rank = actor.groups.world, dist.get_rank()
        folder = _save(actor, run_dir, 1)
        said["whole"] = verify_checkpoint(folder, world)
        file = Path(folder, "__4_0.distcp")
        if rank == 0:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        world.barrier("the test")
        said["flipped"] = verify_checkpoint(folder, world)
        world.barrier("the test")
        if rank == 0:
            os.truncate(file, 100)
        world.barrier("the test")
        said["cut"] = verify_checkpoint(folder, world)
        said["cut, read"] = message(lambda: _load(actor, folder))
        second = _save(actor, run_dir, 2)
        if rank == 1:  # only this rank sees it
            next(iter(actor.parameters().values())).data.view(-1)[0] = float("nan")
        said["nan"] = message(lambda: _save(actor, run_dir, 3))
    with actor_in(Case(dp=2), wider, lr=1e-2) as actor:
        said["shape"] = message(lambda: _load(actor, second))
    with actor_in(Case(dp=2), lr=1e-2) as actor:
        from megarl.checkpoint.store import load_checkpoint

        wanted = {"reference": actor.sharded_weights("reference.")}
        world = actor.groups.world
        said["key"] = message(lambda: load_checkpoint(second, wanted, rng=False, world=world))
    said["left"] = sorted(os.listdir(Path(run_dir, "checkpoints")))
    return said


def test_all_ranks_say_the_same_of_what_cannot_be_read(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(2, _bad_luck, str(tmp_path))
    assert results[0] == results[1]
    said, parent = results[0], tmp_path / "checkpoints"
    assert said["whole"] is None
    assert said["flipped"] == "__4_0.distcp is not what was written: its checksum differs"
    assert re.fullmatch(r"__4_0\.distcp has 100 bytes instead of \d+", said["cut"])
    assert said["cut, read"].startswith(f"checkpoint '{parent}/global_step_1': it cannot be read: ")
    assert "\n" not in said["cut, read"]
    assert re.fullmatch(
        r"\S+ \(weight\) is not finite: nothing is saved, and earlier checkpoints stay as they are", said["nan"]
    )
    assert re.fullmatch(
        rf"checkpoint '{parent}/global_step_2': its \S+ has shape \[[\d, ]+\], this run's has \[[\d, ]+\]",
        said["shape"],
    )
    assert re.fullmatch(
        rf"checkpoint '{parent}/global_step_2': it has no reference\.\S+, which this run needs with shape \[[\d, ]+\]",
        said["key"],
    )
    assert said["left"] == ["global_step_1", "global_step_2"]


def _full_disk(run_dir: str) -> list[str]:
    from megarl.checkpoint.sharded_files import ShardedParts
    from megarl.checkpoint.store import SaveFailed

    said = []

    def no_room(parts: ShardedParts, folder: str) -> list[Any]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with actor_in(Case(dp=2), lr=1e-2) as actor:
        _save(actor, run_dir, 1)
        with pytest.raises(SaveFailed) as caught, pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(ShardedParts, "write", no_room)
            _save(actor, run_dir, 2)
        said.append(str(caught.value))
        if dist.get_rank() == 0:
            fill(Path(run_dir))
        actor.groups.world.barrier("the test")
        with pytest.raises(SaveFailed) as caught:
            _save(actor, run_dir, 3)
        said.append(str(caught.value))
        actor.groups.world.barrier("the test")
        if dist.get_rank() == 0:
            os.unlink(Path(run_dir, "ballast"))
        actor.groups.world.barrier("the test")
        _save(actor, run_dir, 4)
    return said


def _little_room(folder: str) -> list[str]:
    """What attempts to write a small state end in, with more room each time."""
    from megarl.checkpoint.rank_failures import on_every_rank
    from megarl.checkpoint.sharded_files import ShardedParts
    from megarl.parallel.world import World

    said, world = [], World()
    parts = ShardedParts({"state": list(range(100_000))}, world)

    def write(disk: str) -> None:
        parts.finish(disk, [parts.write(disk)])

    for kib in range(4, 36, 8):
        with small_disk(Path(folder, str(kib)), kib) as disk:
            try:
                on_every_rank(world, partial(write, str(disk)))
            except (OSError, RuntimeError) as e:
                said.append(f"{type(e).__name__}: {e}")
    world.leave()
    return [line.split(" (rank 0", 1)[0] for line in said]


def test_a_disk_that_is_full_in_any_file_is_said_as_such(ranks: Ranks, tmp_path: Path) -> None:
    """torch's own writing to a path gives an error in which the disk is not named."""
    from megarl.checkpoint.rank_failures import RankFailed

    with small_disk(tmp_path / "probe", 4):
        pass
    (said,) = ranks.run(1, _little_room, str(tmp_path))
    assert said and set(said) == {f"{RankFailed.__name__}: [Errno 28] No space left on device"}


def test_a_full_disk_fails_the_save_and_not_the_run(ranks: Ranks, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        first, second = ranks.run(2, _full_disk, str(disk), timeout=500)
        assert first == second
        assert re.fullmatch(
            rf"global_step_2 could not be saved in '{disk}/checkpoints': \[Errno 28\] No space left on device"
            r"(: \S+)? \(rank 1, \S+\); the newest whole checkpoint there is global_step_1",
            first[0],
        )
        assert first[1].startswith(f"global_step_3 could not be saved in '{disk}/checkpoints': [Errno 28] No space")
        assert sorted(os.listdir(disk / "checkpoints")) == ["global_step_1", "global_step_4"]
        assert [found.problem for found in checkpoints(str(disk))] == [None, None]
