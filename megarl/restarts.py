"""Decides whether the ranks of a run that ended are started again. Pure: endings go in, a decision comes out.

| how it ended | decision |
| --- | --- |
| finished, refused, stopped itself, a reward or the data failed | leave: another start would end the same way |
| a signal asked it to stop | leave: a person, or the scheduler that starts it again, wants so |
| killed, another rank or GPU lost, stalled | restart |
| out of GPU memory | restart with smaller micro-batches |
| another error | restart, once unless it gets further |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from megarl.endings import Ending, ExitCode

LONGEST_WAIT = 300.0
"""Seconds before a restart at most."""
HOST_FAILURES = 2
"""Failures in a row that began on one host, after which it is left out where nodes can be spared."""
_NEVER = (ExitCode.FINISHED, ExitCode.REFUSED, ExitCode.STOPPED, ExitCode.INPUT)
_ALIKE = 3  # failures in a row that look the same, and between which no step was done: no luck will change that
_ALIKE_FAILED = 2  # an error with a traceback: most often it is in the code


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Says what follows an ending.

    Attributes:
        restarts: the ranks are started again; otherwise the launcher leaves with the ending's code.
        number: of this restart, of the most that may follow each other without progress.
        wait: seconds before it.
        smaller: GPU memory ran out: the micro-batches must become smaller, or the run cannot go on.
        suspect: the node whose host failed first too often; None: none did.
        why: why it is given up, where a restart might have helped; a clause.
    """

    restarts: bool
    number: int = 0
    wait: float = 0.0
    smaller: bool = False
    suspect: int | None = None
    why: str = ""


def leaves(ending: Ending) -> bool:
    """Tell whether an ending is one after which no restart helps or is wanted."""
    return ending.asked or ending.code in _NEVER or (ending.code > 128 and ending.killed_by is None)


def decide(endings: Sequence[Ending], *, limit: int, first_wait: float) -> Decision:
    """Decide what follows the last ending.

    Args:
        endings: of all starts of this launcher, in order; never empty.
        limit: restarts in a row, without training getting past the step of the failures before.
        first_wait: seconds before the first restart of a row; each later wait is twice as long.
    """
    last, row = endings[-1], in_a_row(endings)
    if leaves(last):
        return Decision(restarts=False)
    if len(row) > limit:
        return Decision(restarts=False, why=f"of --restarts {limit} in a row, none got beyond step {_furthest(row)}")
    alike = len([*takewhile(lambda ending: _look_of(ending) == _look_of(last), reversed(row))])
    most = _ALIKE_FAILED if last.code == ExitCode.FAILED else _ALIKE
    if last.code != ExitCode.OUT_OF_MEMORY and alike >= most:
        return Decision(restarts=False, why=f"it ended {alike} times in the same way, and no step was done in between")
    return Decision(
        restarts=True,
        number=len(row),
        wait=min(LONGEST_WAIT, first_wait * 2 ** (len(row) - 1)),
        smaller=last.code == ExitCode.OUT_OF_MEMORY,
        suspect=_suspect(row),
    )


def in_a_row(endings: Sequence[Ending]) -> list[Ending]:
    """Return the endings since training last got past the step of a failure, the last one included."""
    row: list[Ending] = []
    for ending in endings:
        if row and ending.step > _furthest(row):
            row = []
        row.append(ending)
    return row


def _furthest(row: Sequence[Ending]) -> int:
    return max(ending.step for ending in row)


def _look_of(ending: Ending) -> tuple[int, int | None, int, int]:
    return ending.code, ending.rank, ending.node, ending.step


def _suspect(row: Sequence[Ending]) -> int | None:
    """Name the node on which a rank, its GPU or all of it was lost each time, several times in a row."""
    node, last = row[-1].node, row[-HOST_FAILURES:]
    if len(last) < HOST_FAILURES or any(ending.node != node or not _is_of_host(ending) for ending in last):
        return None
    return node


def _is_of_host(ending: Ending) -> bool:
    """Tell whether a failure began on its host; a rank that lost another one, or waited, reports somebody else's."""
    return ending.killed_by is not None or ending.code == ExitCode.DEVICE or ending.rank is None
