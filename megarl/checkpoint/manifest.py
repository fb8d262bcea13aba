"""Lists the files of a whole checkpoint, with size and checksum, in `manifest.json`, which is written last. Torch-free.

{"format": 1, "files": {"common.pt": {"size": 1234, "blake2b": "9f86d0..."}, ".metadata": ...}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from megarl.telemetry.lines import only_file

MANIFEST_FILE = "manifest.json"
SOURCE_FILE = "made_from.json"
"""Name of the record, in a folder that was made from a checkpoint, of that checkpoint's manifest."""
FORMAT = 1
"""Of the checkpoints that this program writes; `trainer.json` names it too."""

THREADS = 8
"""Files that one rank reads or writes at a time: hashing and disk calls do without Python's lock."""

_BLOCK = 2**20


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Describes a file as it was written.

    Attributes:
        size: in bytes.
        blake2b: its checksum, 64 hexadecimal digits.
    """

    size: int
    blake2b: str


def new_checksum() -> hashlib.blake2b:
    """Begin a checksum; its `hexdigest` is that of a `FileRecord`."""
    return hashlib.blake2b(digest_size=32)


def files_of(folder: str) -> list[str]:
    """List every file below the folder but the manifest, relative to it, sorted."""
    paths = [os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names]
    return sorted(path for path in paths if path != MANIFEST_FILE)


def record_files(folder: str, names: Iterable[str], *, sync: bool = False) -> dict[str, FileRecord]:
    """Take the size and checksum of files, several at a time.

    Args:
        sync: wait until each is on the disk.

    Raises:
        OSError: one cannot be read.
    """
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        records = pool.map(partial(_record, sync=sync), [os.path.join(folder, name) for name in names])
        return dict(zip(names, records, strict=True))


def write_manifest(folder: str, records: Mapping[str, FileRecord]) -> None:
    """Write `manifest.json`, and wait until it and the folder's entries are on the disk."""
    manifest = {"format": FORMAT, "files": {name: asdict(record) for name, record in sorted(records.items())}}
    with open(os.path.join(folder, MANIFEST_FILE), "w", encoding="utf-8") as f:
        json.dump(manifest, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    for at, _, _ in os.walk(folder):
        sync_folder(at)


def read_manifest(folder: str) -> dict[str, FileRecord]:
    """Read the records of the files by name. Raises ValueError without a manifest, or if it cannot be understood."""
    try:
        with open(os.path.join(folder, MANIFEST_FILE), encoding="utf-8", opener=only_file) as f:
            manifest = json.load(f)
        written = manifest["format"]
        if isinstance(written, int) and written > FORMAT:
            raise ValueError(f"its format is {written}, and this MegaRL reads up to {FORMAT}: use a newer one")
        if outside := [name for name in manifest["files"] if os.path.normpath(name).startswith(("..", os.sep))]:
            raise ValueError(f"it names {outside[0]!r:.80}, which is no file of the checkpoint")
        return {
            name: FileRecord(size=int(record["size"]), blake2b=str(record["blake2b"]))
            for name, record in manifest["files"].items()
        }
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST_FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{MANIFEST_FILE} cannot be read: {one_line(e)}") from e


def record_source(folder: str, checkpoint: str) -> None:
    """Write down that a folder is made from a checkpoint, if that has a manifest."""
    if os.path.isfile(os.path.join(checkpoint, MANIFEST_FILE)):
        with open(os.path.join(folder, SOURCE_FILE), "w", encoding="utf-8") as f:
            json.dump(_source(checkpoint), f)


def is_made_from(folder: str, checkpoint: str) -> bool:
    """Say whether a folder is made from a checkpoint with a manifest, which has not been written anew since."""
    try:
        with open(os.path.join(folder, SOURCE_FILE), encoding="utf-8", opener=only_file) as f:
            return bool(json.load(f) == _source(checkpoint))
    except (OSError, ValueError, RecursionError):
        return False


def _source(checkpoint: str) -> dict[str, object]:
    return {"manifest": asdict(record_files(checkpoint, [MANIFEST_FILE])[MANIFEST_FILE])}


def size_problem(folder: str, records: Mapping[str, FileRecord]) -> str | None:
    """Name the first file that is missing or of another size."""
    for name, record in sorted(records.items()):
        try:
            size = os.stat(os.path.join(folder, name)).st_size
        except OSError as e:
            return f"{name} is missing" if isinstance(e, FileNotFoundError) else f"{name}: {one_line(e)}"
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
    return None


def checksum_problem(folder: str, records: Mapping[str, FileRecord], names: Iterable[str]) -> str | None:
    """Name the first of these files whose contents differ from what was written; reads them all."""
    try:
        contents = record_files(folder, names)
    except OSError as e:
        return one_line(e)
    for name, record in sorted(contents.items()):
        if record != records[name]:
            return f"{name} is not what was written: its checksum differs"
    return None


def sync_folder(folder: str) -> None:
    """Wait until the folder's entries (names, renames) are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def one_line(error: BaseException) -> str:
    """Cut an error's message to its first line; a bare EOFError has none, and gives its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _record(path: str, *, sync: bool) -> FileRecord:
    digest, size, block = new_checksum(), 0, bytearray(_BLOCK)
    with open(path, "rb", buffering=0, opener=only_file) as f:
        while count := f.readinto(block):
            digest.update(memoryview(block)[:count])
            size += count
        if sync:
            os.fsync(f.fileno())
    return FileRecord(size=size, blake2b=digest.hexdigest())
