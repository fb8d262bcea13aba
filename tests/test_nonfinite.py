"""Nothing that is not finite passes: whole runs whose loss, weights or engine go wrong, and what is left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kill_and_resume import tensors_of
from ranks import Ranks
from run_cases import run_here
from tiny_run import FINGERPRINT, metrics_of, write_run

from megarl.trainer.session.nonfinite import NonFiniteUpdates

QUIET: dict[str, Any] = {
    "trainer__val_before_train": False,
    "trainer__test_freq": 0,
    "trainer__logger": ["jsonl"],
    "trainer__save_freq": 1,
}


def both_alike(results: list[tuple[str, str]]) -> tuple[str, str]:
    """How the run ended, the same on both ranks, and what rank 0 said."""
    assert len({ended for ended, _ in results}) == 1
    return results[0]


def varied_reward(folder: Path) -> str:
    """Of an untrained model's responses hardly any is right, and equal scores train nothing."""
    file = folder / "reward.py"
    file.write_text("def varied(response, row):\n    return len(response) / 4 + response.count('1')\n")
    return f"{file}:varied"


def checkpoint(folder: Path, step: int) -> str:
    return str(folder / "run" / "checkpoints" / f"global_step_{step}")


def same(one: str, other: str) -> bool:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys() and len(a) > 20
    return all(torch.equal(a[name], b[name]) for name in a)


def test_an_update_that_is_not_finite_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    """Weights and optimizer stay as they were, to the bit; the run goes on."""
    config = write_run(tmp_path, **QUIET, reward__name=varied_reward(tmp_path), trainer__total_training_steps=4)
    ended, _ = both_alike(ranks.run(2, run_here, str(config), [], "nan_in_the_second_step"))
    assert ended == ""
    rows = metrics_of(tmp_path)
    assert [row["actor/skipped"] for row in rows] == [0, 1, 0, 0]
    assert rows[1]["actor/grad_norm"] is None and rows[2]["actor/grad_norm"] > 0
    assert same(checkpoint(tmp_path, 1), checkpoint(tmp_path, 2))
    assert not same(checkpoint(tmp_path, 2), checkpoint(tmp_path, 3))
    assert all(x.isfinite().all() for x in tensors_of(checkpoint(tmp_path, 4)).values())


@pytest.mark.parametrize(("mode", "updates", "left_out"), [("skip", "4 updates in a row", 3), ("stop", "2 updates", 2)])
def test_a_run_stops_with_its_last_good_weights_saved(
    ranks: Ranks, tmp_path: Path, mode: str, updates: str, left_out: int
) -> None:
    """Two updates a step: the third in a row is in step 3, and the step is finished before the run stops."""
    config = write_run(tmp_path, **QUIET, trainer__on_nonfinite=mode, trainer__total_training_steps=5)
    ended, _ = both_alike(ranks.run(2, run_here, str(config), [], "infinity_in_every_step_from_the_second"))
    assert ended.startswith(f"RunStopped: step {left_out}: loss or gradient norm of {updates} ")
    assert "the last step without is 1; " in ended and f"{checkpoint(tmp_path, left_out)} holds them" in ended
    assert same(checkpoint(tmp_path, 1), checkpoint(tmp_path, left_out))


def test_a_run_rolls_back_and_takes_the_next_batches(ranks: Ranks, tmp_path: Path) -> None:
    sections = QUIET | {"trainer__logger": ["console", "jsonl"]}
    decay = {"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_steps": 0}
    config = write_run(
        tmp_path,
        **sections,
        trainer__on_nonfinite="rollback",
        trainer__total_training_steps=4,
        actor_rollout_ref__actor__optim=decay,
    )
    ended, said = both_alike(ranks.run(2, run_here, str(config), [], "nan_in_the_second_step"))
    assert ended == ""
    assert f"rolled back to {checkpoint(tmp_path, 1)}, to go on with the next batches" in said
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["actor/skipped"] for row in rows] == [0, 0, 0, 0]
    last_of_step = [1e-3 * (1 - (2 * step - 0.5) / 8) for step in (1, 2, 3, 4)]  # as if nothing had been
    assert [row["actor/lr"] for row in rows] == pytest.approx(last_of_step, rel=1e-6)


def test_a_run_that_stops_closes_its_records(ranks: Ranks, tmp_path: Path) -> None:
    """Nobody is shown a run that is over as one that goes on."""
    prometheus = {"mode": "textfile", "textfile": str(tmp_path / "megarl.prom")}
    sections = QUIET | {"trainer__logger": ["jsonl", "prometheus"], "telemetry__prometheus": prometheus}
    config = write_run(tmp_path, **sections, trainer__on_nonfinite="stop")
    ended, _ = both_alike(ranks.run(2, run_here, str(config), [], "nan_in_the_second_step"))
    assert ended.startswith("RunStopped: step 2: ") and len(metrics_of(tmp_path)) == 2
    assert not (tmp_path / "megarl.prom").exists()


@pytest.mark.slow
def test_rollbacks_come_to_an_end(ranks: Ranks, tmp_path: Path) -> None:
    config = write_run(tmp_path, **QUIET, trainer__on_nonfinite="rollback", trainer__total_training_steps=9)
    ended, _ = both_alike(ranks.run(2, run_here, str(config), [], "infinity_in_every_step_from_the_second"))
    assert f"rolled back to {checkpoint(tmp_path, 1)} too often" in ended
    assert same(checkpoint(tmp_path, 1), checkpoint(tmp_path, 2))


def test_weights_that_are_not_finite_are_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    config = write_run(tmp_path, **QUIET, trainer__max_ckpt_to_keep=1)
    ended, _ = both_alike(ranks.run(2, run_here, str(config), [], "nan_in_the_weights"))
    assert ended.startswith("RunStopped: not saved: ")
    assert ended.endswith(f"the last checkpoint is {checkpoint(tmp_path, 1)}")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["global_step_1"]


def test_equal_scores_train_nothing(ranks: Ranks, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def constant(response, row):\n    return 10.3\n")
    sections = QUIET | {"trainer__logger": ["console", "jsonl"], "trainer__save_freq": 0}
    config = write_run(tmp_path, **sections, reward__name=f"{reward}:constant", actor_rollout_ref__rollout__n=16)
    ended, said = both_alike(ranks.run(2, run_here, str(config)))
    assert ended == ""
    assert "step 1: in every group all responses scored the same (10.3), so there is nothing to learn from" in said
    assert [row["actor/grad_norm"] for row in metrics_of(tmp_path)] == [0, 0]


def test_one_response_to_a_prompt_may_teach_something(ranks: Ranks, tmp_path: Path) -> None:
    """Where an estimator compares responses over the whole batch."""
    (tmp_path / "reward.py").write_text(FINGERPRINT)
    sections = QUIET | {"algorithm__adv_estimator": "reinforce_plus_plus", "actor_rollout_ref__rollout__n": 1}
    sections |= {"trainer__total_training_steps": 1, "trainer__logger": ["console", "jsonl"], "trainer__save_freq": 0}
    config = write_run(tmp_path, **sections, reward__name=f"{tmp_path / 'reward.py'}:score")
    ((ended, said),) = ranks.run(1, run_here, str(config))
    assert ended == "" and metrics_of(tmp_path)[0]["actor/grad_norm"] > 0
    assert "nothing to learn from" not in said
    (tmp_path / "reward.py").write_text("def score(response, row):\n    return 1.5\n")
    ((ended, said),) = ranks.run(1, run_here, str(config), [f"trainer.default_local_dir={tmp_path / 'other'}"])
    assert ended == "" and "step 1: all responses scored the same (1.5), so there is nothing to learn from" in said


def test_an_engine_with_old_weights_is_noticed(ranks: Ranks, tmp_path: Path) -> None:
    """The actor is split over two ranks, each replica of the engine is whole and keeps the weights that it has."""
    megatron = {"actor_rollout_ref__actor__megatron": {"tensor_model_parallel_size": 2}}
    sections = QUIET | megatron | {"actor_rollout_ref__reshard": {}, "trainer__save_freq": 0}
    config = write_run(
        tmp_path,
        **sections,
        reward__name=varied_reward(tmp_path),
        actor_rollout_ref__actor__optim={"lr": 0.01},
        actor_rollout_ref__rollout={"n": 4, "free_cache_engine": False},
    )
    ended, _ = both_alike(ranks.run(2, run_here, str(config), [], "no_reshard_from_the_second_on"))
    assert ended.startswith("RunStopped: step 2: the native engine's log-probabilities are ")
    assert "more than rollout.max_logp_gap = 0.01: it does not generate with the actor's weights" in ended
    assert [row["step"] for row in metrics_of(tmp_path)] == [1]


def test_the_first_reshard_is_verified(ranks: Ranks, tmp_path: Path) -> None:
    megatron = {"actor_rollout_ref__actor__megatron": {"tensor_model_parallel_size": 2}}
    config = write_run(tmp_path, **QUIET, **megatron, actor_rollout_ref__reshard={})
    with pytest.raises(AssertionError, match="1 pieces differ from their source after the reshard"):
        ranks.run(2, run_here, str(config), [], "a_reshard_that_loses_a_bit")


@pytest.mark.slow
def test_no_response_that_ends_is_said(ranks: Ranks, tmp_path: Path) -> None:
    config = write_run(tmp_path, **QUIET, data__max_response_length=1, trainer__total_training_steps=1)
    (_, said), *_ = ranks.run(1, run_here, str(config))
    ended = "no response ended before data.max_response_length = 1 tokens; look at the stop tokens (</s> (1))"
    assert (ended in said) == (metrics_of(tmp_path)[0]["response/truncated"] == 1)


def test_updates_are_counted_over_steps() -> None:
    skip = NonFiniteUpdates("skip", step=4)
    assert skip.after_step(5, {"actor": [False, True]}) is None
    assert skip.after_step(6, {"actor": [True, False]}) is None
    assert skip.after_step(7, {"actor": [False, True, True]}) is None
    what = skip.after_step(8, {"actor": [True]})
    assert what is not None and "step 8: loss or gradient norm of 3 updates in a row" in what
    assert what.endswith("the last step without is 4")


def test_updates_are_counted_by_model() -> None:
    """A critic that learns is no sign that the policy does."""
    skip, of_a_step = NonFiniteUpdates("skip", step=0), {"actor": [True], "critic": [False]}
    assert [skip.after_step(step, of_a_step) for step in (1, 2)] == [None, None]
    what = skip.after_step(3, of_a_step)
    assert what is not None and "3 updates in a row" in what
