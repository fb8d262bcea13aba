"""The processes that score: verifiers that hang, die, flood or fork, and what a score is made of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from selection import quick

from megarl.config import build_config
from megarl.rewards import pool as pool_module
from megarl.rewards.parts import parts_of
from megarl.rewards.pool import RewardPool
from megarl.rewards.results import Failure, Response, RewardError, Scored
from megarl.trainer.records.score_metrics import call_metrics, part_metrics, parts_by_name
from megarl.trainer.scoring.reward_workers import Host, workers_of
from megarl.types import Prompt, Rollout, Rollouts

ROOT = Path(__file__).parents[1]

VERIFIERS = '''
import asyncio, ctypes, os, re, signal, subprocess, sys, threading, time

def length(response, row):
    return len(response)

def acts(response, row):
    """Does to its process what the response says."""
    if response == "sleeps":
        time.sleep(9999)
    elif response == "loops":
        while True:
            try:
                time.sleep(9999)
            except BaseException:
                pass
    elif response == "backtracks":
        re.fullmatch("(a|aa)+b", "a" * 60)
    elif response == "pauses in C":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        ctypes.CDLL(None).pause()
    elif response == "exits":
        os._exit(3)
    elif response == "crashes":
        ctypes.string_at(0)
    elif response == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif response == "is asked to stop":
        os.kill(os.getpid(), signal.SIGTERM)
    elif response == "floods":
        for _ in range(512):
            os.write(1, b"x" * 2**20)
            os.write(2, b"x" * 2**20)
    elif response == "closes everything":
        os.closerange(3, 1000)
    elif response == "forks":
        if os.fork() == 0:
            return 7.0
    elif response == "cannot be pickled":
        return threading.Lock()
    elif response == "is large":
        return "x" * 2**30
    elif response == "is nan":
        return float("nan")
    elif response == "says much":
        raise ValueError("x" * 10**7)
    elif response == "leaves":
        sys.exit(3)
    return 1.0

def leaves_a_child(response, row):
    """One that its parent leaves behind, in a session of its own."""
    code = "import subprocess as s; print(s.Popen(['sleep', '9999'], stdout=s.DEVNULL, start_new_session=True).pid)"
    child = subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True).stdout
    with open(row["note"], "a") as f:
        f.write(child)
    if response == "hangs":
        time.sleep(9999)
    return 1.0

def lists(responses, rows, *, tokens):
    with open(rows[0]["note"], "a") as f:
        f.write(f"{len(responses)}\\n")
    assert isinstance(responses, list) and len(rows) == len(tokens) == len(responses)
    if "poison" in responses:
        raise ValueError("poison")
    if "hang" in responses:
        time.sleep(9999)
    if "short" in responses:
        return [1.0]
    return [float("nan") if text == "nan" else len(text) + n / 100 for text, n in zip(responses, tokens)]

async def asks(response, row):
    if response == "hangs":
        await asyncio.sleep(9999)
    if response == "swallows":
        while True:
            try:
                await asyncio.sleep(9999)
            except asyncio.CancelledError:
                pass
    if response == "blocks":
        time.sleep(9999)
    if response == "dies":
        os._exit(1)
    if response == "raises":
        raise KeyError("no")
    await asyncio.sleep(0.2)
    return len(response)

here = 0

async def meets(response, row):
    """Ends when a hundred are there."""
    global here
    here += 1
    while here < 100:
        await asyncio.sleep(0.01)
    return len(response)

def second_time(response, row):
    with open(row["note"], "a+") as f:
        f.write(f"{time.time()}\\n")
        f.seek(0)
        if len(f.readlines()) <= row["failures"]:
            raise OSError("the judge is out")
    return 1.0

def waits(response, row):
    with open(row["note"], "a") as f:
        f.write(f"{os.getpid()} ")
    while not os.path.exists(row["note"] + ".go"):
        time.sleep(0.01)
    return len(response)

def where(response, row):
    return {"score": 1.0, "pid": os.getpid()}

def told(response, row, bonus, *, scale=1.0, tokens, finish_reason):
    return {"score": bonus + scale * tokens, "stopped": finish_reason == "stop", "number": 0.5}
'''

Answer = dict[Any, Scored | Failure]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(VERIFIERS)
    return str(path)


@contextmanager
def pool_of(workers: int = 2, **reward: Any) -> Iterator[RewardPool]:
    settings = build_config({"reward": {"on_error": "drop", "timeout": 300, **reward}}).reward
    pool = RewardPool(parts_of(settings), settings, workers)
    try:
        yield pool
    finally:
        alive = pool._leader.process.poll() is None
        processes = [pool._leader.process.pid, *(p.pid for p in workers_under(pool))] if alive else []
        pool.close()
        assert not any(psutil.pid_exists(pid) for pid in processes)


def workers_under(pool: RewardPool) -> list[psutil.Process]:
    return psutil.Process(pool._leader.process.pid).children(recursive=True)


def submit(pool: RewardPool, texts: list[str], row: dict[str, Any] | None = None, source: str = "") -> None:
    for i, text in enumerate(texts):
        prompt: Any = SimpleNamespace(index=i, row=row or {}, source=f"train.jsonl:{i}")
        pool.submit(i, Response(text=text, tokens=i), prompt, source)


def results(pool: RewardPool, texts: list[str], row: dict[str, Any] | None = None) -> list[float | str]:
    """The scores, or what is wrong; the function's name and the row stand around that."""
    submit(pool, texts, row)
    collected = pool.collect()
    assert list(collected) == list(range(len(texts)))
    return [outcome(result) for result in collected.values()]


def outcome(result: Scored | Failure) -> float | str:
    if isinstance(result, Scored):
        return result.score
    head, _, rest = result.reason.partition("; row train.jsonl:")
    assert head.startswith("reward.name = ") and ", response '" in rest
    return head.split(" ", 3)[3]


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


# ------------------------------------------------------------------------------------------------ what goes wrong

LATE = "took longer than reward.timeout = 5 s"
WRONG = {
    "sleeps": LATE,
    "loops": LATE,
    "backtracks": LATE,
    "pauses in C": LATE,
    "exits": "ended its process: exit code 3",
    "crashes": "ended its process: SIGSEGV",
    "is killed": "ended its process: SIGKILL (out of memory?)",
    "closes everything": "ended its process: exit code 1",
    "cannot be pickled": "returned <unlocked _thread.lock",
    "is nan": "returned nan, which is not finite",
    "says much": f"raised ValueError: {'x' * 188}...",
    "leaves": "raised SystemExit: 3",
}


def test_what_a_verifier_does_costs_its_own_response_only(file: str) -> None:
    with pool_of(4, name=f"{file}:acts", timeout=5) as pool:
        texts = [text for wrong in WRONG for text in (wrong, "is well")]
        found = results(pool, texts)
        assert found[1::2] == [1.0] * len(WRONG)
        for (text, said), one in zip(WRONG.items(), found[::2], strict=True):
            assert isinstance(one, str) and one.startswith(said), (text, one)
        assert results(pool, ["is asked to stop", "forks", "is well"]) == [1.0, 1.0, 1.0]
        until(lambda: sum(worker.status() != "zombie" for worker in workers_under(pool)) == 4)


@pytest.mark.slow
def test_runs_of_a_response_end_before_the_response_is_ended() -> None:
    """Each of its tests keeps to `wall`; together they would take longer than `reward.timeout`, and end a run."""
    rows = {"tests": [{"input": "3\n", "output": "9"}] * 20}
    with pool_of(1, name="code", on_error="fail", timeout=20.0, args={"wall": 4.0, "partial": True}) as pool:
        assert results(pool, ["```python\nimport time\ntime.sleep(999)\n```"], rows) == [0.0]


def test_a_gigabyte_goes_nowhere(file: str) -> None:
    """One on stdout and stderr, one as a score."""
    with pool_of(name=f"{file}:acts") as pool:
        said = f"returned '{'x' * 199}..., a str, and not one number"
        assert results(pool, ["floods", "is well", "is large"]) == [1.0, 1.0, said]


def test_the_frames_of_what_is_ended_are_shown(file: str) -> None:
    with pool_of(name=f"{file}:acts", timeout=5) as pool:
        submit(pool, ["sleeps", "crashes", "says much"])
        said = [str(result) for result in pool.collect().values()]
    source = VERIFIERS.splitlines()
    lines = ("time.sleep(9999)", "ctypes.string_at(0)", 'raise ValueError("x" * 10**7)')
    for text, line in zip(said, lines, strict=True):
        number = next(i for i, one in enumerate(source, 1) if one.strip() == line)
        assert f'\n  File "{file}", line {number}, in acts\n    {line}' in text
        assert "megarl/rewards" not in text and len(text) < 3000


def test_a_killed_worker_is_replaced(file: str) -> None:
    with pool_of(name=f"{file}:where") as pool:
        submit(pool, ["x"])
        (first,) = pool.collect().values()
        assert isinstance(first, Scored)
        for worker in workers_under(pool):
            worker.kill()
        submit(pool, ["x"] * 50)
        pids = {result.metrics["pid"] for result in pool.collect().values() if isinstance(result, Scored)}
        assert pids and first.metrics["pid"] not in pids


def test_what_a_verifier_leaves_behind_ends_with_its_worker(file: str, tmp_path: Path) -> None:
    note = tmp_path / "children"
    with pool_of(name=f"{file}:leaves_a_child", timeout=5) as pool:
        assert results(pool, ["is well", "hangs"], {"note": str(note)}) == [1.0, LATE]
        left = [int(pid) for pid in note.read_text().split()]
        assert len(left) == 2
        until(lambda: sum(psutil.pid_exists(pid) for pid in left) <= 1)  # the other's worker goes on
    until(lambda: gone(left))


def test_a_function_that_workers_cannot_import_is_said(tmp_path: Path) -> None:
    file = tmp_path / "here_only.py"
    file.write_text(f"import os\nif os.getpid() != {os.getpid()}:\n    1 / 0\ndef f(response, row):\n    return 1\n")
    with pool_of(name=f"{file}:f") as pool:
        submit(pool, ["x"])
        with pytest.raises(RewardError, match=r"(?s)a reward worker cannot start:.*ZeroDivisionError: division"):
            pool.collect()


def at_work(note: Path) -> list[int]:
    """The workers that have begun with a response."""
    return [int(pid) for pid in note.read_text().split()] if note.exists() else []


def test_a_call_whose_worker_somebody_kills_is_tried_once_more(file: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    with pool_of(name=f"{file}:waits") as pool:
        submit(pool, ["abc"], {"note": str(note)})
        until(lambda: len(at_work(note)) == 1)
        os.kill(at_work(note)[0], signal.SIGKILL)
        until(lambda: len(at_work(note)) == 2)
        (tmp_path / "pids.go").touch()
        (scored,) = pool.collect().values()
        assert isinstance(scored, Scored) and (scored.score, scored.retried) == (3.0, 1)


@pytest.mark.parametrize("how", quick([signal.SIGKILL, signal.SIGSTOP], 0))
def test_another_process_leads_the_workers_when_the_first_is_lost(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """One that ends, or gives no sign of life; what was waiting is given to another one, but not to a third."""
    monkeypatch.setattr(pool_module, "SILENCE", 5.0)
    note = tmp_path / "pids"
    with pool_of(name=f"{file}:waits", timeout=5.0 if how == signal.SIGSTOP else 300) as pool:
        submit(pool, ["abc", "de"], {"note": str(note)})
        until(lambda: len(at_work(note)) == 2)
        first, left = pool._leader.process, [p.pid for p in workers_under(pool)]
        first.send_signal(how)
        (tmp_path / "pids.go").touch()
        assert [one.retried for one in pool.collect().values() if isinstance(one, Scored)] == [1, 1]
        assert pool._leader.process.pid != first.pid
        until(lambda: gone(left))
        assert results(pool, ["x"], {"note": str(note)}) == [1.0]


def test_the_end_of_what_leads_the_workers_is_said(file: str) -> None:
    with pool_of(name=f"{file}:acts") as pool:
        submit(pool, ["sleeps"])
        left = list[int]()

        def kill_all_leaders() -> None:
            for _ in range(2):
                leader = pool._leader.process
                until(lambda leader=leader: len(psutil.Process(leader.pid).children()) == 2)
                left.extend(p.pid for p in psutil.Process(leader.pid).children())
                leader.kill()
                until(lambda leader=leader: pool._leader.process is not leader or pool._ended != "")

        killer = threading.Thread(target=kill_all_leaders)
        killer.start()
        with pytest.raises(RewardError, match="the process that leads the reward workers has ended"):
            pool.collect()
        killer.join()
        until(lambda: len(left) == 4 and gone(left))


# ------------------------------------------------------------------------------------------------ whatever the order


def test_scores_do_not_depend_on_who_finishes_first(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ndef f(response, row):\n    time.sleep(float(response))\n    return float(response)\n")
    delays = [0.3, 0.0, 0.2, 0.05, 0.1, 0.0]
    with pool_of(3, name=f"{file}:f") as pool:
        assert results(pool, [str(delay) for delay in delays]) == delays


def test_the_first_failure_is_the_first_that_was_submitted(tmp_path: Path) -> None:
    """Response 3 fails at once, response 1 later; nobody waits for those after them, which hang."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\ndef f(response, row):\n    wait, fails = response.split()\n    time.sleep(float(wait))\n"
        "    return 1 / (1 - int(fails))\n"
    )
    with pool_of(4, name=f"{file}:f", on_error="fail", timeout=9999) as pool:
        submit(pool, ["0 0", "0.5 1", "0 0", "0 1", *["9999 0"] * 20])
        found = pool.collect()
        assert [key for key, result in found.items() if isinstance(result, Failure)] == [1, 3]
    with pool_of(2, name=f"{file}:f", on_error="fail") as pool:  # what was not waited for is forgotten
        submit(pool, ["0 1", "0.3 0"])
        assert list(pool.collect()) in ([0], [0, 1])
        submit(pool, ["0 0"])
        assert [outcome(result) for result in pool.collect().values()] == [1.0]


def test_two_pools_and_one_that_is_closed_while_busy(file: str) -> None:
    with pool_of(1, name=f"{file}:acts") as busy, pool_of(1, name=f"{file}:length") as other:
        submit(busy, ["sleeps"] * 5)
        assert results(other, ["a", "bbb"]) == [1, 3]
        until(lambda: len(workers_under(busy)) == 1)
        busy.close()
        assert results(other, ["cc"]) == [2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_rank(file: str, tmp_path: Path, how: signal.Signals) -> None:
    """Nor what a verifier left behind, in a session of its own."""
    note = tmp_path / "children"
    program = (
        "import time, sys\nfrom types import SimpleNamespace as P\nfrom megarl.config import build_config\n"
        "from megarl.rewards.results import Response\nfrom megarl.rewards.parts import parts_of\n"
        "from megarl.rewards.pool import RewardPool\n"
        f"s = build_config({{'reward': {{'name': {file + ':leaves_a_child'!r}}}}}).reward\n"
        "pool = RewardPool(parts_of(s), s, 2)\n"
        f"pool.submit(0, Response(text='hangs'), P(index=0, row={{'note': {str(note)!r}}}, source=''))\n"
        "pool.collect()\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until(lambda: note.exists() and bool(note.read_text().strip()))
        below = [p.pid for p in psutil.Process(rank.pid).children(recursive=True)]
        assert len(below) >= 4 and int(note.read_text()) in below
        rank.send_signal(how)
        rank.wait(120)
        until(lambda: gone(below))
    finally:
        rank.kill()


# ------------------------------------------------------------------------------------------------ kinds of functions


@pytest.mark.slow
def test_lists_of_responses(file: str, tmp_path: Path) -> None:
    """A list that fails is tried again one by one, so that nobody fails for the company it was in."""
    note = {"note": str(tmp_path / "sizes")}
    with pool_of(1, name=f"{file}:lists", batch_size=4, timeout=5) as pool:
        assert results(pool, ["a"] * 9, note) == [pytest.approx(1 + i / 100) for i in range(9)]
        sizes = [int(size) for size in Path(note["note"]).read_text().split()]
        assert sum(sizes) == 9 and max(sizes) == 4 and len(sizes) <= 4
        texts = ["a", "poison", "bb", "nan", "hang", "ccc"]
        expected = [1.0, "raised ValueError: poison", 2.02, "returned nan, which is not finite", LATE, 3.05]
        assert results(pool, texts, note) == expected
        said = results(pool, ["short", "b"], note)
        assert said in (["returned 1 score for a list of 2 responses, and not one for each"] * 2, [1.0, 1.01])
    with pool_of(1, name=f"{file}:lists", batch_size=64) as pool:
        submit(pool, ["first"], note)  # the others wait for it, and go together
        found = results(pool, ["short"] * 8, note)
        assert "returned 1 score for a list of" in str(found[-1]) and found.count(found[-1]) >= 7


def test_hundreds_of_coroutines_at_once(file: str) -> None:
    with pool_of(1, name=f"{file}:meets", concurrency=100) as pool:
        assert results(pool, ["x" * (i % 7) for i in range(200)]) == [i % 7 for i in range(200)]


@pytest.mark.slow
def test_each_coroutine_has_its_own_deadline(file: str) -> None:
    with pool_of(1, name=f"{file}:asks", timeout=5) as pool:
        found = results(pool, ["hangs", "a", "raises", "swallows", "bb"])
        assert found == [LATE, 1, "raised KeyError: 'no'", LATE, 2]
        submit(pool, ["hangs"])
        assert f'File "{file}", line' in str(pool.collect()[0])
        # one that blocks the loop, or dies, takes no other with it: they are tried again alone
        assert results(pool, ["a", "blocks", "bb", "dies", "ccc"]) == [1, LATE, 2, "ended its process: exit code 1", 3]


@pytest.mark.slow
def test_a_retry_comes_after_a_pause(file: str, tmp_path: Path) -> None:
    with pool_of(name=f"{file}:second_time", on_error="retry", retries=2) as pool:
        submit(pool, ["x"], {"note": str(tmp_path / "one"), "failures": 1})
        (scored,) = pool.collect().values()
        assert isinstance(scored, Scored) and (scored.score, scored.retried) == (1.0, 1)
        first, second = map(float, (tmp_path / "one").read_text().split())
        assert second - first >= 1.0
        submit(pool, ["x"], {"note": str(tmp_path / "never"), "failures": 9})
        (failure,) = pool.collect().values()
        assert isinstance(failure, Failure) and failure.retried == 2
        assert failure.reason.split(" ", 3)[3] == "raised OSError: the judge is out; row train.jsonl:0, response 'x'"
        times = [float(line) for line in (tmp_path / "never").read_text().split()]
        assert len(times) == 3 and times[1] - times[0] >= 1 and times[2] - times[1] >= 2
    assert call_metrics([scored, failure])["retried"] == 3.0


# ------------------------------------------------------------------------------------------------ what a score is


def test_arguments_and_numbers_beside_the_score(file: str) -> None:
    with pool_of(name=f"{file}:told", args={"bonus": 10, "scale": 2}) as pool:
        submit(pool, ["a", "b"])
        assert pool.collect() == {
            i: Scored(score=10.0 + 2 * i, parts={"": 10.0 + 2 * i}, metrics={"stopped": 1.0, "number": 0.5})
            for i in range(2)
        }


def test_parts_are_weighed_and_belong_to_data_sources(file: str) -> None:
    parts = {
        "length": {"name": f"{file}:length", "weight": 0.5},
        "told": {"name": f"{file}:told", "weight": -1, "args": {"bonus": 3}, "data_sources": ["gsm8k"]},
        "judge": {"name": f"{file}:asks", "data_sources": ["chat", "gsm8k"]},
    }
    with pool_of(parts=parts) as pool:
        for _ in range(3):  # workers go to and fro between the two kinds of functions
            submit(pool, ["a" * (i % 3) for i in range(60)], source="chat")
            assert [outcome(one) for one in pool.collect().values()] == [1.5 * (i % 3) for i in range(60)]
        submit(pool, ["aa", "bbbb"], source="gsm8k")
        math = pool.collect()
        submit(pool, ["aa"], source="chat")
        chat = list(pool.collect().values())
        submit(pool, ["cccccc"], source="")
        chat += pool.collect().values()
        submit(pool, ["raises"], source="chat")
        (failure,) = pool.collect().values()
    told = {"part/told/stopped": 1.0, "part/told/number": 0.5}
    assert math[1] == Scored(score=2 - 4 + 4, parts={"length": 4, "told": 4, "judge": 4}, metrics=told)
    assert [one.score for one in chat if isinstance(one, Scored)] == [3.0, 3.0]
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(f"reward.parts.judge.name = {file}:asks raised KeyError: 'no'; row train.jsonl:0,")
    results = [*math.values(), *chat, failure]
    metrics = call_metrics(results) | part_metrics(_rollouts(results, ["gsm8k", "gsm8k", "chat", "", "chat"]))
    assert metrics["part/length"] == (2 + 4 + 2 + 6) / 4 and metrics["part/told"] == 3.5
    assert metrics["part/judge"] == pytest.approx(8 / 3) and metrics["part/told/number"] == 0.5
    assert metrics["source/gsm8k/mean"] == 1.0 and metrics["source/chat/mean"] == 3.0
    assert metrics["source/gsm8k/accuracy"] == 0.5 and metrics["source/chat/accuracy"] == 1.0
    assert metrics["latency_max_s"] >= metrics["latency_p95_s"] >= metrics["latency_mean_s"] > 0.05


def _rollouts(results: Sequence[Scored | Failure], sources: Sequence[str]) -> Rollouts:
    """Responses that were scored so, to rows of these data sources."""
    return Rollouts(
        items=tuple(
            Rollout(
                prompt=Prompt(index=i, token_ids=(5,), row={}, data_source=source),
                group=i,
                seed=i,
                reward=one.score if isinstance(one, Scored) else None,
                parts=parts_by_name(one) if isinstance(one, Scored) else {},
            )
            for i, (one, source) in enumerate(zip(results, sources, strict=True))
        )
    )


def test_a_worker_begins_without_what_no_function_needs() -> None:
    """Not with torch, nor with numpy, whose threads a fork would lose."""
    code = (
        "import sys, threading, os, megarl.rewards.supervisor; print({'torch', 'numpy', 'pydantic'} & {*sys.modules}, "
    )
    code += "len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "set() 1\n", done.stderr


def test_workers_are_shared_between_the_ranks_of_a_node() -> None:
    def host(name: str, cores: range, scores: bool = True, quota: float | None = None) -> Host:
        return Host(name=name, scores=scores, cores=frozenset(cores), quota=quota)

    def shares(hosts: list[Host], per_node: int | None = None) -> list[int]:
        return [workers_of(rank, hosts, per_node) for rank in range(len(hosts))]

    assert shares([host("a", range(8))] * 2) == [4, 4]
    assert shares([host("a", range(4)), host("a", range(4, 8))]) == [4, 4]  # pinned to cores of their own
    assert shares([host("a", range(7)), host("a", range(7)), host("b", range(2))]) == [4, 3, 2]
    assert shares([host("a", range(8)), host("a", range(8), scores=False)] * 2) == [4, 0, 4, 0]
    assert shares([host("a", range(64), quota=2.5)] * 2) == [1, 1]
    assert shares([host("a", range(2))] * 4) == [1, 1, 1, 1]
    assert shares([host("a", range(2))] * 2, per_node=33) == [17, 16]


# ------------------------------------------------------------------------------------------------ before the run

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"args": {"strict": 1}}, "reward.args: exact_match takes no argument 'strict'; it takes none"),
    ({"name": "FILE:told"}, "reward.args: FILE:told needs bonus"),
    (
        {"name": "FILE:told", "args": {"bonus": 1, "skale": 1}},
        "reward.args: FILE:told takes no argument 'skale'; it takes bonus, scale",
    ),
    (
        {"name": "FILE:told", "args": {"tokens": 1}},
        "reward.args: leave tokens out: each function that names it is given the response's own",
    ),
    ({"name": "FILE:told", "args": {"bonus": {1, 2}}}, "reward.args: 'bonus' is {1, 2}, and not a value that JSON has"),
    (
        {"args": {"x": 1}, "name": "model"},
        "reward.args are a function's, and reward.name=model is none; leave them off",
    ),
    ({"batch_size": 2}, "reward.batch_size: exact_match scores one response at a time; unset it"),
    (
        {"batch_size": 2, "name": "FILE:asks"},
        "reward.batch_size hands lists to a function; FILE:asks is an async def, of which up to reward.concurrency run "
        "at a time: unset reward.batch_size",
    ),
    (
        {"parts": {"a": {"name": "exakt_match"}}},
        "reward.parts.a.name = 'exakt_match' is not known; use exact_match, code, environment, format, gsm8k, http, "
        "length, math_verify, multiple_choice, openai_judge, overlong, reasoning_gym, regex, or "
        "path/to/file.py:function",
    ),
    (
        {"parts": {"a": {"name": "exact_match", "args": {"x": 1}}}},
        "reward.parts.a.args: exact_match takes no argument 'x'; it takes none",
    ),
    (
        {"parts": {"a b": {"name": "exact_match"}}},
        "reward.parts: 'a b' is no label; use letters, digits, '_', '.' and '-'",
    ),
    (
        {"parts": {"a": {"name": "exact_match", "weight": 0}}},
        "reward.parts: every weight is 0, and so is every score; set one to another number",
    ),
    (
        {"parts": {"a": {"name": "model"}}},
        "reward.parts: a reward model without a function beside it is reward.name=model without parts",
    ),
    (
        {"parts": {"a": {"name": "exact_match"}, "b": {"name": "model"}, "c": {"name": "model"}}},
        "reward.parts: 2 parts have the name model, and there is one reward model",
    ),
    (
        {"parts": {"a": {"name": "exact_match"}, "b": {"name": "model", "args": {"x": 1}}}},
        "reward.parts.b.args are a function's, and a reward model is none; leave them off",
    ),
    (
        {"parts": {"a": {"name": "exact_match"}}, "name": "reasoning_gym"},
        "reward.parts is set, and reward.name = reasoning_gym would not be used; leave one of the two off",
    ),
    (
        {"parts": {"a": {"name": "exact_match"}}, "batch_size": 2},
        "reward.batch_size hands lists to the function of reward.name; with reward.parts, unset it",
    ),
    (
        {"parts": {"a": {"name": "exact_match"}}, "args": {"x": 1}},
        "reward.args belong to reward.name; with reward.parts, set reward.parts.<label>.args",
    ),
    ({"parts": {"a": {}}}, "reward.parts.a.name: field required (got {})"),
    ({"parts": {"a": {"name": ""}}}, "reward.parts.a.name: string should have at least 1 character (got '')"),
    (
        {"parts": {"a": {"name": "exact_match", "weight": float("inf")}}},
        "reward.parts.a.weight: input should be a finite number (got inf)",
    ),
]


@pytest.mark.parametrize(("reward", "said"), REFUSED)
def test_what_cannot_work_is_refused(file: str, reward: dict[str, Any], said: str) -> None:
    if reward.get("name", "").startswith("FILE"):
        reward = {**reward, "name": reward["name"].replace("FILE", file)}
    with pytest.raises(ValueError) as refusal:
        parts_of(build_config({"reward": reward}).reward)
    assert str(refusal.value) == said.replace("FILE", file)


# ------------------------------------------------------------------------------------------- what comes with MegaRL

SHIPPED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "math_verify": ({}, {"answer": r"\frac{1}{2}"}, r"so \boxed{0.5}", r"so \boxed{0.6}"),
    "gsm8k": ({}, {"answer": "#### 1,000"}, "#### 1000", "#### 1001"),
    "regex": ({"pattern": r"answer: (\w+)"}, {"answer": "four"}, "answer: four", "answer: five"),
    "format": ({"pattern": r"<think>.*</think>"}, {}, "<think>so</think>", "so"),
    "code": (
        {},
        {"tests": [{"input": "2\n", "output": "4"}]},
        "```python\nprint(int(input())**2)\n```",
        "```python\n1\n```",
    ),
    "reasoning_gym": (
        {},
        {"data_source": "chain_sum", "question": "1 + 1 =", "answer": "2", "metadata": {}},
        "2",
        "3",
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_what_comes_with_megarl_scores_in_workers(name: str) -> None:
    args, row, right, wrong = SHIPPED[name]
    with pool_of(name=name, args=args) as pool:
        good, bad = results(pool, [right, wrong], row)
    assert good == 1.0 and isinstance(bad, float) and bad < 1.0
