"""Asks a service for a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rewards.post import check_service, key_of, number_in, post_json
from megarl.rewards.registry import register


def _check_args(*, url: str, columns: Sequence[str], timeout: float, retries: int, token_env: str | None) -> None:
    check_service(url, timeout=timeout, retries=retries, key_env=token_env)
    if "response" in columns:
        raise ValueError("columns has 'response', which is the name of the response itself")


@register("http", check_args=_check_args)
async def http(
    response: str,
    row: Mapping[str, Any],
    *,
    url: str,
    columns: Sequence[str] = ("answer",),
    timeout: float = 30.0,
    retries: int = 3,
    token_env: str | None = None,
) -> float | Mapping[str, float]:
    """POST {"response": ..., "answer": ...} as JSON; the service answers a number or {"score": number, ...}.

    Further numbers beside "score" are logged. After a broken connection, a timeout or a status 408, 425, 429 or 5xx it
    is asked again, after 0.5, 1, 2, ... seconds; any other status ends the scoring of this response.

    Args:
        url: http:// or https://.
        columns: of the row, sent under their names.
        timeout: seconds of one try.
        retries: tries after the first.
        token_env: environment variable with a bearer token; the token is in no record of the run.

    Raises:
        ServiceError: the service gives no score; the message has its address and what it said.
        ValueError: a column that the row does not have, or that is no JSON.
    """
    missing = [column for column in columns if column not in row]
    if missing:
        raise ValueError(f"sends the columns {', '.join(missing)}, which the row has not: it has {', '.join(row)}")
    key = key_of(token_env)
    body = {"response": response, **{column: row[column] for column in columns}}
    return number_in(await post_json(url, body, timeout=timeout, retries=retries, key=key), url, key)
