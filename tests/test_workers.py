"""Processes that answer requests in a sandbox: what code in them reaches, and what is left of it afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.workers import Child, WorkerError
from megarl.workers.deadline import DeadlinePassed, call_within
from megarl.workers.installed import files_of

ROOT = Path(__file__).parents[1]
SECONDS = 120.0  # for hangs only


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Evaluates what it is asked, as a verifier may that has a hole."""
    one = Child("builtins:eval")
    yield one
    one.close()


def evaluated(child: Child, expression: str, timeout: float = SECONDS) -> object:
    return child.ask(expression, timeout=timeout)


def test_it_answers(child: Child) -> None:
    assert evaluated(child, "6 * 7") == 42
    assert evaluated(child, "[None, 'x' * (1 << 20)]") == [None, "x" * (1 << 20)]
    assert evaluated(child, "__import__('math').comb(5, 2)") == 10


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "__import__('os')._exit(0)",
        "exit()",
        "{1}",  # no JSON
        "__import__('os').write(3, b'x' * 99)",  # where other processes have their connection
        "[__import__('os').write(i, b'\\xff' * 99) for i in range(3, 20)]",  # a message without end
        "__import__('ctypes').string_at(0)",
        "bytearray(1 << 40)",
        "(lambda f: f(f))(lambda f: f(f))",
    ],
)
def test_what_breaks_a_process_costs_its_own_answer(child: Child, expression: str) -> None:
    assert evaluated(child, expression) is None
    assert evaluated(child, "6 * 7") == 42


def test_what_is_late_is_ended(child: Child) -> None:
    assert evaluated(child, "sum(1 for _ in iter(int, 1))", 0.5) is None
    assert evaluated(child, "6 * 7") == 42
    with pytest.raises(DeadlinePassed):
        call_within(0.5, lambda: evaluated(child, "sum(1 for _ in iter(int, 1))"))
    assert evaluated(child, "6 * 7") == 42


def test_a_process_is_replaced_before_long(child: Child) -> None:
    """What one answer left behind in it ends with it."""
    pids = "__import__('sys').__dict__.setdefault('left', [0]).append(1) or len(__import__('sys').left)"
    assert max(int(str(evaluated(child, pids))) for _ in range(150)) <= 65


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(os.getpid(), 9)",
        "os.kill(1, 9)",
        "os.fork()",
        "os.execv('/bin/sh', ['sh'])",
        "__import__('socket').socket()",
        "open('/tmp/left', 'w')",
        "os.open('/tmp/left', os.O_RDWR | os.O_CREAT)",
        "os.mkdir('/tmp/left')",
        "os.chmod('/tmp', 0o777)",
        "os.unlink('/main.py')",
        "os.setpriority(os.PRIO_PROCESS, 0, 5)",
        "__import__('resource').prlimit(1, 0, (0, 0))",
        "__import__('fcntl').fcntl(0, 8, 1)",  # F_SETOWN: a signal to another process
        "__import__('signal').pthread_kill(__import__('threading').get_ident(), 9)",
        "open('/proc/1/mem', 'rb')",
        "__import__('threading').Thread(target=print).start()",
    ],
)
def test_a_process_computes_and_nothing_else(child: Child, call: str) -> None:
    """Where the call is refused, the answer is its error's kind; none says that the process is gone."""
    function = f"(lambda os: {call})(__import__('os'))"
    tried = (
        "(lambda space: exec('try:\\n    eval(call)\\n    said = 0\\nexcept (OSError, RuntimeError) as e:\\n"
        "    said = type(e).__name__', space) or space['said'])"
        f"({{'call': {function!r}}})"
    )
    assert evaluated(child, tried) in ("PermissionError", "RuntimeError", "OSError")
    assert evaluated(child, "6 * 7") == 42


def test_it_sees_nothing_of_this_machine(child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (tmp_path / "secret").write_text("secret")
    one = Child("builtins:eval")
    try:
        for process in (one, child):
            assert evaluated(process, f"__import__('os').path.exists({str(tmp_path)!r})") is False
            assert evaluated(process, "[k for k in __import__('os').environ if 'KEY' in k]") == []
            assert evaluated(process, "'secret' in str(__import__('os').environ)") is False
            assert evaluated(process, "__import__('os').path.exists('/etc/passwd')") is False
            assert evaluated(process, "__import__('os').listdir('/tmp')") in ([], None) or ROOT.parts[1] == "tmp"
        assert evaluated(child, "__import__('importlib.util').util.find_spec('torch') is None") is True
    finally:
        one.close()


def test_it_sees_the_packages_that_it_needs() -> None:
    shown, roots = files_of(["math-verify[antlr4_13_2]"])
    names = {os.path.basename(path) for path in shown}
    assert {"math_verify", "sympy", "mpmath", "antlr4"} <= names and "torch" not in names and roots
    child = Child("sympy:sstr", distributions=["sympy"])
    try:
        assert child.ask("x", timeout=SECONDS) == "x"
    finally:
        child.close()


def test_without_a_sandbox_a_process_computes_and_nothing_else() -> None:
    child = Child("builtins:eval", isolation="process")
    try:
        assert evaluated(child, "6 * 7") == 42
        assert evaluated(child, "__import__('os').kill(1, 0)") is None
        assert evaluated(child, "__import__('os').fork()") is None
        assert evaluated(child, "dict(__import__('os').environ).get('HOME')") == "/tmp"
    finally:
        child.close()


def test_a_function_that_cannot_be_loaded_is_said() -> None:
    with pytest.raises(WorkerError) as refusal:
        Child("no_such_module:answer").start()
    assert str(refusal.value) == (
        "the process for no_such_module:answer does not start: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_it_starts_anew_after_it_was_killed() -> None:
    child = Child("builtins:eval")
    try:
        assert evaluated(child, "6 * 7") == 42
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(child.pid)], timeout=SECONDS) if psutil.pid_exists(child.pid) else None
        evaluated(child, "0")  # it may have been under way
        assert evaluated(child, "6 * 7") == 42
    finally:
        child.close()


def test_it_ends_with_the_one_that_started_it() -> None:
    code = """
import os, psutil
from megarl.workers import Child
child = Child("builtins:eval")
assert child.ask("6 * 7", timeout=500) == 42
print(*[one.pid for one in psutil.Process().children(recursive=True)], flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    started = [int(word) for word in done.stdout.split()]
    assert len(started) >= 2, done.stderr
    until = time.monotonic() + SECONDS
    while any(map(runs, started)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(runs, started))


def runs(pid: int) -> bool:
    """Whether the process goes on; it may wait to be waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
