"""Episodes with environments: KV cache kept over turns, masks, failures, ranks in step, whole runs."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from chat_tokenizer import SIZE, write_chat_tokenizer
from ranks import Ranks
from run_cases import run_here
from test_vllm_engine import needs_vllm
from tiny_engines import engine_of, text_of
from tiny_families import ARCHITECTURES, VOCAB
from tiny_run import FOUR_RANKS, megarl, metrics_of, numbers_of, train_in, write_run

from megarl.config import load_config
from megarl.endings import ExitCode
from megarl.environments.broadcast import Broadcast
from megarl.environments.environment import Turn
from megarl.environments.environment_episodes import EpisodeLimits, WithEnvironments
from megarl.environments.episodes import Orders, Played, serve
from megarl.environments.speech import Speech
from megarl.rollout.engine import Request
from megarl.rollout.native import engine as native
from megarl.rollout.native.scheduler import Admission, Scheduler
from megarl.trainer.admission.checks import check_run
from megarl.types import Completion, Prompt, Rollout, Rollouts, SamplingParams, Tokens

ARCH = ARCHITECTURES["qwen3"]
PARAMS = SamplingParams(temperature=0.9, max_tokens=60, stop_token_ids=(3, 7, 11))
LENGTH = 80


class Words:
    """The tokenizer of `text_of`: token 7 is "<7>"."""

    vocab_size, eos_id = VOCAB, 3

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.strip("<>").split("><")] if text.startswith("<") else [1, 2]

    def decode(self, ids: Sequence[int]) -> str:
        return text_of(ids)


class Echo:
    """Answers with token ids that depend on what was said, after a while; three turns, or as many as the row says."""

    def __init__(self, seed: int = 0, slow: float = 0.0) -> None:
        self._clock, self._slow, self._turns = random.Random(seed + id(self)), slow, 0

    def reset(self, row: Mapping[str, Any]) -> Sequence[int] | None:
        self._wanted, self._fails = row.get("turns", 3), row.get("fails", "")
        self._reward = row.get("reward", 0.5)
        time.sleep(self._clock.random() * self._slow)
        return row.get("opening")

    def step(self, response: str) -> Turn:
        self._turns += 1
        time.sleep(self._clock.random() * self._slow)
        if self._fails and self._turns == 2:
            return self._fail()
        said = Words().encode(response)
        observed = [sum(said) % VOCAB, len(said), (7 * said[0]) % VOCAB]
        return Turn(observation=observed, done=self._turns >= self._wanted, reward=self._reward)

    def close(self) -> None:
        if self._fails == "close":
            raise OSError("no way out")

    def _fail(self) -> Any:
        if self._fails == "hangs":
            threading.Event().wait()
        if self._fails == "leaves":
            raise SystemExit(1)
        if self._fails == "raises":
            return {}["gone"]
        rewards: dict[str, Any] = {"nan": float("nan"), "text": "1"}
        if self._fails in rewards:
            return Turn(reward=rewards[self._fails])
        return {"no Turn": "x", "strange": Turn(observation=[VOCAB])}.get(self._fails, Turn(done=True))


def rollouts_of(rows: Sequence[dict[str, Any]], n: int = 1) -> dict[int, Rollout]:
    made = {}
    for i, row in enumerate(rows):
        prompt = Prompt(index=i, token_ids=tuple(range(4, 9 + 3 * (i % 4))), row=row, source=f"data:{i}")
        for j in range(n):
            made[i * n + j] = Rollout(prompt=prompt, group=i, sample=j, seed=1000 * i + j)
    return made


def source_of(
    rollouts: dict[int, Rollout], *, slow: float = 0.0, params: SamplingParams = PARAMS, **limits: Any
) -> Any:
    usual = {"max_turns": 8, "max_prompt_length": 20, "at_a_time": 64, "timeout": 5.0, "threads": 4}
    words: Any = Words()
    return WithEnvironments(
        rollouts,
        params,
        make=lambda: Echo(slow=slow),
        speech=Speech(words, stop_tokens=PARAMS.stop_token_ids, role="user", limit=8),
        limits=EpisodeLimits(**{**usual, **limits}),
        prompt_key="prompt",
    )


def play(rollouts: dict[int, Rollout], engine: Any = None, **settings: Any) -> dict[int, Played]:
    source = source_of(rollouts, **settings)
    serve(engine or engine_of(ARCH, max_model_len=LENGTH), source, Broadcast(None))
    return {place: played for place, (played,) in sorted(source.played.items())}


def what_was_said(played: Mapping[int, Played]) -> list[tuple[Any, ...]]:
    return [(p.response.ids, p.response.sampled, p.finish_reason, p.reward, p.episode.turns) for p in played.values()]


ROWS = [{"turns": 1 + i % 4} for i in range(10)]

# --------------------------------------------------------------------------------------------------------- the cache


def _afresh(rollouts: Mapping[int, Rollout], played: Mapping[int, Played]) -> None:
    """Every turn of the policy again, each from a prefill of all that came before it."""
    engine = engine_of(ARCH, max_model_len=LENGTH)
    for place, one in played.items():
        end = 0
        for own, ids in one.response.turns:
            begin, end = end, end + len(ids)
            if not own:
                continue
            request = Request(
                key=0,
                prompt=one.prompt_ids or rollouts[place].prompt.token_ids,
                params=PARAMS,
                seed=rollouts[place].seed,
                response=Tokens(ids=one.response.ids[:begin], logp=one.response.logp[:begin]),
            )
            engine.submit([request])
            made: dict[int, Completion] = {}
            while engine.busy:
                made |= engine.step()
            assert made[0].response.ids == one.response.ids[:end]
            assert made[0].response.logp == pytest.approx(one.response.logp[:end], abs=1e-5)


@pytest.mark.parametrize("blocks", [None, 12])
def test_a_turn_from_the_kept_cache_equals_one_from_a_prefill(
    monkeypatch: pytest.MonkeyPatch, blocks: int | None
) -> None:
    """Also where blocks run out, and what is kept for a turn to come goes."""
    extended, computed = [], []
    admit = Scheduler.admit

    def spy(self: Scheduler) -> Admission:
        admission = admit(self)
        extended.extend(r.request.key for r in admission.extended)
        computed.extend(r.request.key for r in admission.computed if r.token_ids)
        return admission

    monkeypatch.setattr(Scheduler, "admit", spy)
    if blocks:
        monkeypatch.setattr(native, "cache_blocks", lambda *_, **__: blocks)
    rollouts = rollouts_of(ROWS, n=2)
    engine = engine_of(ARCH, max_model_len=LENGTH)
    played = play(rollouts, engine)
    assert engine._scheduler is not None
    assert engine._scheduler._pool.free == (blocks or engine._cache.blocks) - 1 and not engine._scheduler._kept
    further = sum(p.episode.turns - 1 for p in played.values())
    if blocks:
        assert computed and len(extended) + len(computed) >= further
    else:
        assert (len(extended), computed) == (further, [])
    monkeypatch.undo()
    _afresh(rollouts, played)


# -------------------------------------------------------------------------------------------------- what is recorded


def _played_with(played: Played, version: int) -> Played:
    return replace(played, response=played.response.with_version(version))


def test_what_the_environment_said_is_not_trained_on() -> None:
    rollouts = rollouts_of(ROWS)
    played = play(rollouts)
    made = Rollouts(items=tuple(_played_with(played[i], 4).of(rollouts[i]) for i in rollouts), version=4)
    batch = made.to_batch()
    for i, rollout in enumerate(made):
        response, turns = rollout.response, rollout.response.turns
        assert [own for own, _ in turns] == [True, False] * (rollout.episode.turns - 1) + [True]
        for (_, said), (_, observed) in zip(turns[::2], turns[1::2], strict=False):
            assert list(observed) == [sum(said) % VOCAB, len(said), (7 * said[0]) % VOCAB]
        start, end = batch.cu_seqlens[i] + len(rollout.prompt.token_ids), batch.cu_seqlens[i + 1]
        mask = [own for own, ids in turns for _ in ids]
        assert batch.response_mask[start:end].tolist() == mask
        assert batch.rollout_logp[start:end].bool().tolist() == mask
        assert rollout.reward == 0.5 * rollout.episode.turns and response.versions == ((4, len(response)),)
    ended = [r for r in made if r.finish_reason == "stop"]
    assert len(ended) > 5 and all(r.episode.turns == ROWS[r.prompt.index]["turns"] for r in ended)


def test_limits_end_an_episode() -> None:
    rollouts = rollouts_of([{"turns": 99}] * 4)
    by_turns = play(rollouts, max_turns=2, params=replace(PARAMS, max_tokens=50))
    assert {(p.finish_reason, p.episode.limited) for p in by_turns.values()} == {("length", True)}
    assert all(p.response.turns[-1][0] for p in by_turns.values())
    assert max(p.episode.turns for p in by_turns.values()) == 2
    by_tokens = play(rollouts, max_turns=99)
    for one in by_tokens.values():
        assert one.finish_reason == "length" and one.episode.limited and len(one.response) <= PARAMS.max_tokens
        assert one.reward == 0.5 * one.episode.turns  # the environment judges what was cut off too
        assert len(one.response) + 3 >= PARAMS.max_tokens


def test_an_opening_becomes_part_of_the_prompt() -> None:
    rollouts = rollouts_of([{"turns": 2}, {"turns": 2, "opening": [5, 6]}, {"opening": [5] * 30}])
    played = play(rollouts)
    assert played[0].prompt_ids is None and played[1].prompt_ids == (*rollouts[1].prompt.token_ids, 5, 6)
    assert len(played[2].prompt_ids or ()) == len(rollouts[2].prompt.token_ids) + 8  # cut as any observation
    assert played[1].of(rollouts[1]).prompt.token_ids == played[1].prompt_ids
    _afresh(rollouts, played)
    too_long = play(rollouts, max_prompt_length=9)
    assert "makes the prompt 10 tokens long, more than data.max_prompt_length = 9" in str(too_long[1].episode.error)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hangs", "environment: step took longer than environment.timeout = 5 s; row data:1, turn 2"),
        ("raises", "environment: step raised KeyError: 'gone'; row data:1, turn 2\n"),
        ("leaves", "environment: step raised SystemExit: 1; row data:1, turn 2\n"),
        ("no Turn", "environment: step returned 'x', and no Turn; row data:1, turn 2"),
        ("nan", "environment: step gave the reward nan, which is not finite; row data:1, turn 2"),
        ("text", "environment: step gave the reward '1', a str, and not one number; row data:1, turn 2"),
        ("strange", "environment: step observed token ids that the vocabulary of 61 does not have; row data:1, turn 2"),
        ("close", "environment: close raised OSError: no way out"),
    ],
)
def test_an_environment_that_fails_costs_its_episode_alone(how: str, said: str) -> None:
    rows = [{"turns": 3}, {"turns": 3, "fails": how}, {"turns": 3}]
    brief = replace(PARAMS, stop_token_ids=tuple(range(0, VOCAB, 4)))
    want = play(rollouts_of([{"turns": 3}] * 3), params=brief)
    got = play(rollouts_of(rows), timeout=5 if how == "hangs" else 300, params=brief)
    assert what_was_said({i: got[i] for i in (0, 2)}) == what_was_said({i: want[i] for i in (0, 2)})
    assert str(got[1].episode.error).startswith(said) and got[1].reward is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "environment: reset raised KeyError: 'task'; row data:0, turn 0\n"),
        ("hangs", "environment: reset took longer than environment.timeout = 5 s; row data:0, turn 0"),
        ("array", "environment: reset observed array([1, 2]), which is neither text nor token ids; row data:0, turn 0"),
    ],
)
def test_an_environment_whose_reset_fails_is_closed(how: str, said: str) -> None:
    closed, over = list[str](), threading.Event()

    class Taken(Echo):
        def reset(self, row: Mapping[str, Any]) -> Any:
            if how == "hangs":
                over.wait()
            return np.array([1, 2]) if how == "array" else row["task"]

        def close(self) -> None:
            closed.append(how)

    source = source_of(rollouts_of([{}]), timeout=5 if how == "hangs" else 300)
    source._make = Taken
    serve(engine_of(ARCH, max_model_len=LENGTH), source, Broadcast(None))
    over.set()
    ((one,),) = source.played.values()
    assert str(one.episode.error).startswith(said) and closed == [how]


def test_rewards_may_be_numpys() -> None:
    rewards = [np.float32(0.5), np.float64(2.5), np.int64(3), np.bool_(True), np.array([0.25])[0], False, 7]
    played = play(rollouts_of([{"turns": 1, "reward": reward} for reward in rewards]))
    assert [p.episode.error for p in played.values()] == [None] * len(rewards)
    assert [p.reward for p in played.values()] == [0.5, 2.5, 3.0, 1.0, 0.25, 0.0, 7.0]
    assert {type(p.reward) for p in played.values()} == {float}
    brief = replace(PARAMS, stop_token_ids=tuple(range(0, VOCAB, 4)))
    error = play(rollouts_of([{"turns": 2, "reward": np.float64(3e38)}]), params=brief)[0].episode.error
    assert str(error).startswith("environment: step gave rewards that add up to 6e+38, which is too large for float32;")


def test_few_episodes_at_a_time() -> None:
    rollouts = rollouts_of(ROWS, n=2)
    alive, most = 0, 0
    source = source_of(rollouts, at_a_time=3)
    begin = source._make

    class Counted(Echo):
        def reset(self, row: Mapping[str, Any]) -> Any:
            nonlocal alive, most
            alive, most = alive + 1, max(most, alive + 1)
            return super().reset(row)

        def close(self) -> None:
            nonlocal alive
            alive -= 1

    assert isinstance(begin(), Echo)
    source._make = Counted
    serve(engine_of(ARCH, max_model_len=LENGTH), source, Broadcast(None))
    assert alive == 0 and 3 <= most <= 4  # one may be closing
    assert what_was_said({i: p for i, (p,) in sorted(source.played.items())}) == what_was_said(play(rollouts))


# -------------------------------------------------------------------------------------------------------------- ranks


def _on_rank(slow: float) -> tuple[list[tuple[Any, ...]] | None, list[tuple[int, Completion]], list[int]]:
    """What the first rank played, and what the engine of each rank was asked and made, in order."""
    assert dist.group.WORLD is not None
    engine, channel = engine_of(ARCH, dist.group.WORLD, max_model_len=LENGTH), Broadcast[Orders](dist.group.WORLD)
    asked: list[int] = []
    made: list[tuple[int, Completion]] = []
    submit, step = engine.submit, engine.step

    def submitted(requests: Sequence[Request]) -> None:
        asked.extend([-1, *(r.key for r in requests)])
        submit(requests)

    def stepped() -> Mapping[int, Completion]:
        asked.append(-2)
        finished = step()
        made.extend(finished.items())
        return finished

    engine.submit, engine.step = submitted, stepped  # type: ignore[method-assign]
    source = source_of(rollouts_of(ROWS, n=2), slow=slow) if channel.leads else None
    serve(engine, source, channel)
    played = None if source is None else what_was_said({i: p for i, (p,) in sorted(source.played.items())})
    return played, made, asked


def test_ranks_of_a_replica_stay_in_step_whenever_answers_arrive(ranks: Ranks) -> None:
    want = what_was_said(play(rollouts_of(ROWS, n=2)))
    orders = set()
    for slow in (0.0, 0.02, 0.02):
        (played, made, asked), (nothing, also_made, also_asked) = ranks.run(2, _on_rank, slow)
        assert nothing is None and played == want
        assert asked == also_asked and made == also_made  # bit for bit
        orders.add(tuple(asked))
    assert len(orders) == 3  # answers came at other times


def test_nothing_is_sent_while_nobody_can_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, steps = False, 0
    share, engine = Broadcast.share, engine_of(ARCH, max_model_len=LENGTH)
    step = engine.step

    def shared(self: Broadcast[Orders], word: Orders | None) -> Orders | None:
        nonlocal quiet
        assert not quiet
        quiet = word is not None and word.quiet and not word.over
        return share(self, word)

    def stepped() -> Mapping[int, Completion]:
        nonlocal quiet, steps
        finished = step()
        steps += quiet
        quiet = quiet and not finished
        return finished

    monkeypatch.setattr(Broadcast, "share", shared)
    engine.step = stepped  # type: ignore[method-assign]
    play(rollouts_of([{"turns": 1}] * 2), engine, params=replace(PARAMS, stop_token_ids=()))
    assert 50 < steps <= PARAMS.max_tokens + 1


# ---------------------------------------------------------------------------------------------------------- whole runs


GUESSING = """
import os, time
from megarl.environments.environment import Turn

class Guess:
    '''Says + once, and gives a point for each digit that is said after it.'''
    def __init__(self, bad=-1, how="raise"):
        self.bad, self.how = bad, how
    def reset(self, row):
        self.row, self.turn = row, 0
    def step(self, response):
        self.turn += 1
        if self.row["id"] == self.bad:
            if self.how == "hang":
                time.sleep(1000)
            raise RuntimeError("row %d is bad" % self.bad)
        if self.turn == 1:
            return Turn(observation="+")
        return Turn(done=True, reward=float(sum(c.isdigit() for c in response)))
    def close(self):
        pass
"""


def guessing_run(folder: Path, *, rollout: dict[str, Any] | None = None, **sections: Any) -> Path:
    (folder / "guess.py").write_text(GUESSING)
    return write_run(
        folder,
        environment={"name": f"{folder / 'guess.py'}:Guess", "max_observation_length": 3},
        reward__name="environment",
        data__max_response_length=12,
        actor_rollout_ref__rollout=rollout or {"n": 4, "stop": ["="]},
        **sections,
    )


@pytest.mark.parametrize("other", [{}, pytest.param(FOUR_RANKS, marks=pytest.mark.slow)], ids=["one", "four"])
def test_a_run_learns_from_episodes(ranks: Ranks, tmp_path: Path, other: dict[str, Any]) -> None:
    """Twice the same, also on four ranks, two of which make a replica."""
    found = {}
    for name, layout in {"one": {}, "again": other}.items():
        folder = tmp_path / name
        folder.mkdir()
        world = layout.get("trainer__n_gpus_per_node", 1)
        train_in(ranks, world, guessing_run(folder, trainer__total_training_steps=3, trainer__test_freq=1, **layout))
        rows = numbers_of(folder)
        found[name] = [{k: v for k, v in row.items() if k != "episode/tool_s"} for row in rows]
    same = ("reward/mean", "episode/turns_mean", "response/length_mean", "episode/observed", "tokens", "val/reward")
    near = ("actor/grad_norm", "actor/entropy")
    for one, again in zip(found["one"], found["again"], strict=True):  # the engine had other requests together
        assert [again.get(k) for k in same] == [one.get(k) for k in same]
        assert [again.get(k, 0.0) for k in near] == pytest.approx([one.get(k, 0.0) for k in near], rel=1e-3)
    step = found["one"][1]
    assert step["episode/turns_max"] == 2.0 and 1.0 < step["episode/turns_mean"] <= 2.0
    assert 0 < step["episode/observed"] < 0.3 and step["episode/limited"] == step["response/truncated"]
    assert step["rollout/logp_gap_max"] < 1e-4 and step["val/turns"] > 1
    samples = (tmp_path / "one" / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"] for line in samples]
    assert ["environment", "+"] in [turn for one in turns for turn in one]
    assert {turn[0][0] for turn in turns} == {"policy"}


def test_an_evaluation_with_messages_within_a_column(ranks: Ranks, tmp_path: Path) -> None:
    """The same as with messages that are a column: who is told what, and which prompts are which."""
    samples = {}
    config = guessing_run(tmp_path, trainer__flow="eval")
    write_chat_tokenizer(tmp_path)
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"vocab_size": SIZE}))
    for name, count in {"val": 5, "train": 16}.items():
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()[:count]]
        chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
        rows = [{**row, "chat": chat, "q": {"messages": chat}} for row, chat in zip(rows, chats, strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for key in ("chat", "q.messages"):
        run_dir = tmp_path / key
        overrides = [f"data.prompt_key={key}", f"trainer.default_local_dir={run_dir}", "data.max_response_length=24"]
        ended, said = ranks.run(1, run_here, str(config), overrides)[0]
        assert ended == "" and "megarl report" not in said
        samples[key] = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert samples["q.messages"] == samples["chat"] and len({sample["row"] for sample in samples["chat"]}) == 5
    write_chat_tokenizer(tmp_path, "{{ messages[-1]['content'] }}")
    with pytest.raises(ValueError, match=r"environment.role = user: the chat template does not write down"):
        check_run(load_config(str(config), ["trainer.flow=ppo", "data.prompt_key=q.messages"]))


@needs_vllm
def test_a_run_of_episodes_with_vllm(tmp_path: Path) -> None:
    """On two ranks that make one replica; twice the same."""
    rollout = {"name": "vllm", "n": 4, "tensor_model_parallel_size": 2, "max_num_seqs": 32, "stop": ["="]}
    found = []
    for name in ("one", "again"):
        folder = tmp_path / name
        folder.mkdir()
        config = guessing_run(
            folder,
            data__val_files=[],
            actor_rollout_ref__actor__megatron={"pipeline_model_parallel_size": 2},
            trainer__total_training_steps=1,
            rollout=rollout,
        )
        model = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(model | {"model_type": "qwen2", "hidden_size": 128}))
        done = megarl("train", "--nproc", "2", str(config), timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        (row,) = metrics_of(folder)
        assert row["episode/turns_mean"] > 1.2 and row["rollout/logp_gap_max"] < 1e-4
        found.append([row[key] for key in ("reward/mean", "episode/turns_mean", "tokens")])
    assert found[0] == found[1]


@pytest.mark.parametrize("how", [pytest.param("raise", marks=pytest.mark.slow), "hang"])
def test_episodes_that_fail_are_dropped_or_end_the_run(ranks: Ranks, tmp_path: Path, how: str) -> None:
    config = guessing_run(tmp_path, trainer__test_freq=0, data__val_files=[], data__train_batch_size=80)
    settings = [f"environment.args={{bad: 3, how: {how}}}", "environment.timeout=1.0", "trainer.total_training_steps=1"]
    said = train_in(ranks, 1, config, *settings, "reward.on_error=drop")
    assert "4 of 320 episodes failed; the first: environment: step" in said and "train.jsonl:" in said
    assert metrics_of(tmp_path)[0]["reward/failed"] == 4
    if how == "raise":
        elsewhere = f"trainer.default_local_dir={tmp_path / 'other'}"
        done = megarl("train", "--nproc", "1", str(config), *settings, elsewhere)
        assert done.returncode == ExitCode.INPUT and "RuntimeError: row 3 is bad" in done.stderr
        assert "reward.on_error=drop leaves out the episodes that fail" in done.stderr and "guess.py" in done.stderr
