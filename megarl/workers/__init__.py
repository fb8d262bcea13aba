"""Processes that work for another one: started, asked and ended from outside. Torch-free.

`Child` is a fresh interpreter, in a sandbox of its own or without, that loads what takes long once and answers each
request in a process forked from it. `Channel` carries framed messages between two processes that never wait for each
other.
"""

from megarl.workers.channel import Channel
from megarl.workers.child import Child, WorkerError

__all__ = ["Channel", "Child", "WorkerError"]
