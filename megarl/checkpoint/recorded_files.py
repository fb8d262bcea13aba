"""Takes the sizes and checksums of files while torch writes them, so that nothing is read again for its manifest."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.utils.serialization import config as serialization

from megarl.checkpoint.manifest import FileRecord, new_checksum

_BLOCK = 2**21
"""Bytes that are hashed and then written, while they are in the processor's cache."""


class RecordingWriter(FileSystemWriter):
    """Writes tensors and objects as torch does; each call of `write_data` writes one file per plan of its list.

    The files are zip archives without checksums of their own: torch computes these slower than a disk writes, and does
    not compare them when it reads.

    Attributes:
        records: of the files that are written, by name.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self.records: dict[str, FileRecord] = {}
        self.fs = _RecordingFileSystem(self.records)


class _RecordingFileSystem(FileSystem):
    def __init__(self, records: dict[str, FileRecord]) -> None:
        self._records = records

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        without_crc = serialization.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
        with _RecordedFile(path, "wb") as file, without_crc:
            yield file
        self._records[os.path.basename(path)] = FileRecord(size=file.size, blake2b=file.digest.hexdigest())


class _RecordedFile(io.FileIO):
    """Writes a file from its beginning to its end.

    Attributes:
        size: bytes that were written.
        digest: of these bytes.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        super().__init__(path, mode)
        self.size, self.digest = 0, new_checksum()

    def write(self, data: Any) -> int:
        """Write all of `data`; raises OSError."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        while rest:
            block = rest[:_BLOCK]
            self.digest.update(block)
            while block:
                block = block[super().write(block) :]
            rest = rest[_BLOCK:]
        self.size += length
        return length

    def close(self) -> None:
        """Close the file, whose pages the host's memory need not keep: they are on the disk."""
        if not self.closed:
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        super().close()
