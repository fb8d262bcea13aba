"""Lets the ranks of a job meet, and chooses the network interface of their sockets.

On one node `megarl train` keeps the store in a file that no other user can open. Over several nodes, and under
torchrun, it is a TCP server without authentication, which whoever reaches its port can read and write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import rendezvous

STORE_VARIABLE = "MEGARL_STORE"
"""Path of the store's file, on one node."""
PREFIX_VARIABLE = "MEGARL_STORE_PREFIX"
"""Prefix of the ranks' keys, over several nodes: ranks that are started again must not read earlier ranks' keys."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def job_store() -> dist.Store:
    """Connect to the job's store anew, for a thread beside the process groups."""
    if file := os.environ.get(STORE_VARIABLE):
        return dist.FileStore(file)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return _with_prefix(dist.TCPStore(host, port, is_master=False, wait_for_workers=False))


def follow_launcher() -> None:
    """Let torch's `env://` meet in the launcher's file, where there is one; sockets of a job on one node stay on
    loopback. Each rank calls it before it joins the others."""
    rendezvous.__globals__["_rendezvous_handlers"]["env"] = _meet
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        use_interface("lo", os.environ)


def use_interface(name: str, environment: Any) -> None:
    """Choose the interface for gloo's and NCCL's sockets, unless the user has."""
    for variable in _INTERFACES:
        environment.setdefault(variable, name)


_of_torch = rendezvous.__globals__["_rendezvous_handlers"]["env"]


def _meet(
    url: str, timeout: timedelta = timedelta(minutes=30), **options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    file = os.environ.get(STORE_VARIABLE)
    if not file:
        joined, rank, world = next(_of_torch(url, timeout=timeout, **options))
        yield _with_prefix(joined), rank, world
        return
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(file, world)
    store.set_timeout(timeout)
    yield store, int(os.environ["RANK"]), world


def _with_prefix(store: dist.Store) -> dist.Store:
    # torchrun keeps one store over its restarts, with the addresses of ranks that are gone
    prefix = os.environ.get(PREFIX_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore(prefix, store) if prefix else store
