"""A small Hugging Face Hub on loopback: its API's listings, and files with revisions, ranges and errors."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

GATED, PRIVATE, BROKEN = "gated", "private", "broken"


@dataclass
class Hub:
    """What the server shows, and what it was asked.

    Attributes:
        commits: files by commit of each model; contents by name.
        branches: the commit of each model's branches.
        errors: GATED, PRIVATE or BROKEN, by model.
        asked: method and path of each request.
        cut: the first contents of these names end after so many bytes, and with them the connection.
        sizes: what the listing says of these names, instead of their sizes.
        hold: the server begins to send contents of these names, and waits for the event before it sends the rest.
    """

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    hold: dict[str, threading.Event] = field(default_factory=dict)
    sending: threading.Event = field(default_factory=threading.Event)
    endpoint: str = ""

    def push(self, model: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch; returns the commit."""
        commit = hashlib.sha1(repr((model, sorted(files.items()))).encode()).hexdigest()
        self.commits.setdefault(model, {})[commit] = files
        self.branches.setdefault(model, {})[branch] = commit
        return commit

    def fetched(self) -> list[str]:
        """Names of the files that were asked for, without those whose head alone was."""
        return [path.rsplit("/", 1)[-1] for path in self.asked if path.startswith("GET") and "/resolve/" in path]


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a `Hub`."""
    hub = Hub()

    class Handler(_Handler):
        shown = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        for event in hub.hold.values():
            event.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    shown: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.shown.asked.append(f"{self.command} {path}")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        model = (api or file or [None, ""])[1]
        if error := self.shown.errors.get(model):
            status, code = {GATED: (403, "GatedRepo"), PRIVATE: (401, "RepoNotFound"), BROKEN: (500, "")}[error]
            return self._send(status, b"{}", {"X-Error-Code": code})
        if model not in self.shown.commits:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        revision = (api[3] if api else file[2] if file else "") or "main"
        commit = self.shown.branches[model].get(revision, revision)
        files = self.shown.commits[model].get(commit)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if api and api[2] == "tree":
            return self._send(200, json.dumps([_entry(name, data) for name, data in files.items()]).encode())
        if api:
            sizes = {name: self.shown.sizes.get(name, len(data)) for name, data in files.items()}
            siblings = [{"rfilename": name, "size": size, "blobId": "0"} for name, size in sizes.items()]
            return self._send(200, json.dumps({"id": model, "sha": commit, "siblings": siblings}).encode())
        assert file is not None
        if file[3] not in files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = files[file[3]]
        return self._send(200, data, {"ETag": f'"{_id(data)}"', "X-Repo-Commit": commit}, file[3])

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, name: str = "") -> None:
        begin = 0
        if (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) and status == 200:
            status, begin = 206, int(wanted[1])
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        data = data[begin:]
        if name in self.shown.cut:
            self.wfile.write(data[: self.shown.cut.pop(name)])
            self.close_connection = True
            return
        if name in self.shown.hold:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.shown.sending.set()
            self.shown.hold[name].wait(120)
            data = data[len(data) // 2 :]
        self.wfile.write(data)


def _id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": _id(data)}
