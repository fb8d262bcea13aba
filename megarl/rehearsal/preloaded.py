"""Imports what ranks need, in the process whose forks they are: the memory of modules is shared by all of them."""

from __future__ import annotations

import gc

gc.disable()  # it would write into the memory that is to be shared, and find nothing

from megarl.debugging import hush_dependencies  # noqa: E402
from megarl.parallel.cpu import enable_cpu_ranks  # noqa: E402
from megarl.processes import die_with_parent  # noqa: E402

die_with_parent()  # by itself this process stays while a rank does, also if the command was killed
hush_dependencies()
enable_cpu_ranks()  # before Megatron-Core is imported
import megarl.flows.learn  # noqa: E402
import megarl.flows.ppo  # noqa: E402
import megarl.rank  # noqa: E402
import megarl.rollout.native.engine  # noqa: E402
import megarl.trainer.session.take_part  # noqa: E402, F401

gc.freeze()
gc.enable()
