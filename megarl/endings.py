"""Says how ranks end: the exit codes of a run, and what launchers learn of the rank that failed first. Torch-free."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

NOTES_VARIABLE = "MEGARL_NOTES"
"""Name of the variable with the folder in which the ranks of a node leave notes for their launcher."""

_ASKED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP})


class ExitCode(IntEnum):
    """Lists the exit codes of a rank, and so of a run; a process that signal s ended has 128 + s."""

    FINISHED = 0
    FAILED = 1  # an error of no kind below: a flow's or loss's of the user's own, a disk's, or a fault of the program
    REFUSED = 2
    STOPPED = 10  # the run ended itself: losses that are not finite, ranks that disagree, a checkpoint that fails
    INPUT = 11  # a reward, an environment or another function of the user's failed, or the data changed
    LOST = 12  # another rank or node is gone, or communication failed
    STALLED = 13  # other ranks were waited for too long
    OUT_OF_MEMORY = 14  # of a GPU
    DEVICE = 15  # a GPU failed


_WORDS = {
    ExitCode.FAILED: "failed",
    ExitCode.REFUSED: "was refused",
    ExitCode.STOPPED: "stopped itself",
    ExitCode.INPUT: "was given what failed",
    ExitCode.LOST: "lost its connection to others",
    ExitCode.STALLED: "waited too long for others",
    ExitCode.OUT_OF_MEMORY: "ran out of GPU memory",
    ExitCode.DEVICE: "lost its GPU",
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Describes how the ranks of a job ended: by the first that failed.

    Attributes:
        code: its exit code, or 128 + s if signal s killed it.
        rank: its number; None if no rank failed, or a whole node is gone.
        node, host: where it was.
        asked: a signal had asked the launcher to stop before.
        step: the last one that is recorded, as metric files count; 0 without any.
        phase: where GPU memory ran out.
    """

    code: int
    rank: int | None = None
    node: int = 0
    host: str = ""
    asked: bool = False
    step: int = 0
    phase: str = ""

    @property
    def killed_by(self) -> int | None:
        """Return the signal that killed the rank, unless it is one that asks a run to stop."""
        number = self.code - 128
        return number if number > 0 and number not in _ASKED else None

    @property
    def kind(self) -> str:
        """Return the exit code's name, "KILLED", or the name of the signal that asked the run to stop."""
        if self.code > 128:
            return "KILLED" if self.killed_by else signal.Signals(self.code - 128).name
        return ExitCode(self.code).name if self.code in set(ExitCode) else f"CODE_{self.code}"

    def __str__(self) -> str:
        """Say who failed, where, how and when; a clause."""
        who = f"node {self.node}" if self.rank is None else f"rank {self.rank}"
        if (number := self.killed_by) is not None:
            names = {member.value: member.name for member in signal.Signals}
            how = f"was killed ({names.get(number, f'signal {number}')})"
        elif self.rank is None:
            how = "is gone"
        else:
            how = _WORDS.get(self.code, f"ended with exit code {self.code}")  # type: ignore[call-overload]
        phase = f" in the phase {self.phase}" if self.phase else ""
        return f"{who} on {self.host} {how}{phase} {f'after step {self.step}' if self.step > 0 else 'before step 1'}"


def note_phase(rank: int, phase: str) -> None:
    """Tell the launcher in which phase this rank's memory ran out; under another launcher nobody is told."""
    if folder := os.environ.get(NOTES_VARIABLE):
        with suppress(OSError), open(os.path.join(folder, f"phase-{rank}"), "w", encoding="utf-8") as f:
            f.write(phase)


def noted_phase(folder: str, rank: int) -> str:
    """Read what `note_phase` wrote; empty without a note."""
    try:
        with open(os.path.join(folder, f"phase-{rank}"), encoding="utf-8") as f:
            return f.read(100)
    except OSError:
        return ""
