"""Which system calls a program that nobody trusts has: all but those that reach around its namespaces or its limits."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from megarl.isolation.system_calls import filter_calls

# Number on x86_64 and on aarch64; from 424 on they are the same.
_REFUSED = {
    # namespaces and mounts: a user namespace of its own would give the program all of the kernel's privileged code
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    # what is not in a namespace, and code of the kernel that few programs need
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "quotactl": (179, 60),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_NEW_NAMESPACES = 0x7E020000  # any CLONE_NEW* of clone
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; AF_VSOCK would reach the host of a virtual machine
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
_X32 = 0x40000000  # numbers of the x32 ABI

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _IS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def restrict_calls() -> None:
    """Refused calls fail with EPERM from now on, in this process and its children; needs `drop_privileges` before.

    Raises:
        CallFailed: the kernel has no seccomp, or a container refuses it.
    """
    code = filter_code(os.uname().machine)
    filter_calls(_Program(len=len(code) // 8, filter=code))


def filter_code(machine: str) -> bytes:
    """The filter as the kernel reads it, 8 bytes an instruction.

    Raises:
        ValueError: a machine whose numbers are not known here.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(f"the numbers of system calls are known for {' and '.join(_ARCHITECTURES)}, not for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    no_permission = _ERROR | errno.EPERM
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_IS, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, no_permission)]
    for numbers in _REFUSED.values():
        code += [_instruction(_IS, numbers[column], 0, 1), _instruction(_RETURN, no_permission)]
    # A filter cannot read the flags of clone3; the C library takes clone where there is no clone3.
    code += [_instruction(_IS, _CLONE3[column], 0, 1), _instruction(_RETURN, _ERROR | errno.ENOSYS)]
    code += [
        _instruction(_IS, _CLONE[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_HAS_BITS, _NEW_NAMESPACES, 0, 1),
        _instruction(_RETURN, no_permission),
        _instruction(_RETURN, _ALLOW),
    ]
    code += [_instruction(_IS, _SOCKET[column], 0, len(_SOCKET_FAMILIES) + 2), _instruction(_LOAD, _FIRST_ARGUMENT)]
    for i, family in enumerate(_SOCKET_FAMILIES):
        code.append(_instruction(_IS, family, len(_SOCKET_FAMILIES) - i, 0))
    code += [_instruction(_RETURN, no_permission), _instruction(_RETURN, _ALLOW)]
    return b"".join(code)


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
