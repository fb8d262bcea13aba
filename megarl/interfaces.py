"""Chooses the network interfaces over which the nodes of a job talk."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import MutableMapping
from contextlib import suppress

import psutil

from megarl.parallel.meeting import use_interface
from megarl.plain import plain

POLL_SECONDS = 0.1
NAME_SECONDS = 10.0
"""For which a server of names may be away."""


def interface_towards(address: str) -> str | None:
    """Return the network interface over which this host reaches an address; None if it is unknown, or loopback where
    the address is not: a host may give its local name an address of loopback."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            local = probe.getsockname()[0]
    except OSError:
        return None
    if _is_loopback(local) and not _is_loopback(address):
        return None
    interfaces = psutil.net_if_addrs()
    return next((name for name, parts in interfaces.items() if any(part.address == local for part in parts)), None)


def stay_on_interface(address: str, environment: MutableMapping[str, str]) -> None:
    """Let ranks of several nodes talk over the interface that leads to the first node, unless the user chose others."""
    if name := interface_towards(address):
        use_interface(name, environment)


def check_name(host: str) -> None:
    """Refuse a host name without an address: ranks would ask for it for ever. Raises ValueError."""
    end = time.monotonic() + NAME_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as e:
            code = e.errno if isinstance(e, socket.gaierror) else None
            if code != socket.EAI_AGAIN or time.monotonic() > end:
                raise ValueError(
                    f"{socket.gethostname()} finds no address of node 0's host '{host}' ({e}); give another "
                    f"--master-addr: a name that every node knows, or an IP address"
                ) from e
        time.sleep(POLL_SECONDS)


def listen(address: str, port: int) -> socket.socket:
    """Listen on the address where other nodes look for this one; on all if it is none of this host's."""
    with suppress(OSError):
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if _is_loopback(address) or not _is_loopback(str(where[0])):
            with socket.socket(family) as probe:
                probe.bind((where[0], 0))  # else it is another host's: of a gateway, say
            return socket.create_server(where[:2], family=family)
    say(f"{address} is no address of this host's own network: the job's store listens on all interfaces")
    return socket.create_server(("0.0.0.0", port))


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def say(text: str) -> None:
    """Tell a person one line."""
    with suppress(OSError):  # nobody reads it; the ranks go on
        print(f"megarl: {plain(text)}", file=sys.stderr, flush=True)
