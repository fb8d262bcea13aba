"""Limits a program that nobody trusts to the system calls that Python programs need for their own work.

Calls that are not named here fail: numbers up to 423 with EPERM, later ones with ENOSYS, as on an older kernel, so that
the C library takes the call that it took there. A new kernel's calls are refused before anybody has thought of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from megarl.isolation.system_calls import filter_calls

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Iterator, Sequence

# Numbers on x86_64 and on aarch64, the latter -1 where it has no such call; from 424 on they are the same.
_FILES = """
read 0 63, write 1 64, open 2 -1, close 3 57, stat 4 -1, fstat 5 80, lstat 6 -1, poll 7 -1, lseek 8 62, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -1, pipe 22 -1, select 23 -1, dup 32 23, dup2 33 -1, sendfile 40
71, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83, truncate 76 45, ftruncate 77 46, getdents 78 -1, getcwd 79
17, chdir 80 49, fchdir 81 50, rename 82 -1, mkdir 83 -1, rmdir 84 -1, creat 85 -1, link 86 -1, unlink 87 -1, symlink
88 -1, readlink 89 -1, chmod 90 -1, fchmod 91 52, chown 92 -1, fchown 93 55, lchown 94 -1, umask 95 166, utime 132 -1,
mknod 133 -1, statfs 137 43, fstatfs 138 44, sync 162 81, readahead 187 213, getdents64 217 61, fadvise64 221 223,
utimes 235 -1, openat 257 56, mkdirat 258 34, mknodat 259 33, fchownat 260 54, futimesat 261 -1, newfstatat 262 79,
unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78, fchmodat 268 53, faccessat 269
48, pselect6 270 72, ppoll 271 73, splice 275 76, tee 276 77, sync_file_range 277 84, utimensat 280 88, fallocate 285
47, dup3 292 24, pipe2 293 59, preadv 295 69, pwritev 296 70, renameat2 316 276, copy_file_range 326 285, preadv2 327
286, pwritev2 328 287, statx 332 291, close_range 436 436, openat2 437 437, faccessat2 439 439, fchmodat2 452 452
"""
_WAITING = """
epoll_create 213 -1, epoll_wait 232 -1, epoll_ctl 233 21, epoll_pwait 281 22, signalfd 282 -1, timerfd_create 283 85,
eventfd 284 -1, timerfd_settime 286 86, timerfd_gettime 287 87, signalfd4 289 74, eventfd2 290 19, epoll_create1 291
20, inotify_init 253 -1, inotify_add_watch 254 27, inotify_rm_watch 255 28, inotify_init1 294 26, epoll_pwait2 441 441
"""
_MEMORY = """
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233,
mlock 149 228, munlock 150 229, mlock2 325 284, membarrier 324 283
"""
_PROCESSES = """
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sched_yield 24 124, pause 34 -1, getpid 39 172, fork
57 -1, vfork 58 -1, execve 59 221, exit 60 93, wait4 61 260, kill 62 129, getpgrp 111 -1, setsid 112 157, getppid 110
173, setpgid 109 154, getpgid 121 155, getsid 124 156, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108
177, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, getgroups 115 158, setgroups 116 159,
setresuid 117 147, getresuid 118 148, setresgid 119 149, getresgid 120 150, capget 125 90, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigqueueinfo 129 138, rt_sigsuspend 130 133, sigaltstack 131 132, getpriority 140 141,
sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
sched_rr_get_interval 148 127, arch_prctl 158 -1, gettid 186 178, tkill 200 130, futex 202 98, sched_getaffinity 204
123, set_tid_address 218 96, restart_syscall 219 128, exit_group 231 94, tgkill 234 131, waitid 247 95, ioprio_get 252
31, set_robust_list 273 99, get_robust_list 274 100, getcpu 309 168, execveat 322 281, rseq 334 293, sched_getattr 315
275, rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424
"""
_TIME_AND_SYSTEM = """
getitimer 36 102, alarm 37 -1, setitimer 38 103, uname 63 160, gettimeofday 96 169, getrlimit 97 163, getrusage 98
165, sysinfo 99 179, times 100 153, time 201 -1, setrlimit 160 164, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, nanosleep 35 101, getrandom 318 278
"""
_SOCKETS = """
connect 42 203, accept 43 202, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, bind
49 200, listen 50 201, getsockname 51 204, getpeername 52 205, socketpair 53 199, setsockopt 54 208, getsockopt 55
209, accept4 288 242, recvmmsg 299 243, sendmmsg 307 269
"""
ALLOWED = {
    words[0]: (int(words[1]), int(words[2]))
    for words in map(
        str.split, ",".join((_FILES, _WAITING, _MEMORY, _PROCESSES, _TIME_AND_SYSTEM, _SOCKETS)).split(",")
    )
}
# of this process alone: its init may be the same user
_OF_ITSELF = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
_OF_ITSELF_SECOND = {"setpriority": (141, 140, 0), "ioprio_set": (251, 30, 1)}  # and the first argument: a process
_CLONE, _CLONE3, _SOCKET, _IOCTL, _PRCTL = (56, 220), (435, 435), (41, 198), (16, 29), (157, 167)
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED and MAP_ANONYMOUS
_NEW_NAMESPACES = 0x7E020000  # any CLONE_NEW* of clone
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; AF_VSOCK would reach the host of a virtual machine
# TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_OPTIONS = (1, 2, 15, 16, 21, 23, 39, 0x53564D41)
_RESTRICTING = (4, 22)  # PR_SET_DUMPABLE, PR_SET_SECCOMP
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
_SAME_EVERYWHERE = 424  # the first number that all machines share

# linux/bpf_common.h, linux/seccomp.h
LOAD, IS, _AT_LEAST, HAS_BITS, _AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 24, 40  # in struct seccomp_data
THIRD_ARGUMENT = 32
ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NO_PERMISSION, _NO_SUCH_CALL = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def restrict_calls(*, may_restrict: bool = False, may_share: bool = True) -> None:
    """Let other calls fail from now on, in this process and its children; needs `drop_privileges` before.

    Args:
        may_restrict: the process may take further calls from itself.
        may_share: the process may share memory that is no file's with its children. Only a control group counts the
            pages of such memory that no process maps any more.

    Raises:
        CallFailed: the kernel has no seccomp, or a container refuses it.
    """
    options = (*_OPTIONS, *_RESTRICTING) if may_restrict else _OPTIONS
    install(filter_code(os.uname().machine, options, may_share=may_share))


def install(code: bytes) -> None:
    """Have the kernel ask a filter about every call of this process and its children."""
    filter_calls(_Program(len=len(code) // 8, filter=code))


def filter_code(machine: str, options: Sequence[int] = _OPTIONS, *, may_share: bool = True) -> bytes:
    """Return the filter as the kernel reads it, 8 bytes an instruction.

    Args:
        options: of prctl, to allow.
        may_share: see `restrict_calls`.

    Raises:
        ValueError: as `beginning`.
    """
    column, code = beginning(machine)
    if not may_share:
        flags = instruction(LOAD, _FOURTH_ARGUMENT) + instruction(_AND, _SHARED_ANONYMOUS)
        code += _checked(ALLOWED["mmap"][column], flags, (0, 1, 0x20))
    for first, last in _ranges(sorted(numbers[column] for numbers in ALLOWED.values() if numbers[column] >= 0)):
        # the numbers rise: what lies between this range and the one before goes past all others, too
        code += [instruction(_AT_LEAST, first, 0, 2), instruction(_AT_LEAST, last + 1, 1, 0)]
        code.append(instruction(RETURN, ALLOW))
    for numbers in _OF_ITSELF.values():
        code += _checked(numbers[column], instruction(LOAD, _FIRST_ARGUMENT), [0])
    for *both, which in _OF_ITSELF_SECOND.values():
        inner = [instruction(LOAD, _FIRST_ARGUMENT), instruction(IS, which, 1, 0)]
        inner += [instruction(RETURN, NO_PERMISSION), instruction(LOAD, _SECOND_ARGUMENT)]
        code += _checked(both[column], b"".join(inner), [0])
    code += _checked(_SOCKET[column], instruction(LOAD, _FIRST_ARGUMENT), _SOCKET_FAMILIES)
    code += _checked(_IOCTL[column], instruction(LOAD, _SECOND_ARGUMENT), _REQUESTS, _ERROR | errno.ENOTTY)
    code += _checked(_PRCTL[column], instruction(LOAD, _FIRST_ARGUMENT), options, _ERROR | errno.EINVAL)
    code += [
        instruction(IS, _CLONE[column], 0, 4),
        instruction(LOAD, _FIRST_ARGUMENT),
        instruction(HAS_BITS, _NEW_NAMESPACES, 0, 1),
        instruction(RETURN, NO_PERMISSION),
        instruction(RETURN, ALLOW),
        # clone3 among them: a filter cannot read its flags, and the C library takes clone where there is none;
        # the numbers of x32 lie higher
        instruction(_AT_LEAST, _SAME_EVERYWHERE, 0, 1),
        instruction(RETURN, _NO_SUCH_CALL),
        instruction(RETURN, NO_PERMISSION),
    ]
    return b"".join(code)


def beginning(machine: str) -> tuple[int, list[bytes]]:
    """Return the column of a machine's numbers, and the instructions that load a call's number.

    Raises:
        ValueError: the numbers of the machine's calls are not known here.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(f"the numbers of system calls are known for {' and '.join(_ARCHITECTURES)}, not for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    code = [instruction(LOAD, _ARCHITECTURE), instruction(IS, architecture, 1, 0)]
    return column, [*code, instruction(RETURN, _KILL), instruction(LOAD, _NUMBER)]


def _checked(number: int, load: bytes, values: Sequence[int], refusal: int = NO_PERMISSION) -> list[bytes]:
    """Allow a call if the word that `load` loads is one of `values`."""
    size = len(load) // 8
    code = [instruction(IS, number, 0, size + len(values) + 2), load]
    code += [instruction(IS, value, len(values) - i, 0) for i, value in enumerate(values)]
    return [*code, instruction(RETURN, refusal), instruction(RETURN, ALLOW)]


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each run of neighbours."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
