"""The OpenAI-compatible endpoint, asked by OpenAI's own client: what is trained on is what was sampled."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import yaml
from chat_tokenizer import SIZE, TEMPLATE, write_chat_tokenizer
from ranks import Ranks
from test_vllm_engine import needs_vllm
from tiny_engines import engine_of
from tiny_families import ARCHITECTURES
from tiny_run import FOUR_RANKS, megarl, metrics_of, train_in, write_run

from megarl.endings import ExitCode
from megarl.environments.agent_episodes import Agents
from megarl.environments.agent_process import check_agent
from megarl.environments.broadcast import Broadcast
from megarl.environments.chat_reply import reply_message
from megarl.environments.chat_request import ChatRequest
from megarl.environments.environment_episodes import EpisodeLimits
from megarl.environments.episodes import Orders, Played, serve
from megarl.environments.parameters import CHAT
from megarl.environments.sessions import Session
from megarl.environments.speech import Speech
from megarl.loopback import STRANGERS
from megarl.rewards.results import RewardError
from megarl.rollout.engine import Request
from megarl.types import Completion, Prompt, Rollout, SamplingParams

PARAMS = SamplingParams(temperature=1.0, max_tokens=120, stop_token_ids=(2, 9, 13, 30, 40))

NONSENSE = (
    b"POST /ses",
    b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: " + b"a" * 2**15,
    b"\xff\r\n",
)
"""What a client may send that is none."""

AGENTS = '''
import asyncio, json, os, time
import numpy, openai

CLIENT = openai.AsyncOpenAI(base_url="http://none", max_retries=0, timeout=500)  # to make one takes 0.1 s
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]

async def two_turns(base_url, row):
    """Asks, is asked for a tool, answers, asks again."""
    client = CLIENT.with_options(base_url=base_url)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": row["question"]}]
    first = await client.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, temperature=1.0, max_tokens=20)
    said = first.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    await asyncio.sleep(row.get("slow", 0.0))
    messages.append({"role": "tool", "content": "= 4", "tool_call_id": "x"})
    second = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, stop=["?"])
    assert second.usage.prompt_tokens > first.usage.total_tokens
    return 0.25 + len(second.choices[0].message.content)

async def rewrites(base_url, row):
    client = CLIENT.with_options(base_url=base_url)
    messages = [{"role": "user", "content": "a"}]
    for content in ("b", "c", "d"):
        said = await client.chat.completions.create(model="x", messages=messages, max_completion_tokens=9)
        text = said.choices[0].message.content
        messages += [{"role": "assistant", "content": text if content != "c" else "I never said so"},
                     {"role": "user", "content": content}]
    return None

async def asks_too_much(base_url, row):
    client = CLIENT.with_options(base_url=base_url)
    messages = [{"role": "user", "content": "a"}]
    ask = lambda **more: client.chat.completions.create(**{"model": "x", "messages": messages, **more})
    said = []
    chat = [{"role": "user", "content": "a"}]
    for more in (dict(temperature=0.2), dict(top_p=0.5), dict(presence_penalty=1.0), dict(n=0), dict(top_logprobs=2),
                 dict(logit_bias={"3": 1}), dict(extra_body={"min_p": 0.1}), dict(max_tokens=0), dict(messages=[]),
                 dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
                 dict(messages=[{"role": "user", "content": "a" * 300}]), dict(stop=[""]), dict(stop=3),
                 dict(messages=[{"role": "user", "content": chat}]),
                 dict(response_format={"type": "json_object"}), dict(functions=[{"name": "add"}]),
                 dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}),
                 dict(tools=[{"type": "web_search"}])):
        try:
            await ask(**more)
            said.append("answered")
        except openai.BadRequestError as e:
            said.append([e.param, e.code, e.body["message"]])
    models = [model.id async for model in await client.models.list()]
    try:
        await client.with_options(base_url=base_url.replace("/v1", "x/v1")).models.list()
    except openai.NotFoundError as e:
        models.append(e.body["message"])
    await ask(max_tokens=2)
    with open(row["file"], "w") as f:
        json.dump([said, models], f)
    return 1.0

async def asks_in_every_way(base_url, row):
    """Whatever a client asks for, it is told what the policy said; notes what it was told."""
    client, said = CLIENT.with_options(base_url=base_url), {}
    question = [{"role": "user", "content": "a"}]
    ask = lambda **more: client.chat.completions.create(**{"model": "x", "messages": question, "max_tokens": 6, **more})
    two = await ask(n=2, logprobs=True, response_format={"type": "text"}, frequency_penalty=0)
    said["two"] = [choice.message.content for choice in two.choices]
    said["logprobs"] = [[(one.token, one.logprob) for one in choice.logprobs.content] for choice in two.choices]
    second = [*question, two.choices[1].message.model_dump(), {"role": "user", "content": "b"}]
    stream = await ask(messages=second, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    said["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    said["ended"], said["usage"] = chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens
    respond = lambda **more: client.responses.create(**{"model": "x", "max_output_tokens": 6, **more})
    third = await respond(instructions="Add.", input="a")
    fourth = await respond(previous_response_id=third.id, instructions="Add.", input="b")
    items = [{"role": "user", "content": "a"}, *[item.model_dump(exclude_none=True) for item in third.output],
             {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
             *[item.model_dump(exclude_none=True) for item in fourth.output], {"role": "user", "content": "c"}]
    events = [event async for event in await respond(instructions="Add.", input=items, stream=True)]
    said["responses"] = [third.output_text, fourth.output_text, events[-1].response.output_text]
    said["events"] = [event.type for event in events]
    said["status"] = [third.status, third.incomplete_details and third.incomplete_details.reason]
    with open(row["file"], "w") as f:
        json.dump(said, f)
    return 1.0

async def asks_without_end(base_url, row):
    client, messages = CLIENT.with_options(base_url=base_url), [{"role": "user", "content": "a"}]
    while True:
        said = await client.chat.completions.create(model="x", messages=messages)
        messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "b"}]
        if row.get("fails"):
            raise ValueError("not today")

async def misbehaves(base_url, row):
    how = row["how"]
    client = CLIENT.with_options(base_url=base_url)
    await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}], max_tokens=5)
    if how == "raises":
        raise ValueError("not today")
    if how == "leaves":
        raise SystemExit(4)
    if how == "cancels":
        task = asyncio.ensure_future(asyncio.sleep(9))
        await asyncio.sleep(0)
        task.cancel()
        await task
    if how == "dies":
        os._exit(9)
    if how == "hangs":
        await asyncio.sleep(1000)
    if how == "blocks":
        time.sleep(1000)
    return {"text": "good", "nan": float("nan"), "numpy": numpy.float32(1)}.get(how, 1.0)

async def silent(base_url, row):
    return 1.0

async def impatient(base_url, row):
    """Gives its first request up while the policy speaks to all of them, and asks again."""
    client = CLIENT.with_options(base_url=base_url)
    messages = [{"role": "user", "content": "a"}]
    first = asyncio.ensure_future(client.chat.completions.create(model="x", messages=messages))
    while not os.path.exists(row["all speak"]):
        await asyncio.sleep(0.02)
    first.cancel()
    said = await client.chat.completions.create(model="x", messages=messages, max_tokens=7, seed=3)
    return float(said.usage.completion_tokens)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer and agents."""
    made = tmp_path_factory.mktemp("endpoint")
    write_chat_tokenizer(made)
    (made / "agents.py").write_text(AGENTS)
    return made


@cache
def tokenizer_in(folder: str) -> Any:
    from megarl.data.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def rollouts_of(rows: list[dict[str, Any]]) -> dict[int, Rollout]:
    prompts = [Prompt(index=i, token_ids=(5,), row=row, source=f"data:{i}") for i, row in enumerate(rows)]
    return {i: Rollout(prompt=prompt, group=i, seed=100 + i) for i, prompt in enumerate(prompts)}


@contextmanager
def agents_of(folder: Path, name: str, *, file: str = "agents.py", **limits: Any) -> Iterator[Agents]:
    usual = {"max_turns": 8, "max_prompt_length": 130, "at_a_time": 64, "timeout": 60.0, "threads": 1}
    speech = Speech(tokenizer_in(str(folder)), stop_tokens=PARAMS.stop_token_ids, role="user", limit=9)
    limits = {**usual, **limits}
    agents = Agents(f"{folder}/{file}:{name}", speech=speech, limits=EpisodeLimits(**limits), training=PARAMS)
    try:
        yield agents
    finally:
        agents.close()


Record = list[tuple[tuple[int, ...], Completion]]
"""Prompt and completion of what an engine finished."""


def engine_in(folder: Path, group: Any = None) -> tuple[Any, Record]:
    """An engine, and its own record of what it makes."""
    from dataclasses import replace

    arch = replace(ARCHITECTURES["qwen3"], vocab_size=SIZE)
    engine = engine_of(arch, group, max_model_len=250, decode=tokenizer_in(str(folder)).decode, max_num_seqs=16)
    record: Record = []
    asked: dict[int, Request] = {}
    submit, step = engine.submit, engine.step

    def submitted(requests: Any) -> None:
        asked.update({request.key: request for request in requests})
        submit(requests)

    def stepped() -> Mapping[int, Completion]:
        finished = step()
        record.extend((tuple(asked[key].prompt), completion) for key, completion in finished.items())
        return finished

    engine.submit, engine.step = submitted, stepped  # type: ignore[method-assign]
    return engine, record


def play(
    folder: Path, name: str, rows: list[dict[str, Any]], *, within: Any = lambda step: step(), **limits: Any
) -> tuple[dict[int, list[Played]], Record]:
    """`within`: gets each step of the engine, to take it or not."""
    engine, record = engine_in(folder)
    step = engine.step
    engine.step = lambda: within(step)
    with agents_of(folder, name, **limits) as agents:
        source = agents.begin(rollouts_of(rows), PARAMS)
        serve(engine, source, Broadcast(None))
        return {place: list(parts) for place, parts in sorted(source.played.items())}, record


QUESTIONS = [{"question": f"{i} + {i}?", "slow": 0.01 * (i % 3)} for i in range(6)]


def check_is_what_was_sampled(played: dict[int, list[Played]], record: Record, tokenizer: Any) -> None:
    """Ids and log-probabilities of both turns are the engine's, and between them is what the template writes."""
    for place, (one,) in played.items():
        response, drawn = one.response, [c.response for prompt, c in record if prompt == one.prompt_ids]
        assert response in drawn
        shorter = [tokens for tokens in drawn if len(tokens) < len(response)]
        first = next(tokens for tokens in shorter if tokens.ids == response.ids[: len(tokens)])
        begun = len(first)
        ended = first.ids[-1] == tokenizer.eos_id
        observed = tokenizer.encode_template(("" if ended else "<end>") + "<tool>= 4<end><assistant>")
        assert list(response.ids[begun : begun + len(observed)]) == observed
        after = len(response) - begun - len(observed)
        assert response.sampled == b"\x01" * begun + b"\x00" * len(observed) + b"\x01" * after and after > 0
        assert response.logp[:begun] == first.logp and not any(response.logp[begun : begun + len(observed)])
        question = QUESTIONS[place]["question"]
        wanted = tokenizer.encode_template(f"add<end><system>Add.<end><user>{question}<end><assistant>")
        assert list(one.prompt_ids or ()) == wanted
        text = tokenizer.decode(response.ids[begun + len(observed) :]).partition("?")[0]
        assert one.reward == 0.25 + len(text)
        assert (one.episode.turns, one.episode.error) == (2, None)


def test_what_is_trained_on_is_what_was_sampled(folder: Path) -> None:
    played, record = play(folder, "two_turns", QUESTIONS)
    assert len(record) == 12
    tokenizer = tokenizer_in(str(folder))
    check_is_what_was_sampled(played, record, tokenizer)
    again, _ = play(folder, "two_turns", QUESTIONS)
    assert [p.response.ids for (p,) in again.values()] == [p.response.ids for (p,) in played.values()]
    # the texts would have been other tokens: the untrained policy spells <end> in characters, or says <pad>
    spelled = [tokenizer.encode(tokenizer.decode(p.response.ids)) for (p,) in played.values()]
    assert any(len(ids) != len(p.response) for ids, (p,) in zip(spelled, played.values(), strict=True))


def _on_rank(folder: str) -> tuple[dict[int, list[Played]] | None, Record]:
    engine, record = engine_in(Path(folder), dist.group.WORLD)
    channel = Broadcast[Orders](dist.group.WORLD)
    if not channel.leads:
        serve(engine, None, channel)
        return None, record
    with agents_of(Path(folder), "two_turns") as agents:
        source = agents.begin(rollouts_of(QUESTIONS), PARAMS)
        serve(engine, source, channel)
        return {place: list(parts) for place, parts in sorted(source.played.items())}, record


def test_ranks_of_a_replica_are_told_what_was_asked(ranks: Ranks, folder: Path) -> None:
    want, _ = play(folder, "two_turns", QUESTIONS)
    (played, record), (nothing, also) = ranks.run(2, _on_rank, str(folder))
    assert nothing is None and record == also  # bit for bit
    check_is_what_was_sampled(played, record, tokenizer_in(str(folder)))
    assert [p.response.ids for (p,) in played.values()] == [p.response.ids for (p,) in want.values()]


def test_a_history_that_was_rewritten_begins_a_new_segment(folder: Path) -> None:
    played, record = play(folder, "rewrites", [{}, {}])
    for parts in played.values():
        before, after = parts
        assert [part.episode.turns for part in parts] == [2, 1] and [part.reward for part in parts] == [None, None]
        text = tokenizer_in(str(folder)).decode
        assert text(before.prompt_ids or ()) == "a"
        assert text(after.prompt_ids or ()).endswith("I never said soc")
        assert all((p.prompt_ids, p.response) in [(a, c.response) for a, c in record] for p in parts)


def test_what_the_run_cannot_do_is_refused_in_openais_form(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    play(folder, "asks_too_much", [{"file": str(file)}])
    said, models = json.loads(file.read_text())
    assert [param for param, _, _ in said] == [
        *("temperature", "top_p", "presence_penalty", "n", "top_logprobs", "logit_bias", "min_p", "max_tokens"),
        *("messages", "messages", "messages", "stop", "stop", "messages", "response_format", "functions"),
        *("tool_choice", "tools"),
    ]
    assert said[0][2].startswith("temperature = 0.2: the run draws tokens with temperature = 1, and trains on what")
    assert said[4][1:] == ["unsupported_parameter", f"top_logprobs: {CHAT['top_logprobs'].says}"]
    assert said[10][1] == "context_length_exceeded" and "data.max_prompt_length = 130" in said[10][2]
    assert "what `messages` takes, as it is" in said[13][2]
    assert said[14][2].startswith("response_format: tokens are drawn freely") and "as a tool" in said[14][2]
    assert models == ["policy", "there is no such session, or its episode is over"]


def test_what_is_asked_for_is_what_was_sampled(folder: Path, tmp_path: Path) -> None:
    """Several replies at once, streams, log-probabilities, responses: each is a conversation of what was drawn."""
    file, text = tmp_path / "said.json", tokenizer_in(str(folder)).decode
    played, record = play(folder, "asks_in_every_way", [{"file": str(file)}])
    assert [part.episode.error for part in played[0]] == [None] * 3
    said = json.loads(file.read_text())
    assert all((p.prompt_ids, p.response) in [(a, c.response) for a, c in record] for p in played[0])
    first, second, third = sorted(played[0], key=lambda part: part.episode.turns)
    assert [part.episode.turns for part in (first, second, third)] == [1, 2, 3]
    one, two = said["two"]
    assert one == text(first.response.ids) and len({one, two}) == 2
    assert [[logp for _, logp in of_one] for of_one in said["logprobs"]] == [
        pytest.approx(list(first.response.logp)),
        pytest.approx(list(second.response.logp[: len(said["logprobs"][1])])),
    ]
    assert "".join(token for token, _ in said["logprobs"][1]) == two
    assert text(third.prompt_ids or ()) == "Add.a" and text(second.prompt_ids or ()) == "a"
    runs = [_runs(part) for part in (second, third)]
    drawn = [[text(ids) for ids in of_one] for of_one in runs]
    assert drawn == [[two, said["streamed"]], said["responses"]]
    assert said["usage"] == len(runs[0][1]) and said["ended"] == ("length" if said["usage"] == 6 else "stop")
    assert said["status"] in (["incomplete", "max_output_tokens"], ["completed", None])
    assert [said["events"][0], said["events"][-1]] == ["response.created", said["events"][-1]]
    assert said["events"][-1] in ("response.completed", "response.incomplete")


def _runs(part: Played) -> list[list[int]]:
    """Token ids of each turn of the policy's."""
    return [list(ids) for drawn, ids in part.response.turns if drawn]


@pytest.mark.parametrize("limits", [{"max_turns": 3}, {"max_turns": 99}], ids=["turns", "tokens"])
def test_an_episode_at_its_limits_is_scored(folder: Path, limits: dict[str, Any]) -> None:
    """The agent makes an error of the refusal, as agents do; one that fails for another reason has failed."""
    played, _ = play(folder, "asks_without_end", [{}, {"fails": True}], **limits)
    (one,), (failed,) = played.values()
    assert (one.episode.error, one.reward, one.finish_reason, one.episode.limited) == (None, None, "length", True)
    if limits["max_turns"] == 3:
        assert one.episode.turns == 3
    else:
        assert PARAMS.max_tokens - 20 < len(one.response) <= PARAMS.max_tokens
    assert str(failed.episode.error).startswith("agent: raised ValueError: not today")


def test_tools_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, TEMPLATE.partition("{% endif %}")[2])
    speech = Speech(tokenizer_in(str(tmp_path)), stop_tokens=(), role="user", limit=9)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with pytest.raises(ValueError, match=r"^the chat template does not write down the tools, which would be lost"):
        speech.conversation([{"role": "user", "content": "a"}], tools=[tool])


def test_an_agents_reward_may_be_numpys(folder: Path) -> None:
    played, _ = play(folder, "misbehaves", [{"how": "numpy"}])
    assert [(p.episode.error, p.reward) for p in played[0]] == [(None, 1.0)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "agent: raised ValueError: not today; row data:1\n"),
        ("leaves", "agent: raised SystemExit: 4; row data:1\n"),
        ("cancels", "agent: raised asyncio.exceptions.CancelledError; row data:1\n"),
        ("dies", "agent: its process ended with exit code 9; row data:1"),
        pytest.param("hangs", "agent: took longer than environment.timeout = 15 s; row data:1", marks=pytest.mark.slow),
        pytest.param(
            *("blocks", "agent: took longer than environment.timeout = 15 s, and let nothing else run; row data:1"),
            marks=pytest.mark.slow,
        ),
        ("text", "agent: returned 'good', a str, and not one number; row data:1"),
        ("nan", "agent: returned nan, which is not finite; row data:1"),
    ],
)
def test_an_agent_that_misbehaves_costs_its_episode_alone(folder: Path, how: str, said: str) -> None:
    tokenizer_in(str(folder)).encode_chat([{"role": "user", "content": "a"}])  # the process of its template stays
    before = {process.pid for process in psutil.Process().children()}
    late = how in ("hangs", "blocks")
    played, _ = play(folder, "misbehaves", [{"how": ""}, {"how": how}, {"how": ""}], timeout=15.0 if late else 300.0)
    (bad,) = played[1]
    assert str(bad.episode.error).startswith(said) and bad.reward is None
    assert {(played[i][0].episode.error, played[i][0].reward) for i in (0, 2)} == {(None, 1.0)}
    assert {process.pid for process in psutil.Process().children()} <= before


def test_a_file_that_cannot_be_imported_ends_the_run(folder: Path) -> None:
    (folder / "broken.py").write_text("import no_such_module\nasync def agent(base_url, row): ...\n")
    check_agent(f"{folder}/broken.py:agent")  # which does not execute it
    engine, _ = engine_in(folder)
    with agents_of(folder, "agent", file="broken.py") as agents:
        source = agents.begin(rollouts_of([{}] * 5), PARAMS)
        with pytest.raises(RewardError, match=r"environment.agent: importing .* failed: ModuleNotFoundError"):
            serve(engine, source, Broadcast(None))


@pytest.mark.slow
def test_importing_an_agent_is_no_part_of_its_time(folder: Path) -> None:
    """Twenty seconds, where an episode has fifteen."""
    slow = "import time\ntime.sleep(20)\n"
    (folder / "slow.py").write_text(slow + (folder / "agents.py").read_text())
    engine, _ = engine_in(folder)
    with agents_of(folder, "two_turns", file="slow.py", timeout=15.0) as agents:
        source = agents.begin(rollouts_of(QUESTIONS), PARAMS)
        serve(engine, source, Broadcast(None))
        assert [one.episode.error for (one,) in source.played.values()] == [None] * len(QUESTIONS)


def test_an_agent_that_asks_for_nothing_fails(folder: Path) -> None:
    played, _ = play(folder, "silent", [{}])
    (one,) = played[0]
    assert one.episode.error == "agent: asked for no response" and not one.response


@pytest.mark.slow
def test_a_request_that_was_given_up_is_not_trained_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, abandon, all_speak = [], Session.abandon, tmp_path / "all speak"
    monkeypatch.setattr(Session, "abandon", lambda self, ticket: (given_up.append(ticket), abandon(self, ticket))[1])
    asked, ask = [], Session.ask
    monkeypatch.setattr(Session, "ask", lambda self, *args, **how: (asked.append(self), ask(self, *args, **how))[1])

    def within(step: Callable[[], Any]) -> Any:
        """Nobody gets more than a token until all three have asked, and given up."""
        if len(asked) < 3 or (all_speak.exists() and len(given_up) < 3):
            time.sleep(0.01)
            return {}
        done = step()
        all_speak.touch()
        return done

    played, _ = play(folder, "impatient", [{"all speak": str(all_speak)}] * 3, within=within)
    assert len(given_up) == 3
    for (one,) in played.values():
        assert one.reward == len(one.response) <= 7


def test_nonsense_is_answered_in_openais_form(folder: Path) -> None:
    def ask(url: str, body: bytes | None) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=500) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read())["error"]["message"]

    with agents_of(folder, "silent") as agents:
        (rollout,) = rollouts_of([{}]).values()
        limits = {"max_turns": 1, "max_prompt_length": 9}
        session = Session(rollout, PARAMS, speech=agents.speech, new_key=iter(range(9)).__next__, **limits)
        base_url = agents.endpoint.open(session)
        assert base_url.startswith("http://127.0.0.1:")
        completions = f"{base_url}/chat/completions"
        for body, said in [
            (b"{", "the body is not JSON"),
            (b"\xff", "the body is not JSON"),
            (b"[" * 100_000, "the body is not JSON"),
            (b"[]", "the body must be a JSON object"),
            (b"{}", "messages must be a list of one message or more"),
            (b'{"messages": [3]}', "messages must be a list of one message or more"),
            (b'{"messages": [{"content": "a"}]}', "messages: message 1: its role must be a name such as user"),
            (b'{"messages": [{"role": "user", "content": 3}]}', "messages: message 1: its content must be text"),
            (
                b'{"messages": [{"role": "user", "tool_calls": [1]}]}',
                "messages: message 1: tool call 1 has no",
            ),
            (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "'utf-8' codec can't encode character"),
            (rb'{"messages": [{"role": "user"}], "stop": "\ud800"}', "stop: 'utf-8' codec can't encode character"),
            (b'{"messages": [{"role": "user"}], "a": 1, "b": 2}', "a: not known here, and it might change"),
        ]:
            status, message = ask(completions, body)
            assert status == 400 and message.startswith(said)
        assert ask(completions, None)[0] == 405 and ask(f"{base_url}/elsewhere", None)[0] == 404
        assert ask(completions, b"x" * (65 * 2**20))[0] == 413
        session.close(reward=None, error=None, seconds=0.0)
        asking = b'{"messages": [{"role": "user", "content": "a"}]}'
        assert ask(completions, asking) == (410, "the episode is over")
        agents.endpoint.drop(base_url)
        assert ask(completions, asking)[0] == 404


def _connections(port: int) -> int:
    mine = psutil.Process().net_connections("tcp")
    return sum(c.laddr.port == port and c.status in ("ESTABLISHED", "CLOSE_WAIT") for c in mine)


def test_strangers_take_no_room(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Half requests, requests without a session, headers without end: an agent's request is answered all the same."""
    with agents_of(folder, "silent") as agents:
        (rollout,) = rollouts_of([{}]).values()
        limits = {"max_turns": 1, "max_prompt_length": 9}
        session = Session(rollout, PARAMS, speech=agents.speech, new_key=iter(range(9)).__next__, **limits)
        base_url = agents.endpoint.open(session)
        port = int(base_url.split(":")[2].partition("/")[0])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(400)]
        for number, stranger in enumerate(strangers):
            with suppress(OSError):  # it was turned away for a later one
                stranger.sendall(NONSENSE[number % len(NONSENSE)])
        with urllib.request.urlopen(f"{base_url}/models", timeout=500) as answer:
            assert json.loads(answer.read())["data"][0]["id"] == "policy"
        until = time.monotonic() + 300
        while _connections(port) > STRANGERS + 1:  # those turned away are closed in the server's next turn
            assert time.monotonic() < until
            time.sleep(0.1)
        for stranger in strangers:
            stranger.close()
    assert capfd.readouterr().err == ""


def test_a_stranger_s_connection_is_closed_after_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.loopback.PATIENCE", 0.2)
    with agents_of(folder, "silent") as agents, socket.socket() as stranger:
        (rollout,) = rollouts_of([{}]).values()
        limits = {"max_turns": 1, "max_prompt_length": 9}
        session = Session(rollout, PARAMS, speech=agents.speech, new_key=iter(range(9)).__next__, **limits)
        base_url = agents.endpoint.open(session)
        stranger.connect(("127.0.0.1", int(base_url.split(":")[2].partition("/")[0])))
        stranger.settimeout(60)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_tool_call_of_brackets_is_text() -> None:
    """A policy that has collapsed may say any number of them."""
    text = f'<tool_call>{{"name": "add", "arguments": {"[" * 100_000}}}</tool_call>'
    request = ChatRequest(messages=(), reads_calls=True)
    assert reply_message(text, request, "1") == {"role": "assistant", "content": text}


def test_few_agents_at_a_time(folder: Path) -> None:
    played, record = play(folder, "two_turns", QUESTIONS, at_a_time=2)
    check_is_what_was_sampled(played, record, tokenizer_in(str(folder)))


# ---------------------------------------------------------------------------------------------------------- whole runs


def agent_run(folder: Path, name: str, **sections: Any) -> Path:
    config = write_run(folder, **sections)
    write_chat_tokenizer(folder)
    (folder / "agents.py").write_text(AGENTS)
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model | {"vocab_size": SIZE, "max_position_embeddings": 256}))
    for part in ("train", "val"):
        rows = [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
        chats = [
            {**row, "question": row["prompt"], "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    values = yaml.safe_load(config.read_text())
    values["data"] |= {"max_prompt_length": 60, "max_response_length": 80, "train_batch_size": 8}
    values["actor_rollout_ref"]["actor"] |= {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 1000}
    values["environment"] = {"agent": f"{folder / 'agents.py'}:{name}", "workers": 1, "timeout": 60}
    config.write_text(yaml.safe_dump(values))
    return config


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "four"])
def test_a_run_trains_with_an_agent(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """The engine's log-probabilities of all turns are the training layout's."""
    shape = FOUR_RANKS if layout == "four" else {}
    config = agent_run(tmp_path, "two_turns", trainer__total_training_steps=2, trainer__test_freq=2, **shape)
    said = train_in(ranks, shape.get("trainer__n_gpus_per_node", 1), config)
    first, *rows = metrics_of(tmp_path)
    assert len(rows) == 2 and first["val/turns"] == 2.0, said
    for row in rows:
        assert row["rollout/logp_gap_max"] < 1e-4 and row["actor/grad_norm"] > 0
        assert row["episode/turns_mean"] == 2.0 and 0.05 < row["episode/observed"] < 0.9
        assert row["reward/mean"] > 0.25 and row["reward/failed"] == 0
    assert rows[0]["actor/lr"] > 0


@pytest.mark.slow
def test_conversations_in_several_segments_are_trained_on(ranks: Ranks, tmp_path: Path) -> None:
    """The reward function scores the last segment; the number of optimizer steps stays what it was."""
    reward = "import zlib\ndef score(response, row):\n    return (zlib.crc32(response.encode()) % 100) / 100\n"
    (tmp_path / "reward.py").write_text(reward)
    score = f"{tmp_path / 'reward.py'}:score"
    config = agent_run(tmp_path, "rewrites", reward__name=score, data__val_files=[])
    train_in(ranks, 1, config)
    for row in metrics_of(tmp_path):
        assert row["episode/turns_mean"] == 3.0 and row["rollout/logp_gap_max"] < 1e-4
        assert 0 < row["reward/mean"] < 1 and row["actor/grad_norm"] > 0


@needs_vllm
def test_a_run_trains_with_an_agent_and_vllm(tmp_path: Path) -> None:
    """On two ranks that make one replica."""
    layout = {"name": "vllm", "n": 4, "tensor_model_parallel_size": 2, "max_num_seqs": 32}
    config = agent_run(
        tmp_path,
        "two_turns",
        data__val_files=[],
        actor_rollout_ref__rollout=layout,
        actor_rollout_ref__actor__megatron={"pipeline_model_parallel_size": 2},
    )
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"model_type": "qwen2", "hidden_size": 128}))
    done = megarl("train", "--nproc", "2", str(config), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in metrics_of(tmp_path):
        assert row["episode/turns_mean"] == 2.0 and row["rollout/logp_gap_max"] < 1e-4


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_agent(tmp_path: Path) -> None:
    import signal
    import subprocess
    import sys

    config = agent_run(tmp_path, "misbehaves", trainer__total_training_steps=5)
    lines = [json.loads(line) | {"how": "hangs"} for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    command = [sys.executable, "-m", "megarl.cli.main", "train", str(config), "data.val_files=[]"]
    run = subprocess.Popen(command, env={**os.environ, "MARK": str(tmp_path)})
    mark = str(tmp_path)
    until = time.monotonic() + 300
    while not _processes(mark) and time.monotonic() < until:
        time.sleep(0.2)
    assert _processes(mark)
    time.sleep(1)
    run.send_signal(signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 120
    while _processes(mark) and time.monotonic() < until:
        time.sleep(0.2)
    assert not _processes(mark)


def _processes(mark: str) -> list[int]:
    """List the processes of agents that a run with this variable MARK started."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if "megarl.environments.agent_process:main" in (process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("MARK") == mark
    ]


@pytest.mark.slow
def test_a_failing_agent_ends_the_run(tmp_path: Path) -> None:
    config = agent_run(tmp_path, "misbehaves", trainer__total_training_steps=1, data__val_files=[])
    rows = [json.loads(line) | {"how": "raises"} for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = megarl("train", str(config))
    assert done.returncode == ExitCode.INPUT, done.stderr
    assert "32 of 32 episodes failed; the first: agent: raised ValueError: not today; row " in done.stderr
    assert "agents.py" in done.stderr and "train.jsonl:" in done.stderr
