"""Starts the ranks of a run again when they end badly: `megarl train --restarts`.

Over several nodes the first node's launcher decides for all: see `megarl.nodes`. Every decision is a line on stderr and
one in RUN/restarts.jsonl: {"time": "2026-01-31T12:00:00", "attempt": 0, "code": 137, "kind": "KILLED", "rank": 3,
"host": "node7", "step": 412, "decision": "restart 1 of 5 from global_step_400 in 10 s"}.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from megarl.checkpoint.folder import read_state, whole_checkpoints
from megarl.config import Config
from megarl.config.load import with_values
from megarl.endings import Ending, ExitCode
from megarl.interfaces import say
from megarl.launcher import STOP_GRACE, attempt, noted_signals
from megarl.nodes import Node, Nodes, NodesMissing, Plan, PlanChanged
from megarl.restarts import Decision, decide, leaves
from megarl.telemetry.lines import LineFile
from megarl.telemetry.sinks.jsonl import METRICS_FILE, last_rows
from megarl.trainer.admission.checks import check_run
from megarl.trainer.less_memory import as_overrides, remember, smaller

RESTARTS_FILE = "restarts.jsonl"
"""Name of the file of decisions in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Says how far a run is started again.

    Attributes:
        limit: restarts in a row without progress.
        least_nodes: nodes without which the run does not go on.
        first_wait: seconds before the first restart of a row.
    """

    limit: int
    least_nodes: int
    first_wait: float


class Supervisor:
    """Starts the ranks of this node, and starts them again as the first node decides."""

    def __init__(
        self, command: Sequence[str], node: Node, load: Callable[[Sequence[str]], Config], restarts: Restarts
    ) -> None:
        """
        Args:
            command: starts a rank; `key=value` may follow it.
            load: loads the run's configuration with further overrides.
        """
        self._command, self._node, self._load, self._restarts = command, node, load, restarts
        trainer = load(()).trainer
        self._run_dir, self._minutes = trainer.run_dir, trainer.timeout_minutes
        self._endings: list[Ending] = []

    def run(self) -> int:
        """Run to the end of the last start; returns its exit code, 0 on a node that was left out.

        Raises:
            ValueError: the nodes do not meet the first time.
        """
        plan = Plan(members=tuple(range(self._node.nnodes)))
        nodes = Nodes(self._node, self._minutes) if self._node.nnodes > 1 else None
        while True:
            plan = nodes.plan if nodes is not None else plan
            with noted_signals() as noted:
                ending = attempt([*self._command, *plan.overrides], self._node, nodes, noted)
            following = self._following(ending, nodes, plan)
            if following is not None and nodes is not None:
                try:
                    nodes = self._meet_again(following, nodes)
                except ValueError as e:
                    say(f"not started again: {e}")
                    following = None
            elif following is not None:
                time.sleep(following.wait)
            if following is None:
                with noted_signals():
                    if nodes is not None:
                        nodes.leave(ending.code, STOP_GRACE)
                return ending.code
            if nodes is not None and nodes.number not in nodes.plan.members:
                return 0
            plan = following

    def _following(self, ending: Ending, nodes: Nodes | None, plan: Plan) -> Plan | None:
        """Return how the ranks are started next; None: this node leaves."""
        if not self._restarts.limit:
            return None
        if nodes is None:
            return self._decide(ending, None, plan)
        if nodes.number == 0:
            first = replace(nodes.first_failure(ending), asked=ending.asked) if ending.code else ending
            return self._decide(first, nodes, plan)
        return None if leaves(ending) else nodes.next_plan()

    def _decide(self, ending: Ending, nodes: Nodes | None, plan: Plan) -> Plan | None:
        ending = replace(ending, step=_last_step(self._run_dir))
        self._endings.append(ending)
        decision = decide(self._endings, limit=self._restarts.limit, first_wait=self._restarts.first_wait)
        following, changes = None, ""
        if decision.restarts:
            try:
                following, changes = self._plan(ending, decision, nodes, plan)
            except ValueError as e:
                decision = Decision(restarts=False, why=str(e))
        self._tell(ending, plan, self._words(decision, changes))
        return following

    def _plan(self, ending: Ending, decision: Decision, nodes: Nodes | None, plan: Plan) -> tuple[Plan, str]:
        """Return the next start, and what changes with it. Raises ValueError if the run cannot go on."""
        overrides, members, changes = list(plan.overrides), plan.members, ""
        if decision.smaller:
            key, value = smaller(self._load(overrides), ending.phase)
            overrides += as_overrides({key: value})
            changes = f", with {overrides[-1]}"
            try:
                remember(self._run_dir, {key: value})
            except OSError as e:
                changes += f" (this start only: {e.strerror})"
        if whole_checkpoints(self._run_dir) or self._load(overrides).trainer.resume_mode == "disable":
            overrides = [*(item for item in overrides if item != _RESUMES), _RESUMES]
        if decision.suspect is not None and nodes is not None:
            members, remark = self._without_suspect(decision.suspect, nodes, overrides)
            changes += remark
        number = plan.attempt + 1
        return Plan(attempt=number, members=members, overrides=tuple(overrides), wait=decision.wait), changes

    def _without_suspect(self, number: int, nodes: Nodes, overrides: Sequence[str]) -> tuple[tuple[int, ...], str]:
        """Leave out the node where failures begin, if the run can spare it; returns the others, and a clause."""
        who, members = nodes.describe([number]), nodes.plan.members
        if number == 0:
            return members, f"; {who} failed first again, and holds the meeting place: start the run without that host"
        others = tuple(member for member in members if member != number)
        try:
            self._check_fewer(others, overrides)
        except ValueError as e:
            return members, f"; {who} failed first again, but {e}"
        return others, f", without {who}, which failed first again"

    def _check_fewer(self, members: tuple[int, ...], overrides: Sequence[str]) -> None:
        """Raise ValueError if the run cannot go on with these nodes alone."""
        count, least, started = len(members), self._restarts.least_nodes, self._node.nnodes
        if count < least:
            raise ValueError(f"{count} of {started} nodes are fewer than --min-nodes {least}")
        try:
            check_run(with_values(self._load(overrides), "trainer", nnodes=count))
        except ValueError as e:
            raise ValueError(f"the run cannot go on with {count} of {started} nodes: {e}") from e

    def _meet_again(self, plan: Plan, before: Nodes) -> Nodes:
        """Meet the nodes of a plan, or of one with fewer nodes if some do not come back.

        Returns:
            the new meeting; the one before, with the newest plan, on a node that is left out.

        Raises:
            ValueError: they do not meet.
        """
        if before.number == 0:
            before.publish(plan)
            time.sleep(plan.wait)
        while before.number in plan.members:
            try:
                return Nodes(self._node, self._minutes, plan, before=before)
            except PlanChanged as e:
                plan = e.plan
            except NodesMissing as e:
                others = tuple(member for member in plan.members if member not in e.numbers)
                missing = f"{before.describe(e.numbers)} did not come back"
                try:
                    self._check_fewer(others, plan.overrides)
                except ValueError as wrong:
                    raise ValueError(f"{missing}, and {wrong}") from wrong
                plan = replace(plan, attempt=plan.attempt + 1, members=others, wait=0.0)
                self._tell(
                    self._endings[-1], plan, f"{missing}; going on with {len(others)} of {self._node.nnodes} nodes"
                )
                before.publish(plan)
        say(f"node {before.number} is left out: its ranks failed first again, or it came back too late")
        before.plan = plan
        return before

    def _words(self, decision: Decision, changes: str) -> str:
        if not decision.restarts:
            return f"given up: {decision.why}" if decision.why else "not started again"
        checkpoints = whole_checkpoints(self._run_dir)
        beginning = os.path.basename(checkpoints[0]) if checkpoints else "the beginning"
        return f"restart {decision.number} of {self._restarts.limit} from {beginning} in {decision.wait:g} s{changes}"

    def _tell(self, ending: Ending, plan: Plan, words: str) -> None:
        """Print a decision and append it to the restarts file; nothing after a finished run."""
        if ending.code == ExitCode.FINISHED:
            return
        say(f"{ending}; {words}")
        if not os.path.isdir(self._run_dir):  # a run that was refused leaves nothing
            return
        line = {
            "time": datetime.now().isoformat(timespec="seconds"),
            "attempt": plan.attempt,
            "code": ending.code,
            "kind": ending.kind,
            "rank": ending.rank,
            "host": ending.host,
            "step": ending.step,
            "decision": words,
        }
        try:
            file = LineFile(os.path.join(self._run_dir, RESTARTS_FILE))
            file.append(json.dumps(line) + "\n")
            file.close()
        except OSError as e:
            say(f"this could not be written to {RESTARTS_FILE}: {e.strerror}")


_RESUMES = "trainer.resume_mode=auto"


def _last_step(run_dir: str) -> int:
    """Return the last step that the metric file or a checkpoint records, as metric files count."""
    rows = last_rows(os.path.join(run_dir, METRICS_FILE))
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    with suppress(ValueError, OSError, IndexError):
        steps.append(int(read_state(whole_checkpoints(run_dir)[0])["row"]))
    return max(steps, default=0)
