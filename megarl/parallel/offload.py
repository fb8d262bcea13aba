"""Gives memory back for a while, under tensors that stay the same objects.

The storage behind the tensors goes (`untyped_storage().resize_(0)`). Parameters, buckets and every other view
that shares it are valid again when it is back, with the same contents to the bit, or without (`Dropped`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megarl.parallel.megatron_internals import storage_identity

Tensors = Callable[[], Iterable[Tensor]]
"""Called anew at each release: an optimizer's tensors appear with its first step."""

SLAB = 2**28
"""Bytes of a piece of pinned memory. A power of two, because torch rounds pinned memory up to one."""


class Resident:
    """Is memory that never leaves the device, and the base class of memory that does."""

    def release(self) -> None:
        """Give the memory back; nothing may touch the tensors until `restore`. Nothing happens if it is."""

    def prefetch(self) -> None:
        """Begin to bring the contents back, beside whatever else the device does."""

    def rewritten(self) -> None:
        """Note that the contents, constant so far, were written anew."""

    def restore(self) -> None:
        """Bring the tensors back, for what follows on the current stream. Nothing happens if they are there."""


class Dropped(Resident):
    """Gives memory back and loses its contents."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._released: list[tuple[torch.UntypedStorage, int]] = []

    def release(self) -> None:
        if not self._released:
            self._free(storages(self._tensors()))

    def restore(self) -> None:
        for storage, nbytes in self._released:
            storage.resize_(nbytes)
        self._released = []

    def _free(self, present: list[torch.UntypedStorage]) -> None:
        self._released = [(storage, storage.nbytes()) for storage in present]
        for storage in present:
            storage.resize_(0)


class Rebuilt(Dropped):
    """Gives memory back and computes its contents again.

    Args:
        source: what they are computed from, which is restored before.
        rebuild: fills the tensors.
    """

    def __init__(self, tensors: Tensors, source: Resident, rebuild: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._source, self._rebuild = source, rebuild

    def prefetch(self) -> None:
        if self._released:
            self._source.prefetch()

    def restore(self) -> None:
        if self._released:
            self._source.restore()
            super().restore()
            self._rebuild()


class OnHost(Dropped):
    """Keeps the contents of memory on the host meanwhile: pinned on GPUs, taken at the first release and kept.

    Args:
        constant: the contents never change, so that they are copied to the host once.
    """

    def __init__(self, tensors: Tensors, *, constant: bool = False) -> None:
        super().__init__(tensors)
        self._constant = constant
        self._slabs: list[Tensor] = []
        self._arrival: Any = None  # the event after which the contents are back

    def release(self) -> None:
        if self._released:
            return
        self.restore()  # finish an outstanding prefetch first, or its copy would write into freed memory
        present = storages(self._tensors())
        nbytes = sum(storage.nbytes() for storage in present)
        copied = sum(map(len, self._slabs)) == nbytes
        if not copied:
            self._slabs = []  # given back before more is taken: pinned memory for both may not be there
            self._slabs = _slabs(nbytes, present[0].device)
        if not (copied and self._constant):
            for host, device in self._pieces(present):
                host.copy_(device, non_blocking=True)
        self._free(present)  # on this stream, hence after the copies

    def rewritten(self) -> None:
        self._slabs = []

    def prefetch(self) -> None:
        if not self._released:
            return
        absent = [storage for storage, _ in self._released]
        super().restore()
        stream = _copy_stream()
        stream.wait_stream(torch.cuda.current_stream())  # the memory was somebody else's until now
        with torch.cuda.stream(stream):
            for host, device in self._pieces(absent):
                device.copy_(host, non_blocking=True)
            self._arrival = stream.record_event()

    def restore(self) -> None:
        self.prefetch()
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None

    def _pieces(self, of: list[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the storages' bytes, one after the other, on the host and on the device; cut where a slab ends."""
        at = 0
        for storage in of:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(there):
                slab, offset = divmod(at, SLAB)
                host = self._slabs[slab][offset : offset + len(there)]
                yield host, there[: len(host)]
                there, at = there[len(host) :], at + len(host)


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """List the storages behind some tensors, each once."""
    behind = (tensor.untyped_storage() for tensor in tensors)
    return list({storage_identity(storage): storage for storage in behind}.values())


def _slabs(nbytes: int, device: torch.device) -> list[Tensor]:
    sizes = [min(SLAB, nbytes - start) for start in range(0, nbytes, SLAB)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for size in sizes]


@functools.cache
def _copy_stream() -> Any:
    return torch.cuda.Stream()
