"""Files as nobody should write them, and what reads them: run as a program that is bounded, one kind after the other.

    python tests/hostile_cases.py FOLDER CASES KIND [KIND ...]

Each case takes a whole file and spoils it, or makes one up; then what reads such files reads it. It must work, or
refuse with a ValueError of one line: no other error, no end of the process, no hang, no memory beyond a bound.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory_peak import memory_peak

MEMORY = 2 * 2**30
"""Bytes that a kind may map beyond what its imports have."""
SECONDS = 60
"""Of the processor's time that one case may take."""

Json = Any
Case = tuple[st.SearchStrategy[Any], Callable[[Any], None]]

# ------------------------------------------------------------------------------------------------ spoiling bytes

PAYLOADS = [b"\x00", b"\xff" * 8, b"\xff\xfe", b"\xed\xa0\x80", b"[" * 100_000, b"{\"a\":" * 20_000, b"9" * 5000,
            b"1e999", b"NaN", b"-1", b"null", b"\n", b"\x1b[2J", b"<|im_end|>", b"\\ud800", b"../" * 50,
            (2**63).to_bytes(8, "little"), (2**62 + 8).to_bytes(8, "little"), b"*a &a ", b"!!python/object:os.system",
            b"${oc.env:HOME}", b"a: &a [*a]", b"\xc2\x85", b"\xe2\x80\xa8"]  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "double", "insert", "write", "zero"]),
        st.floats(0, 1),
        st.integers(1, 64),
        st.sampled_from(PAYLOADS),
    ),
    min_size=1,
    max_size=4,
)


def spoilt(content: bytes, edits: list[tuple[str, float, int, bytes]]) -> bytes:
    """The content after some edits."""
    for kind, where, size, payload in edits:
        at = int(where * len(content))
        rest = content[at + size :]
        middle = {
            "flip": bytes(byte ^ (1 << size % 8) for byte in content[at : at + 1]) + content[at + 1 : at + size],
            "drop": b"",
            "double": content[at : at + size] * 2,
            "insert": payload + content[at : at + size],
            "write": payload[:size],
            "zero": b"\x00" * size,
        }
        content = content[:at] if kind == "cut" else content[:at] + middle[kind] + rest
    return content


# ------------------------------------------------------------------------------------------------- spoiling JSON

DEEP, LONG = "@@deep@@", "@@long@@"
ODD = st.sampled_from(
    [None, True, False, -1, 0, 1, 5, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf"),
     "", "x", "\x00", "\ud800", "\x1b[31m", "x" * 100_000, "../../etc/passwd", "1" * 5000, [], {}, [[]], [None], [1, 2],
     {"": None}, {"a": {"b": [1]}}, ["x"] * 1000, [-1], "BF16", "user", DEEP, LONG]
)  # fmt: skip
JSON_EDITS = st.lists(
    st.tuples(st.lists(st.floats(0, 1, exclude_max=True), max_size=6), st.sampled_from(["set", "drop", "add"]), ODD),
    min_size=1,
    max_size=3,
)


def with_edits(value: Json, edits: list[tuple[list[float], str, Json]]) -> Json:
    """A copy of a value with some places of it set, dropped or added."""
    value = json.loads(json.dumps(value))
    for path, kind, drawn in edits:
        odd = copy.deepcopy(drawn)
        at = value
        for step in path:
            keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
            if not keys:
                break
            key = keys[int(step * len(keys))]
            inner = at[key]
            if isinstance(inner, dict | list) and inner and step is not path[-1]:
                at = inner
                continue
            if kind == "set":
                at[key] = odd
            elif kind == "drop":
                del at[key]
            elif isinstance(at, dict):
                at[odd if isinstance(odd, str) else "odd"] = odd
            else:
                at.append(odd)
            break
    return value


def as_json(value: Json) -> bytes:
    text = json.dumps(value)
    return text.replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).replace(f'"{LONG}"', "7" * 4000).encode()


SPOILT_JSON = st.one_of(st.tuples(JSON_EDITS, st.just([])), st.tuples(st.just([]), EDITS), st.tuples(JSON_EDITS, EDITS))


def spoilt_json(value: Json, how: tuple[Any, Any]) -> bytes:
    return spoilt(as_json(with_edits(value, how[0])), how[1])


# ------------------------------------------------------------------------------------------------------- running


def one_line(error: BaseException) -> None:
    assert isinstance(error, ValueError) and str(error).strip() and "\n" not in str(error), repr(error)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """What is raised inside must be a refusal."""
    from megarl.data.row_files import RowsChanged

    try:
        yield
    except RowsChanged as e:
        COUNTS["refused"] += 1
        assert "\n" not in str(e)
    except ValueError as e:
        COUNTS["refused"] += 1
        one_line(e)


COUNTS = {"cases": 0, "refused": 0}


def command(*words: str) -> None:
    """`megarl WORDS`: exit code 0, or 2 with one line."""
    from megarl.cli.main import main

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(list(words))
    if code:
        COUNTS["refused"] += 1
        said = error.getvalue()
        assert code == 2 and said.startswith("megarl: error: ") and said.count("\n") == 1, (code, said[:2000])


def run_kind(case: Case, cases: int) -> None:
    strategy, use = case

    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def check(drawn: Any) -> None:
        COUNTS["cases"] += 1
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        use(drawn)
        signal.setitimer(signal.ITIMER_PROF, 0)

    check()


def bound_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


def main(folder: Path, cases: int, names: list[str]) -> None:
    import hostile_kinds

    for name in names:
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        COUNTS.update(cases=0, refused=0)
        case = hostile_kinds.KINDS[name](place)
        case[1](None)  # what is whole is read; and what reads it is imported
        soft = resource.getrlimit(resource.RLIMIT_AS)
        if soft[0] == resource.RLIM_INFINITY:
            bound_memory()
        run_kind(case, cases)
        print(json.dumps({"kind": name, **COUNTS, "most": memory_peak()}), flush=True)


if __name__ == "__main__":
    import hostile_cases  # the one that the kinds count in

    hostile_cases.main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
