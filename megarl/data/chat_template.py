"""Renders chat templates, which are programs of whoever made the tokenizer, in a process that is bounded. Torch-free.

The process imports jinja2 alone. It ends when its memory or the time of its processor is used up, or with the process
that started it.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megarl.workers.channel import read_message, write_message

MEMORY = 2**29
"""Bytes that the process may map."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """Parses `{% generation %}`, which marks the assistant's text for other programs and leaves the text as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names by which a template would come out of the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *positional = args
        given = dict(*positional, **values)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r:.40}")


def _refuse(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(8)
def _compiled(template: str) -> jinja2.Template:
    """Compile a template in the environment that transformers gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


def render(template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """Write the text of a conversation; raises what the template raises."""
    completed = []
    for message in messages:
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        aliases = {} if reasoning is None else {"reasoning_content": reasoning}
        completed.append({**({"thinking": reasoning} if aliases else {}), **message, **aliases})
    return _compiled(template).render(messages=completed, **variables)


def serve(connection: socket.socket) -> None:
    """Answer requests until the connection is closed, in a process of its own.

    The first message is how many seconds of the processor's time a text may take. Each further one is JSON, the
    arguments of `render`; its answer is {"text": ...} or {"error": ...}.
    """
    descriptor = connection.fileno()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = float(read_message(descriptor) or 0)
    while (request := read_message(descriptor)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process, whatever it is in
        answer = _answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(descriptor, answer)


def _answer(request: bytes) -> bytes:
    try:
        text = render(**json.loads(request))
        if len(text) > 2**20 + 16 * len(request):
            return _json(error=f"it writes {len(text)} characters for messages of {len(request)} bytes")
        return _json(text=text)
    except MemoryError:
        return _json(error=f"it needs more than {MEMORY // 2**20} MiB of memory")
    except RecursionError:
        return _json(error="it calls itself without end, or the messages are nested too deeply")
    except Exception as e:  # templates are programs and raise what they like
        return _json(error=" ".join(str(e)[:1000].split())[:200] or type(e).__name__)


def _json(**fields: str) -> bytes:
    return json.dumps(fields).encode()
