"""Writes the report of a run: progress, metric files, sample rollouts. Rank 0 only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from rich.table import Table

from megarl.config.load import CONFIG_FILE
from megarl.data.pieces import Pieces
from megarl.evaluation.records import Record, write_records
from megarl.flow_kinds import trains
from megarl.own_code import in_a_line, torch_as_before
from megarl.telemetry.progress import Counting, Progress, print_table
from megarl.telemetry.samples import write_samples
from megarl.telemetry.sinks import FILES, SINKS, Sink, open_sinks
from megarl.telemetry.sinks.sink import TakesArtifacts, TakesRollouts
from megarl.trainer.inputs import Inputs
from megarl.trainer.records.shown_rollouts import ShownRollouts
from megarl.trainer.run_folder import HeldFolder
from megarl.trainer.starts import Lasting
from megarl.types import Batch, Rollouts


class Report:
    """Speaks on the first rank, and writes files there from `begin` on. Silent on every other rank."""

    def __init__(self, inputs: Inputs, *, rank: int, first_step: int | None) -> None:
        """
        Args:
            first_step: the first step that a resumed run will report, at most 0 in a warm-up; None for a fresh run.
        """
        self._inputs, self._speaks = inputs, rank == 0
        self._trainer = inputs.config.trainer
        self._sinks: list[Sink] = []
        self._progress: Progress | None = None
        self._pieces: Pieces | None = None
        self._shown: ShownRollouts | None = None  # may still be told of their tokens
        self._failing: set[Sink] = set()  # of which a person was told
        self._files: tuple[type, ...] = ()  # classes of sinks that are files
        self._folder: HeldFolder | None = None
        self._lasting: Lasting | None = None
        self._first_step, self._logged = first_step, False
        self._began = self._since = time.perf_counter()

    def begin(self) -> None:
        """Open the files of the run, which nothing can refuse any more, and cut what earlier processes wrote of the
        steps that come."""
        if self._speaks and os.path.isdir(self._trainer.run_dir):
            self._folder = HeldFolder(self._trainer.run_dir)
            self._lasting = Lasting(self._trainer.run_dir)
            self._lasting.beat()
        self._open(self._first_step)
        config = os.path.join(self._trainer.run_dir, CONFIG_FILE)
        if os.path.exists(config):
            self.artifact(config)
        self._began = self._since = time.perf_counter()

    def folder_problem(self) -> str | None:
        """Return, on the first rank, a line if the run's folder has gone; nothing is written into what is there now."""
        return self._folder.problem() if self._folder is not None else None

    def rewind(self, first_step: int) -> None:
        """Drop what is written of `first_step` (at most 0 in a warm-up) and later ones: the run goes back."""
        staying = [sink for sink in self._sinks if getattr(sink, "append_only", False)]
        self._close_sinks([sink for sink in self._sinks if sink not in staying])
        self._open(first_step, staying)

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[None]:
        """Show a progress bar over the `total` steps of a loop."""
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
        """Print a line on the console, above the progress."""
        if not self._speaks or "console" not in self._trainer.logger:
            return
        if self._progress is not None:
            self._progress.note(text)
        else:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning, even where the console shows no progress."""
        if not self._speaks:
            return
        if self._progress is not None:
            self._progress.note(f"megarl: warning: {text}")
        else:
            print(f"megarl: warning: {text}", file=sys.stderr, flush=True)

    def show(self, table: Table) -> None:
        """Print a table on the console, above the progress."""
        if not self._speaks or "console" not in self._trainer.logger:
            return
        if self._progress is not None:
            self._progress.note(table)
        else:
            print_table(table)

    def step(
        self, row: int, metrics: Mapping[str, float], seconds: Mapping[str, float], sequences: int = 0
    ) -> dict[str, float]:
        """Write a step under its number in the metric files; those of a supervised warm-up are at most 0.

        Args:
            seconds: by phase.
            sequences: that the step trained on.

        Returns:
            the row.
        """
        now = time.perf_counter()
        timing = {f"timing/{phase}_s": s for phase, s in seconds.items()}
        timing["timing/step_s"], self._since = now - self._since, now
        if "tokens" in metrics:
            timing["tokens_per_s"] = metrics["tokens"] / timing["timing/step_s"]
        if sequences:
            timing["perf/samples_per_s"] = sequences / timing["timing/step_s"]
        timing |= {"perf/since_start_s": now - self._began, "perf/timestamp_s": time.time()}
        self._log(row, {**metrics, **timing})
        if self._lasting is not None:
            self._lasting.beat()
        return {**metrics, **timing}

    def samples(self, step: int, rollouts: Rollouts) -> None:
        """Write some of the step's rollouts as text."""
        if not self._speaks or not self._trainer.log_rollouts or self.folder_problem():
            return
        self._pieces = self._pieces or Pieces(self._inputs.tokenizer)
        shown = self._shown = ShownRollouts(step, rollouts, self._trainer.log_rollouts, self._pieces)
        self._write_samples(shown)
        for sink in self._sinks:
            if isinstance(sink, TakesRollouts):
                with self._told_once(sink, f"the sample rollouts of step {step}"):
                    sink.rollouts(step, shown.samples())

    @property
    def shown(self) -> list[int]:
        """List the places of the rollouts that are still to be told of their tokens; none but on the first rank."""
        return [] if self._shown is None else self._shown.places

    def trained_on(self, batch: Batch) -> None:
        """Write log-probabilities and advantages beside the samples. A step that ends before leaves the samples
        without.

        Args:
            batch: made of the rollouts of the last `samples`, with the tokens of those that are shown.
        """
        shown, self._shown = self._shown, None
        if shown is not None and not self.folder_problem():
            self._write_samples(shown, batch)

    def _write_samples(self, shown: ShownRollouts, batch: Batch | None = None) -> None:
        try:
            write_samples(self._trainer.run_dir, shown.step, shown.samples(batch))
        except OSError as e:
            self._shown = None  # once is enough
            self.warn(f"the sample rollouts of step {shown.step} are not written: {e}")

    def artifact(self, path: str) -> None:
        """Tell the sinks that note artifacts of a file or folder that the run has written."""
        for sink in self._sinks:
            if isinstance(sink, TakesArtifacts):
                with self._told_once(sink, path):
                    sink.artifact(path)

    def validation(self, step: int, records: Sequence[Record]) -> None:
        """Write all responses of a validation into `validation/step_000012.jsonl`."""
        if not self._speaks or not self._trainer.log_rollouts or self.folder_problem():
            return
        path = os.path.join(self._trainer.run_dir, "validation", f"step_{step:06d}.jsonl")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_records(path, records)
        except OSError as e:
            self.warn(f"the responses of the validation of step {step} are not written: {e}")

    @contextmanager
    def counting(self, total: int, description: str) -> Iterator[Callable[[], None]]:
        """Show how many of `total` things are done; yields what to call for each of them."""
        if not self._speaks or "console" not in self._trainer.logger:
            yield lambda: None
            return
        with Counting(total, description) as counting:
            yield counting.one_more

    def close(self) -> None:
        """Close the metric files and say where they are. A finished run fails at nothing here."""
        folder, self._folder = self._folder, None
        if folder is not None:
            gone = folder.problem()
            folder.release()
            if gone:  # closing them would write into another place
                self._close_sinks([sink for sink in self._sinks if not isinstance(sink, self._files)])
                return
        self._close_sinks(self._sinks)
        if not self._logged or "jsonl" not in self._trainer.logger or not trains(self._inputs.config):
            return
        run_dir = self._trainer.run_dir
        rollouts = os.path.isdir(os.path.join(run_dir, "rollouts"))
        self.say(f"metrics{' and sample rollouts' if rollouts else ''} are in {run_dir}; `megarl report` draws them")

    def _open(self, first_step: int | None, staying: Sequence[Sink] = ()) -> None:
        if not self._speaks:
            return
        run_dir, config = self._trainer.run_dir, self._inputs.config
        self._files = tuple(cast(type, SINKS.load(name)) for name in self._trainer.logger if name in FILES)
        there = {type(sink) for sink in staying}
        names = [name for name in self._trainer.logger if not (there and SINKS.load(name) in there)]
        self._sinks = [*staying, *open_sinks(names, run_dir, first_step, self.warn, config)]

    def _close_sinks(self, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            try:
                sink.close()
            except Exception as e:
                self.warn(f"metrics are lost: {e if isinstance(e, OSError) else in_a_line(e)}")
        self._sinks = [sink for sink in self._sinks if sink not in sinks]

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged = self._speaks
        for sink in self._sinks:
            with self._told_once(sink, f"metrics of step {step}"):
                sink.log(step, {**metrics})
        if self._progress is not None:
            self._progress.advance(metrics)

    @contextmanager
    def _told_once(self, sink: Sink, what: str) -> Iterator[None]:
        """Warn once of a sink that fails: it is no reason to stop. A file that was writable in between is warned of
        again."""
        try:
            with torch_as_before():
                yield
        except (Exception, SystemExit) as e:  # a user's class, or a library, can fail in any way
            if sink in self._failing:
                return
            self._failing.add(sink)
            if isinstance(e, OSError) and isinstance(sink, self._files):
                self.warn(f"{what} and later ones wait until they can be written: {e}")
            else:
                self.warn(f"{type(sink).__name__} of trainer.logger failed at {what}: {in_a_line(e)}; the run goes on")
        else:
            if isinstance(sink, self._files):
                self._failing.discard(sink)


def title_of(loop: str) -> str:
    """Return what people call a loop of a flow."""
    return {"rl": "RL", "warmup": "warm-up", "train": "training"}.get(loop, loop)
