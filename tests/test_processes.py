"""How processes are ended."""

from __future__ import annotations

import subprocess
import sys

RANK = """
import subprocess
from megarl import processes
processes._KILLED_SECONDS = 600.0
helper = subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE)
helper.stdout.readline()
(found,) = processes.children()
(grandchild,) = found.children()
processes.kill_descendants()
assert not found.is_running() and grandchild.status() == "zombie"
"""

LAUNCHER = """
import subprocess, sys
from megarl.processes import adopt_orphans
adopt_orphans()
sys.exit(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait(120))
"""


def test_a_process_that_nobody_waits_for_is_not_waited_for() -> None:
    """The launcher adopts what a rank's helpers leave behind; it waits for its ranks alone."""
    subprocess.run([sys.executable, "-c", LAUNCHER, RANK], check=True)
