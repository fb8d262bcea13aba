"""What a run tells the outside: progress, metric files, sample rollouts, the learning curve. Rank 0 only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.table import Table

from megarl.evaluation.records import Record, write_records
from megarl.telemetry.counting import Counting
from megarl.telemetry.progress import Progress, print_table
from megarl.telemetry.samples import Sample, write_samples
from megarl.telemetry.sinks import Sink, open_sinks
from megarl.trainer.inputs import Inputs
from megarl.types import Rollout, Rollouts


class Report:
    """Silent on every rank but the first."""

    def __init__(self, inputs: Inputs, *, rank: int, first_step: int | None) -> None:
        """
        Args:
            first_step: the first step that a resumed run will report, at most 0 in a warm-up; None for a fresh run.
        """
        self._inputs, self._speaks = inputs, rank == 0
        self._trainer = inputs.config.trainer
        self._sinks: list[Sink] = []
        self._progress: Progress | None = None
        self._unwritten: set[int] = set()  # which sinks have rows that wait for room
        self._open(first_step)
        self._since = time.perf_counter()

    def rewind(self, first_step: int) -> None:
        """The run goes back: `first_step` (at most 0 in a warm-up) comes next, and what is there of it is dropped."""
        self._close_sinks()
        self._open(first_step)

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[None]:
        """A progress bar over the `total` steps of a loop."""
        self._since = time.perf_counter()
        if not self._speaks or "console" not in self._trainer.logger:
            yield
            return
        try:
            with Progress(total, name, done) as self._progress:
                yield
        finally:
            self._progress = None

    def say(self, text: str) -> None:
        """A line on the console, above the progress."""
        if not self._speaks or "console" not in self._trainer.logger:
            return
        if self._progress is not None:
            self._progress.note(text)
        else:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """A line that is shown even where the console has no progress."""
        if not self._speaks:
            return
        if self._progress is not None:
            self._progress.note(f"megarl: warning: {text}")
        else:
            print(f"megarl: warning: {text}", file=sys.stderr, flush=True)

    def show(self, table: Table) -> None:
        """A table on the console, above the progress."""
        if not self._speaks or "console" not in self._trainer.logger:
            return
        if self._progress is not None:
            self._progress.note(table)
        else:
            print_table(table)

    def step(self, row: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """A step, under its number in the metric files; a supervised warm-up's are those up to 0.

        Args:
            seconds: by phase.

        Returns:
            the row.
        """
        now = time.perf_counter()
        timing = {f"timing/{phase}_s": s for phase, s in seconds.items()}
        timing["timing/step_s"], self._since = now - self._since, now
        if "tokens" in metrics:
            timing["tokens_per_s"] = metrics["tokens"] / timing["timing/step_s"]
        self._log(row, {**metrics, **timing})
        return {**metrics, **timing}

    def samples(self, step: int, rollouts: Rollouts) -> None:
        """Some of the step's rollouts, as text."""
        if not self._speaks or not self._trainer.log_rollouts:
            return
        chosen = [rollouts[i] for i in _evenly(len(rollouts), self._trainer.log_rollouts)]
        samples = [self._sample(rollout) for rollout in chosen]
        try:
            write_samples(self._trainer.run_dir, step, samples)
        except OSError as e:
            self.warn(f"the sample rollouts of step {step} are not written: {e}")

    def validation(self, step: int, records: Sequence[Record]) -> None:
        """All responses of a validation, in `validation/step_000012.jsonl`."""
        if not self._speaks or not self._trainer.log_rollouts:
            return
        path = os.path.join(self._trainer.run_dir, "validation", f"step_{step:06d}.jsonl")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_records(path, records)
        except OSError as e:
            self.warn(f"the responses of the validation of step {step} are not written: {e}")

    @contextmanager
    def counting(self, total: int, description: str) -> Iterator[Callable[[], None]]:
        """Yields what to call for each of so many things that are done."""
        if not self._speaks or "console" not in self._trainer.logger:
            yield lambda: None
            return
        with Counting(total, description) as counting:
            yield counting.one_more

    def _sample(self, rollout: Rollout) -> Sample:
        decode, turns, error = self._inputs.tokenizer.decode, None, None
        if rollout.episode is not None:
            said = [("policy" if own else "environment", decode(token_ids)) for own, token_ids in rollout.turns]
            turns, error = tuple(said), rollout.episode.error
        return Sample(
            prompt=decode(rollout.prompt.token_ids),
            response=decode(rollout.token_ids),
            answer=str(rollout.prompt.row.get("answer", "")),
            reward=rollout.reward,
            turns=turns,
            error=error,
        )

    def close(self) -> None:
        """Flush the metric files and draw the learning curve from them. A finished run fails at nothing here."""
        self._close_sinks()
        if not self._speaks or "jsonl" not in self._trainer.logger:
            return
        from megarl.telemetry.plot import plot_learning_curve  # matplotlib, which no other rank needs

        run_dir = self._trainer.run_dir
        picture = os.path.join(run_dir, "learning_curve.png")
        try:
            plot_learning_curve(os.path.join(run_dir, "metrics.jsonl"), picture)
        except Exception as e:  # matplotlib's and the disk's
            self.warn(f"no learning curve is drawn: {str(e) or type(e).__name__}".splitlines()[0])
        else:
            self.say(f"learning curve, metrics and sample rollouts are in {run_dir}")

    def _open(self, first_step: int | None) -> None:
        if self._speaks:
            self._sinks = open_sinks(self._trainer.logger, self._trainer.run_dir, first_step, self.warn)

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as e:
                self.warn(f"metrics are lost: {e}")
        self._sinks, self._unwritten = [], set()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for i, sink in enumerate(self._sinks):
            try:
                sink.log(step, metrics)
                self._unwritten.discard(i)
            except OSError as e:
                if i not in self._unwritten:
                    self.warn(f"metrics of step {step} and later ones wait until they can be written: {e}")
                self._unwritten.add(i)
        if self._progress is not None:
            self._progress.advance(metrics)


def title_of(loop: str) -> str:
    """What people call a loop of a flow."""
    return {"rl": "RL", "warmup": "warm-up", "train": "training"}.get(loop, loop)


def _evenly(there_are: int, wanted: int) -> range:
    """At most `wanted` places of a list, evenly spread."""
    return range(0, there_are, max(1, there_are // wanted))[:wanted]
