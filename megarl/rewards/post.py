"""Sends a JSON request to a service that may be slow, busy or broken."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_MOST = 1 << 20  # bytes of an answer
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds before the second try, doubled for each further one
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses after which another try may succeed


class ServiceError(RuntimeError):
    """Raised where a service gave no score; the message is one line with its address and what it said."""


class _TryAgain(Exception):
    """Raised where the service is busy or was cut off; the message says how."""


async def post_json(url: str, body: Any, *, timeout: float, retries: int, key: str | None = None) -> Any:
    """Send a JSON request, and return the answer, decoded.

    It waits 0.5, 1, 2, ... seconds before further tries; each try has its own timeout. Without a deadline around it,
    it takes at most (retries + 1) * timeout and the waits.

    Args:
        timeout: seconds of one try, from the connection to the answer's last byte.
        retries: tries after the first, where the connection breaks or times out, and for statuses 408, 425, 429, 5xx.
        key: sent as a bearer token; never part of a message.

    Raises:
        ServiceError: any other status, an answer over 1 MiB or that is no JSON, or no try succeeded.
        ValueError: the body is no JSON.
    """
    try:
        sent = json.dumps(body).encode()
    except (TypeError, ValueError) as e:
        raise ValueError(f"cannot send the row to {url.partition('?')[0]}: {e}") from e
    wait = _FIRST_WAIT
    for left in range(retries, -1, -1):
        try:
            content = await _once(url, sent, timeout, key)
            break
        except _TryAgain as e:
            if not left:
                tries = f"in each of {retries + 1} tries, the last time: " if retries else ""
                raise ServiceError(_line_of(url, f"{tries}{e}", key)) from e
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise ServiceError(_line_of(url, f"answered what is no JSON: {content[:200]!r}", key)) from e


async def _once(url: str, body: bytes, timeout: float, key: str | None) -> bytes:
    import aiohttp

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    limits = aiohttp.ClientTimeout(total=timeout)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, headers=headers, auto_decompress=False) as session,
            session.post(url, data=body, allow_redirects=False) as answer,
        ):
            content = b""
            async for part in answer.content.iter_chunked(1 << 16):
                content += part
                if len(content) > _MOST:
                    raise ServiceError(_line_of(url, f"answered more than {_MOST} bytes", key))
    except (TimeoutError, asyncio.TimeoutError) as e:  # two classes before Python 3.11
        raise _TryAgain(f"no answer in {timeout:g} s") from e
    except aiohttp.InvalidURL as e:
        raise ServiceError(_line_of(url, "is no address", key)) from e
    except (aiohttp.ClientError, OSError) as e:
        raise _TryAgain(str(e) or type(e).__name__) from e
    if answer.status in _BUSY:
        raise _TryAgain(f"status {answer.status}: {_shown(content)}")
    if answer.status >= 300:
        raise ServiceError(_line_of(url, f"status {answer.status}: {_shown(content)}", key))
    return content


def check_service(url: str, *, timeout: float, retries: int, key_env: str | None) -> None:
    """Raise ValueError for an address that cannot be one, and for an environment variable that is not set."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port over 65535, an open bracket
        usable = False
    if not usable or re.search(r"\s", url):
        raise ValueError(f"{url!r:.200} is no address: use http://host:port/path or https://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address with a password would be in every record of the run: use token_env or api_key_env")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout = {timeout} must be seconds, more than 0")
    if not 0 <= retries <= 100:
        raise ValueError(f"retries = {retries} must be 0 to 100")
    key_of(key_env)


def key_of(variable: str | None) -> str | None:
    """Read the token in an environment variable; raises ValueError if there is none, or if no header can hold it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"the environment variable {variable} is {'no token' if key else 'not set'}")
    return key


def number_in(answer: Any, url: str, key: str | None) -> float | Mapping[str, float]:
    """Read a service's answer: a score, or a mapping of numbers with "score"; raises ServiceError for another value."""
    if isinstance(answer, dict) and "score" in answer:
        numbers = {name: float(value) for name, value in answer.items() if _is_number(value)}
        if "score" in numbers:
            return numbers
    elif _is_number(answer):
        return float(answer)
    raise ServiceError(_line_of(url, f"answered neither a number nor an object with 'score': {answer!r:.200}", key))


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number under 1e300: JSON as Python reads it has NaN, and whole numbers of any size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300


def _shown(content: bytes) -> str:
    return " ".join(content[:1000].decode(errors="replace").split())[:200]


def _line_of(url: str, what: str, key: str | None) -> str:
    """Write an error's line without the token, which a service may repeat that refuses it."""
    line = " ".join(f"POST {url.partition('?')[0]}: {what}".split())
    return line.replace(key, "***") if key else line
