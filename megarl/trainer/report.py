"""What a run tells the outside: progress, metric files, sample rollouts, the learning curve. Rank 0 only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.table import Table

from megarl.telemetry.plot import plot_learning_curve
from megarl.telemetry.progress import Progress, print_table
from megarl.telemetry.samples import Sample, write_samples
from megarl.telemetry.sinks import Sink, open_sinks
from megarl.trainer.inputs import Inputs
from megarl.types import Rollouts


class Report:
    """Silent on every rank but the first."""

    def __init__(self, inputs: Inputs, *, rank: int, first_step: int) -> None:
        """
        Args:
            first_step: the first RL step that will be reported; the warm-up and the first validation come before 1.
        """
        self._inputs, self._speaks = inputs, rank == 0
        self._trainer = inputs.config.trainer
        self._sinks: list[Sink] = []
        if self._speaks:
            self._sinks = open_sinks(self._trainer.logger, self._trainer.run_dir, first_step)
        self._progress: Progress | None = None
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[None]:
        """A progress bar over `total` steps."""
        self._since = time.perf_counter()
        if not self._speaks or "console" not in self._trainer.logger:
            yield
            return
        with Progress(total, name, done) as self._progress:
            yield
        self._progress = None

    def say(self, text: str) -> None:
        """A line on the console."""
        if self._speaks and "console" in self._trainer.logger:
            print(text, flush=True)

    def show(self, table: Table) -> None:
        """A table on the console, above the progress."""
        if not self._speaks or "console" not in self._trainer.logger:
            return
        if self._progress is not None:
            self._progress.note(table)
        else:
            print_table(table)

    def warmup_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A warm-up step, from 1; logged at steps up to 0, so that RL steps keep their numbers."""
        self._log(step - self._inputs.config.warmup.total_training_steps, metrics)

    def rl_step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """An RL step, or step 0 for the validation before the first."""
        now = time.perf_counter()
        timing = {f"timing/{phase}_s": s for phase, s in seconds.items()}
        timing["timing/step_s"], self._since = now - self._since, now
        if "tokens" in metrics:
            timing["tokens_per_s"] = metrics["tokens"] / timing["timing/step_s"]
        self._log(step, {**metrics, **timing})

    def samples(self, step: int, rollouts: Rollouts) -> None:
        """Some of the step's rollouts, as text."""
        if not self._speaks or not self._trainer.log_rollouts:
            return
        decode = self._inputs.tokenizer.decode
        chosen = range(0, len(rollouts.completions), max(1, len(rollouts.completions) // self._trainer.log_rollouts))
        write_samples(
            self._trainer.run_dir,
            step,
            [
                Sample(
                    prompt=decode(rollouts.prompt_of(i).token_ids),
                    response=decode(rollouts.completions[i].token_ids),
                    answer=str(rollouts.prompt_of(i).row.get("answer", "")),
                    reward=rollouts.rewards[i],
                )
                for i in list(chosen)[: self._trainer.log_rollouts]
            ],
        )

    def close(self) -> None:
        """Flush the metric files and draw the learning curve from them."""
        for sink in self._sinks:
            sink.close()
        if self._speaks and "jsonl" in self._trainer.logger:
            run_dir = self._trainer.run_dir
            picture = os.path.join(run_dir, "learning_curve.png")
            plot_learning_curve(os.path.join(run_dir, "metrics.jsonl"), picture)
            self.say(f"learning curve, metrics and sample rollouts are in {run_dir}")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)
        if self._progress is not None:
            self._progress.advance(metrics)
