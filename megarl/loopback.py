"""Serves HTTP on this machine's loopback, which every user of the machine can reach. Torch-free.

Whoever knows the secret in the address is let in. The others get no room: few of their connections are open at a time,
for some seconds each, and nothing that they send is logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from aiohttp import web

STRANGERS = 64
"""Connections that have not shown the secret yet; for one more the oldest is closed."""
PATIENCE = 20.0
"""Seconds that such a connection may take."""
_LINGER = 1.0  # seconds that the rest of a refused request is read, so that its client sees the answer

_SILENT = logging.getLogger("megarl.loopback")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


class Loopback:
    """Serves an application on a socket of loopback. Its handlers call `admit` once a request has shown the secret."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=_SILENT,
            lingering_time=_LINGER,
            shutdown_timeout=0.1,
        )
        self._strangers: dict[Any, float] = {}  # connection -> when it came, the oldest first
        self._server: asyncio.Server | None = None

    async def start(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)  # of accept(), say, as often as somebody knocks
        await self._runner.setup()
        self._server = await loop.create_server(self._connection, sock=listening)

    def admit(self, request: web.Request) -> None:
        """Note that the request's connection has shown the secret."""
        self._strangers.pop(request.protocol, None)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None
        for old, since in list(self._strangers.items()):
            if old.transport is None and loop.time() - since > 1:  # it has left
                del self._strangers[old]
        while len(self._strangers) >= STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        connection = server()
        self._strangers[connection] = loop.time()
        loop.call_later(PATIENCE, self._turn_away, connection)
        return connection

    def _turn_away(self, connection: Any) -> None:
        if self._strangers.pop(connection, None) is not None:
            _abort(connection)


def _abort(connection: Any, again: bool = True) -> None:
    if connection.transport is not None:
        connection.transport.abort()
    elif again:  # it was accepted in this moment
        asyncio.get_running_loop().call_later(0.1, _abort, connection, False)
