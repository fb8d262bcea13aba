"""Real ranks for tests: a pool of processes that stay alive, each job with a process group of its own.

Starting a rank costs seconds of imports, so the pool is started once per test session and every job initialises and
destroys its own world of 1 to 8 ranks: gloo on CPUs; where there are enough GPUs, NCCL for tensors on them as well.
A job that joins the others by itself, as a whole run does, gets a launcher's variables instead.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp


def _serve(pipe: Connection, cpu: int) -> None:
    gc.disable()  # while modules are loaded it would take a seventh of the time, and find nothing
    import torch
    import torch.distributed as dist

    from megarl.parallel.cpu import enable_cpu_ranks

    enable_cpu_ranks()  # before Megatron-Core is imported
    import megarl.trainer.session.take_part  # noqa: F401 (with most of what jobs need)

    gc.enable()
    if not torch.cuda.is_available():  # gloo's threads of one rank wake each other, soonest where they already are
        os.sched_setaffinity(0, {cpu})
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    modules, freeze = 0, gc.freeze
    gc.freeze = gc.unfreeze = lambda: None  # vLLM would freeze its engine, and as it leaves unfreeze the modules
    while (job := pipe.recv()) is not None:
        fn, rank, world, meeting, args = job
        try:
            if isinstance(meeting, int):
                result = _launched(fn, rank, world, meeting, args)
            else:
                backend = "gloo"
                if torch.cuda.device_count() >= world:
                    torch.cuda.set_device(rank)
                    backend = "cpu:gloo,cuda:nccl"
                dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
                dist.all_reduce(torch.zeros(1))  # a job may leave at once, while others are not connected yet
                result = fn(*args)
                dist.destroy_process_group()
            # models hold their groups in cycles, and gloo's groups hold threads that wake a hundred times a second;
            # what a cycle held is often a cycle itself
            while gc.collect():
                pass
            if len(sys.modules) > modules:
                freeze()  # what the job imported: the next collections, which are many, need not look at it
                modules = len(sys.modules)
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return  # the rank's state is unknown: the pool starts a fresh one
        pipe.send((True, result))  # not before the groups are gone: the pool then removes the store they look into


def _launched(fn: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...]) -> Any:
    """`fn(*args)` with the variables that a launcher on one node sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    variables = {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    os.environ.update(variables)
    try:
        return fn(*args)
    finally:
        for name in variables:
            del os.environ[name]


def free_port() -> int:
    """A port of this machine that nobody listens on, below those that connections get: one of these could take it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # tests seed the other one
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


class Ranks:
    """Runs functions on as many ranks as they need."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self, world: int) -> None:
        os.environ.update(OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
        cpus = sorted(os.sched_getaffinity(0))
        first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # else all workers' first ranks share a core
        for rank in range(len(self._pipes), world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, cpus[(first + rank) % len(cpus)]), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        """`fn(*args)` on every rank of a world; returns the results in rank order, raises if a rank did."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run(world, fn, args, os.path.join(folder, "store"), timeout)

    def launch(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        """As `run`, for a function that joins and leaves the other ranks itself."""
        return self._run(world, fn, args, free_port(), timeout)

    def _run(
        self, world: int, fn: Callable[..., Any], args: tuple[Any, ...], meeting: str | int, timeout: float
    ) -> list[Any]:
        """`meeting`: the file in which the ranks of a world find each other, or their launcher's port."""
        if 0 < torch.cuda.device_count() < world:  # ranks cannot share a GPU, but see tests/one_gpu
            pytest.skip(f"needs {world} GPUs")
        self._start(world)
        for rank in range(world):
            self._pipes[rank].send((fn, rank, world, meeting, args))
        results, failure = self._collect(world, timeout)
        if failure is not None:
            self.close()
            raise AssertionError(failure)
        return [results[rank] for rank in range(world)]

    def _collect(self, world: int, timeout: float) -> tuple[dict[int, Any], str | None]:
        """Results by rank, and what the first rank to fail says: the others may then wait for it for ever."""
        results: dict[int, Any] = {}
        pending = {self._pipes[rank]: rank for rank in range(world)}
        while pending:
            answered = wait(list(pending), timeout)
            if not answered:
                for rank in pending.values():  # each writes to stderr where it is
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
                time.sleep(1)
                return results, f"ranks {sorted(pending.values())} gave no answer within {timeout} s"
            for pipe in answered:
                rank = pending.pop(pipe)
                try:
                    ok, results[rank] = pipe.recv()
                except EOFError:
                    return results, f"rank {rank} died"
                if not ok:
                    return results, f"rank {rank}:\n{results[rank]}"
        return results, None

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
