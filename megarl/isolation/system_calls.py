"""Makes the Linux calls that Python has no name for, or only in newer versions."""

from __future__ import annotations

import _signal as signal
import ctypes
import os

# linux/sched.h
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
# linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
_MNT_DETACH = 2
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_CAPABILITY_VERSION_3 = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


class CallFailed(OSError):
    """A system call was refused; `str` of it names the call and the reason."""

    def __str__(self) -> str:
        return f"{self.args[1]}: {os.strerror(self.args[0])}"


def unshare(flags: int) -> None:
    """Move this process into new namespaces; its first child is the init of a new pid namespace."""
    _check(_libc.unshare(flags), "unshare")


def enter_namespace(descriptor: int) -> None:
    """Enter the namespace of an open file of /proc/PID/ns; a pid namespace is that of children from then on."""
    _check(_libc.setns(descriptor, 0), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    done = _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode() or None)
    _check(done, f"mount {kind or 'of ' + source} on {target}")


def bind(source: str, target: str) -> None:
    """Have both paths show the same files from now on, with all that is mounted below the source."""
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None), f"bind {source}")


def leave(root: str) -> None:
    """Change `/` to `root`, a mount; what was `/` cannot be reached any more."""
    os.chdir(root)
    swap_root(".", ".")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def swap_root(new: str, old: str) -> None:
    """Change `/` to `new`, a mount; what was `/` then lies at `old`, a folder in it."""
    call = ctypes.c_long(_PIVOT_ROOT[os.uname().machine])
    _check(_libc.syscall(call, os.fsencode(new), os.fsencode(old)), "pivot_root")


def set_host_name(name: str) -> None:
    """Set the host name of this uts namespace."""
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends; to become another user undoes it."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_inspection() -> None:
    """Keep other processes of the same user from tracing this one, and from reading its memory and its files."""
    _prctl(_PR_SET_DUMPABLE, 0)


def ignore_signals() -> None:
    """Ignore all signals but that of a child's end: Python's own answer to SIGINT would end an init."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)


def heed_signals() -> None:
    """Undo `ignore_signals`, which an exec keeps."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


def drop_privileges(uid: int | None) -> None:
    """Drop all capabilities, now and after any exec, and become another user and group, unless `uid` is None."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0):
            break  # past the last that the kernel knows, or there are none to drop
    _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_calls(program: ctypes.Structure) -> None:
    """Install a seccomp filter (a `struct sock_fprog`), for this process and all its children."""
    done = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0)
    _check(done, "seccomp")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _check(result: int, call: str) -> None:
    if result < 0:
        raise CallFailed(ctypes.get_errno(), call)
