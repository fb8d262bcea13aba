"""`trainer.deterministic`: a run that was killed has the bits of one that was not, on GPUs too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_and_resume import last_checkpoint
from ranks import Ranks
from tiny_run import FINGERPRINT, numbers_of, train_in, write_run
from training_cases import Case, actor_in

from megarl.config import load_config
from megarl.trainer.admission.checks import check_layouts


def _within_and_after() -> dict[str, Any]:
    """What a rank computes by, within and after."""
    from megarl.parallel.deterministic import deterministic

    seen: dict[str, Any] = {}
    variables = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    for name, wanted in (("within", True), ("after", False)):
        with deterministic(wanted), actor_in(Case()) as actor:
            told = (torch.are_deterministic_algorithms_enabled(), actor.transformer_config.deterministic_mode)
            seen[name] = (*told, *(os.environ.get(variable) for variable in variables))
    return seen


def test_torch_megatron_and_libraries_are_told(ranks: Ranks) -> None:
    (seen,) = ranks.run(1, _within_and_after)
    assert seen == {"within": (True, True, ":4096:8", "Ring", "0"), "after": (False, False, None, None, None)}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"actor_rollout_ref__rollout__name": "vllm"}, "rollout.name = vllm round as its batches fall"),
        ({"environment__name": "calculator"}, "an environment answers by the clock"),
        (
            {"actor_rollout_ref__actor__megatron": {"override_transformer_config": {"deterministic_mode": False}}},
            "actor.megatron.override_transformer_config.deterministic_mode=false takes it back",
        ),
    ],
)
def test_what_cannot_repeat_itself_is_refused(tmp_path: Path, sections: dict[str, Any], reason: str) -> None:
    config = write_run(tmp_path, trainer__deterministic=True, **sections)
    with pytest.raises(ValueError, match=reason):
        check_layouts(load_config(str(config), []))


@pytest.mark.slow
def test_runs_end_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    """On a GPU this fails without the key: atomic additions of gradients come in another order each time."""
    runs = []
    for name in ("one", "other", "in two parts"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "reward.py").write_text(FINGERPRINT)
        trainer = {
            "deterministic": True,
            "save_freq": 1,
            "resume_mode": "auto",
            "test_freq": 0,
            "val_before_train": False,
        }
        config = write_run(
            folder,
            reward__name=f"{folder / 'reward.py'}:score",
            **{f"trainer__{key}": value for key, value in (trainer | {"total_training_steps": 4}).items()},
        )
        if name == "in two parts":
            train_in(ranks, 1, config, "trainer.total_training_steps=2")
        train_in(ranks, 1, config)
        runs.append((last_checkpoint(folder / "run"), numbers_of(folder)))
    one, rows = runs[0]
    assert all(row["actor/grad_norm"] > 0 for row in rows), "there is something to add up"
    for other, other_rows in runs[1:]:
        assert rows == other_rows and one.keys() == other.keys()
        assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []
