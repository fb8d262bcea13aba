"""Runs the process of a `Child`: loads what its answers need, and forks a process for each connection that arrives.

server             loads the code, never reads a request
  forked process   answers the requests of one connection, until that is closed; has few system calls
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from megarl.isolation.compute_only import compute_only
from megarl.workers.channel import read_message, write_message

READY, FORKED, BROKEN = b"r", b"f", b"b"
"""Words of the server: it is ready; a process answers the new connection; it does not start, and why."""


def main(control: int, target: str) -> NoReturn:
    """Serve until the other end of a socket is closed.

    Args:
        control: the socket's descriptor; connections arrive over it.
        target: "module:function" of what answers: (request) -> answer, both JSON. If the module has a function
            `prepare`, it is called once, before the first fork.
    """
    asks = socket.socket(fileno=control)
    try:
        answer = _load(target)
    except BaseException:
        asks.sendall(BROKEN + traceback.format_exc()[-4000:].encode(errors="replace"))
        os._exit(1)
    asks.sendall(READY)
    answering = 0
    while True:
        _, received, _, _ = socket.recv_fds(asks, 1, 1)
        if answering:
            os.kill(answering, signal.SIGKILL)
            os.waitpid(answering, 0)
        if not received:
            os._exit(0)
        answering = os.fork()
        if answering == 0:
            try:
                asks.close()
                _answer(received[0], answer)
            finally:
                os._exit(1)
        os.close(received[0])
        asks.sendall(FORKED)


def _load(target: str) -> Callable[[Any], Any]:
    import gc

    module, _, name = target.partition(":")
    loaded = importlib.import_module(module)
    if hasattr(loaded, "prepare"):
        loaded.prepare()
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all that it looks at
    function: Callable[[Any], Any] = getattr(loaded, name)
    return function


def _answer(connection: int, answer: Callable[[Any], Any]) -> NoReturn:
    """Read a request, write its answer, until nobody asks any more. An error of the function ends the process."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    compute_only()
    while (message := read_message(connection)) is not None:
        write_message(connection, json.dumps(answer(json.loads(message))).encode())
    os._exit(0)
