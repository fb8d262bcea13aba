"""What follows the end of a run's ranks: the policy, and a launcher that starts ranks again which need no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port

from megarl.config import load_config
from megarl.endings import Ending, ExitCode
from megarl.nodes import Node
from megarl.restarts import LONGEST_WAIT, decide, in_a_row, leaves
from megarl.supervisor import RESTARTS_FILE, Restarts, Supervisor
from megarl.trainer.less_memory import FILE, LEAST_SHARE, remember, remembered, smaller

HOST = socket.gethostname()
KILLED = 128 + signal.SIGKILL


def after(code: int, step: int = 4, **values: Any) -> Ending:
    return Ending(**{"code": code, "rank": 1, "host": "node7", "step": step, **values})


LEAVE, RESTART = False, True
ENDINGS = [
    ("finished", after(0), LEAVE),
    ("refused", after(ExitCode.REFUSED), LEAVE),
    ("updates that are not finite", after(ExitCode.STOPPED), LEAVE),
    ("a reward that fails", after(ExitCode.INPUT), LEAVE),
    ("preemption", after(128 + signal.SIGUSR1), LEAVE),
    ("the scheduler's end", after(128 + signal.SIGTERM), LEAVE),
    ("Ctrl-C", after(128 + signal.SIGINT), LEAVE),
    ("a closed terminal", after(128 + signal.SIGHUP), LEAVE),
    ("a rank that is lost while a signal asks all to stop", after(KILLED, asked=True), LEAVE),
    ("a rank that is killed", after(KILLED), RESTART),
    ("a segmentation fault", after(128 + signal.SIGSEGV), RESTART),
    ("NCCL or gloo", after(ExitCode.LOST), RESTART),
    ("a node that is gone", after(ExitCode.LOST, rank=None), RESTART),
    ("a GPU's error", after(ExitCode.DEVICE), RESTART),
    ("a rank that stalls", after(ExitCode.STALLED), RESTART),
    ("out of memory", after(ExitCode.OUT_OF_MEMORY), RESTART),
    ("an error of no known kind", after(ExitCode.FAILED), RESTART),
]


@pytest.mark.parametrize(("ending", "restarts"), [row[1:] for row in ENDINGS], ids=[row[0] for row in ENDINGS])
def test_what_follows_an_ending(ending: Ending, restarts: bool) -> None:
    decision = decide([ending], limit=5, first_wait=10)
    assert (decision.restarts, leaves(ending), decision.why) == (restarts, not restarts, "")
    if restarts:
        assert (decision.number, decision.wait, decision.suspect) == (1, 10, None)
        assert decision.smaller == (ending.code == ExitCode.OUT_OF_MEMORY)


def test_the_count_and_the_wait_begin_again_with_progress() -> None:
    """Steps 4, 6 (resumed before 4, and past it), 5, 6: the last two did not get past the first 6."""
    endings = [after(KILLED, step, rank=rank) for rank, step in enumerate((4, 6, 5, 6))]
    numbers = [decide(endings[:n], limit=5, first_wait=10) for n in (1, 2, 3, 4)]
    assert [(decision.number, decision.wait) for decision in numbers] == [(1, 10), (1, 10), (2, 20), (3, 40)]
    assert in_a_row(endings) == endings[1:]
    last = decide(endings, limit=2, first_wait=10)
    assert not last.restarts and last.why == "of --restarts 2 in a row, none got beyond step 6"
    many = [after(KILLED, rank=rank) for rank in range(12)]
    assert decide(many, limit=20, first_wait=10).wait == LONGEST_WAIT


def test_endings_that_look_the_same_are_given_up_sooner() -> None:
    def number(code: int, times: int, **values: Any) -> int:
        return decide([after(code, **values)] * times, limit=9, first_wait=1).number

    assert [number(KILLED, times) for times in (1, 2, 3)] == [1, 2, 0]
    assert [number(ExitCode.FAILED, times) for times in (1, 2)] == [1, 0]
    assert [number(ExitCode.OUT_OF_MEMORY, times) for times in (1, 5)] == [1, 5]  # each start was another one
    given_up = decide([after(KILLED)] * 3, limit=9, first_wait=1)
    assert given_up.why == "it ended 3 times in the same way, and no step was done in between"
    moved = [after(ExitCode.FAILED, 4), after(ExitCode.FAILED, 5)]
    assert decide(moved, limit=9, first_wait=1).restarts


def test_a_host_that_fails_first_twice_is_suspect() -> None:
    def suspect(*endings: Ending) -> int | None:
        return decide(endings, limit=9, first_wait=1).suspect

    bad, lost = after(KILLED, node=2), after(ExitCode.LOST, node=2)
    assert suspect(bad, replace(bad, rank=5)) == 2
    assert suspect(bad, after(ExitCode.DEVICE, node=2)) == 2
    assert suspect(bad, replace(bad, node=1)) is None
    assert suspect(bad, lost) is None  # it tells of another rank
    assert suspect(after(KILLED, 4, node=2), after(KILLED, 9, node=2)) is None  # it trained in between
    assert suspect(replace(lost, rank=None), replace(lost, rank=None)) == 2  # the node itself was gone


def test_the_words_for_an_ending() -> None:
    assert str(after(KILLED, 412, rank=3)) == "rank 3 on node7 was killed (SIGKILL) after step 412"
    assert str(after(ExitCode.LOST, 0)) == "rank 1 on node7 lost its connection to others before step 1"
    assert str(after(ExitCode.LOST, rank=None, node=2)) == "node 2 on node7 is gone after step 4"
    out = after(ExitCode.OUT_OF_MEMORY, phase="update")
    assert str(out) == "rank 1 on node7 ran out of GPU memory in the phase update after step 4"
    assert str(after(7)) == "rank 1 on node7 ended with exit code 7 after step 4"
    kinds = [after(code).kind for code in (0, 7, ExitCode.DEVICE, KILLED, 128 + signal.SIGINT, 128 + 63)]
    assert kinds == ["FINISHED", "CODE_7", "DEVICE", "KILLED", "SIGINT", "KILLED"]
    assert all(not leaves(after(code)) or str(after(code)) for code in range(256))


# ------------------------------------------------------------------------------------------------ less memory

ACTOR = "actor_rollout_ref.actor"
FIXED = f"{ACTOR}.use_dynamic_bsz=false"


@pytest.mark.parametrize(
    ("phase", "key", "values"),
    [
        ("update", f"{ACTOR}.ppo_max_token_len_per_gpu", [1000, 500, 400]),
        ("ref", f"{ACTOR}.ppo_max_token_len_per_gpu", [1000, 500, 400]),
        ("log_probs", f"{ACTOR}.ppo_micro_batch_size_per_gpu", [3, 1]),
        ("values", "critic.ppo_max_token_len_per_gpu", [1000, 500, 400]),
        ("reward", "reward_model.ppo_max_token_len_per_gpu", [500, 400]),
        ("generate", "actor_rollout_ref.rollout.max_num_seqs", [5, 2, 1]),
        ("reshard", "actor_rollout_ref.rollout.gpu_memory_utilization", [0.16, 0.12, LEAST_SHARE]),
    ],
)
def test_a_phase_becomes_smaller_down_to_one_sequence(phase: str, key: str, values: list[float]) -> None:
    settings = ["data.max_prompt_length=100", "data.max_response_length=300", f"{key}={values[0]}"]
    if "micro" in key:
        settings.append(FIXED)
    for value in values[1:]:
        assert smaller(load_config(None, settings), phase) == (key, value)
        settings.append(f"{key}={value}")
    with pytest.raises(ValueError, match=f"^{key} = {values[-1]:g} cannot be lower: that is "):
        smaller(load_config(None, settings), phase)


def test_a_pair_stays_together_and_some_phases_have_no_key() -> None:
    pairs = load_config(None, ["trainer.flow=preference", FIXED, f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"])
    with pytest.raises(ValueError, match="cannot be lower: that is one sequence, or one pair"):
        smaller(pairs, "update")
    for phase, words in (("save", "the phase save"), ("", "what it held")):
        with pytest.raises(ValueError, match=f"^no key makes {words} smaller$"):
            smaller(pairs, phase)


def test_a_folder_remembers_what_was_lowered(tmp_path: Path) -> None:
    key, config = "critic.ppo_max_token_len_per_gpu", load_config(None)
    assert remembered(str(tmp_path), config) == {}
    remember(str(tmp_path), {key: 5000})
    remember(str(tmp_path), {"actor_rollout_ref.rollout.max_num_seqs": 100})
    assert remembered(str(tmp_path), config) == {key: 5000, "actor_rollout_ref.rollout.max_num_seqs": 100}
    assert key not in remembered(str(tmp_path), load_config(None, [f"{key}=4000"]))  # the user's is lower still


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"data.seed": 1}', '{"critic.ppo_max_token_len_per_gpu": "x"}', "[" * 9999]
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{FILE} does not hold what a run lowered .*; delete it$"):
        remembered(str(tmp_path), load_config(None))


# ------------------------------------------------------------------------------------------------ the launcher


def supervised(folder: Path, code: str, *, limit: int = 5, nproc: int = 2, overrides: tuple[str, ...] = ()) -> int:
    """Run Python code as ranks; `start` in it is the number of the start, and `keys` what follows the command."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    prelude = (
        (
            "import glob, json, os, signal, sys, time\n"
            "rank, keys = int(os.environ['RANK']), sys.argv[1:]\n"
            f"mark = os.path.join({str(folder)!r}, f'start-{{rank}}-')\n"
            "start = next(n for n in range(99) if not os.path.exists(mark + str(n)))\n"
            "open(mark + str(start), 'w').write(' '.join(keys))\n"
            f"marks = os.path.join({str(folder)!r}, f'start-*-{{start}}')\n"  # else a rank is killed that has none yet
            "while len(glob.glob(marks)) < int(os.environ['WORLD_SIZE']): time.sleep(0.02)\n"
            "def row(step): open({!r}, 'a').write(json.dumps({{'step': step}}) + chr(10))\n"
        )
        .replace("{!r}, 'a'", f"{str(run / 'metrics.jsonl')!r}, 'a'")
        .replace("{{", "{")
        .replace("}}", "}")
    )
    settings = [f"trainer.default_local_dir={run}", *overrides]
    return Supervisor(
        [sys.executable, "-c", prelude + code],
        Node(nproc=nproc),
        lambda more: load_config(None, [*settings, *more]),
        Restarts(limit=limit, least_nodes=1, first_wait=0.0),
    ).run()


def decisions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / RESTARTS_FILE).read_text().splitlines()]


def test_a_rank_that_is_killed_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "if start == 0:\n if rank: row(3); os.kill(os.getpid(), signal.SIGKILL)\n time.sleep(999)"
    assert supervised(tmp_path, code) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("megarl: rank 1 (pid ") and len(said) == 2
    words = "restart 1 of 5 from the beginning in 0 s"
    assert said[1] == f"megarl: rank 1 on {HOST} was killed (SIGKILL) after step 3; {words}"
    (line,) = decisions(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", line.pop("time"))
    assert line == {
        **{"attempt": 0, "code": KILLED, "kind": "KILLED", "rank": 1, "host": HOST, "step": 3},
        "decision": words,
    }
    assert sorted(path.name for path in tmp_path.glob("start-*")) == [f"start-{r}-{n}" for r in (0, 1) for n in (0, 1)]


def test_a_rank_that_is_killed_again_and_again_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a step in between, after as many restarts as are allowed; without one, sooner."""
    dies = "os.kill(os.getpid(), signal.SIGKILL)"
    assert supervised(tmp_path, dies, nproc=1) == KILLED
    assert [line["decision"].partition(":")[0] for line in decisions(tmp_path)][-1] == "given up"
    assert len(decisions(tmp_path)) == 3
    assert "it ended 3 times in the same way" in capfd.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    assert supervised(other, f"row(5 - start % 2); {dies}", nproc=1, limit=2) == KILLED
    assert decisions(other)[-1]["decision"] == "given up: of --restarts 2 in a row, none got beyond step 5"


@pytest.mark.parametrize("code", [ExitCode.REFUSED, ExitCode.STOPPED, ExitCode.INPUT, 128 + signal.SIGTERM])
def test_an_ending_that_no_restart_mends(tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int) -> None:
    assert supervised(tmp_path, f"sys.exit({code})", nproc=1) == code
    assert len(list(tmp_path.glob("start-*"))) == 1
    assert capfd.readouterr().err.endswith("; not started again\n")
    assert [line["kind"] for line in decisions(tmp_path)] == [after(code).kind]


def test_without_restarts_nothing_is_said_or_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervised(tmp_path, "sys.exit(1)", nproc=1, limit=0) == 1
    assert capfd.readouterr().err == "" and not (tmp_path / "run" / RESTARTS_FILE).exists()


def test_ranks_that_are_lost_while_a_signal_ends_the_run_stay_ended(tmp_path: Path) -> None:
    """The signal comes to the launcher, which is this process; the rank dies before it could save."""
    code = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(12)); os.kill(os.getppid(), signal.SIGUSR1)\n"
    code += "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1]); time.sleep(999)"
    assert supervised(tmp_path, code, nproc=1) == ExitCode.LOST
    assert [line["decision"] for line in decisions(tmp_path)] == ["not started again"]


def test_the_page_of_exit_codes_has_all() -> None:
    page = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
    assert [code for code in ExitCode if f"\n| {int(code)} | " not in page] == []


def test_memory_that_runs_out_makes_micro_batches_smaller(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Until it is enough, and in later starts, too; or until nothing is left to be halved."""
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    limits = (f"{key}=1000", "data.max_prompt_length=100", "data.max_response_length=200")
    code = (
        "from megarl.endings import ExitCode, note_phase\n"
        f"if keys[-1:] != ['{key}=300']: note_phase(rank, 'update'); sys.exit(ExitCode.OUT_OF_MEMORY)"
    )
    assert supervised(tmp_path, code, nproc=1, overrides=limits) == 0
    said = capfd.readouterr().err.splitlines()
    assert [line.rpartition(", with ")[2] for line in said] == [f"{key}=500", f"{key}=300"]
    assert (tmp_path / "start-0-2").read_text().split() == [f"{key}=500", f"{key}=300"]
    assert remembered(str(tmp_path / "run"), load_config(None)) == {key: 300}
    code = code.replace("=300", "=1")
    assert supervised(tmp_path, code, nproc=1, overrides=limits) == ExitCode.OUT_OF_MEMORY
    why = f"given up: {key} = 300 cannot be lower: that is one sequence, or one pair"
    assert decisions(tmp_path)[-1]["decision"] == why


# ------------------------------------------------------------------------------------------------ several nodes

LAUNCHER = """
import sys
import megarl.nodes, megarl.supervisor
from megarl.config import load_config
from megarl.nodes import Node

megarl.nodes.REJOIN_SECONDS = {rejoin}
{before}
code = "import os, signal, sys, time; from pathlib import Path; from megarl.processes import die_with_parent\\n"
code += "die_with_parent(); folder = Path({folder!r}); rank, world = os.environ['RANK'], os.environ['WORLD_SIZE']\\n"
code += "start = int(os.environ['MEGARL_STORE_PREFIX'].partition('/')[2])\\n"
code += "(folder / f'{{rank}}-of-{{world}}-start-{{start}}').touch()\\n" + {code!r}
sys.exit(megarl.supervisor.Supervisor(
    [sys.executable, "-c", code],
    Node(nproc=1, nnodes={nnodes}, node_rank={number}, master_port={port}),
    lambda more: load_config(None, ["trainer.default_local_dir={folder}", *more]),
    megarl.supervisor.Restarts(limit=5, least_nodes={least}, first_wait=0.0),
).run())
"""


def launchers(
    folder: Path, code: str, *, nnodes: int = 2, least: int, rejoin: float = 60.0, before: str = ""
) -> list[Any]:
    """Start the launchers of several nodes on this host, with one rank each; each rank leaves a file of its start."""
    values = {"folder": str(folder), "code": code, "port": free_port(), "nnodes": nnodes, "least": least}
    values |= {"rejoin": rejoin, "before": before}
    return [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHER.format(number=number, **values)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        for number in range(nnodes)
    ]


def ends_of(jobs: list[Any]) -> list[tuple[int, list[str]]]:
    """Exit code and lines of each launcher, but for what a busy machine may make it say."""
    texts = [job.communicate(timeout=500)[1].splitlines() for job in jobs]
    said = [[line for line in lines if not line.startswith("megarl: waiting for ")] for lines in texts]
    return [(job.returncode, lines) for job, lines in zip(jobs, said, strict=True)]


def starts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-of-*"))


@pytest.mark.slow
def test_nodes_meet_again_after_a_rank_was_lost(tmp_path: Path) -> None:
    dies = "if rank == '1' and start == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(999 * (start == 0))"
    (first, said), (second, _) = ends_of(launchers(tmp_path, dies, least=2))
    assert (first, second) == (0, 0)
    assert said == [
        f"megarl: rank 1 on {HOST} was killed (SIGKILL) before step 1; restart 1 of 5 from the beginning in 0 s"
    ]
    assert starts(tmp_path) == [f"{rank}-of-2-start-{start}" for rank in (0, 1) for start in (0, 1)]


@pytest.mark.slow
def test_a_node_that_fails_first_twice_is_left_out(tmp_path: Path) -> None:
    """The nodes that are left are numbered anew; the one that is left out leaves with code 0."""
    dies = (
        "if rank == '1' and world == '3':\n"
        " while len(list(folder.glob(f'*-start-{start}'))) < 3: time.sleep(0.05)\n"
        " os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(999 * (world == '3'))"
    )
    accepts = "megarl.supervisor.check_run = lambda config: config.trainer.nnodes == 2 or 1 / 0"
    ends = ends_of(launchers(tmp_path, dies, nnodes=3, least=2, before=accepts))
    assert [code for code, _ in ends] == [0, 0, 0]
    changed = f"restart 2 of 5 from the beginning in 0 s, without node 1 of 3 (on {HOST}), which failed first again"
    assert ends[0][1][-1].endswith(changed)
    assert ends[1][1][-1] == "megarl: node 1 is left out: its ranks failed first again, or it came back too late"
    assert ends[2][1] == []
    assert {name for name in starts(tmp_path) if "of-2" in name} == {"0-of-2-start-2", "1-of-2-start-2"}


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 2])
def test_a_node_that_does_not_come_back(tmp_path: Path, least: int) -> None:
    """Its launcher is killed. The run cannot do without it: too few are left, or its configuration does not let it."""
    fails = f"while not (folder / 'gone').exists(): time.sleep(0.05)\nsys.exit({int(ExitCode.LOST)})"
    jobs = launchers(tmp_path, fails, least=least, rejoin=0.5)
    while len(starts(tmp_path)) < 2:
        time.sleep(0.05)
    jobs[1].kill()
    jobs[1].communicate()
    (tmp_path / "gone").touch()
    ((code, said),) = ends_of(jobs[:1])
    assert code == ExitCode.LOST
    why = {1: "the run cannot go on with 1 of 2 nodes: ", 2: "1 of 2 nodes are fewer than --min-nodes 2"}[least]
    place = f"megarl: not started again: node 1 of 2 (on {HOST}) did not come back, and {why}"
    assert [line.startswith(place) for line in said] == [False, True, False][: len(said)], said
