"""Whole runs inside the pool's ranks, where a run starts in no time; with faults that only a program can have."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def run_here(
    config: str, overrides: Sequence[str] = (), fault: str = "", folder: str = "", callbacks: Sequence[Any] = ()
) -> tuple[str, str]:
    """A run on the ranks of an initialised world; returns how it ended and what this rank said.

    Args:
        fault: a function of this module that breaks something first.
        folder: working directory of rank 1, instead of rank 0's.
    """
    from megarl.config import load_config
    from megarl.flow_kinds import FLOWS
    from megarl.parallel.train_groups import leave_groups
    from megarl.parallel.world import World
    from megarl.rewards.results import RewardError
    from megarl.trainer.admission.checks import check_run
    from megarl.trainer.session.take_part import take_part
    from megarl.trainer.stop import StopRequest
    from megarl.trainer.stopped import RunRefused, RunStopped

    world, rank, said = dist.get_world_size(), dist.get_rank(), io.StringIO()
    here = os.getcwd()
    undo: Callable[[], None] = globals()[fault]() if fault else lambda: None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if folder and rank == 1:
                os.chdir(folder)
            inputs = check_run(load_config(config, [*overrides, f"trainer.n_gpus_per_node={world}"]))
            ours = World()
            try:
                take_part(inputs, FLOWS.load(inputs.config.trainer.flow), ours, StopRequest(rank), callbacks)
            finally:
                leave_groups(ours)
        except (RunRefused, RunStopped, RewardError) as e:
            return f"{type(e).__name__}: {e}", said.getvalue()
        except ValueError as e:
            return f"refused: {e}", said.getvalue()
        finally:
            undo()
            os.chdir(here)
    return "", said.getvalue()


def _advantages(poison: Callable[[Any, int], Any]) -> Callable[[], None]:
    """Let `poison` see each step's batch with its advantages; steps are counted from 1 in this process."""
    from megarl.flows import ppo

    original, calls = ppo.compute_advantages, [0]

    def poisoned(*args: Any) -> Any:
        calls[0] += 1
        return poison(original(*args), calls[0])

    ppo.compute_advantages = poisoned

    def undo() -> None:
        ppo.compute_advantages = original

    return undo


def nan_in_the_second_step() -> Callable[[], None]:
    def poison(batch: Any, step: int) -> Any:
        return batch.with_(advantages=batch.advantages * torch.nan) if step == 2 else batch

    return _advantages(poison)


def infinity_in_every_step_from_the_second() -> Callable[[], None]:
    def poison(batch: Any, step: int) -> Any:
        return batch.with_(advantages=torch.full_like(batch.advantages, torch.inf)) if step > 1 else batch

    return _advantages(poison)


def another_advantage_on_rank_1() -> Callable[[], None]:
    """In the last bit, from the second step on."""

    def poison(batch: Any, step: int) -> Any:
        if step == 1 or dist.get_rank() == 0:
            return batch
        return batch.with_(advantages=torch.nextafter(batch.advantages, torch.tensor(9.0)))

    return _advantages(poison)


def nan_in_the_weights() -> Callable[[], None]:
    """After the second step's updates: what is saved then would be lost."""
    from megarl.trainer.session.loops import Loops

    original, calls = Loops._end_step, [0]

    def poisoned(self: Any, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            for actor in self._trained:
                next(iter(actor.parameters().values())).data.view(-1)[0] = torch.nan
        original(self, *args)

    Loops._end_step = poisoned  # type: ignore[method-assign]

    def undo() -> None:
        Loops._end_step = original  # type: ignore[method-assign]

    return undo


def no_reshard_from_the_second_on() -> Callable[[], None]:
    from megarl.reshard.execute import Resharder

    original, calls = Resharder.run, [0]

    def once(self: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            original(self)

    Resharder.run = once  # type: ignore[method-assign]

    def undo() -> None:
        Resharder.run = original  # type: ignore[method-assign]

    return undo


def a_reshard_that_loses_a_bit() -> Callable[[], None]:
    from megarl.reshard.execute import Resharder

    original = Resharder.run

    def careless(self: Any) -> None:
        original(self)
        if self.local and dist.get_rank() == 0:
            self.local[0][1].tensor().view(-1)[0] += 1e-3

    Resharder.run = careless  # type: ignore[method-assign]

    def undo() -> None:
        Resharder.run = original  # type: ignore[method-assign]

    return undo


def held_out_rows_are_gone_after_two_steps() -> Callable[[], None]:
    """They are read before the first step, too."""
    from megarl.data.row_files import RowRefused
    from megarl.flows import learn

    original, calls = learn.evaluate_on, [0]

    def gone(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise RowRefused("held out, and gone")
        return original(*args)

    learn.evaluate_on = gone

    def undo() -> None:
        learn.evaluate_on = original

    return undo


def rows_are_drawn() -> Callable[[], None]:
    """Rows with answers of any size are tokenised when they are drawn, and before the run the first and the last."""
    from megarl.data import example_set

    kept = example_set.LATER_BYTES, example_set.TRIED
    example_set.LATER_BYTES, example_set.TRIED = -1, 2

    def undo() -> None:
        example_set.LATER_BYTES, example_set.TRIED = kept

    return undo
