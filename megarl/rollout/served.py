"""Serves requests by an engine, which may be a user's, and checks the completions that it returns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megarl.models.weights import EMBEDDING
from megarl.own_code import OwnCodeError, form_of, name_of
from megarl.rollout.engine import Engine, Request
from megarl.types import Completion, Tokens


class Served:
    """Passes requests to an engine, and takes their completions.

    Methods raise OwnCodeError, naming the engine, where it returns what `Engine` does not allow.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._name = engine, f"the engine {name_of(type(engine))}"
        self._waiting: dict[int, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """See `Engine.submit`."""
        self._engine.submit(requests)
        self._waiting |= {request.key: request for request in requests}

    @property
    def busy(self) -> bool:
        """Tell whether requests are not finished."""
        busy = bool(self._engine.busy)
        if self._waiting and not busy:
            raise OwnCodeError(f"{self._name} is not busy, and {len(self._waiting)} requests are not finished")
        return busy

    def step(self) -> Mapping[int, Completion]:
        """See `Engine.step`."""
        return self._taken(self._engine.step(), "step", ("stop", "length"))

    def interrupt(self) -> Mapping[int, Completion]:
        """See `Engine.interrupt`."""
        completions = self._taken(self._engine.interrupt(), "interrupt", (None,))
        if self._waiting:
            raise OwnCodeError(f"{self._name}: interrupt() left out {len(self._waiting)} unfinished requests")
        return completions

    def _taken(self, completions: Any, method: str, reasons: Sequence[str | None]) -> Mapping[int, Completion]:
        if not isinstance(completions, Mapping):
            raise OwnCodeError(f"{self._name}: {method}() must return completions by key, not {form_of(completions)}")
        for key, completion in completions.items():
            request = self._waiting.pop(key, None)
            if request is None:
                raise OwnCodeError(f"{self._name}: {method}() returned key {key!r}, of no request that is not finished")
            if problem := _problem(request, completion, reasons):
                raise OwnCodeError(f"{self._name}: {method}() returned for request {key} {problem}")
        return completions


def weights_of(engine: Engine) -> Mapping[str, Tensor]:
    """Return the weights of an engine by name: see `Engine.parameters`.

    Raises:
        OwnCodeError: it does not give them.
    """
    weights: Any = engine.parameters()
    if not isinstance(weights, Mapping) or EMBEDDING not in weights:
        raise OwnCodeError(
            f"the engine {name_of(type(engine))}: parameters() must return all weights by name, {EMBEDDING} among "
            f"them, not {form_of(weights)}"
        )
    return weights


def _problem(request: Request, completion: Any, reasons: Sequence[str | None]) -> str | None:
    """Say what is wrong with the completion of a request; None: nothing is."""
    if not isinstance(completion, Completion) or not isinstance(completion.response, Tokens):
        return f"{form_of(completion)}, and no Completion with Tokens"
    ids, logp, before = completion.response.ids, completion.response.logp, request.response
    if completion.finish_reason not in reasons:
        return f"finish_reason = {completion.finish_reason!r}, and not {' or '.join(map(repr, reasons))}"
    if not isinstance(ids, array) or not isinstance(logp, array) or (ids.typecode, logp.typecode) != ("i", "f"):
        return "token ids that are no array('i'), or log-probabilities that are no array('f'); use Tokens.drawn"
    if len(ids) != len(logp):
        return f"{len(ids)} token ids with {len(logp)} log-probabilities"
    if ids[: len(before)] != before.ids:
        return "a response that does not begin with the request's"
    added, most = len(ids) - len(before), request.params.max_tokens
    if len(ids) > most or (added == 0 and completion.finish_reason is not None):
        return f"{added} new tokens; there must be 1 to {most - len(before)}"
    return None
