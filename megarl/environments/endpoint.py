"""Answers OpenAI's clients over HTTP, on this machine alone; passes their requests to the engine's loop."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from megarl.environments.chat_reply import MODEL, ChatReply, completion_body, completion_events
from megarl.environments.chat_request import ChatRequest, Refused, read_request
from megarl.environments.responses_api import read_response_request, response_body, response_events
from megarl.environments.sessions import Session, Ticket
from megarl.loopback import Loopback
from megarl.rollout.engine import Request
from megarl.types import Completion, SamplingParams

_LARGEST_BODY = 64 * 2**20
_CLOSING = 5.0  # seconds
_SHOWN = 200  # characters of what a client sent, in the answer


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Holds a request whose client waits.

    Attributes:
        session: of the episode.
        answer: gives the client the engine's completion, or None where there will be none; from any thread.
        gone: whether the client has stopped waiting.
    """

    request: Request
    session: Session
    answer: Callable[[Completion | None], None]
    gone: Callable[[], bool]


class Endpoint:
    """Serves sessions at http://127.0.0.1:PORT/sessions/ID/v1, in a thread of its own. An ID is a secret.

    Args:
        ask: takes a request to the engine's loop; called in that thread.
        training: how tokens are drawn in training; requests may name these values though a phase uses others.

    Attributes:
        lock: held while a session is read or changed.
    """

    def __init__(self, ask: Callable[[Waiting], None], training: SamplingParams) -> None:
        self._ask, self._training = ask, training
        self._sessions: dict[str, Session] = {}
        self.lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._port = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="megarl-endpoint")
        self._thread.start()

    def open(self, session: Session) -> str:
        """Serve a session from now on; returns its base_url."""
        number = secrets.token_hex(16)
        with self.lock:
            self._sessions[number] = session
        return f"http://127.0.0.1:{self._port}/sessions/{number}/v1"

    def drop(self, base_url: str) -> None:
        """Stop serving a session."""
        with self.lock:
            del self._sessions[base_url.split("/")[-2]]

    def close(self) -> None:
        """End the server and its thread."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout=_CLOSING)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[_in_openais_form], client_max_size=_LARGEST_BODY)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._completions)
        app.router.add_post("/sessions/{session}/v1/responses", self._responses)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        self._server = Loopback(app)
        await self._server.start(self._socket)
        await self._ended.wait()
        await self._server.close()

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        chat = read_request(await _body(request), session.params, self._training)
        replies = await self._replies(session, chat)
        if chat.stream:
            return await _streamed(request, completion_events(replies, chat))
        return web.json_response(completion_body(replies))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        chat = read_response_request(await _body(request), session.earlier, session.params, self._training)
        (reply,) = await self._replies(session, chat)
        if chat.stream:
            return await _streamed(request, response_events(reply))
        return web.json_response(response_body(reply))

    async def _replies(self, session: Session, chat: ChatRequest) -> list[ChatReply]:
        """Wait for all the replies that a request asks for."""
        waiting: list[tuple[Ticket, asyncio.Future[Completion | None]]] = []
        replies: list[ChatReply] = []
        try:
            with self.lock:
                for i in range(chat.choices):
                    ticket = session.ask(chat, anew=i > 0)
                    waiting.append((ticket, self._loop.create_future()))
                for ticket, future in waiting:
                    self._ask(
                        Waiting(request=ticket.request, session=session, answer=self._to(future), gone=future.cancelled)
                    )
            for ticket, future in waiting:
                completion = await future
                if completion is None:
                    raise Refused("the episode is over", status=410)
                with self.lock:
                    replies.append(session.reply(ticket, completion))
        finally:
            with self.lock:  # the client is gone, or one of several choices was refused
                for ticket, future in waiting[len(replies) :]:
                    future.cancel()
                    session.abandon(ticket)
        return replies

    def _to(self, future: asyncio.Future[Completion | None]) -> Callable[[Completion | None], None]:
        """Return a function that sets the future's result, from any thread."""

        def arrive(completion: Completion | None) -> None:
            if not future.done():
                future.set_result(completion)

        def answer(completion: Completion | None) -> None:
            self._loop.call_soon_threadsafe(arrive, completion)

        return answer

    def _session(self, request: web.Request) -> Session:
        with self.lock:
            session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise Refused("there is no such session, or its episode is over", status=404)
        self._server.admit(request)
        return session


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as e:
        raise Refused("the body is not JSON") from e


async def _streamed(request: web.Request, events: Iterable[str]) -> web.StreamResponse:
    text = "".join(events)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(text.encode())
    await response.write_eof()
    return response


@web.middleware
async def _in_openais_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    refused: Any
    try:
        return await handler(request)
    except Refused as e:
        refused = e
    except web.HTTPException as e:
        refused = Refused(f"{request.method} {request.path[:_SHOWN]}: {e.reason}", status=e.status)
    except Exception as e:  # a client gets an answer, whatever happens here
        refused = Refused(f"{type(e).__name__}: {str(e)[:_SHOWN]}", status=500)
    return web.json_response(refused.body, status=refused.status)
