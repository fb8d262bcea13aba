"""Holds the private names of Megatron-Core and torch that are used, and the versions that they were seen in.

No Megatron is imported here: the names belong to objects that callers hold.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

OLDEST, TOO_NEW = Version("0.16.1"), Version("0.20")


def check_megatron_core() -> None:
    """Raise ValueError, with what to install, if Megatron-Core is none that these names were seen in."""
    supported = f"megatron-core>={OLDEST},<{TOO_NEW}"
    try:
        installed = Version(version("megatron-core"))
    except PackageNotFoundError:
        raise ValueError(f"Megatron-Core is not installed: pip install '{supported}'") from None
    if not OLDEST <= installed < TOO_NEW:
        raise ValueError(f"megatron-core {installed} is not supported: pip install '{supported}'")


def copy_main_params_to_model_params(optimizer: Any) -> None:
    """Round the fp32 weights of a Megatron-Core optimizer into the model's; the distributed one its own part only."""
    optimizer._copy_main_params_to_model_params()


def model_param_range(optimizer: Any, parameter: Tensor) -> tuple[int, int]:
    """Find the elements [start, stop) of a flattened parameter that a rank of the distributed optimizer steps."""
    elements = optimizer._get_model_param_range_map(parameter)["param"]
    return elements.start, elements.end


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Identify a storage, whichever tensor shares it; a storage that was resized to nothing has no address."""
    return storage._cdata


def default_store() -> Any:
    """Get the key-value store that the ranks of the world found each other through."""
    return dist.distributed_c10d._get_default_store()
