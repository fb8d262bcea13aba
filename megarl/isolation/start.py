"""Runs one program that nobody trusts, and ends with all of its processes ended. A process of its own, see `main`.

    start             takes namespaces, keeps the time, and is told to stop by its standard input's end
      init            pid 1 of the namespaces: when it ends, the kernel kills every process in them
        the program   another user, or none that means anything outside; no capabilities, limits, a filter of calls

Where one of the first two is killed, PR_SET_PDEATHSIG kills the next.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

from megarl.isolation import call_filter, view
from megarl.isolation import system_calls as linux

_NAMESPACES = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
_SIGKILL = 9
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
_NOBODY = 65534
_UIDS = 1 << 30  # the first of those that root gives to programs, far from people's and from those of containers


class Job:
    """What `main` is told.

    Attributes:
        isolated: in namespaces; else the limits alone.
        python, prefix: the interpreter and where its library lies, without symbolic links.
        program, stdin: file descriptors of the program's text and of what it reads.
        report: file descriptor for `main`'s line.
        folder: where the program starts, if not isolated.
        group: `cgroup.procs` of the program's control group; "": none.
        wall, cpu: seconds. memory, disk, file: bytes. processes, open_files, files: counts.
    """

    def __init__(self, words: list[str]) -> None:
        said = dict(word.split("=", 1) for word in words)
        self.isolated = said["isolated"] == "1"
        self.python, self.prefix = said["python"], said["prefix"]
        self.folder, self.group = said["folder"], said["group"]
        self.program, self.stdin, self.report = int(said["program"]), int(said["stdin"]), int(said["report"])
        self.wall, self.cpu = float(said["wall"]), int(said["cpu"])
        self.memory, self.disk, self.files = int(said["memory"]), int(said["disk"]), int(said["files"])
        self.processes, self.open_files = int(said["processes"]), int(said["open_files"])


def main(words: list[str]) -> None:
    """Run the program, and write one line to `report`.

    "done STATUS CPU WALL" (as of `os.waitpid`; microseconds of its processor time, of the clock), "time" if it was
    killed for its time, or "failed REASON" if it was never started. No line: its init was killed.
    """
    parent = os.getppid()
    linux.die_with_parent()
    if os.getppid() != parent or not _open(0):
        return
    job = Job(words)
    for descriptor in (job.program, job.stdin, job.report):
        os.set_inheritable(descriptor, False)
    try:
        uid = _take_namespaces() if job.isolated else None
    except OSError as e:
        return _say(job, f"failed {type(e).__name__}: {e}")
    linux.die_with_parent()  # a new user namespace has undone it
    if os.getppid() != parent:
        return
    stop = os.dup(0)  # not inheritable; the program has another standard input
    alive, init_alive = os.pipe()
    linux.adopt_orphans()
    init = os.fork()
    if init == 0:
        os.close(alive)
        os.close(stop)
        try:
            _init(job, uid, init_alive)
        except Exception as e:
            _say(job, f"failed {type(e).__name__}: {e}")
        finally:
            os._exit(1)
    os.close(init_alive)
    for stream in (job.program, job.stdin, 1, 2):
        os.close(stream)
    poll = select.poll()
    poll.register(alive, 0)
    poll.register(stop, 0)  # 0: only its other end's closing
    if not poll.poll(job.wall * 1000):
        _say(job, f"time {round(job.wall * 1e6)}")
    os.kill(init, _SIGKILL)
    os.waitpid(init, 0)  # of a pid namespace: returns when all in it are gone
    if not job.isolated:
        _end_children()


def _take_namespaces() -> int | None:
    """New ones for the children of this process; returns the user that the program is to become, None: the same.

    With privileges it becomes a user that nobody else is, and needs no user namespace; without them the user namespace
    gives what the other namespaces need, and nothing outside.
    """
    if os.geteuid() == 0:
        try:
            linux.unshare(_NAMESPACES)
            return _own_uid()
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


def _own_uid() -> int:
    """A user of this program alone: limits of processes and signals are a user's."""
    with open("/proc/self/uid_map") as f:
        first, _, count = (int(word) for word in f.readline().split())
    pid = os.getpid()  # at most 2^22, and of one process at a time
    return _UIDS + pid if first == 0 and count > _UIDS + (1 << 22) else 40_000 + pid % 20_000


def _init(job: Job, uid: int | None, alive: int) -> None:
    """Pid 1: builds what the program sees, starts it, and reports its end."""
    linux.die_with_parent()
    program = b"".join(iter(lambda: os.read(job.program, 1 << 20), b""))
    os.close(job.program)
    if job.group:
        with open(job.group, "w") as f:
            f.write("0")
    if job.isolated:
        linux.set_host_name("sandbox")
        view.enter(job.prefix, program, disk_bytes=job.disk, files=job.files)
        path = view.PROGRAM
        if uid is not None:  # for a program that opens /dev/stdout
            os.fchown(1, uid, uid)
            os.fchown(2, uid, uid)
    else:
        path = os.path.join(job.folder, "main.py")
        with open(path, "wb") as f:
            f.write(program)
        os.chdir(job.folder)
        linux.adopt_orphans()
    del program
    linux.drop_privileges(uid)
    linux.die_with_parent()  # a change of user has undone it
    linux.forbid_inspection()
    if not _open(alive):
        return  # nobody would kill this one
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _become(job, path, job.processes + (1 if uid is not None else 2))  # with init; with start, if the same user
        except Exception as e:
            _say(job, f"failed {type(e).__name__}: {e}")
        finally:
            os._exit(1)
    for stream in (0, 1, 2):
        os.close(stream)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == child:
            break
    cpu = usage.ru_utime + usage.ru_stime
    _say(job, f"done {status} {round(cpu * 1e6)} {round((time.monotonic() - start) * 1e6)}")
    os._exit(0)


def _become(job: Job, path: str, processes: int) -> None:
    """This process becomes the program."""
    linux.die_with_parent()
    os.dup2(job.stdin, 0)
    for which, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, job.memory),
        (resource.RLIMIT_FSIZE, job.disk),
        (resource.RLIMIT_NOFILE, job.open_files),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(which, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (job.cpu, job.cpu + 1))
    if job.isolated:  # else all processes of the user count
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    call_filter.restrict_calls()
    os.execve(job.python, [job.python, "-I", "-S", "-B", "-X", "utf8", path], _ENVIRONMENT)


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
    """Whether somebody holds the other end."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(0)


def _say(job: Job, line: str) -> None:
    os.write(job.report, f"{' '.join(line.split())}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
