"""Leaves a process the few system calls that it needs to compute, read files and answer.

It cannot reach another process. Every other call fails with EPERM: no signal, no program, no process or thread, no
socket, no file to write.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from megarl.isolation.system_calls import filter_calls, forbid_inspection

_NONE = -1
# Number on x86_64 and on aarch64, which has no old forms of some.
_ALLOWED = {
    "read": (0, 63),
    "readv": (19, 65),
    "pread64": (17, 67),
    "write": (1, 64),
    "writev": (20, 66),
    "lseek": (8, 62),
    "close": (3, 57),
    "stat": (4, _NONE),
    "lstat": (6, _NONE),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, _NONE),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, _NONE),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "uname": (63, 160),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_OPENAT = (257, 56)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _IS, _HAS_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def compute_only() -> None:
    """Leave this process the calls of the list alone, for good; its memory is closed to processes of the same user.

    It needs to have given up its privileges, as programs of `megarl.isolation` have.

    Raises:
        OSError: the kernel has no seccomp, or a container refuses it.
        ValueError: a machine whose numbers are not known here.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise ValueError(f"the numbers of system calls are known for {' and '.join(_ARCHITECTURES)}, not for {machine}")
    code = _filter(*_ARCHITECTURES[machine])
    forbid_inspection()
    filter_calls(_Program(len=len(code) // 8, filter=code))


def _filter(column: int, architecture: int) -> bytes:
    """Return the filter as the kernel reads it, 8 bytes an instruction."""
    allow, refuse = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERROR | errno.EPERM)
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_IS, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    for numbers in _ALLOWED.values():
        if numbers[column] != _NONE:
            code += [_instruction(_IS, numbers[column], 0, 1), allow]
    code += [_instruction(_IS, _OPENAT[column], 0, 4), _instruction(_LOAD, _THIRD_ARGUMENT)]
    code += [_instruction(_HAS_BITS, _WRITING, 0, 1), refuse, allow, refuse]
    return b"".join(code)


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
