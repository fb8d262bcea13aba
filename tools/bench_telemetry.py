"""What telemetry costs of a step: every sink on, measured within one process.

    python tools/bench_telemetry.py RUN_CONFIG [key=value ...]

trains with the configuration (its number of ranks; the quickstart's model and data, say), every sink on: jsonl, csv,
tensorboard, prometheus, offline W&B, and MLflow with a store of its own. On every rank the seconds are added up that
the run itself spends on its records: gathering a step's numbers over the ranks, the rows of all sinks, and the sample
rollouts. They are compared with the same process' steps, so that no noise between two runs is in the figure.

The first steps are left out: there, threads import W&B and MLflow.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from statistics import fmean, median
from typing import Any

WARM_UP = 5
WITHIN = "Report.step"
"""Shown, and not counted again: it is a part of `RunRecords.step`, whose rest is a gather over the ranks."""
SINKS = ["jsonl", "csv", "tensorboard", "prometheus", "wandb", "mlflow"]


class Clock:
    """Seconds of some functions and of whole steps, by name and step.

    CPU seconds are those of the whole process for a step, of the main thread for a function; wall-clock seconds are the
    step's, with what it waits.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = [{}]
        self._since = self._now()

    def next_step(self) -> None:
        """The step under way is over."""
        now = self._now()
        self.steps[-1] |= {name: seconds - self._since.get(name, 0.0) for name, seconds in now.items()}
        self._since = now
        self.steps.append({})

    def _now(self) -> dict[str, float]:
        return {"step wall": time.perf_counter(), "step cpu": time.process_time(), **threads_seconds()}

    def around(self, owner: Any, name: str) -> None:
        """From now on every call counts."""
        method: Callable[..., Any] = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                for kind, seconds in (("wall", time.perf_counter() - wall), ("cpu", time.thread_time() - cpu)):
                    key = f"{owner.__name__}.{name} {kind}"
                    self.steps[-1][key] = self.steps[-1].get(key, 0.0) + seconds

        setattr(owner, name, timed)


def main(argv: Sequence[str]) -> int:
    """Runs as one rank under a launcher, or starts the ranks; prints one JSON object and a table."""
    if "RANK" not in os.environ:
        return launch(argv)
    from megarl.config import load_run_config
    from megarl.flow_kinds import FLOWS
    from megarl.parallel.cpu import enable_cpu_ranks
    from megarl.trainer.admission.checks import check_run

    try:
        inputs = check_run(load_run_config(argv[0], argv[1:]))
    except ValueError as e:
        print(f"bench_telemetry: error: {e}", file=sys.stderr)
        return 2
    enable_cpu_ranks()
    from megarl.trainer.records.report import Report
    from megarl.trainer.records.run_records import RunRecords
    from megarl.trainer.session.take_part import run
    from megarl.trainer.stop import StopRequest

    clock = Clock()
    for owner, name in ((RunRecords, "step"), (Report, "samples"), (Report, "trained_on"), (Report, "step")):
        clock.around(owner, name)

    def next_step(loop: str, step: int, row: Any) -> None:
        if loop == "rl":
            clock.next_step()

    run(inputs, FLOWS.load(inputs.config.trainer.flow), StopRequest(int(os.environ["RANK"])), [next_step])
    if os.environ["RANK"] == "0":
        show(clock.steps[WARM_UP:-1])
    return 0


def show(steps: Sequence[dict[str, float]]) -> None:
    """Medians over the steps, on rank 0; of the sinks' threads the mean of the later half, because the kernel counts
    in 1/100 s, and they import W&B and MLflow at first."""
    wall, cpu = (median([one[f"step {kind}"] for one in steps]) for kind in ("wall", "cpu"))
    names = [name for name in dict.fromkeys(name for one in steps for name in one) if not name.startswith("step ")]
    threads = {
        name: fmean([one.get(name, 0.0) for one in steps[len(steps) // 2 :]]) for name in names if "." not in name
    }
    cost = {name: median([one.get(name, 0.0) for one in steps]) for name in names if name not in threads}
    print(f"{len(steps)} steps of {wall * 1e3:.1f} ms, {cpu * 1e3:.1f} ms of CPU time (medians, rank 0)")
    for name, taken in cost.items():
        share = taken / (wall if name.endswith("wall") else cpu)
        print(f"{name:24}{taken * 1e6:>10.0f} us{share:>9.3%}")
    for name, taken in threads.items():
        print(f"thread {name:17}{taken * 1e6:>10.0f} us{taken / cpu:>9.3%}")
    counted = {name: taken for name, taken in cost.items() if not name.startswith(WITHIN)}
    of_cpu = sum(taken for name, taken in counted.items() if name.endswith("cpu"))
    shares = {
        "wall": sum(taken for name, taken in counted.items() if name.endswith("wall")) / wall,
        "cpu": of_cpu / cpu,
        "threads": sum(threads.values()) / cpu,
        "of_step": of_cpu / wall,
        "of_step_with_threads": (of_cpu + sum(threads.values())) / wall,
    }
    print(json.dumps({"steps": len(steps), "step_s": wall, "step_cpu_s": cpu, "seconds": cost, "shares": shares}))


def threads_seconds() -> dict[str, float]:
    """CPU seconds so far of the threads of this process that are sinks', by name."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.name.startswith("megarl-") and thread.name != "megarl-watch":
            with suppress(OSError), open(f"/proc/self/task/{thread.native_id}/stat") as f:
                fields = f.read().rpartition(")")[2].split()
                seconds[thread.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def launch(argv: Sequence[str]) -> int:
    from mlflow.tracking import MlflowClient

    from megarl.config import load_config
    from megarl.launcher import Node
    from megarl.launcher import launch as start

    with tempfile.TemporaryDirectory() as folder:
        config, store = load_config(argv[0], argv[1:]), f"sqlite:///{folder}/mlflow.db"
        MlflowClient(store).create_experiment(config.trainer.project_name, artifact_location=f"file:{folder}/artifacts")
        options = [
            f"trainer.logger=[{','.join(SINKS)}]",
            "telemetry.wandb.mode=offline",
            f"telemetry.mlflow.tracking_uri={store}",
            f"trainer.default_local_dir={folder}/run",
            "trainer.save_freq=0",
            "trainer.test_freq=0",
            "trainer.val_before_train=false",
        ]
        command = [sys.executable, os.path.abspath(__file__), *argv, *options]
        return start(command, Node(nproc=config.trainer.world_size), timeout_minutes=5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
