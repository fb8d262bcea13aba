"""Runs one rank of a training run, for `megarl train` or `torchrun --nproc_per_node N -m megarl.train CONFIG ...`."""

from __future__ import annotations

import atexit
import sys

from megarl.processes import kill_descendants
from megarl.rank import main

if __name__ == "__main__":
    atexit.register(kill_descendants)  # first registered, so it runs last: what is left of helpers then
    sys.exit(main(sys.argv[1:]))
