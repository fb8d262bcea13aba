"""Checkpoints that go through a disk of the node's own: what a job that died had not copied yet is not lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from small_state import STATE, rl_step
from training_cases import Case, actor_in, fixed_batch, update

from megarl.checkpoint.folder import checkpoint_folder, listed_partials, problem_with
from megarl.checkpoint.local_disk import local_folder, take


def _names(*folder: str) -> list[str]:
    path = Path(*folder)
    return sorted(os.listdir(path)) if path.is_dir() else []


def _save(run_dir: str, local_dir: str, stages: int) -> tuple[list[str], list[str]]:
    """Save a checkpoint as far as so many stages; what is on the node's disk then, and in the run's folder."""
    from megarl.checkpoint.store import Save, take_snapshot

    with actor_in(Case(dp=2), lr=1e-2) as actor:
        update(actor, fixed_batch())
        state = {"actor": actor.sharded_state(loading=False)}
        settings: dict[str, Any] = {"model_files": lambda folder: None, "local_dir": local_dir}
        world = actor.groups.world
        save = Save(take_snapshot(run_dir, rl_step(1), state, STATE, world=world, **settings), world)
        for _ in range(stages):
            save.go_on(save.work)
        world.barrier("the test")
        return _names(local_folder(local_dir, run_dir), "global_step_1"), _names(run_dir, "checkpoints")


def _fails(run_dir: str, local_dir: str) -> tuple[list[str], list[str]]:
    """What is left on the node's own disk and the shared one, where the latter has no room for the copy."""
    from megarl.checkpoint import store

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(store.SaveFailed):
        patch.setattr(store, "copy_over", no_room)
        _save(run_dir, local_dir, 3)
    return _names(local_folder(local_dir, run_dir)), _names(run_dir, "checkpoints")


def test_a_save_that_fails_leaves_nothing_on_either_disk(ranks: Ranks, tmp_path: Path) -> None:
    run_dir, local_dir = str(tmp_path / "run"), str(tmp_path / "local")
    assert ranks.run(2, _fails, run_dir, local_dir)[0] == ([], [])


def _finish(run_dir: str, local_dir: str) -> None:
    from megarl.parallel.world import World
    from megarl.trainer.resuming.resume import finish_unfinished

    world = World()
    finish_unfinished(run_dir, local_dir, world)
    world.leave()


def test_parts_leave_the_nodes_disk_when_they_are_copied(ranks: Ranks, tmp_path: Path) -> None:
    run_dir, local_dir = str(tmp_path / "run"), str(tmp_path / "local")
    ((local, checkpoints), _) = ranks.run(2, _save, run_dir, local_dir, 3)
    assert (local, checkpoints) == ([], ["global_step_1"])
    assert problem_with(checkpoint_folder(run_dir, rl_step(1))) is None


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_not_copied_is_brought_over(ranks: Ranks, tmp_path: Path, lost: bool) -> None:
    """The job dies before it copies anything; `lost`: so does the disk of one node."""
    run_dir, local_dir = str(tmp_path / "run"), str(tmp_path / "local")
    ((local, checkpoints), _) = ranks.run(2, _save, run_dir, local_dir, 2)
    assert checkpoints == [".global_step_1.partial"] and len(local) >= 2
    if lost:
        Path(local_folder(local_dir, run_dir), "global_step_1", local[0]).unlink()
    ranks.run(2, _finish, run_dir, local_dir)
    assert os.listdir(tmp_path / "run" / "checkpoints") == [".global_step_1.partial" if lost else "global_step_1"]
    final = checkpoint_folder(run_dir, rl_step(1))
    assert problem_with(final) == ("it is no folder" if lost else None)
    if not lost:
        assert set(local) <= json.loads(Path(final, "manifest.json").read_text())["files"].keys()


def test_a_partial_folder_without_a_manifest_stays_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".global_step_1.partial").mkdir(parents=True)
    assert listed_partials(str(tmp_path)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    folder = local_folder(str(tmp_path / "local"), str(tmp_path / "run"))
    assert folder != local_folder(str(tmp_path / "local"), str(tmp_path / "run-2"))
    take(os.path.join(folder, "global_step_1"))
    assert os.stat(folder).st_mode & 0o777 == 0o700
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="is not this user's folder; set"):
        take(os.path.join(folder, "global_step_2"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    linked = tmp_path / "linked"
    linked.symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        take(str(linked / "global_step_1"))
