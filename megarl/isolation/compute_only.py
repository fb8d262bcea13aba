"""Limits a process to the few system calls that it needs to compute, read files and answer.

It cannot reach another process. Every other call fails with EPERM: no signal, no program, no process or thread, no
socket, no file to write.
"""

from __future__ import annotations

import os

from megarl.isolation import call_filter as calls
from megarl.isolation.call_filter import instruction
from megarl.isolation.system_calls import forbid_inspection

_NAMES = """
read readv pread64 write writev lseek close stat lstat fstat newfstatat statx access faccessat faccessat2 readlink
readlinkat getdents64 getcwd mmap mprotect munmap mremap madvise brk futex sched_yield rt_sigaction rt_sigprocmask
rt_sigreturn sigaltstack clock_gettime clock_getres clock_nanosleep gettimeofday times getrusage getrandom uname getpid
gettid getuid geteuid getgid getegid exit exit_group
"""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY


def compute_only() -> None:
    """Limit this process to the calls of the list, for good; its memory is closed to processes of the same user.

    The process must have given up its privileges, as programs of `megarl.isolation` have.

    Raises:
        OSError: the kernel has no seccomp, or a container refuses it.
        ValueError: the numbers of the machine's calls are not known here.
    """
    column, code = calls.beginning(os.uname().machine)
    allow, refuse = instruction(calls.RETURN, calls.ALLOW), instruction(calls.RETURN, calls.NO_PERMISSION)
    for name in _NAMES.split():
        if (number := calls.ALLOWED[name][column]) >= 0:
            code += [instruction(calls.IS, number, 0, 1), allow]
    openat = calls.ALLOWED["openat"][column]
    code += [instruction(calls.IS, openat, 0, 4), instruction(calls.LOAD, calls.THIRD_ARGUMENT)]
    code += [instruction(calls.HAS_BITS, _WRITING, 0, 1), refuse, allow, refuse]
    forbid_inspection()
    calls.install(b"".join(code))
