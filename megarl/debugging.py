"""Has every process of a run say more, with `--debug`. Torch-free."""

from __future__ import annotations

import faulthandler
import logging
import os
import warnings
from contextlib import suppress

VARIABLE = "MEGARL_DEBUG"
_SETTINGS = {
    VARIABLE: "1",
    "PYTHONFAULTHANDLER": "1",  # a rank that is killed by a signal says where it was
    "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DETAIL compares every collective, and changes the groups that do them
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "NCCL_DEBUG": "INFO",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}


def enable_debugging() -> None:
    """Have this process and those that it starts say more; variables that are set already stay."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    follow_environment()


def debugging() -> bool:
    """Tell whether this process was started with `--debug`, or by one that was."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def follow_environment() -> None:
    """Show tracebacks of crashes and the libraries' logs, if debugging is on; a rank calls it first."""
    if not debugging():
        return
    with suppress(ValueError, OSError):  # stderr is no file: a test's, a notebook's
        faulthandler.enable()
    rank = f" rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s{rank} %(name)s %(levelname)s %(message)s")


def hush_dependencies() -> None:
    """Silence the warnings of Megatron-Core, torch and vLLM about their own deprecations and absent options, which come
    per process and call site; not with `--debug`."""
    if debugging():
        return
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for module in ("megatron", "torch", "vllm"):
        warnings.filterwarnings("ignore", module=module)
