"""Joins the launchers of a job: they meet before any rank starts, compare how they were started, and end together.

Where the first node's launcher starts the ranks again, it publishes a `Plan`, and the launchers that this names meet
again: each meeting has keys of its own.

All of it is in the store of the first node's launcher, in which the ranks meet, too. It is a TCP server that asks
nobody for a password: the network between the nodes must be trusted with it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore

from megarl.endings import Ending, ExitCode
from megarl.interfaces import check_name, listen, say

POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0  # how often a node looks at the others
FIRST_WORD, NEXT_WORD = 5.0, 60.0  # seconds until it is said which nodes are waited for, and between two such lines
GONE_SECONDS = 120.0  # without a sign of life: the launcher's machine is gone, or no longer on the network
LEAVE_SECONDS = 3.0  # what a node of a job that failed has to take its leave
REJOIN_SECONDS = 120.0  # what a node has to come back to a later meeting, or the first one to say what follows
_PLAN, _OVER = "megarl/plan", "megarl/over"
_REFUSED, _COMPLETE, _FAILED, _DONE, _LAST_WORD = (
    f"megarl/{name}" for name in ("refused", "complete", "failed", "done", "last word")
)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Describes the place of this node in the job.

    Attributes:
        nproc: ranks to start here, as on every other node.
        master_addr, master_port: of several nodes, where the first one's launcher keeps the store in which all meet.
        same: what must be the same on all nodes, by name: digests.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    same: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Says how the ranks of a job are started, the first time or again.

    Attributes:
        attempt: number of the start, from 0.
        members: the nodes that take part, by the numbers with which they were started; the first is 0.
        overrides: `key=value` for the ranks, beside those of the command line.
        wait: seconds until the first node comes to the meeting.
    """

    attempt: int = 0
    members: tuple[int, ...] = (0,)
    overrides: tuple[str, ...] = ()
    wait: float = 0.0


class NodesMissing(Exception):
    """Raised on the first node: others did not come back to a later meeting.

    Attributes:
        numbers: theirs, with which they were started.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__(numbers)
        self.numbers = numbers


class PlanChanged(Exception):
    """Raised on a node that is not the first, in a meeting that was given up for another one.

    Attributes:
        plan: of the other one.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.plan = plan


class Nodes:
    """Watches the launchers of the other nodes, once all are there and agree.

    Attributes:
        plan: of this meeting.
        number: this node's, with which it was started.
        node: the place of this node among those that take part.
    """

    def __init__(
        self, node: Node, timeout_minutes: float, plan: Plan | None = None, *, before: Nodes | None = None
    ) -> None:
        """
        Args:
            node: as it was started.
            timeout_minutes: how long all nodes are waited for, the first time.
            plan: of a later meeting; a launcher that is started late takes the plan of the meeting under way.
            before: the meeting before, whose store is used again.

        Raises:
            ValueError: the first node's name has no address, the store cannot be reached or its port is taken, a node
                does not come, or it was started with something else; in one line, on all nodes that are there.
            NodesMissing, PlanChanged: in a later meeting.
        """
        check_name(node.master_addr)
        self._node, self._minutes, self.number = node, timeout_minutes, node.node_rank
        self._end = time.monotonic() + 60 * timeout_minutes
        self._next_look, self._next_word = 0.0, time.monotonic() + FIRST_WORD
        self._of, self.plan = node.nnodes, plan or Plan(members=tuple(range(node.nnodes)))
        self._job: TCPStore = before._job if before else self._serve() if node.node_rank == 0 else self._connect()
        if plan is None:
            self.plan = self._published() or self.plan
        if self.number not in self.plan.members:
            raise ValueError(f"node {self.number} was left out of this job, which goes on without it")
        if self.plan.attempt:
            self._end = time.monotonic() + REJOIN_SECONDS + (60 * timeout_minutes if self.number else 0.0)
        members = self.plan.members
        self.node = self._node = replace(node, nnodes=len(members), node_rank=members.index(self.number))
        self._store = PrefixStore(f"{self.plan.attempt}", self._job)
        self._hosts: dict[int, str] = {}
        self._signs: dict[int, tuple[int, float]] = {}  # node -> its counter, and since when it stands there
        self._said_gone = False
        self._meet()

    @property
    def port(self) -> int:
        return int(self._job.port)

    def failure(self) -> Ending | None:
        """Return how the first node ended that failed, which says why itself, or that a node is gone."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            if self._store.check([_FAILED]):
                self._say_heard()
                return Ending(**json.loads(self._store.get(_FAILED)))
            self._give_sign()
        except DistError:
            self._say_first_is_gone()
            return self._lost(0)
        if gone := [number for number, (_, since) in self._signs.items() if time.monotonic() - since > GONE_SECONDS]:
            self._say_gone(self._gone(gone))
            ending = self._lost(gone[0])
            self.note_failure(ending)
            return ending
        return None

    def note_failure(self, ending: Ending) -> None:
        """Tell the other nodes, unless one of them has failed before."""
        with suppress(DistError):
            self._store.compare_set(_FAILED, "", json.dumps(asdict(ending)))
            self._say_heard()

    def first_failure(self, ending: Ending) -> Ending:
        """Return how the node ended that failed first, which is not always the one that was heard of first."""
        try:
            return Ending(**json.loads(self._store.get(_FAILED))) if self._store.check([_FAILED]) else ending
        except DistError:
            return ending

    def publish(self, plan: Plan) -> None:
        """Tell the other nodes how the ranks are started again; the first node calls it."""
        self._job.set(_PLAN, json.dumps(asdict(plan)))

    def next_plan(self) -> Plan | None:
        """Wait for what the first node publishes; None if the job is over."""
        end = time.monotonic() + REJOIN_SECONDS
        try:
            while time.monotonic() < end and not self._job.check([_OVER]):
                if (plan := self._published()) and plan.attempt > self.plan.attempt:
                    return plan
                time.sleep(POLL_SECONDS)
        except DistError:
            self._say_first_is_gone()
        return None

    def leave(self, code: int, seconds: float) -> None:
        """Leave the job, the first node last: its launcher keeps the store, in which the others look for failures.

        Args:
            seconds: that nodes may need to end, in a job that ends well.
        """
        try:
            done = self._store.add(_DONE, 1)
            self._store.set(f"megarl/left/{self._node.node_rank}", "")
            if self._node.node_rank:
                if code:
                    self._hear_last_word()
                return
            self._job.set(_OVER, "")
            end = time.monotonic() + (LEAVE_SECONDS if code else seconds)
            while done < self._node.nnodes and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                done = self._store.add(_DONE, 0)
            if code:
                self._have_last_word()
        except DistError:
            self._say_first_is_gone()

    def _serve(self) -> TCPStore:
        node = self._node
        try:
            listening = listen(node.master_addr, node.master_port)
            address, port = listening.getsockname()[:2]
            return TCPStore(
                "127.0.0.1" if address == "0.0.0.0" else address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60 * self._minutes),
                master_listen_fd=listening.detach(),
            )
        except (OSError, DistError) as e:
            raise ValueError(f"port {node.master_port} of this host is in use; give another --master-port") from e

    def _connect(self) -> TCPStore:
        host, port = self._node.master_addr, self._node.master_port
        while True:  # torch's client would warn of every attempt
            with suppress(OSError), socket.create_connection((host, port), timeout=5):
                break
            if time.monotonic() > self._end:
                raise ValueError(
                    f"no launcher of node 0 answers at {host}:{port}; "
                    f"start it there, or check --master-addr and --master-port"
                )
            self._say_waiting([0])
            time.sleep(2 * POLL_SECONDS)
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60 * self._minutes))

    def _published(self) -> Plan | None:
        if not self._job.check([_PLAN]):
            return None
        plan = json.loads(self._job.get(_PLAN))
        return Plan(**{**plan, "members": tuple(plan["members"]), "overrides": tuple(plan["overrides"])})

    def _meet(self) -> None:
        node = self._node
        if self._store.add(f"megarl/claims/{node.node_rank}", 1) > 1:
            raise ValueError(f"another launcher is node {self.number} of this job; give each its own --node-rank")
        self._store.set(f"megarl/node/{node.node_rank}", json.dumps({**asdict(node), "host": socket.gethostname()}))
        try:
            while not self._store.check([_COMPLETE]):
                if self._store.check([_REFUSED]):
                    self._stay_for_others()
                    raise ValueError(self._store.get(_REFUSED).decode())
                if (plan := self._published()) and plan.attempt > self.plan.attempt:
                    raise PlanChanged(plan)
                self._look_for_others()
                time.sleep(POLL_SECONDS)
            self._look_for_others()  # the first node may have completed the meeting before this one looked for its host
        except DistError as e:
            raise ValueError(f"the launcher of node 0 at {node.master_addr}:{node.master_port} has ended") from e

    def _look_for_others(self) -> None:
        """Look which nodes have come: the first waits for all; the others compare themselves with it, and wait."""
        node = self._node
        awaited = range(1, node.nnodes) if node.node_rank == 0 else [0]
        for number in awaited:
            if number not in self._hosts and self._store.check([f"megarl/node/{number}"]):
                other = json.loads(self._store.get(f"megarl/node/{number}"))
                if difference := _difference(asdict(node) | {"host": socket.gethostname()}, other):
                    self._refuse(difference)
                self._hosts[number] = other["host"]
        missing = [number for number in awaited if number not in self._hosts]
        if node.node_rank == 0 and not missing:
            self._signs = {number: (-1, time.monotonic()) for number in self._hosts}
            self._store.set(_COMPLETE, "")
        elif time.monotonic() > self._end and node.node_rank == 0:
            if self.plan.attempt:
                raise NodesMissing(tuple(self.plan.members[place] for place in missing))
            self._refuse(
                f"{self._names(missing)} did not come within {self._minutes:g} minutes "
                f"(trainer.timeout_minutes); start `megarl train` there too, or set --nnodes"
            )
        elif time.monotonic() > self._end + LEAVE_SECONDS:
            raise ValueError(f"node 0 waits for other nodes for more than {self._minutes:g} minutes")
        elif missing:
            self._say_waiting(missing)

    def _refuse(self, why: str) -> None:
        """Raise ValueError here, and on the other nodes that are there."""
        self._store.set(_REFUSED, why)
        self._stay_for_others()
        raise ValueError(why)

    def _stay_for_others(self) -> None:
        """Let the other nodes read why the job is refused: the store ends with the first node's process."""
        if self._node.node_rank == 0:
            time.sleep(1.0)

    def _say_waiting(self, missing: list[int]) -> None:
        if time.monotonic() >= self._next_word:
            self._next_word = time.monotonic() + NEXT_WORD
            say(f"waiting for {self._names(missing)}")

    def _give_sign(self) -> None:
        self._store.add(f"megarl/alive/{self._node.node_rank}", 1)
        now = time.monotonic()
        for number, (count, _) in list(self._signs.items()):
            new = self._store.add(f"megarl/alive/{number}", 0)
            if new != count or self._store.check([f"megarl/left/{number}"]):
                self._signs[number] = (new, now)

    def _say_heard(self) -> None:
        self._store.set(f"megarl/heard/{self._node.node_rank}", "")

    def _have_last_word(self) -> None:
        """Have all nodes say which ones are gone: those that have not heard by now that the job failed."""
        failed = self._store.check([_FAILED])  # else it was stopped
        heard = {number for number in self._hosts if self._store.check([f"megarl/heard/{number}"])}
        gone = sorted(self._hosts.keys() - heard) if failed else []
        text = self._gone(gone) if gone else ""
        self._store.set(_LAST_WORD, text)
        if text and not self._said_gone:
            self._say_gone(text)
        if self._node.nnodes - len(gone) > 1:
            time.sleep(5 * POLL_SECONDS)  # the others hear it

    def _hear_last_word(self) -> None:
        end = time.monotonic() + 2 * LEAVE_SECONDS
        while time.monotonic() < end:
            if self._store.check([_LAST_WORD]):
                if text := self._store.get(_LAST_WORD).decode():
                    self._say_gone(text)
                return
            time.sleep(POLL_SECONDS)

    def _names(self, places: Sequence[int]) -> str:
        """Name nodes by the numbers with which they were started."""
        return _names([self.plan.members[place] for place in places], self._of)

    def describe(self, numbers: Sequence[int]) -> str:
        """Name nodes with their hosts, as far as they are known."""
        hosts = [host for place, host in self._hosts.items() if self.plan.members[place] in numbers]
        return _names(numbers, self._of) + (f" (on {', '.join(hosts)})" if hosts else "")

    def _lost(self, place: int) -> Ending:
        host = self._hosts.get(place, "an unknown host")
        return Ending(code=ExitCode.LOST, node=self.plan.members[place], host=host)

    def _gone(self, numbers: list[int]) -> str:
        return f"{self.describe([self.plan.members[n] for n in numbers])} is gone: its launcher gives no sign of life"

    def _say_first_is_gone(self) -> None:
        host = f" (on {self._hosts[0]})" if 0 in self._hosts else ""
        self._say_gone(f"node 0 of {self._of}{host} is gone: the launcher of node 0 no longer answers")

    def _say_gone(self, text: str) -> None:
        if not self._said_gone:
            self._said_gone = True
            say(text)


def _difference(mine: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Say in what two nodes differ that must be the same, the first such thing; None: in nothing."""
    first, second = sorted([mine, other], key=lambda node: node["node_rank"])
    who = [f"node {node['node_rank']} on {node['host']}" for node in (first, second)]
    for key, option in (("nnodes", "--nnodes"), ("nproc", "--nproc")):
        if first[key] != second[key]:
            return f"{who[0]} was started with {option} {first[key]}, {who[1]} with {second[key]}; give all the same"
    for name, value in first["same"].items():
        if second["same"].get(name) != value:
            return (
                f"{who[0]} and {who[1]} differ in their {name}; start every node with the same file and the same "
                f"key=value arguments"
            )
    return None


def _names(numbers: Sequence[int], nnodes: int) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"node{'s' if len(numbers) > 1 else ''} {shown} of {nnodes}"
