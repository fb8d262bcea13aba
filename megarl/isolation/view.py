"""Builds what a program that nobody trusts sees of files: Python, the system's libraries, a small folder to write."""

from __future__ import annotations

import os

from megarl.isolation import system_calls as linux

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module typing takes as long to import as Python to start
    from collections.abc import Sequence

_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/etc/ld.so.cache")
_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # of /usr today, folders of their own before
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": "/tmp",
}
PROGRAM = "/main.py"
"""Where the program lies."""


def build(prefix: str, program: bytes, shown: Sequence[str], *, disk_bytes: int, files: int, zero: bool) -> None:
    """Lay out what a program is to see; then comes `enter`, in a child or more. The caller needs a mount namespace.

    `/tmp` can be written, up to a limit, and lies in memory. All else is read-only.

    Args:
        prefix: of Python, an absolute path without symbolic links.
        program: becomes `PROGRAM`.
        shown: folders that it sees too. Other packages than Python's own are not shown.
        disk_bytes: that all files in /tmp may hold.
        files: that may be in /tmp.
        zero: it sees /dev/zero, which can be mapped as memory that processes share.
    """
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    root_size = len(program) + (1 << 20)
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=0755")
    os.chdir("/tmp")
    os.mkdir("old")
    os.mkdir("new")
    linux.swap_root(".", "old")  # from here on nothing of what lay below /tmp is hidden: /old/tmp shows it
    os.chdir("/")
    linux.mount("tmpfs", "/new", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"size={root_size},mode=0755")
    os.mkdir("/new/tmp")
    writable = f"size={disk_bytes},nr_inodes={files},mode=1777"
    linux.mount("tmpfs", "/new/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, writable)
    for path in (*_SYSTEM, *_of_python(prefix)):
        _show(path)
    for path in _LINKS:
        if os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), f"/new{path}")
        else:
            _show(path)
    _hide_packages({*_of_python(prefix), "/usr/lib", "/usr/local/lib", "/usr/lib64"}, shown)
    for path in shown:
        _show(path)
    os.makedirs("/new/dev", exist_ok=True)
    for device in _DEVICES:
        if device != "zero" or zero:
            _show(f"/dev/{device}")
    for name, target in _DEVICE_LINKS.items():
        if not os.path.lexists(f"/new/dev/{name}"):  # Python may lie below /dev/shm
            os.symlink(target, f"/new/dev/{name}")
    with open(f"/new{PROGRAM}", "wb") as f:
        f.write(program)
    os.mkdir("/new/proc")
    _make_read_only(but=b"/new/tmp")


def enter() -> None:
    """Leave this machine's files for those of `build`; the calling process needs a pid namespace of its own."""
    _mount_proc()
    linux.leave("/new")


def enter_alone(prefix: str, shown: Sequence[str]) -> None:
    """Enter in no pid namespace of its own: with nothing in /proc, and nothing of what the program writes.

    Args:
        prefix, shown: that `build` was given.
    """
    linux.mount("tmpfs", "/new/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=0755")
    if prefix.startswith("/tmp/"):
        for path in _of_python(prefix):
            _show(path)
        _hide_packages(_of_python(prefix), shown)
    for path in shown:
        _show(path)  # again what lies below /tmp
    _make_read_only(but=b"")
    linux.leave("/new")


def _of_python(prefix: str) -> set[str]:
    return {os.path.join(prefix, part) for part in ("bin", "lib", "lib64")}


def _hide_packages(roots: set[str], shown: Sequence[str]) -> None:
    """Lay empty folders over those of installed packages: answers of benchmarks may lie there."""
    but = set(map(os.path.realpath, shown))
    for root in roots:
        if not os.path.isdir(f"/new{root}"):
            continue
        for name in os.listdir(f"/new{root}"):
            for packages in ("site-packages", "dist-packages"):
                path = f"{root}/{name}/{packages}"
                if name.startswith("python") and os.path.isdir(f"/new{path}") and path not in but:
                    linux.mount("tmpfs", f"/new{path}", "tmpfs", 0, "size=1m,mode=0755")  # has what is shown


def _show(path: str) -> None:
    """Bind what this machine has at a path, if it has it."""
    source, target = f"/old{path}", f"/new{path}"
    if os.path.lexists(target) or not os.path.exists(source):
        return
    if os.path.islink(source):  # it would lead to another place here
        _show(os.path.realpath(source).removeprefix("/old"))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.path.realpath(source).removeprefix("/old"), target)
        return
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.bind(source, target)


def _mount_proc() -> None:
    """Mount the processes of this pid namespace and nothing of the kernel, or leave the folder empty.

    The kernel refuses the mount in containers that hide a part of their own /proc.
    """
    flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    for options in ("subset=pid", ""):  # the former from Linux 5.8 on
        try:
            return linux.mount("proc", "/new/proc", "proc", flags, options)
        except linux.CallFailed:
            continue


def _make_read_only(but: bytes) -> None:
    """Make all mounts of the view but one read-only, those included that came with a bind."""
    with open("/old/proc/self/mountinfo", "rb") as f:
        places = [line.split(b" ")[4] for line in f]
    for path in places:
        for character in b" \t\n\\":
            path = path.replace(b"\\%03o" % character, bytes([character]))
        if not path.startswith(b"/new") or path == but:
            continue
        flags = os.statvfs(path).f_flag
        kept = flags & (linux.MS_NODEV | linux.MS_NOEXEC | linux.MS_NOATIME | linux.MS_NODIRATIME)
        kept |= linux.MS_RELATIME if flags & os.ST_RELATIME else 0
        kept |= 0 if path.startswith(b"/new/dev/") else linux.MS_NODEV
        changed = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | kept
        linux.mount("none", os.fsdecode(path), flags=changed)
