"""Records each start of a run: who began it, where and with what, how long it lasted and how it ended.

RUN/starts/0001/config.yaml        the resolved configuration of this start
RUN/starts/0001/environment.json   user, hosts, code, versions, command, variables, the checkpoint it began from
RUN/starts/0001/end.json           {"seconds": 812.5, "ended": "stopped by SIGTERM"}; seconds so far, while it goes on
RUN/parent.json                    of a run that `megarl branch` made: the checkpoint of another run that it began from
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megarl.config.load import CONFIG_FILE
from megarl.telemetry.lines import only_file, rewrite

STARTS = "starts"
ENVIRONMENT_FILE, END_FILE, PARENT_FILE = "environment.json", "end.json", "parent.json"
BEAT_SECONDS = 30.0
"""Seconds between two notes of how long a start lasts: what a killed one may lack."""
_LARGEST = 2**20
_NAME = re.compile(r"\d{4,9}")


@dataclass(frozen=True, kw_only=True)
class PastStart:
    """Describes a start, as far as its files can be read.

    Attributes:
        number: counts the starts of a run from 1.
        began: seconds since 1970.
        seconds: how long it lasted, or has lasted so far.
        ended: how it ended; empty if it goes on or was killed.
        hosts: host -> its devices, such as "8 x NVIDIA H100".
        ranks: number of ranks.
        on_gpus: whether the ranks had GPUs.
        code: version and commit of megarl.
        checkpoint: folder that it began from; empty for a fresh run.
    """

    number: int
    user: str
    began: float
    seconds: float
    ended: str
    hosts: Mapping[str, str]
    ranks: int
    on_gpus: bool
    code: str
    command: str
    checkpoint: str

    @property
    def gpu_hours(self) -> float:
        return self.ranks * self.seconds / 3600 if self.on_gpus else 0.0


def record_start(run_dir: str, configuration: str, environment: Mapping[str, Any]) -> None:
    """Write down a start that begins now. Raises OSError if the disk refuses."""
    number = max((number for number, _ in _folders(run_dir)), default=0) + 1
    folder = os.path.join(run_dir, STARTS, f"{number:04d}")
    os.makedirs(folder, mode=0o700)
    rewrite(os.path.join(folder, CONFIG_FILE), configuration.encode(), private=True)
    rewrite(os.path.join(folder, ENVIRONMENT_FILE), json.dumps(dict(environment), indent=1).encode(), private=True)


class Lasting:
    """Notes from time to time how long the newest start lasts, so that this is known of a killed one, too."""

    def __init__(self, run_dir: str) -> None:
        self._folder = max(_folders(run_dir), default=(0, ""))[1]
        self._began = _number(_read(self._folder, ENVIRONMENT_FILE).get("began")) or time.time()
        self._next = 0.0

    def beat(self) -> None:
        """Note the seconds so far, unless that was done a moment ago. A disk that refuses ends no run."""
        if not self._folder or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + BEAT_SECONDS
        with suppress(OSError):
            _write_end(self._folder, {"seconds": time.time() - self._began})


def note_end(run_dir: str, began: float, how: str) -> None:
    """Write down how the newest start ended, if it is the one that began then: a refused run has recorded none."""
    folder = max(_folders(run_dir), default=(0, ""))[1]
    if folder and _read(folder, ENVIRONMENT_FILE).get("began") == began:
        _write_end(folder, {"seconds": time.time() - began, "ended": how})


def past_starts(run_dir: str, *, running: bool = False) -> list[PastStart]:
    """Read the starts of a run, in order.

    Args:
        running: the newest one goes on.
    """
    starts = [_past_start(number, folder) for number, folder in sorted(_folders(run_dir))]
    if running and starts and starts[-1].began:
        lasting = max(0.0, time.time() - starts[-1].began)
        starts[-1] = PastStart(**{**vars(starts[-1]), "seconds": lasting, "ended": ""})
    return starts


def read_parent(run_dir: str) -> dict[str, Any]:
    """Read from which checkpoint of which run a run was branched; empty if it was not."""
    return _read(run_dir, PARENT_FILE)


def _write_end(folder: str, values: Mapping[str, Any]) -> None:
    rewrite(os.path.join(folder, END_FILE), json.dumps(dict(values)).encode(), private=True)


def _folders(run_dir: str) -> list[tuple[int, str]]:
    try:
        names = os.listdir(os.path.join(run_dir, STARTS))
    except OSError:  # no start is recorded, or the folder is another user's
        return []
    return [(int(name), os.path.join(run_dir, STARTS, name)) for name in names if _NAME.fullmatch(name)]


def _past_start(number: int, folder: str) -> PastStart:
    environment, end = _read(folder, ENVIRONMENT_FILE), _read(folder, END_FILE)
    hosts, command = environment.get("hosts"), environment.get("command")
    return PastStart(
        number=number,
        user=_text(environment.get("user")),
        began=_number(environment.get("began")),
        seconds=_number(end.get("seconds")),
        ended=_text(end.get("ended")),
        hosts={_text(host): _text(devices) for host, devices in hosts.items()} if isinstance(hosts, dict) else {},
        ranks=int(_number(environment.get("ranks"))),
        on_gpus=environment.get("on_gpus") is True,
        code=_code(environment.get("code")),
        command=" ".join(map(_text, command)) if isinstance(command, list) else "",
        checkpoint=_text(environment.get("checkpoint")),
    )


def _code(values: Any) -> str:
    """Write version and commit in a line: "0.1.0, 1a2b3c4d5e6f, changed"."""
    if not isinstance(values, dict):
        return ""
    parts: Sequence[str] = [_text(values.get("version")), _text(values.get("commit"))[:12]]
    return ", ".join([part for part in parts if part] + ["changed"] * (values.get("changed") is True))


def _read(folder: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, name), encoding="utf-8", opener=only_file) as f:
            values = json.loads(f.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 2**53 and math.isfinite(value) and value > 0 else 0.0
