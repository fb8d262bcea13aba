"""Finds the files that the configuration names, here or in a store that `pyarrow.fs` reads. Torch-free."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Literal, cast, get_args

if TYPE_CHECKING:
    from pyarrow import fs

REMOTE_TIMEOUT = 20.0  # seconds that a store may take to answer

Kind = Literal["jsonl", "json", "csv", "parquet", "arrow"]
_KINDS: Mapping[str, Kind] = {**{f".{kind}": kind for kind in get_args(Kind)}, ".ndjson": "jsonl"}
_TEXTS = ("jsonl", "json", "csv")
_PACKINGS = {".gz": "gzip", ".zst": "zstd"}
_FORMS = ".jsonl, .json, .csv, .ndjson (also .gz or .zst of these), .parquet and .arrow"


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """Describes a file of rows, as it is now.

    Attributes:
        name: what people call it: the path, or "s3://bucket/train.parquet".
        place: the path, or the URI with what else is in it, such as a key that nobody should read.
        entry: which entry of the list named it, from 0.
        size: bytes.
        changed: nanoseconds since 1970, of the content (mtime) and of the file's entry (ctime): a file that is copied
            over this one with its time (`rsync -t`) may have the same mtime, and has another ctime.
        remote: it has to be fetched before rows can be read one by one.
        packing: "gzip" or "zstd", of a file of text.
    """

    name: str
    place: str
    entry: int
    kind: Kind
    size: int
    changed: tuple[int, int]
    remote: bool = False
    packing: str = ""

    def open(self) -> BinaryIO:
        """Open the file for reading from its beginning; raises OSError or pyarrow's errors."""
        if not self.remote:
            return open(self.place, "rb")
        store, path = _store(self.place)
        return cast(BinaryIO, store.open_input_file(path))

    def unchanged(self) -> bool:
        """Return whether the file is the same as when it was found."""
        try:
            return (self.size, self.changed) == _size_and_times(self.place, self.remote)
        except OSError:
            return False


def stem_of(name: str) -> str:
    """Return a file's name without folders and extensions: "train" of "data/train.jsonl.gz"."""
    path = PurePosixPath(name)
    return PurePosixPath(path.stem).stem if path.suffix in _PACKINGS else path.stem


def row_prefix(name: str) -> str:
    """Return the text before a row's number in messages: "train.jsonl:" (17, the line), "train.csv row " (17)."""
    kind, _ = _form_of(name)
    return f"{name}:" if kind in (None, "jsonl") else f"{name} row "


def data_files(patterns: Sequence[str], what: str) -> list[DataFile]:
    """Find the files that the patterns match: patterns as given, the files of one pattern sorted by name.

    Args:
        patterns: paths, globs or URIs of files, or paths of folders; a file that two patterns match is taken once. A
            folder stands for the files of rows in it, which are of one kind; one called .parquet for those in its
            folders, too.
        what: the configuration key that they come from, for messages.

    Raises:
        ValueError: no pattern, a pattern without a file, an unknown extension, a file that is not readable.
    """
    if not patterns:
        raise ValueError(f"{what} is empty: name at least one file of rows")
    files: dict[str, DataFile] = {}
    for entry, pattern in enumerate(patterns):
        remote = "://" in pattern and not pattern.startswith("file://")
        names = _remote_matches(pattern, what) if remote else _matches(pattern.removeprefix("file://"), what)
        if not names:
            raise ValueError(f"{what}: no file matches '{_shown(pattern) if remote else pattern}'")
        for name in names:
            if name not in files:
                files[name] = _data_file(name, entry, remote, what)
    return list(files.values())


def _data_file(place: str, entry: int, remote: bool, what: str) -> DataFile:
    name = _shown(place) if remote else place
    kind, packing = _form_of(name)
    if kind is None or (packing and kind not in _TEXTS):
        packed = packing or os.path.splitext(name)[1] in (".bz2", ".xz", ".zip")
        raise ValueError(f"{what}: '{name}' is none of {_FORMS}{'; unpack it first' if packed else ''}")
    try:
        size, changed = _size_and_times(place, remote)
    except OSError as e:
        raise ValueError(f"{what}: '{name}' cannot be read: {e.strerror or _short(e)}") from e
    return DataFile(
        name=name, place=place, entry=entry, kind=kind, size=size, changed=changed, remote=remote, packing=packing
    )


def _form_of(name: str) -> tuple[Kind | None, str]:
    """Tell a file's kind and packing by how its name ends."""
    stem, ending = os.path.splitext(name)
    packing = _PACKINGS.get(ending, "")
    return _KINDS.get(os.path.splitext(stem)[1] if packing else ending), packing


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


def _matches(pattern: str, what: str) -> list[str]:
    try:
        names = sorted(glob.glob(pattern, recursive=True))
    except (OSError, ValueError):  # a NUL byte, a name that the file system cannot hold
        return []
    return [name for match in names for name in (_files_in(match, what) if os.path.isdir(match) else [match])]


def _files_in(folder: str, what: str) -> list[str]:
    """List the files of rows in a folder, by name."""
    if folder.rstrip("/").endswith(".parquet"):
        return sorted(glob.glob(os.path.join(glob.escape(folder), "**", "*.parquet"), recursive=True))
    try:
        there = sorted(name for name in os.listdir(folder) if name[0] not in "._")
    except OSError as e:
        raise ValueError(f"{what}: '{folder}' cannot be read: {e.strerror}") from e
    if "dataset_dict.json" in there:
        splits = [name for name in there if os.path.isdir(os.path.join(folder, name))]
        raise ValueError(f"{what}: '{folder}' holds the splits {', '.join(splits)[:200]}: name one, as {folder}/NAME")
    kinds = {name: kind for name in there if (kind := _form_of(name)[0])}
    if "state.json" in kinds and "arrow" in kinds.values():  # of `save_to_disk`: its files of JSON hold no rows
        kinds = {name: kind for name, kind in kinds.items() if kind == "arrow"}
    if not kinds and (deeper := glob.glob(os.path.join(glob.escape(folder), "*", "*.*"))):
        rows = sorted({os.path.splitext(name)[1] for name in deeper if _form_of(name)[0]})
        if rows:  # parts of a table, say, each in the folder of its partition
            raise ValueError(f"{what}: the rows of '{folder}' are in folders of it: name '{folder}/**/*{rows[0]}'")
    if len(set(kinds.values())) != 1:
        content = f"holds files of {' and '.join(sorted(set(kinds.values())))}" if kinds else f"has no {_FORMS} in it"
        raise ValueError(f"{what}: the folder '{folder}' {content}; name the files")
    return [os.path.join(folder, name) for name in kinds]


def _remote_matches(pattern: str, what: str) -> list[str]:
    """List the URIs that a pattern matches; without a wildcard the pattern itself, though there may be no such file."""
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
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            store = fs.S3FileSystem(
                endpoint_override=endpoint,
                region=region or (None if endpoint else fs.resolve_s3_region(bucket)),
                connect_timeout=REMOTE_TIMEOUT,
                request_timeout=REMOTE_TIMEOUT,
            )
            return store, uri.removeprefix("s3://")
        return cast("tuple[fs.FileSystem, str]", fs.FileSystem.from_uri(uri))
    except (ArrowException, ValueError) as e:
        raise OSError(5, _short(e)) from e


def _shown(uri: str) -> str:
    """Leave keys and settings out of a URI."""
    return re.sub("://[^/]*@", "://", uri.partition("?")[0])


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
