"""Makes the Hugging Face folder in a checkpoint, in a process of its own: this module needs no Megatron-Core."""

from __future__ import annotations

import os
import signal
import subprocess

from megarl.processes import STOP_SIGNALS, ending, module_command

HUGGINGFACE = "huggingface"
"""The folder in a checkpoint."""


def export_beside(folder: str, *, prefix: str, scalar: bool) -> None:
    """Write a model's weights from a checkpoint's files into its `huggingface/`, whose other files are there already.

    A process of its own does it at low priority: it takes no GPU, and training does not share Python's lock with it.

    Args:
        prefix, scalar: of the model in the checkpoint.

    Raises:
        OSError: with what the process lines last.
    """
    command = [*module_command("megarl.checkpoint.export_huggingface"), folder, prefix, "scalar" if scalar else ""]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # here and in the process: the run's main thread acts
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"the Hugging Face folder: {lines[-1] if lines else ending(ended.returncode)}")
