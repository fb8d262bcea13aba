"""Messages between two processes over a socket, without ever waiting for the other side. Torch-free."""

from __future__ import annotations

import select
import socket
import struct

_LENGTH = struct.Struct("!Q")
_READ = 1 << 18


def framed(message: bytes) -> bytes:
    """As it travels."""
    return _LENGTH.pack(len(message)) + message


def take_messages(received: bytearray, longest: int | None = None) -> list[bytes]:
    """The messages that have arrived whole, which are removed from what was received.

    Args:
        longest: bytes of a message that is believed.

    Raises:
        EOFError: a longer one begins.
    """
    found, at = [], 0
    while len(received) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received, at)
        if longest is not None and length > longest:
            raise EOFError
        if len(received) - at - _LENGTH.size < length:
            break
        at += _LENGTH.size
        found.append(bytes(received[at : at + length]))
        at += length
    del received[:at]
    return found


class Channel:
    """One end of a connection."""

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
        self._out += framed(message)
        self.flush()

    def flush(self) -> bool:
        """Whether everything is handed over. What cannot be, because the other side is gone, is dropped."""
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
        """The messages that have arrived.

        Raises:
            EOFError: the other side is gone, or sends what is no message; and what it sent before has been returned.
        """
        ended = False
        while True:
            try:
                read = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                read = b""
            if not read:
                ended = True
                break
            self._in += read
            if len(self._in) > 8 * _READ:  # the rest waits in the kernel while these are dealt with
                break
        messages = take_messages(self._in, self._longest)
        if ended and not messages:
            raise EOFError
        return messages

    @property
    def is_between_messages(self) -> bool:
        """Whether no part of a message waits for its rest."""
        return not self._in

    def wait(self) -> None:
        """Sleep until there is something to receive, sending meanwhile what is left."""
        while not self._sleep(select.POLLIN | (0 if self.flush() else select.POLLOUT)) & ~select.POLLOUT:
            pass

    def drain(self) -> None:
        """Sleep until everything is handed over."""
        while not self.flush():
            self._sleep(select.POLLOUT)

    def _sleep(self, events: int) -> int:
        poll = select.poll()  # unlike select, for descriptors of any number
        poll.register(self, events)
        ((_, happened),) = poll.poll()
        return happened

    def close(self) -> None:
        self._socket.close()
