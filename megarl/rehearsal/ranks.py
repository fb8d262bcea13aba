"""Runs the ranks of a small run as forks of one process that has imported everything: 64 of them fit into 8 GiB."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from megarl.checkpoint.folder import checkpoints
from megarl.parallel.meeting import STORE_VARIABLE
from megarl.private_folder import private_folder

if TYPE_CHECKING:  # only the ranks need torch
    from megarl.trainer.records.run_records import Metrics

KILLED_AFTER = 2
"""The step after which a rank may be killed: the checkpoint of the first one is there then, or soon."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Tells how the ranks of a run ended.

    Attributes:
        code: exit code of the first rank that ended with another than 0, negative for a signal; 0 if none did.
        rank: which one that was.
        printed: by all ranks.
    """

    code: int
    rank: int
    printed: str


class ForkedRanks:
    """Starts runs of CPU ranks, each of which is a fork, and waits for their ends."""

    def __init__(self, world: int) -> None:
        self._world = world

    @cached_property
    def _context(self) -> ForkServerContext:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megarl.rehearsal.preloaded"])
        return context

    def run(self, words: Sequence[str], log: str, *, killed: int | None = None) -> Ending:
        """Run `megarl.rank` with these arguments on all ranks, to the end; the first that fails ends the others.

        Args:
            log: file for what the ranks print.
            killed: a rank that kills itself between two steps, once a checkpoint is there.
        """
        with private_folder("megarl-rehearsal-job-") as folder:
            store = os.path.join(folder, "store")
            processes = [self._start(words, rank, log, store, killed=rank == killed) for rank in range(self._world)]
            try:
                rank, code = _first_failure(processes)
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        with open(log, encoding="utf-8", errors="replace") as f:
            return Ending(code=code, rank=rank, printed=f.read())

    def _start(self, words: Sequence[str], rank: int, log: str, store: str, *, killed: bool) -> BaseProcess:
        world = str(self._world)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            STORE_VARIABLE: store,
        }
        process = self._context.Process(target=_rank, args=(list(words), environment, log, killed))
        process.start()
        return process


def _first_failure(processes: Sequence[BaseProcess]) -> tuple[int, int]:
    """Wait until all ranks have ended with 0, or one has not; returns that rank and its exit code, or (0, 0)."""
    alive = {process.sentinel: rank for rank, process in enumerate(processes)}
    while alive:
        ended = wait(list(alive))
        for sentinel in [sentinel for sentinel in alive if sentinel in ended]:
            rank = alive.pop(sentinel)
            processes[rank].join()
            if code := processes[rank].exitcode:
                return rank, code
    return 0, 0


def _rank(words: list[str], environment: dict[str, str], log: str, killed: bool) -> None:
    """Be one rank. It ends when the process ends of which it is a fork."""
    os.setsid()  # the terminal's Ctrl-C reaches the command alone
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.environ.update(environment, MEGARL_LAUNCHER=str(os.getppid()))
    from megarl.rank import main

    run_dir = next(word.partition("=")[2] for word in words if word.startswith("trainer.default_local_dir="))
    sys.exit(main(words, [partial(_kill_between_steps, run_dir)] if killed else []))


def _kill_between_steps(run_dir: str, loop: str, step: int, row: Metrics) -> None:
    """Kill this process if a checkpoint is there and the warm-up is over, as a callback of a run."""
    whole = [checkpoint for checkpoint in checkpoints(run_dir) if checkpoint.problem is None]
    if whole and loop != "warmup" and step >= KILLED_AFTER:
        os.kill(os.getpid(), signal.SIGKILL)
