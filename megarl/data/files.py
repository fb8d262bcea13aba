"""Which files the configuration names, here or in a store that `pyarrow.fs` reads. Torch-free."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

if TYPE_CHECKING:
    from pyarrow import fs

REMOTE_TIMEOUT = 20.0  # seconds that a store may take to answer


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of rows, as it is now.

    Attributes:
        name: what people call it: the path, or "s3://bucket/train.parquet".
        place: the path, or the URI with what else is in it, such as a key that nobody should read.
        entry: which entry of the list named it, from 0.
        size: bytes.
        changed: nanoseconds since 1970, of the content and of the file's entry: what is copied over another file with
            its time (`rsync -t`) has the same content's time, and another one of its entry.
        remote: it has to be fetched before rows can be read one by one.
    """

    name: str
    place: str
    entry: int
    kind: Literal["jsonl", "parquet"]
    size: int
    changed: tuple[int, int]
    remote: bool = False

    @property
    def stem(self) -> str:
        """ "train" of "data/train.jsonl"."""
        return PurePosixPath(self.name).stem

    def open(self) -> BinaryIO:
        """For reading from its beginning; raises OSError or pyarrow's errors."""
        if not self.remote:
            return open(self.place, "rb")
        store, path = _store(self.place)
        return cast(BinaryIO, store.open_input_file(path))

    def unchanged(self) -> bool:
        """Whether it still is what it was."""
        try:
            return (self.size, self.changed) == _size_and_times(self.place, self.remote)
        except OSError:
            return False


def data_files(patterns: Sequence[str], what: str) -> list[DataFile]:
    """The files that the patterns match: patterns as given, the files of one pattern sorted by name.

    Args:
        patterns: paths, globs or URIs of .jsonl and .parquet files; a file that two patterns match is taken once. A
            folder called .parquet stands for the .parquet files in it.
        what: the configuration key that they come from, for messages.

    Raises:
        ValueError: no pattern, a pattern without a file, an unknown extension, a file that is not readable.
    """
    if not patterns:
        raise ValueError(f"{what} is empty: name at least one .jsonl or .parquet file")
    found: dict[str, DataFile] = {}
    for entry, pattern in enumerate(patterns):
        remote = "://" in pattern and not pattern.startswith("file://")
        names = _remote_matches(pattern, what) if remote else _matches(pattern.removeprefix("file://"))
        if not names:
            raise ValueError(f"{what}: no file matches '{_shown(pattern) if remote else pattern}'")
        for name in names:
            if name not in found:
                found[name] = _data_file(name, entry, remote, what)
    return list(found.values())


def _data_file(place: str, entry: int, remote: bool, what: str) -> DataFile:
    name = _shown(place) if remote else place
    kinds: dict[str, Literal["jsonl", "parquet"]] = {".jsonl": "jsonl", ".parquet": "parquet"}
    kind = kinds.get(os.path.splitext(name)[1])
    if kind is None:
        packed = os.path.splitext(name)[1] in (".gz", ".zst", ".bz2", ".xz", ".zip")
        raise ValueError(f"{what}: '{name}' is neither .jsonl nor .parquet{'; unpack it first' if packed else ''}")
    try:
        size, changed = _size_and_times(place, remote)
    except OSError as e:
        raise ValueError(f"{what}: '{name}' cannot be read: {e.strerror or _short(e)}") from e
    return DataFile(name=name, place=place, entry=entry, kind=kind, size=size, changed=changed, remote=remote)


def _size_and_times(name: str, remote: bool) -> tuple[int, tuple[int, int]]:
    if remote:
        store, path = _store(name)
        info = store.get_file_info(path)
        if not info.is_file:
            raise FileNotFoundError(2, "no such file")
        return info.size, (info.mtime_ns or 0, 0)
    if not stat.S_ISREG(os.stat(name).st_mode) and not os.path.isdir(name):
        raise OSError(22, "it is no regular file")
    with open(name, "rb") as f:  # a folder, a link to nothing, no permission
        status = os.fstat(f.fileno())
    return status.st_size, (status.st_mtime_ns, status.st_ctime_ns)


def _matches(pattern: str) -> list[str]:
    try:
        names = sorted(glob.glob(pattern, recursive=True))
    except (OSError, ValueError):  # a NUL byte, a name that the file system cannot hold
        return []
    return [name for match in names for name in _parts(match)]


def _parts(name: str) -> Iterator[str]:
    if name.rstrip("/").endswith(".parquet") and os.path.isdir(name):
        yield from sorted(glob.glob(os.path.join(glob.escape(name), "**", "*.parquet"), recursive=True))
    else:
        yield name


def _remote_matches(pattern: str, what: str) -> list[str]:
    """URIs; without a wildcard the pattern itself, whether there is such a file or not."""
    if not any(c in pattern for c in "*["):
        return [pattern]
    uri, _, query = pattern.partition("?")
    fixed = uri[: min(uri.find(c) for c in "*[" if c in uri)].rpartition("/")[0]
    from pyarrow import fs

    try:
        store, base = _store(f"{fixed}?{query}" if query else fixed)
        infos = store.get_file_info(fs.FileSelector(base, recursive=True))
    except (OSError, ValueError) as e:
        raise ValueError(f"{what}: '{_shown(uri)}' cannot be listed: {_short(e)}") from e
    scheme = fixed[: len(fixed) - len(base)] if fixed.endswith(base) else f"{uri.partition('://')[0]}://"
    names = sorted(f"{scheme}{info.path}" for info in infos if info.is_file)
    suffix = f"?{query}" if query else ""
    depth = uri.count("/") if "**" not in uri else None
    return [
        name + suffix
        for name in names
        if fnmatch.fnmatchcase(name, uri.replace("**/", "*")) and depth in (None, name.count("/"))
    ]


def _store(uri: str) -> tuple[fs.FileSystem, str]:
    from pyarrow import ArrowException, fs

    try:
        if uri.startswith("s3://") and not set("?@") & set(uri):  # made from its URI, it would have no time limits
            bucket, _, _ = uri.removeprefix("s3://").partition("/")
            own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            store = fs.S3FileSystem(
                endpoint_override=own,
                region=region or (None if own else fs.resolve_s3_region(bucket)),
                connect_timeout=REMOTE_TIMEOUT,
                request_timeout=REMOTE_TIMEOUT,
            )
            return store, uri.removeprefix("s3://")
        return cast("tuple[fs.FileSystem, str]", fs.FileSystem.from_uri(uri))
    except (ArrowException, ValueError) as e:
        raise OSError(5, _short(e)) from e


def _shown(uri: str) -> str:
    """Without keys and settings."""
    return re.sub("://[^/]*@", "://", uri.partition("?")[0])


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
