"""Says before a comparison how much memory and disk it takes, and refuses what does not fit."""

from __future__ import annotations

import shutil
import tempfile

import psutil
import torch

from megarl.estimate.job import parameter_count
from megarl.host import host_memory
from megarl.models.architecture import Architecture
from megarl.parity.sequences import sequences_for

BYTES = 12
"""Per parameter: MegaRL's weights and fp32 gradients, and the engine's or the optimizer's copy. Those of transformers
take less, and are gone by then."""
ON_DISK = 4
"""Per parameter: of transformers' gradients, and of random or cut weights."""


def check_room(arch: Architecture, *, copies: bool, dtype: str) -> int:
    """Return the bytes of memory that the comparison takes.

    Args:
        copies: the weights are written into a temporary folder.

    Raises:
        ValueError: there are fewer free here, or the disk of temporary files is too small.
    """
    count, sequences = parameter_count(arch), sequences_for(arch)
    outputs = 2 * 4 * 3 * (arch.num_layers + 1) * arch.hidden_size * sequences.count
    logits = 4 * 4 * arch.vocab_size * max(map(len, sequences.tokens))
    memory = BYTES * count + outputs + logits
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    free = min(free, host_memory())
    advice = "compare its first layers with --layers 1"
    if memory > free:
        raise ValueError(f"the model would take {_gb(memory)} of memory, and {_gb(free)} are free: {advice}")
    disk = ON_DISK * count * ((2 if dtype != "float32" else 1) + copies)
    folder = tempfile.gettempdir()
    if disk > (there := shutil.disk_usage(folder).free):
        raise ValueError(
            f"its gradients and weights would take {_gb(disk)} in '{folder}', and {_gb(there)} are free: {advice}, or "
            "set TMPDIR"
        )
    return memory


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
