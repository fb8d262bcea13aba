"""Programs that nobody trusts: each attack ends within its limit, gets nothing, and leaves no process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from other_user import python_of, with_path

from megarl.isolation.call_filter import filter_code
from megarl.isolation.launch import IsolatedProcess, start_isolated
from megarl.rewards import code, load_reward
from megarl.rewards.sandbox import (
    Examination,
    Limits,
    Outcome,
    SandboxError,
    check_isolation,
    run_python,
    run_tests,
)
from megarl.workers.deadline import DeadlinePassed, call_within

ROOT = Path(__file__).parents[1]
FAIR = Limits(wall=20.0, cpu=20.0, memory=256, disk=16, processes=8, output=10_000)
SHORT = replace(FAIR, wall=1.0, cpu=1.0)  # for what does not end by itself


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    others = running()
    yield
    until = time.monotonic() + 120
    while running() - others and time.monotonic() < until:  # one that was killed takes its time on a busy machine
        time.sleep(0.05)
    assert not running() - others


def running(below: int | None = None) -> set[psutil.Process]:
    """The processes below one, this one by default, but for those that only wait for their parent."""
    found = set()
    for process in psutil.Process(below).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def run(source: str, stdin: str = "", limits: Limits = FAIR) -> Outcome:
    """The outcome; the caller goes on: the next program runs."""
    outcome = run_python(source, stdin=stdin, limits=limits)
    assert run_python("print(6 * 7)", limits=Limits(wall=20)).stdout == "42\n"
    return outcome


def test_what_a_program_gets() -> None:
    outcome = run(
        "import os, sys\n"
        "print(input(), os.getcwd(), sorted(os.environ), os.uname().nodename, os.listdir('/tmp'), sys.flags.isolated)\n"
        "print('wrong', file=open('/dev/stderr', 'w'))\n",
        stdin="één\nrest",
    )
    assert outcome.stdout == "één / ['HOME', 'LANG', 'PATH'] sandbox [] 1\n"
    assert (outcome.stderr, outcome.ended, outcome.exit_code) == ("wrong\n", "exit", 0)
    assert 0 < outcome.seconds < 5 and outcome.cpu_seconds is not None and outcome.cpu_seconds < 5


@pytest.mark.parametrize(
    ("source", "ended", "code"),
    [
        ("raise SystemExit(7)", "exit", 7),
        ("1 / 0", "exit", 1),
        ("import os; os._exit(255)", "exit", 255),
        ("import os; os.abort()", "signal", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 15)", "signal", -signal.SIGTERM),
        ("import ctypes; ctypes.string_at(0)", "signal", -signal.SIGSEGV),
        ("(", "exit", 1),
        ("", "exit", 0),
    ],
)
def test_exit_codes(source: str, ended: str, code: int) -> None:
    outcome = run(source)
    assert (outcome.ended, outcome.exit_code) == (ended, code)


def test_a_fork_bomb() -> None:
    assert run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=SHORT).ended == "time"


def test_many_processes_are_refused() -> None:
    source = "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(99)\nexcept OSError: print(n)"
    outcome = run(source)
    assert outcome.stdout == "7\n"


def test_many_threads() -> None:
    source = """
import threading, time
n = 0
try:
    for n in range(10_000):
        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
except RuntimeError:
    print(n)
"""
    assert run(source, limits=Limits(wall=300, processes=8)).stdout == "7\n"


def test_ten_gigabytes() -> None:
    outcome = run("x = bytearray(10 << 30)")
    assert (outcome.ended, outcome.exit_code) == ("memory", 1)
    assert outcome.stderr.endswith("MemoryError\n")


def test_the_memory_of_all_processes_together() -> None:
    group = Path("/proc/self/cgroup").read_text()
    source = """
import os, time
for _ in range(6):
    if not os.fork():
        x = b"x" * (150 << 20)
        print("held", flush=True)
        time.sleep(99)
"""
    outcome = run(source + "os.wait()\nprint('one ended')\nraise SystemExit(3)")
    from megarl.isolation.memory_group import memory_group

    made = memory_group(1 << 20)
    if made is None:
        pytest.skip(f"no control group can be made here: {group}")
    made.close()
    assert outcome.stdout.count("held") < 3
    assert outcome.ended == "memory"


def test_shared_memory_that_no_process_holds() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, ctypes.c_size_t(1 << 30), 0o1600), ctypes.get_errno())
try: os.memfd_create("x")
except OSError as e: print(e.errno)
"""
    assert run(source).stdout == "-1 1\n1\n"


@pytest.mark.parametrize("ignoring", [False, True], ids=["", "ignoring all signals"])
def test_an_endless_loop(ignoring: bool) -> None:
    ignore = "import signal\nfor s in signal.valid_signals() - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
    outcome = run((ignore if ignoring else "") + "while True: pass", limits=SHORT)
    assert outcome.ended == "time" and 0.9 < outcome.seconds < 4


@pytest.mark.parametrize("ignoring", [False, True], ids=["", "ignoring all signals"])
def test_processor_time(ignoring: bool) -> None:
    ignore = "import signal\nfor s in signal.valid_signals() - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
    outcome = run((ignore if ignoring else "") + "while True: pass", limits=Limits(wall=30, cpu=1))
    assert outcome.ended == "time" and outcome.exit_code in (-signal.SIGXCPU, -signal.SIGKILL)
    assert outcome.cpu_seconds is not None and 0.7 < outcome.cpu_seconds < 2.5


def test_sleeping() -> None:
    outcome = run("import time; print('on', flush=True); time.sleep(99)", limits=SHORT)
    assert (outcome.ended, outcome.stdout, outcome.exit_code) == ("time", "on\n", None)


def test_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind("\0megarl-test-sandbox")
        named.listen()
        source = f"""
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
    (socket.AF_INET, ("1.1.1.1", 80)),
    (socket.AF_INET6, ("::1", {server.getsockname()[1]})),
    (socket.AF_UNIX, "\\0megarl-test-sandbox"),
    (socket.AF_VSOCK, (2, 1)),
    (socket.AF_NETLINK, (0, 0)),
):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError as e:
        print(e.strerror)
try: print(socket.gethostbyname("example.com"))
except OSError: print("no name")
"""
        refused = ["Network is unreachable", "Network is unreachable", "Cannot assign requested address"]
        refused += ["Connection refused", "Operation not permitted", "Operation not permitted", "no name"]
        assert run(source).stdout.splitlines() == refused
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_writing_outside(tmp_path: Path) -> None:
    mine = Path("/tmp") / f"megarl-test-{os.getpid()}"
    places = ["/etc/x", "/x", "/main.py", "/usr/lib/x", "/dev/x", "/proc/x", "/proc/sys/kernel/core_pattern"]
    places += [f"{tmp_path}/x", f"{ROOT}/x", f"{os.path.realpath(sys.base_prefix)}/lib/x", "/dev/shm/../x"]
    source = f"""
for place in {places!r}:
    try:
        open(place, "w").close()
        print("wrote", place)
    except OSError:
        pass
open({str(mine)!r}, "w").write("x")
open("/dev/null", "w").write("x")
print(open({str(mine)!r}).read())
"""
    assert run(source).stdout == "x\n"
    assert not mine.exists() and not list(tmp_path.iterdir())


def test_reading_a_secret(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("hf_secret")
    secret.chmod(0o644)
    os.environ["MEGARL_TEST_TOKEN"] = "hf_secret"
    handle = secret.open()
    os.set_inheritable(handle.fileno(), True)
    try:
        source = f"""
import os
for place in [{str(secret)!r}, "/proc/1/root{secret}", "/proc/self/root/..{secret}", "/..{secret}", "/proc/1/environ",
              "/proc/{os.getpid()}/environ", "/proc/2/../1/mem", "/etc/passwd", "/etc/shadow", "/root/.ssh",
              "/proc/1/cwd", "/proc/1/fd/3", "{ROOT}/README.md", "/sys", "/proc/kcore", "/home", "/var", "/run"]:
    try:
        print("read", place, open(place, "rb").read(10) if not os.path.isdir(place) else os.listdir(place))
    except OSError:
        pass
print([fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{{fd}}")], "MEGARL_TEST_TOKEN" in os.environ)
"""
        assert run(source).stdout == "[] False\n"
    finally:
        del os.environ["MEGARL_TEST_TOKEN"]
        handle.close()


@pytest.mark.parametrize("stream", [1, 2])
def test_a_gigabyte_of_output(stream: int) -> None:
    outcome = run(f"import os\nfor _ in range(1 << 14): os.write({stream}, b'x' * (1 << 16))", limits=Limits(wall=20))
    assert outcome.ended == "output"
    assert len((outcome.stdout, outcome.stderr)[stream - 1]) == 1 << 20


def test_a_program_that_stops_reading_its_input() -> None:
    outcome = run("print(len(input()))", stdin="x" * 1000 + "\n" + "y" * (8 << 20))
    assert (outcome.stdout, outcome.ended) == ("1000\n", "exit")
    assert run("pass", stdin="y" * (8 << 20)).exit_code == 0
    assert run("import sys; print(len(sys.stdin.read()))", stdin="y" * (8 << 20)).stdout == f"{8 << 20}\n"


def test_its_input_cannot_grow() -> None:
    source = "import os\ntry: os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x' * 9)\nexcept OSError: print('no')"
    assert run(source, stdin="x").stdout == "no\n"


def test_signals_to_others() -> None:
    outside = {os.getpid(), os.getppid()} - {1}
    source = f"""
import os
for pid in (os.getppid(), 1, *{outside}):
    try: os.kill(pid, 9)
    except OSError as e: print(e.strerror)
try: os.kill(-1, 9)
except OSError as e: print(e.strerror)
print("here")
"""
    outcome = run(source)
    # its parent is the init of its namespace: another user's where root made it, deaf to signals where not
    assert outcome.ended == "exit" and outcome.stdout.endswith("No such process\n" * (len(outside) + 1) + "here\n")


def test_a_daemon() -> None:
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(99)
    os._exit(0)
time.sleep(0.1)
print("done")
"""
    outcome = run(source)
    assert (outcome.ended, outcome.stdout) == ("exit", "done\n") and outcome.seconds < 9


@pytest.mark.parametrize("files", [1, 200], ids=["one file", "many"])
def test_filling_the_disk(files: int) -> None:
    source = f"""
import os
total = 0
try:
    for i in range({files}):
        with open(f"/tmp/{{i}}", "wb", buffering=0) as f:
            while f.tell() < {100 << 20} // {files}:
                total += f.write(b"x" * (1 << 16))
except OSError as e:
    print(total >> 20, e.strerror)
"""
    outcome = run(source)
    assert outcome.stdout in ("16 No space left on device\n", "15 No space left on device\n", "16 File too large\n")


def test_many_files() -> None:
    source = "n = 0\ntry:\n    while True: open(f'/tmp/{n}', 'w').close(); n += 1\nexcept OSError: print(n)"
    assert 4000 < int(run(source).stdout) <= 4096


def test_tracing_others() -> None:
    source = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, os.getppid(), {os.getpid()}):
    print(libc.ptrace(16, pid, 0, 0), ctypes.get_errno())
    for name in ("mem", "environ", "maps", "fd/0"):
        try: print("read", open(f"/proc/{{pid}}/{{name}}", "rb").read(1))
        except OSError: pass
"""
    assert run(source).stdout == "-1 1\n" * 3


def test_links(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    source = f"""
import os
for i, place in enumerate(["{secret}", "/../..{secret}", "/proc/1/root", "/proc/1/cwd", "/proc/self/root/.."]):
    os.symlink(place, f"/tmp/{{i}}")
    try:
        print("read", place, open(f"/tmp/{{i}}").read())
    except OSError: pass
    try:
        open(f"/tmp/{{i}}", "w").close()
        print("wrote", place)
    except OSError: pass
try: os.link("/main.py", "/tmp/main.py")
except OSError as e: print(e.strerror)
print(os.listdir("/tmp/4") == os.listdir("/"), os.path.realpath("/tmp/4"))
os.chdir("/tmp/4/../../../..")
print(sorted(os.listdir("."))[:2])
"""
    assert run(source).stdout == "Invalid cross-device link\nTrue /\n['bin', 'dev']\n"
    assert secret.read_text() == "x"


def test_namespaces_of_its_own() -> None:
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    print(name, getattr(libc, name)(*arguments), ctypes.get_errno())
call("unshare", 0x10000000)
call("unshare", 0x00020000)
call("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0)  # clone
call("syscall", 435, 0, 0)  # clone3
call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)
call("chroot", b"/tmp")
call("setuid", 0)
call("umount2", b"/proc", 2)
"""
    said = [line.split() for line in run(source).stdout.splitlines()]
    assert len(said) == 8 and all(result == "-1" for _, result, _ in said)
    assert [errno for *_, errno in said] == ["1", "1", "1", "38", "1", "1", "22" if os.getuid() else "1", "1"]


def test_programs_with_privileges() -> None:
    source = """
import os, subprocess
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
print(int(status["CapEff"], 16), int(status["CapPrm"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"])
print(os.getuid() == 0, os.path.exists("/usr/bin/su") and subprocess.run(["/usr/bin/su", "-c", "id"]).returncode == 0)
"""
    assert run(source).stdout == "0 0 0 1\nFalse False\n"


def test_output_that_is_no_text() -> None:
    outcome = run("import os; os.write(1, b'a\\xff\\x00\\xc3b\\n'); os.write(2, b'\\xe2\\x82')")
    assert (outcome.stdout, outcome.stderr) == ("a\ufffd\0\ufffdb\n", "\ufffd")


def test_sources_of_all_kinds() -> None:
    assert run("#" + "x" * (32 << 20) + "\nprint(1)").stdout == "1\n"
    assert run("x = " + "(" * 100_000, limits=Limits()).exit_code == 1
    assert run("print('\ud800')").ended == "exit"  # half of a surrogate pair
    assert run("print(1)\0").ended == "exit"
    huge = run("x = [" + "[1, {2: 'x'}, lambda: 3]," * 1_000_000 + "]", limits=SHORT)
    assert huge.ended in ("memory", "time")


def test_a_deadline_of_the_caller_ends_it() -> None:
    def sleep() -> Outcome:
        return run_python("import time; time.sleep(9999)", limits=Limits(wall=9999))

    with pytest.raises(DeadlinePassed):
        call_within(0.7, sleep)


def test_it_ends_when_the_caller_is_killed() -> None:
    code = """
from megarl.rewards.sandbox import Limits, run_python
run_python("import os, time\\nfor _ in range(3): os.fork()\\ntime.sleep(99)", limits=Limits(wall=90))
"""
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=with_path())
    until = time.monotonic() + 120
    while len(started := running(caller.pid)) < 8 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(started) >= 8
    caller.kill()
    caller.wait()
    while any(goes_on(process) for process in started) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [process for process in started if goes_on(process)]


def goes_on(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_children(others: set[psutil.Process]) -> None:
    for child in set(psutil.Process().children()) - others:
        child.kill()


def test_it_is_killed_from_outside() -> None:
    others = set(psutil.Process().children())  # the ranks of other tests
    timer = threading.Timer(0.7, kill_children, [others])
    timer.start()
    assert run_python("import os, time\nos.fork()\ntime.sleep(99)", limits=Limits(wall=50)).ended == "killed"
    timer.join()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("tests", [["assert f() == 3"], [{"input": "", "output": "3"}]], ids=["asserts", "input"])
def test_a_response_whose_sandbox_was_killed_is_run_once_more(
    monkeypatch: pytest.MonkeyPatch, times: int, tests: list[object]
) -> None:
    others = set(psutil.Process().children())
    begun, over, run = [], threading.Event(), code._Runs._run

    def count(self: Any, attempt: Any, limits: Limits) -> Any:
        def counted(limits: Limits) -> Any:
            begun.append(limits)
            return attempt(limits)

        return run(self, counted, limits)

    def kill() -> None:
        while not over.is_set():
            time.sleep(0.02)
            children = set(psutil.Process().children()) - others
            for child in children if len(begun) <= times else ():
                with suppress(psutil.Error):
                    if "megarl.isolation" in str(child.cmdline()):
                        child.kill()

    monkeypatch.setattr(code._Runs, "_run", count)
    thread = threading.Thread(target=kill)
    thread.start()
    program = "import time\ntime.sleep(2)\ndef f(): return 3\nprint(3)"
    scores = load_reward("code")(f"```python\n{program}\n```", {"tests": tests}, wall=60.0)
    over.set()
    thread.join()
    assert len(begun) == 2 and scores["score"] == (1.0 if times == 1 else 0.0)


INIT = [
    "os.kill(1, 2)",
    "[os.kill(1, n) for n in range(1, 65) if n not in (32, 33)]",
    "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
    "resource.prlimit(1, resource.RLIMIT_AS, (0, 0))",
    "os.setpriority(os.PRIO_USER, 0, 19)",
    "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "os.sched_setaffinity(1, {0})",
    "ctypes.CDLL(None).syscall(251, 1, 1, 3 << 13)",
]
HARMLESS = """
import ctypes, os, resource, sys
for i in range(3):  # orphans, for the init to wait for
    if not os.fork(): os.fork(); os._exit(0)
for attack in {attacks!r}:
    try: exec(attack)
    except OSError: pass
os.nice(1); resource.setrlimit(resource.RLIMIT_CPU, (5, 5)); os.sched_setaffinity(0, os.sched_getaffinity(0))
print("on")
def f(): return 3
"""


def test_a_program_does_nothing_to_its_init() -> None:
    for one in ([attack] for attack in INIT):
        outcome = run_python(HARMLESS.format(attacks=one), limits=Limits(wall=60))
        assert (outcome.ended, outcome.stdout) == ("exit", "on\n"), (one, outcome)
    scores = load_reward("code")(f"```python\n{HARMLESS.format(attacks=INIT)}\n```", {"tests": ["assert f() == 3"]})
    assert scores["score"] == 1.0


def test_at_once_from_many_threads() -> None:
    done: list[str] = []
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"

    def work(i: int) -> None:
        source = bomb if i == 0 else f"import os\nif os.fork(): os.wait(); print({i})"
        done.append(run_python(source, limits=Limits(wall=5 if i == 0 else 300, processes=4)).stdout)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["", "1\n", "2\n", "3\n", "4\n", "5\n"]


@pytest.mark.slow
def test_as_an_ordinary_user() -> None:
    """Its namespaces come from a user namespace of its own; the interpreter must be one that the user may read."""
    command = [*python_of(12345), "-m", "pytest", __file__]
    environment = {**with_path(), "HOME": "/nonexistent"}
    command += ["-p", "no:cacheprovider", "--noconftest", "-k", "daemon or secret or signals or network or privileges"]
    done = subprocess.run([*command, f"--rootdir={ROOT}"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "7 passed" in done.stdout and done.returncode == 0, done.stdout + done.stderr


def as_nobody(code: str) -> str:
    """What a program of user 65534 prints; its interpreter must be one that the user may run."""
    done = subprocess.run([*python_of(65534), "-c", code], cwd="/", env=with_path(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


HOLD = """
import os, time
for i in range(30):
    if not os.fork():
        x = b"x" * (32 << 20)
        os.write(1, b"held")
        time.sleep(99)
    time.sleep(i >= 5)  # what is too much is there, and a busy machine takes a while to see it
os.wait()
"""


SHARE = """
import os
x = b"x" * (64 << 20)
for _ in range(4):
    os.fork()
os.write(1, b"on")
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""
LET_GO = """
import mmap, os
def shared(*file):
    try:
        with mmap.mmap(*(file or (-1,)), 40 << 20) as memory:
            return "shared"
    except OSError as e:
        return type(e).__name__
print(shared(), os.path.exists("/dev/zero") and shared(os.open("/dev/zero", os.O_RDWR)))
print(len(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
"""


def test_the_memory_of_all_processes_without_a_control_group() -> None:
    """Each of thirty keeps to its own limit; what they hold together does not grow past it."""
    code = f"""
from megarl.isolation.memory_group import memory_group
from megarl.rewards.sandbox import Limits, run_python
hold = {HOLD!r}
limits = Limits(wall=60, memory=128)
outcome = run_python(hold, limits=limits)
shared = run_python({SHARE!r}, limits=limits)
print(memory_group(1 << 26), outcome.ended, outcome.stdout.count("held") < 15, shared.ended, shared.stdout.count("on"))
"""
    assert as_nobody(code) == "None memory True exit 16\n"


def test_memory_that_no_process_maps_is_held_by_none_without_a_control_group() -> None:
    """Pages of shared memory that were let go count for no process, and stay: 630 MiB of a limit of 128."""
    code = f"from megarl.rewards.sandbox import run_python\nprint(run_python({LET_GO!r}).stdout)"
    assert as_nobody(code) == "PermissionError False\n1048576\n\n"


def test_a_program_of_an_ordinary_user_does_nothing_to_its_init() -> None:
    code = f"""
from megarl.rewards.code import code
from megarl.rewards.sandbox import Limits, run_python
source = {HARMLESS.format(attacks=INIT)!r}
outcome = run_python(source, limits=Limits(wall=60))
scores = code("```python\\n" + source + "\\n```", {{"tests": ["assert f() == 3"]}})
print(outcome.ended, outcome.stdout, scores["score"])
"""
    assert as_nobody(code) == "exit on\n 1.0\n"


def test_where_namespaces_are_forbidden() -> None:
    """A filter as a container's: `unshare` is refused."""
    code = """
import ctypes
import os, struct
from megarl.isolation import call_filter
from megarl.rewards.sandbox import check_isolation
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
unshare = 272 if os.uname().machine == "x86_64" else 97
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
call_filter.install(b"".join(struct.pack("=HBBI", *step) for step in steps))
try: check_isolation()
except ValueError as e: print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "no namespaces can be made here" in done.stdout, done.stdout + done.stderr
    assert "reward.args.isolation=process" in done.stdout and done.stdout.count("\n") == 1


def test_a_process_that_lasts(tmp_path: Path) -> None:
    (tmp_path / "shown_module.py").write_text("ANSWER = 42\n")
    tmp_path.chmod(0o755)
    program = """
import os, socket, sys, shown_module
channel = socket.socket(fileno=3)
while text := channel.recv(99):
    try: said = str(eval(text))
    except OSError as e: said = type(e).__name__
    channel.sendall(said.encode())
"""
    ours, its = socket.socketpair()
    with ours, start_isolated(program, channel=its, folders=[str(tmp_path)]) as process:
        its.close()

        def ask(text: str) -> str:
            ours.sendall(text.encode())
            return ours.recv(999).decode()

        assert ask("shown_module.ANSWER") == "42"
        assert ask("sys.path[0], sorted(os.environ)") == str((str(tmp_path), ["HOME", "LANG", "PATH", "PYTHONPATH"]))
        assert ask(f"open('{tmp_path}/x', 'w')") == "OSError"  # read-only
        assert ask(f"os.path.exists('{ROOT}/README.md'), os.getpid()") == "(False, 2)"
        assert ask("socket.create_connection(('1.1.1.1', 80))") == "OSError"
        assert not process.poll()
        ours.sendall(b"os._exit(3)")
        assert ours.recv(9) == b""
        until = time.monotonic() + 60
        while not process.poll() and time.monotonic() < until:
            time.sleep(0.02)
        assert process.poll() and process.how_it_ended() == "exit 3"


def test_a_lasting_process_is_killed_and_outlives_the_thread_that_started_it() -> None:
    started: list[IsolatedProcess] = []
    ours, its = socket.socketpair()

    def start() -> None:
        started.append(start_isolated("import time\nwhile True: time.sleep(1)", channel=its))
        its.close()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with ours, started[0] as process:
        ours.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ours.recv(1)
        assert not process.poll()
        process.kill()
        ours.settimeout(60)
        assert ours.recv(1) == b"" and process.how_it_ended() == "killed"


def test_installed_packages_are_hidden() -> None:
    source = """
import os, sys
for root in {os.path.dirname(os.__file__), *("/usr/lib/" + name for name in os.listdir("/usr/lib"))}:
    for name in ("site-packages", "dist-packages"):
        try: print(os.listdir(os.path.join(root, name)))
        except OSError: pass
"""
    assert set(run(source).stdout.splitlines()) <= {"[]"}
    assert os.listdir(sysconfig.get_path("purelib"))


def test_limits_alone(tmp_path: Path) -> None:
    def alone(source: str, limits: Limits = Limits(wall=300)) -> Outcome:  # noqa: B008
        return run_python(source, limits=limits, isolation="process")

    assert alone("import os; print(sorted(os.environ), len(os.listdir()))").stdout == "['HOME', 'LANG', 'PATH'] 1\n"
    assert alone("x = bytearray(10 << 30)").ended == "memory"
    assert alone("while True: pass", SHORT).ended == "time"
    assert alone("while True: print('x' * 9999)").ended == "output"
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(99)\n"
    before = set(psutil.Process().children(recursive=True))
    assert alone(daemon).ended == "exit"
    # nothing of it is there any more, not even to wait for
    assert set(psutil.Process().children(recursive=True)) <= before


def test_limits_that_make_no_sense() -> None:
    for wrong, said in (
        ({"wall": 0}, "limit wall = 0 must be finite and more than 0"),
        ({"cpu": float("inf")}, "limit cpu = inf must be finite and more than 0"),
        ({"memory": 10}, "limit memory = 10 must be a whole number from 64 on"),
        ({"processes": 1.5}, "limit processes = 1.5 must be a whole number from 1 on"),
    ):
        with pytest.raises(ValueError) as refusal:
            Limits(**wrong)  # type: ignore[arg-type]
        assert str(refusal.value) == said


def test_the_filter_of_every_machine() -> None:
    """Every jump ends inside the filter."""
    for machine in ("x86_64", "aarch64"):
        code = filter_code(machine)
        steps = [code[i : i + 8] for i in range(0, len(code), 8)]
        for i, step in enumerate(steps):
            assert i + 1 + max(step[2], step[3]) < len(steps) or step[0] == 0x06
    with pytest.raises(ValueError, match="known for x86_64 and aarch64, not for riscv64"):
        filter_code("riscv64")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_calls_that_nobody_named_are_refused() -> None:
    """A new kernel's, too: 9999 and 463 are none of any kernel that there is."""
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (9999, 463, 450, 425, 435, 272, 165, 300, 298, 321, 250, 135):
    ctypes.set_errno(0)
    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())
"""
    assert run(source).stdout == "-1 38\n" * 5 + "-1 1\n" * 7


def test_installed_packages_where_they_are_asked_for() -> None:
    """In the tests' process as in the program's; without it neither finds the package."""
    program = "import pytest\ndef f(): return pytest.__name__"
    row = {"tests": ["import pytest\nassert f() == pytest.__name__ == 'pytest'"]}
    reward = load_reward("code")
    assert reward(f"```python\n{program}\n```", row, memory=2048, wall=60.0, site_packages=True)["score"] == 1.0
    assert reward(f"```python\n{program}\n```", row, memory=2048, wall=60.0)["score"] == 0.0
    source = "import numpy as np\ndef f(x): return np.cumsum(x), x.sum(), np.float32(0.5)"
    row = {"tests": ["import numpy as np\nsums, total, half = f(np.array([1, 2]))\nassert np.allclose(sums, [1, 3])"]}
    row["tests"].append("assert total == 3 and half == 0.5")
    wide: dict[str, Any] = {"memory": 4096, "wall": 60.0, "cpu": 60.0, "site_packages": True}
    assert reward(f"```python\n{source}\n```", row, **wide)["score"] == 1.0
    cheat = "class A:\n    __array_function__ = staticmethod(lambda *a, **k: True)\ndef f(x): return A(), 3, 0.5"
    assert reward(f"```python\n{cheat}\n```", {"tests": row["tests"][:1]}, **wide)["score"] == 0.0
    pair = {"tests": [{"input": "", "output": "pytest"}]}
    source = "```python\nimport pytest\nprint(pytest.__name__)\n```"
    assert reward(source, pair, memory=2048, wall=60.0, site_packages=True)["score"] == 1.0


def test_tests_find_packages_that_lie_below_tmp_and_nothing_else_there() -> None:
    """An environment may lie there; what the program writes there is hidden from its tests."""
    program = """
import below_tmp
def f():
    open("/tmp/of-the-program", "w").close()
    return below_tmp.value
"""
    test = """
import os, below_tmp
assert f() == below_tmp.value == 7
found = os.listdir("/tmp")
assert found == [os.path.basename(os.path.dirname(below_tmp.__file__))]
for path in ("/tmp/new", os.path.dirname(below_tmp.__file__) + "/new"):
    try:
        open(path, "w")
    except OSError:
        pass
    else:
        raise ValueError(path)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "below_tmp.py").write_text("value = 7\n")
        outcome, passed = run_tests(program, Examination(tests=[test], subjects=["f"]), folders=[folder])
    assert passed == [True], outcome


def test_this_machine_isolates() -> None:
    check_isolation()
    assert issubclass(SandboxError, RuntimeError)


SENT_AWAY = """
import os, socket
here, there = socket.socketpair()
socket.send_fds(here, [b"x"], [0, 1, 2, here.fileno(), there.fileno()])
print(9)
"""


def test_descriptors_on_their_way_to_nobody_keep_no_one_waiting() -> None:
    """A pair of sockets that lies in itself is held by no process, and holds the program's streams open for ever."""
    start = time.monotonic()
    outcome = run_python(SENT_AWAY, limits=Limits(wall=600))
    assert (outcome.stdout, outcome.ended) == ("9\n", "exit") and time.monotonic() - start < 300


def test_limits_of_the_starter_that_are_lower_than_those_of_programs() -> None:
    code = """
import resource
from megarl.rewards.sandbox import check_isolation
for which, limit in ((resource.RLIMIT_NOFILE, 48), (resource.RLIMIT_FSIZE, 8 << 20), (resource.RLIMIT_CPU, 600)):
    resource.setrlimit(which, (limit, limit))
check_isolation()
print("on")
"""
    assert as_nobody(code) == "on\n"


def test_root_of_a_user_namespace_with_few_users() -> None:
    code = """
from megarl.rewards.sandbox import check_isolation, run_python
check_isolation()
print(run_python("print(3)").stdout)
"""
    inner = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    done = subprocess.run(inner, env=with_path(), capture_output=True, text=True)
    if "unshare failed" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.stdout == "3\n\n", done.stderr


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_a_python_that_lies_where_programs_write(place: str) -> None:
    code = """
from megarl.rewards.code import code
from megarl.rewards.sandbox import check_isolation
check_isolation()
row = {"tests": ["assert f(2) == 4"]}
for program in ("def f(x): return x * x", "import torch"):
    print(code(f"```python\\n{program}\\n```", row)["score"])
"""
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("root alone can lay a folder there for one process")
    with tempfile.TemporaryDirectory(dir=place) as base:
        python = f"{base}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        command = f"mount --bind {sys.base_prefix} {base}; exec {python} -c '{code}'"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", command], cwd="/", env=with_path(), capture_output=True, text=True
        )
    assert done.stdout == "1.0\n0.0\n", done.stderr


def test_what_a_killed_starter_left_is_removed(tmp_path: Path) -> None:
    """A program without namespaces starts in a folder; who is killed cannot remove it."""
    code = """
import os, sys, time
from megarl.rewards.sandbox import run_python
print(run_python("print(3)" if sys.argv[1] == "short" else "import time; time.sleep(600)", isolation="process").stdout)
"""
    env = {**with_path(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code, "long"], env=env) as busy:
        while not list(tmp_path.glob("megarl-program-*/main.py")):
            time.sleep(0.01)
        (folder,) = tmp_path.iterdir()
        os.utime(folder, (0, 0))
        for left in (True, False):
            subprocess.run([sys.executable, "-c", code, "short"], env=env, check=True)
            assert list(tmp_path.iterdir()) == ([folder] if left else [])
            busy.kill()
            busy.wait()
            while processes_in(folder):
                time.sleep(0.01)


def processes_in(folder: Path) -> list[int]:
    """Those that hold it open, or are in it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if str(folder) in (process.cwd(), *(os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir())):
                found.append(process.pid)
    return found
