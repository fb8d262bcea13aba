"""Runs one program that nobody trusts, and ends with all of its processes ended. A process of its own, see `main`.

    start             takes namespaces, keeps time and memory, and is told to stop by its standard input's end
      init            pid 1 of the namespaces: when it ends, the kernel kills every process in them
        the program   another user, or none that means anything outside; no capabilities, limits, a filter of calls

With tests, two processes that see nothing of each other but a channel:

    start
      the tests       pid 1 of the namespaces; asks the program, and says which tests passed
        init          pid 1 of a second pid namespace, without the tests
          the program

Where one of the first is killed, PR_SET_PDEATHSIG kills the next.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import resource
import select
import stat
import sys
import time

from megarl.isolation import call_filter, memory_watch, view
from megarl.isolation import system_calls as linux

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Callable
    from typing import NoReturn

CHANNEL = 3
"""The descriptor of the channel in a program that has one."""
_NAMESPACES = linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
_SIGKILL = 9
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
_LAST_WORD = 2.0  # seconds that the init of a program that has ended has to say how
_NOBODY = 65534
_FEW_UIDS = 40_000  # where containers have no more than 65,536
_UIDS = 1 << 30  # the first of those that root gives to programs, far from people's and from those of containers


_PROGRAM = """
def run():
    import builtins, sys
    builtins.exit = builtins.quit = sys.exit
    del sys.argv[0], globals()["run"]
    globals()["__file__"] = sys.argv[0]
    sys.setrecursionlimit(sys.getrecursionlimit() + 2)
    with open(sys.argv[0], "rb") as f:
        source = f.read()
    exec(compile(source, sys.argv[0], "exec", dont_inherit=True), globals())
run()
"""  # as Python runs a file, with what the module site gives: programs end with exit()


class Arguments:
    """Holds the arguments of `main`.

    Attributes:
        isolated: in namespaces; else the limits alone.
        python, prefix: the interpreter and where its library lies, without symbolic links.
        program, stdin: file descriptors of the program's text and of what it reads.
        report: file descriptor for `main`'s lines.
        channel: file descriptor that the program gets as `CHANNEL`; -1: none.
        tests: file descriptor of what `megarl.isolation.examine` reads; -1: none.
        shown: files and folders that the program sees beside Python's own library.
        paths: folders in front of its `sys.path`.
        folder: where the program starts, if not isolated.
        group: `cgroup.procs` of the program's control group; "": none.
        wall, cpu: seconds; 0: no limit. memory, disk: bytes. processes, open_files, files: counts.
    """

    def __init__(self, words: list[str]) -> None:
        values = dict(word.split("=", 1) for word in words)
        self.isolated = values["isolated"] == "1"
        self.python, self.prefix = values["python"], values["prefix"]
        self.folder, self.group = values["folder"], values["group"]
        self.shown = [word.partition("=")[2] for word in words if word.startswith("shown=")]
        self.paths = [word.partition("=")[2] for word in words if word.startswith("path=")]
        self.program, self.stdin, self.report = int(values["program"]), int(values["stdin"]), int(values["report"])
        self.channel, self.tests = int(values["channel"]), int(values["tests"])
        self.wall, self.cpu = float(values["wall"]), int(values["cpu"])
        self.memory, self.disk, self.files = int(values["memory"]), int(values["disk"]), int(values["files"])
        self.processes, self.open_files = int(values["processes"]), int(values["open_files"])

    def close_streams(self) -> None:
        """Close what the program reads and writes."""
        for stream in (self.program, self.stdin, self.channel, self.tests, 1, 2):
            if stream >= 0:
                os.close(stream)
        self.program = self.stdin = self.channel = self.tests = -1


def main(words: list[str]) -> None:
    """Run the program, and write lines to `report`, the last of which says how it ended.

    "started" before a program with a channel. "tests" and a digit for each test, 1 if it passed. "done STATUS CPU WALL"
    (as of `os.waitpid`; microseconds of its processor time, of the clock), "time" or "memory" if it was killed for it,
    or "failed REASON" if it was never started. None of these: its init was killed.
    """
    args = Arguments(words)
    parent = os.getppid()
    if args.wall:  # else it may outlive the thread that started it: the end of standard input alone ends it
        linux.die_with_parent()
    if os.getppid() != parent or not _open(0):
        return
    for descriptor in (args.program, args.stdin, args.report, args.channel, args.tests):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    try:
        uid = _take_namespaces() if args.isolated else None
    except OSError as e:
        return _say(args, f"failed {type(e).__name__}: {e}")
    if args.wall:
        linux.die_with_parent()  # a new user namespace has undone it
    stop = os.dup(0)  # not inheritable; the program has another standard input
    alive, init_alive = os.pipe()
    linux.adopt_orphans()
    first = os.fork()
    if first == 0:
        os.close(alive)
        os.close(stop)
        _child(args, lambda: (_init if args.tests < 0 else _tests)(args, uid, init_alive))
    os.close(init_alive)
    args.close_streams()
    _watch(args, first, alive, stop)
    os.kill(first, _SIGKILL)
    os.waitpid(first, 0)  # of a pid namespace: returns when all in it are gone
    if not args.isolated:
        _end_children()


def _watch(args: Arguments, first: int, alive: int, stop: int) -> None:
    """Wait for the end of the first process, of standard input, or of what the program may use up."""
    poll = select.poll()
    poll.register(alive, 0)
    poll.register(stop, 0)  # 0: only its other end's closing
    end = time.monotonic() + (args.wall or float("inf"))
    while (left := end - time.monotonic()) > 0:
        wait = left if args.group else min(left, memory_watch.INTERVAL)
        if poll.poll(wait * 1000 if wait < 1e6 else None):
            return
        if not args.group and memory_watch.held(first, over=args.memory):
            return _say(args, "memory")
    _say(args, f"time {round(args.wall * 1e6)}")


def _child(args: Arguments, work: Callable[[], None]) -> NoReturn:
    """Do the work of a fork, and end it."""
    try:
        work()
    except Exception as e:
        _say(args, f"failed {type(e).__name__}: {e}")
    finally:
        os._exit(1)


def _take_namespaces() -> int | None:
    """Take namespaces for the children of this process; return the user that the program is to become, None: the same.

    With privileges it becomes a user that nobody else is, and needs no user namespace; without them the user namespace
    gives what the other namespaces need, and nothing outside.
    """
    if os.geteuid() == 0 and (program_uid := _own_uid()) is not None:
        try:
            linux.unshare(_NAMESPACES)
            return program_uid
        except linux.CallFailed:
            pass
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(_NAMESPACES | linux.CLONE_NEWUSER)
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {uid} 1"),
        ("gid_map", f"{_NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(content)
    return None


def _own_uid() -> int | None:
    """Choose a user for this program alone; the next one is its init's: limits of processes and signals are a user's.

    None: this user namespace has too few.
    """
    ends = []  # of the users, and groups, that follow upon 0
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as f:
            first, _, count = (int(word) for word in f.readline().split())
        ends.append(count if first == 0 else 0)
    pid = os.getpid()  # at most 2^22, and of one process at a time
    if min(ends) > _UIDS + (1 << 23):
        return _UIDS + 2 * pid
    return _FEW_UIDS + 2 * (pid % 10_000) if min(ends) > _FEW_UIDS + 20_000 else None


def _init(args: Arguments, uid: int | None, alive: int) -> None:
    """Build what the program sees, start the program, and report its end, as pid 1."""
    linux.die_with_parent()
    _prepare(args)
    _start_program(args, uid, alive)


def _tests(args: Arguments, uid: int | None, alive: int) -> None:
    """Start an init with the program in a pid namespace of its own, and ask what the tests ask of it, as pid 1."""
    from megarl.isolation import examine

    linux.die_with_parent()
    namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if args.isolated else -1
    _prepare(args)
    channel, program_channel = _socket.socketpair()
    init_alive, program_alive = os.pipe()
    if args.isolated:
        linux.unshare(linux.CLONE_NEWPID)
    init = os.fork()
    if init == 0:

        def start() -> None:
            linux.die_with_parent()
            for stream in (args.tests, alive, init_alive):
                os.close(stream)
            channel.close()
            args.tests, args.channel = -1, program_channel.detach()
            os.read(args.channel, 1)
            _start_program(args, uid, program_alive)

        _child(args, start)
    if args.isolated:  # back, for the program's init alone: with children elsewhere the kernel gives no threads
        linux.enter_namespace(namespace)
        os.close(namespace)
    program_channel.close()
    os.close(program_alive)
    tests, args.tests = args.tests, -1
    args.close_streams()
    if args.isolated:
        linux.unshare(linux.CLONE_NEWNS)  # the first is the program's
    channel.send(b"x")  # a new root of the first would have been this process's, too
    if args.isolated:
        view.enter_alone(args.prefix, args.shown)
    linux.drop_privileges(None if uid is None else uid + 1)
    linux.die_with_parent()
    linux.forbid_inspection()
    if not _open(alive):
        return
    _limit(args, args.processes + (0 if uid is not None else 3))
    with open("/dev/null", "r+b", 0) as null:
        for stream in (0, 1, 2):
            os.dup2(null.fileno(), stream)
    call_filter.restrict_calls()
    try:
        passed, broken = examine.run(tests, channel.fileno(), args.paths)
    except BaseException:  # of what a program did to it, such as an answer larger than its memory
        passed, broken = [], True
    _say(args, f"tests {''.join('01'[test] for test in passed)}")
    if broken:
        poll = select.poll()
        poll.register(init_alive, 0)
        poll.poll(_LAST_WORD * 1000)
    os._exit(0)


def _prepare(args: Arguments) -> None:
    """Make all that the program will see, but what is a process's own."""
    if args.group:
        with open(args.group, "w") as f:
            f.write("0")
    program = b"".join(iter(lambda: os.read(args.program, 1 << 20), b""))
    if args.isolated:
        linux.unshare(linux.CLONE_NEWNS)  # not before: `start` looks at processes in this machine's /proc
        linux.set_host_name("sandbox")
        view.build(args.prefix, program, args.shown, disk_bytes=args.disk, files=args.files, zero=bool(args.group))
    else:
        with open(os.path.join(args.folder, "main.py"), "wb") as f:
            f.write(program)


def _start_program(args: Arguments, uid: int | None, alive: int) -> None:
    """Become the init of the program: start it, and report its end."""
    path = os.path.join(args.folder, "main.py")
    if args.isolated:
        view.enter()
        path = view.PROGRAM
        for stream in (1, 2):
            if uid is not None and stat.S_ISFIFO(os.fstat(stream).st_mode):  # for a program that opens /dev/stdout
                os.fchown(stream, uid, uid)
    else:
        os.chdir(args.folder)
        linux.adopt_orphans()
    linux.forbid_inspection()
    linux.ignore_signals()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(args, lambda: _become(args, path, uid))
    linux.drop_privileges(None if uid is None else uid + 1)  # another user than the program: out of its reach
    linux.die_with_parent()  # a change of user has undone it
    linux.forbid_inspection()  # and this
    if not _open(alive):
        return  # nobody would kill this one
    args.close_streams()
    os.close(0)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == child:
            break
    cpu = usage.ru_utime + usage.ru_stime
    _say(args, f"done {status} {round(cpu * 1e6)} {round((time.monotonic() - start) * 1e6)}")
    os._exit(0)


def _become(args: Arguments, path: str, uid: int | None) -> None:
    """Turn this process into the program."""
    linux.drop_privileges(uid)
    linux.die_with_parent()
    linux.heed_signals()
    os.dup2(args.stdin, 0)
    if args.channel >= 0:
        _say(args, "started")
        args.report = fcntl.fcntl(args.report, fcntl.F_DUPFD_CLOEXEC, 10)  # it may lie at CHANNEL
        os.dup2(args.channel, CHANNEL)
        os.set_inheritable(CHANNEL, True)  # if it lay there already
    # a user of its own has the program alone; else init, this process and the one that asks the tests count, too
    processes = args.processes + (0 if uid is not None else 2 if args.tests < 0 else 3)
    _limit(args, processes)
    call_filter.restrict_calls(may_restrict=args.channel >= 0, may_share=bool(args.group))
    options, environment = ["-I"], dict(_ENVIRONMENT)
    if args.paths:
        options = ["-s", "-P"] if sys.version_info >= (3, 11) else ["-s"]
        environment["PYTHONPATH"] = ":".join(args.paths)
    words = [path] if args.channel >= 0 else ["-c", _PROGRAM, path]
    os.execve(args.python, [args.python, *options, "-S", "-B", "-X", "utf8", *words], environment)


def _limit(args: Arguments, processes: int) -> None:
    """Limit what this process and its children may use up."""
    for which, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, args.memory),
        (resource.RLIMIT_FSIZE, args.disk),
        (resource.RLIMIT_NOFILE, args.open_files),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _set_limit(which, limit, limit)
    if args.cpu:
        _set_limit(resource.RLIMIT_CPU, args.cpu, args.cpu + 1)
    if args.isolated:  # else all processes of the user count
        _set_limit(resource.RLIMIT_NPROC, processes, processes)


def _set_limit(which: int, soft: int, hard: int) -> None:
    """Set a limit, or the one that this process has where that is lower."""
    present = resource.getrlimit(which)[1]
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.setrlimit(which, (soft, hard))


def _end_children() -> None:
    """Kill what the program left behind: it has become this process's, generation by generation."""
    while True:
        with open("/proc/thread-self/children") as f:
            for child in f.read().split():
                os.kill(int(child), _SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _open(pipe: int) -> bool:
    """Return whether somebody holds the other end."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(0)


def _say(args: Arguments, line: str) -> None:
    os.write(args.report, f"{' '.join(line.split())}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
