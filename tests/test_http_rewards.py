"""Rewards that a service gives, over real connections: one that answers, and several that do not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.rewards import load_reward, post
from megarl.rewards.openai_judge import fill
from megarl.rewards.post import ServiceError

KEY = "sk-very-secret"


class Service:
    """Answers as it is told, in turn; the last way again and again."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.ways: list[Callable[[BaseHTTPRequestHandler], None]] = []
        self.stop = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                service.times.append(time.monotonic())
                service.keys.append(self.headers["Authorization"])
                service.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                way = service.ways[min(len(service.asked), len(service.ways)) - 1]
                try:
                    way(self)
                except OSError:  # the caller has gone
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"

    def answers(self, *ways: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.ways = list(ways)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.stop.set()
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "_FIRST_WAIT", 0.05)
    monkeypatch.setenv("MEGARL_TEST_KEY", KEY)


def status(code: int, body: Any = "", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    text = body if isinstance(body, str | bytes) else json.dumps(body)
    content = text.encode() if isinstance(text, str) else text

    def way(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    return way


def ok(body: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    return status(200, body)


def cut(handler: BaseHTTPRequestHandler) -> None:
    """The connection breaks in the middle of the answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"score": ')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def reset(handler: BaseHTTPRequestHandler) -> None:
    """It breaks before the answer."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    handler.connection.close()
    handler.close_connection = True


def flood(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 30))
    handler.end_headers()
    for _ in range(1 << 14):
        handler.wfile.write(b"1" * (1 << 16))


def ask(name: str, response: str = "it is 4", row: dict[str, Any] | None = None, **args: Any) -> Any:
    reward = load_reward(name)
    assert reward.check_args is not None
    reward.check_args(**args)
    return asyncio.run(reward(response, {"answer": "4"} if row is None else row, **args))


def refused(name: str, *asked: Any, **args: Any) -> str:
    with pytest.raises(ServiceError) as e:
        ask(name, *asked, **args)
    assert "\n" not in str(e.value) and KEY not in str(e.value)
    return str(e.value)


def test_a_score(service: Service) -> None:
    service.answers(ok(0.5), ok({"score": 1, "style": 0.25, "why": "good", "right": True}), ok("3"))
    assert ask("http", url=service.url) == 0.5
    assert ask("http", url=service.url, columns=["id", "tags"], row={"id": 3, "tags": ["a"], "x": 0}) == {
        "score": 1.0,
        "style": 0.25,
    }
    assert ask("http", url=service.url, columns=[], token_env="MEGARL_TEST_KEY") == 3.0
    assert service.asked == [
        {"response": "it is 4", "answer": "4"},
        {"response": "it is 4", "id": 3, "tags": ["a"]},
        {"response": "it is 4"},
    ]
    assert service.keys == [None, None, f"Bearer {KEY}"]


@pytest.mark.parametrize(
    "way", [status(503), status(429), status(500, "oops"), cut, reset], ids=["503", "429", "500", "cut", "reset"]
)
def test_it_is_asked_again(service: Service, way: Callable[[BaseHTTPRequestHandler], None]) -> None:
    service.answers(way, way, ok(0.25))
    assert ask("http", url=service.url) == 0.25
    first, second, third = service.times
    assert 0.05 <= second - first < 1 and 0.1 <= third - second < 1
    assert service.asked[0] == service.asked[2]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (status(503, "busy\nnow"), "in each of 3 tries, the last time: status 503: busy now"),
        (cut, "in each of 3 tries, the last time: Response payload is not completed"),
        (reset, "in each of 3 tries, the last time: "),
        (lambda handler: handler.wfile.write(b"\x00\xff garbage\r\n\r\n"), "in each of 3 tries, the last time: "),
    ],
    ids=["busy", "cut", "reset", "no HTTP"],
)
def test_a_service_that_stays_broken(service: Service, way: Any, said: str) -> None:
    service.answers(way)
    assert refused("http", url=service.url, retries=2).startswith(f"POST {service.url}: {said}")
    assert len(service.asked) == 3


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said = refused("http", url=f"http://127.0.0.1:{port}/", retries=1)
    assert said.startswith(f"POST http://127.0.0.1:{port}/: in each of 2 tries, the last time: Cannot connect to host")


@pytest.mark.parametrize("trickle", [False, True], ids=["silent", "a byte now and then"])
def test_a_service_that_hangs(service: Service, trickle: bool) -> None:
    def hang(handler: BaseHTTPRequestHandler) -> None:
        if trickle:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
        while not service.stop.wait(0.05):
            handler.wfile.write(b"1" if trickle else b"")

    service.answers(hang)
    said = refused("http", url=service.url, timeout=0.3, retries=1)
    assert said == f"POST {service.url}: in each of 2 tries, the last time: no answer in 0.3 s"
    service.answers(hang, hang, hang, ok(1))  # two have asked already, or one that was late
    assert ask("http", url=service.url, timeout=0.3, retries=100) == 1.0


def test_a_flood(service: Service) -> None:
    service.answers(flood)
    assert refused("http", url=service.url) == f"POST {service.url}: answered more than 1048576 bytes"
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (status(404, "no\nsuch page"), "status 404: no such page"),
        (status(401, f"wrong key: Bearer {KEY}"), "status 401: wrong key: Bearer ***"),
        (status(302, "", Location="http://127.0.0.1:1/"), "status 302: "),
        (ok("<html>"), "answered what is no JSON: b'<html>'"),
        (ok(b"\xff\xfe\x00"), "answered what is no JSON: b'\\xff\\xfe\\x00'"),
        (ok("[" * 500_000), "answered what is no JSON: b'[[[["),
        (ok({"value": 1}), "answered neither a number nor an object with 'score': {'value': 1}"),
        (ok({"score": "1"}), "answered neither a number nor an object with 'score': {'score': '1'}"),
        (ok({"score": None}), "answered neither a number nor an object with 'score': {'score': None}"),
        (ok("NaN"), "answered neither a number nor an object with 'score': nan"),
        (ok("1" + "0" * 400), "answered neither a number nor an object with 'score': 1000"),
        (ok("true"), "answered neither a number nor an object with 'score': True"),
    ],
)
def test_an_answer_that_is_no_score(service: Service, way: Any, said: str) -> None:
    service.answers(way)
    message = refused("http", url=service.url, token_env="MEGARL_TEST_KEY")
    assert message.startswith(f"POST {service.url}: {said}".rstrip()) and len(message) < 400
    assert len(service.asked) == 1


def test_a_deadline_around_it(service: Service) -> None:
    service.answers(lambda handler: service.stop.wait() and None)

    async def within() -> None:
        await asyncio.wait_for(load_reward("http")("", {"answer": 4}, url=service.url), 0.2)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(within())
    assert not service.stop.is_set()  # it answers afterwards only


def test_many_at_once(service: Service) -> None:
    all_are_there = threading.Barrier(20)
    service.answers(lambda handler: (all_are_there.wait(), ok(1)(handler))[1])

    async def all_of_them() -> list[float]:
        reward = load_reward("http")
        return await asyncio.gather(*(reward(str(i), {"answer": 4}, url=service.url) for i in range(20)))

    assert asyncio.run(all_of_them()) == [1.0] * 20


def test_columns_that_cannot_be_sent(service: Service) -> None:
    with pytest.raises(ValueError, match=r"^sends the columns question, which the row has not: it has answer$"):
        ask("http", url=service.url, columns=["question"])
    with pytest.raises(ValueError, match=r"^cannot send the row to http://127.* bytes is not JSON serializable$"):
        ask("http", url=service.url, row={"answer": b"1"})
    assert not service.asked


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"url": "localhost:80"}, "'localhost:80' is no address: use http://host:port/path or https://"),
        ({"url": "ftp://host/"}, "'ftp://host/' is no address: use http://host:port/path or https://"),
        ({"url": "http://"}, "'http://' is no address"),
        ({"url": "http://host:99999/"}, "'http://host:99999/' is no address"),
        ({"url": "http://ho st/"}, "'http://ho st/' is no address"),
        (
            {"url": "http://me:pw@host/"},
            "an address with a password would be in every record of the run: use token_env",
        ),
        ({"url": "http://host/", "timeout": 0}, "timeout = 0 must be seconds, more than 0"),
        ({"url": "http://host/", "timeout": "5"}, "timeout = '5': input should be a valid number"),
        ({"url": "http://host/", "retries": -1}, "retries = -1 must be 0 to 100"),
        ({"url": "http://host/", "token_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
        ({"url": "http://host/", "columns": ["response"]}, "columns has 'response', which is the name of the response"),
    ],
)
def test_arguments_are_refused_before_the_run(args: dict[str, Any], said: str) -> None:
    check = load_reward("http").check_args
    assert check is not None
    with pytest.raises(ValueError) as refusal:
        check(**args)
    assert str(refusal.value).startswith(said) and "\n" not in str(refusal.value)


# ---------------------------------------------------------------------------------------------------- a judge


def chat(reply: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    return ok({"choices": [{"message": {"role": "assistant", "content": reply}}], "usage": {}})


def test_a_judge(service: Service) -> None:
    service.answers(status(503), chat("Good, [[3]]? No:\n[[ 7.5 ]]"))
    base = service.url.removesuffix("/score") + "/v1/"
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": 4}
    args = {"base_url": base, "model": "judge", "api_key_env": "MEGARL_TEST_KEY"}
    assert ask("openai_judge", "five {answer} [[10]]", row, **args) == 0.75
    asked = service.asked[1]
    question = asked.pop("messages")[0]["content"]
    assert "user: 2 + 2?" in question and "[Reference answer]\n4\n" in question and "five {answer} [[10]]" in question
    assert asked == {"model": "judge", "temperature": 0, "max_tokens": 1024}
    assert service.keys == [f"Bearer {KEY}"] * 2


def test_a_judge_with_a_template_of_its_own(service: Service) -> None:
    service.answers(chat("score: 4"))
    args = {"template": 'Rate {response} as {"n": 1}', "pattern": r"score: (\d)", "scale": 5, "max_tokens": 8}
    assert ask("openai_judge", row={}, base_url=service.url, model="m", **args) == 0.8
    assert service.asked[0]["messages"] == [{"role": "user", "content": 'Rate it is 4 as {"n": 1}'}]
    with pytest.raises(ValueError, match=r"^template has \{prompt\}, and the row has none$"):
        ask("openai_judge", base_url=service.url, model="m")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (chat("fine"), "m gave no score from 0 to 10; its reply ends: 'fine'"),
        (chat("[[11]]"), "m gave no score from 0 to 10; its reply ends: '[[11]]'"),
        (chat("[[-1]]"), "m gave no score from 0 to 10"),
        (chat("x" * 5000), "m gave no score from 0 to 10; its reply ends: 'xxxx"),
        (chat(None), "answered no chat completion: {'choices'"),
        (ok([]), "answered no chat completion: []"),
        (ok({"choices": []}), "answered no chat completion: {'choices': []}"),
        (status(400, {"error": "no model m"}), 'status 400: {"error": "no model m"}'),
    ],
)
def test_a_judge_that_gives_no_score(service: Service, way: Any, said: str) -> None:
    service.answers(way)
    message = refused("openai_judge", row={"prompt": "?", "answer": ""}, base_url=service.url, model="m")
    assert message.startswith(f"POST {service.url}/chat/completions: {said}") and len(message) < 400


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"model": ""}, "model is empty: name the model that judges"),
        ({"template": "Rate it"}, "template has no {response}: the judge would not see what it judges"),
        ({"pattern": "[0-9]+"}, "pattern = '[0-9]+' needs 1 group in brackets, and has 0"),
        ({"scale": 0}, "scale = 0 must be the best score, more than 0"),
        ({"max_tokens": 0}, "max_tokens = 0 must be 1 or more"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
        ({"base_url": "host"}, "'host' is no address"),
    ],
)
def test_arguments_of_a_judge(args: dict[str, Any], said: str) -> None:
    check = load_reward("openai_judge").check_args
    assert check is not None
    with pytest.raises(ValueError) as refusal:
        check(**{"base_url": "http://host/v1", "model": "m", **args})
    assert str(refusal.value).startswith(said) and "\n" not in str(refusal.value)


def test_fields_are_filled_once() -> None:
    assert fill("{prompt}{response}{x}", {"prompt": "{response}", "response": "{prompt}"}) == "{response}{prompt}{x}"
