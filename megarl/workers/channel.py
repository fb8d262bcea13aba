"""Carries framed messages between two processes, over one connection. Torch-free.

A message is its number of bytes (8, big-endian) and these bytes. `read_message` and `write_message` wait for the other
side; a `Channel` waits only where it is told to, and up to a deadline.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time

LENGTH = struct.Struct("!Q")
_READ = 1 << 18


def write_message(descriptor: int, message: bytes) -> None:
    """Write a message; raises OSError if the other side has gone."""
    data = memoryview(LENGTH.pack(len(message)) + message)
    while data:
        data = data[os.write(descriptor, data) :]


def read_message(descriptor: int) -> bytes | None:
    """Wait for the next message; None if the other side has gone."""
    head = _read(descriptor, LENGTH.size)
    return None if head is None else _read(descriptor, *LENGTH.unpack(head))


def _read(descriptor: int, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        try:
            part = os.read(descriptor, min(_READ, length - len(data)))
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


class Channel:
    """Sends and receives messages at one end of a connection, for a process that must not wait for the other side."""

    def __init__(self, connection: socket.socket, longest: int | None = None) -> None:
        """
        Args:
            longest: bytes of a message that is believed; a longer one ends the connection.
        """
        connection.setblocking(False)
        self._socket, self._longest = connection, longest
        self._in, self._out = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Hand over as much as the other side takes now; `flush` goes on with the rest."""
        self._out += LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> bool:
        """Hand over more; returns whether everything is handed over. A side that is gone takes everything."""
        while self._out:
            try:
                sent = self._socket.send(self._out[:_READ])
            except BlockingIOError:
                return False
            except OSError:
                self._out.clear()
                break
            del self._out[:sent]
        return True

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived.

        Raises:
            EOFError: the other side is gone, or sends what is no message; and what it sent before has been returned.
        """
        ended = False
        while True:
            try:
                part = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                ended = True
                break
            self._in += part
            if len(self._in) > 8 * _READ:  # the rest waits in the kernel while these are dealt with
                break
        messages = self._take_messages()
        if ended and not messages:
            raise EOFError
        return messages

    def _take_messages(self) -> list[bytes]:
        """Remove the messages that have arrived whole from what was received; raises EOFError where one is too long."""
        messages, at = [], 0
        while len(self._in) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in, at)
            if self._longest is not None and length > self._longest:
                raise EOFError
            if len(self._in) - at - LENGTH.size < length:
                break
            at += LENGTH.size + length
            messages.append(bytes(self._in[at - length : at]))
        del self._in[:at]
        return messages

    @property
    def is_between_messages(self) -> bool:
        """Tell whether no part of a message waits for its rest."""
        return not self._in

    def wait(self, deadline: float = math.inf) -> None:
        """Sleep until there is something to receive, sending meanwhile what is left; raises TimeoutError."""
        while not wait_for(self, select.POLLIN | (0 if self.flush() else select.POLLOUT), deadline) & ~select.POLLOUT:
            pass

    def drain(self) -> None:
        """Sleep until everything is handed over."""
        while not self.flush():
            wait_for(self, select.POLLOUT)

    def close(self) -> None:
        self._socket.close()


def wait_for(connection: socket.socket | Channel, events: int, deadline: float = math.inf) -> int:
    """Sleep until one of some events of `select.poll` happens, and return it.

    Args:
        deadline: in seconds of `time.monotonic`.

    Raises:
        TimeoutError: none has happened by then.
    """
    poll = select.poll()  # unlike select, for descriptors of any number
    poll.register(connection, events)
    left = deadline - time.monotonic()
    happened = poll.poll(None if left == math.inf else left * 1000) if left > 0 else []
    if not happened:
        raise TimeoutError
    return happened[0][1]
