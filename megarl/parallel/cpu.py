"""Lets Megatron-Core (0.16.1 to 0.19) run on CPU ranks over gloo. No other file knows how.

Megatron-Core writes the literal `device='cuda'`, asks `torch.cuda` for the current device and stream, and compares
`Tensor.type()` with 'torch.cuda.FloatTensor'. On a machine without a GPU these are redirected to the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

_FACTORIES = [
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "tensor",
    "zeros",
    "zeros_like",
]
_CPU = torch.device("cpu")


class _NoStream:
    """Stands in for `torch.cuda.current_stream()`: on a CPU everything has already happened in order."""

    def wait_stream(self, stream: object) -> None:
        del stream

    def wait_event(self, event: object) -> None:
        del event

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None: ...


@functools.cache
def enable_cpu_ranks() -> None:
    """Redirect what Megatron-Core asks of `torch.cuda` to the CPU; does nothing where there is a GPU. Idempotent.

    It changes torch for the whole process, so only a process that is to be a rank calls it, as the functions of
    `megarl.parallel.world` and `megarl.parallel.train_groups` that begin one do. Called before the first import of
    Megatron-Core it saves the seconds that loading torch's compiler takes; after it, an optimizer of Transformer Engine
    or apex would stay in use.
    """
    if torch.cuda.is_available():
        return
    modules: dict[str, Any] = sys.modules
    if "megatron.core.jit" in modules:  # its functions are compiled ones already: let them run as they are
        torch.compiler.set_stance("force_eager")
    for package in ("transformer_engine", "apex"):
        modules.setdefault(package, None)  # Megatron-Core would take its Adam, which has no CPU kernel
    loose: Any = torch
    _device_constructors()  # cached: `with torch.device(...)` must know the factories that the redirected ones call
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: _NoStream()
    cuda.Stream, cuda.stream = _NoStream, contextlib.nullcontext  # who copies beside the computation
    cuda.FloatTensor, cuda.IntTensor, cuda.BoolTensor = torch.FloatTensor, torch.IntTensor, torch.BoolTensor
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.pin_memory = lambda self, *_: self
    tensor.type = _type_as_cuda(torch.Tensor.type)

    dist.all_gather, dist.reduce_scatter = _gather_any_sizes(dist.all_gather), _scatter_any_sizes(dist.reduce_scatter)

    # Megatron-Core decorates a few functions with it as it is imported, which loads the compiler: a third of the time
    # that a rank takes to start. On a CPU they run as they are. Another ninth would be what its own timers and engine
    # log to, which nobody uses here.
    compile_, loose.compile = loose.compile, _as_it_is
    unused = {"wandb", "torch.utils.tensorboard"} - modules.keys()
    modules.update(dict.fromkeys(unused))
    try:
        import megatron.core.tensor_parallel.random as megatron_random
    finally:
        loose.compile = compile_
        for name in unused:
            del modules[name]

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _gather_any_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let gloo gather tensors of several sizes, as NCCL does: ranks that share experts have unequally many tokens."""

    @functools.wraps(original)
    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        if len({part.shape for part in parts}) <= 1:
            return original(parts, mine, group, **kwargs)
        for source, part in enumerate(parts):
            if source == dist.get_rank(group):
                part.copy_(mine)
            dist.broadcast(part, group=group, group_src=source)

    return all_gather


def _scatter_any_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let gloo reduce and scatter tensors of several sizes, as NCCL does."""

    @functools.wraps(original)
    def reduce_scatter(
        mine: torch.Tensor, parts: list[torch.Tensor], *args: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        if len({part.shape for part in parts}) <= 1:
            return original(mine, parts, *args, group=group, **kwargs)
        for taker, part in enumerate(parts):
            total = part.clone()
            dist.reduce(total, group=group, group_dst=taker)
            if taker == dist.get_rank(group):
                mine.copy_(total)

    return reduce_scatter


def counts_on_host(counts: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Hand on counts of tokens as Megatron-Core's dispatcher of experts does that of a GPU: as an array, if asked."""
    return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """Stand in for `torch.compile`, with and without arguments, and compile nothing."""
    return function if function is not None else _as_it_is


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # pinning is an error without a GPU
        return factory(*args, **kwargs)

    return create


def _type_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give `param.type()` CUDA's names: the optimizer sorts parameters by them and knows no others."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if not args and not kwargs else result

    return type_
