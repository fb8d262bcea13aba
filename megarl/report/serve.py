"""Serves the live page of runs. Its address holds a secret, which only the user who started it knows."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import signal
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from megarl.loopback import Loopback
from megarl.report.blocks import Blocks
from megarl.report.page import page
from megarl.report.runs import Run

HOST = "127.0.0.1"
_READ_SECONDS = 2.0  # between two readings of the runs' files
_OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")


class LivePage:
    """Answers a browser on this machine with the page, the list of block versions, and each block.

    Other users of the machine reach the port, too, and get nothing without the secret, the first part of the path.
    The files are read on request, at most every two seconds.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._blocks, self._lock, self._read_at = Blocks(runs), asyncio.Lock(), float("-inf")
        self.secret = secrets.token_urlsafe(24)
        app = web.Application(middlewares=[_only_here, self._only_with_secret])
        app.router.add_get("/{secret}/", self._page)
        app.router.add_get("/{secret}/blocks", self._list)
        app.router.add_get("/{secret}/blocks/{name}", self._block)
        self._server = Loopback(app)

    async def serve(self, listening: socket.socket) -> None:
        """Answer requests until SIGINT or SIGTERM."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await self._server.start(listening)
        await stop.wait()
        await self._server.close()

    @web.middleware
    async def _only_with_secret(self, request: web.Request, handler: Any) -> web.StreamResponse:
        secret = request.match_info.get("secret", "")
        if not hmac.compare_digest(secret.encode("utf-8", "replace"), self.secret.encode()):
            raise web.HTTPForbidden(text="the address that `megarl report --serve` printed has a secret, and this not")
        self._server.admit(request)
        response: web.StreamResponse = await handler(request)
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=page(None), content_type="text/html", headers={"Cache-Control": "no-store"})

    async def _list(self, request: web.Request) -> web.Response:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._read_at >= _READ_SECONDS:
                try:
                    await asyncio.to_thread(self._blocks.refresh)
                except OSError as e:  # such as a file that is being replaced: the page asks again
                    raise web.HTTPServiceUnavailable(text=f"the runs cannot be read now: {e}") from e
                self._read_at = asyncio.get_running_loop().time()
            versions = {name: block.version for name, block in self._blocks.blocks.items()}
        return web.json_response(versions, headers={"Cache-Control": "no-store"})

    async def _block(self, request: web.Request) -> web.Response:
        block = self._blocks.blocks.get(request.match_info["name"])
        if block is None:
            raise web.HTTPNotFound(text="no such block")
        headers = {"Cache-Control": "no-store", "X-Version": block.version}
        return web.Response(body=block.data, content_type="application/gzip", headers=headers)


@web.middleware
async def _only_here(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refuse a request under another host name: a foreign page could let its own name lead to this address."""
    name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
    if name not in _OWN_NAMES:
        raise web.HTTPForbidden(text="this page is for 127.0.0.1")
    response: web.StreamResponse = await handler(request)
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def serve(runs: Sequence[Run], port: int) -> None:
    """Serve the live page until SIGINT or SIGTERM.

    Args:
        port: the port; 0: any free port.

    Raises:
        ValueError: the port is taken or not allowed.
    """
    try:
        listening = socket.create_server((HOST, port))
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise ValueError(f"port {port} of {HOST} cannot be used ({reason}); give --serve another one") from e
    with listening:
        live = LivePage(runs)
        print(f"http://{HOST}:{listening.getsockname()[1]}/{live.secret}/  (Ctrl-C ends it)", flush=True)
        asyncio.run(live.serve(listening))
