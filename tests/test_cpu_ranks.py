"""What Megatron-Core takes on CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ADAM = """
from megarl.parallel.cpu import enable_cpu_ranks
enable_cpu_ranks()
from megatron.core.optimizer import Adam
print(Adam.__module__)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Megatron-Core takes the fastest Adam there is")
def test_the_optimizer_is_torchs_where_others_have_no_kernel(tmp_path: Path) -> None:
    """Transformer Engine and apex can be imported on a machine without a GPU; their Adam cannot run there."""
    for package, module in (("transformer_engine/pytorch", "optimizers"), ("apex", "optimizers")):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / f"{module}.py").write_text("class FusedAdam: ...\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", ADAM], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.optim.adamw"]
