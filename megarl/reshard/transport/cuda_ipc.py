"""Maps other processes' GPU memory into this one's address space, by the CUDA driver's interprocess handles.

torch shares storages between processes, too, but it opens them in a context on the owner's GPU, which takes hundreds of
MiB there, and it counts one receiver for each time that a storage is shared, keeping what nobody opened. The driver
maps memory into the context of this process's own GPU, and closes it when it is told to.

Every call needs a CUDA context, which torch makes for the first tensor on a GPU. All addresses are on GPUs.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

_BUFFER_ID = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID: a number that no other allocation of the process has had or will have."""
_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class _Handle(ctypes.Structure):
    """Has the layout of CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Identifies a piece of memory as the driver gave it out; torch's allocator divides it among tensors.

    Attributes:
        start: address.
        number: this allocation's and no other's, even if a later one has its address.
    """

    start: int
    number: int


def allocation_at(address: int) -> Allocation:
    """Find the allocation around an address.

    Raises:
        OSError: there is none.
    """
    start, size = c_ulonglong(), c_size_t()
    _call("cuMemGetAddressRange_v2", byref(start), byref(size), address)
    return Allocation(start=start.value, number=_number_of(start.value))


def still_there(allocation: Allocation) -> bool:
    """Say whether the memory is still the same allocation's: an address alone may have been given out anew."""
    try:
        return _number_of(allocation.start) == allocation.number
    except OSError:
        return False


def _number_of(address: int) -> int:
    number = c_ulonglong()
    _call("cuPointerGetAttribute", byref(number), _BUFFER_ID, address)
    return number.value


def export_handle(allocation: Allocation) -> bytes:
    """Make the handle with which another process on this host maps the allocation.

    Raises:
        OSError: memory of this kind cannot be shared.
    """
    handle = _Handle()
    _call("cuIpcGetMemHandle", byref(handle), allocation.start)
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation; returns its address here.

    Raises:
        OSError: it cannot be mapped.
    """
    address = c_ulonglong()
    _call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    """Unmap what `open_handle` has mapped there. No kernel may still be reading it."""
    _call("cuIpcCloseMemHandle", address)


def _call(function: str, *args: Any) -> None:
    code = getattr(_driver(), function)(*args)
    if code:
        name = c_char_p()
        _driver().cuGetErrorName(code, byref(name))
        raise OSError(f"{function}: {(name.value or b'unknown error').decode()} ({code})")


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemGetAddressRange_v2.argtypes = [c_void_p, c_void_p, c_ulonglong]
    driver.cuPointerGetAttribute.argtypes = [c_void_p, c_int, c_ulonglong]
    driver.cuIpcGetMemHandle.argtypes = [c_void_p, c_ulonglong]
    driver.cuIpcOpenMemHandle_v2.argtypes = [c_void_p, _Handle, c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [c_ulonglong]
    driver.cuGetErrorName.argtypes = [c_int, c_void_p]
    return driver
