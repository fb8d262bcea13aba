"""Makes the process groups of the training layouts. The only place that touches Megatron-Core's `parallel_state`.

Megatron-Core knows one training layout: parts of it read its groups and sizes from module globals, whatever they are
passed. Models may have layouts of their own over the same ranks; while one is built or runs, the globals are those of
its layout (`TrainGroups.active`).
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl.parallel.cpu import enable_cpu_ranks
from megarl.parallel.layout import TrainLayout
from megarl.parallel.world import World

if TYPE_CHECKING:  # Megatron-Core is imported where ranks begin: after the CPU redirection, which changes torch
    from megatron.core.process_groups_config import ProcessGroupCollection

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(kw_only=True)
class MegatronState:
    """Keeps Megatron-Core's state of one training layout.

    Attributes:
        pgs: its groups.
        set_aside: its modules' globals of this layout, while those of another are in place; None: these are.
    """

    pgs: ProcessGroupCollection
    set_aside: dict[str, Any] | None = None


_STATES: dict[TrainLayout, MegatronState] = {}
"""Of every layout that this process takes part in. Megatron-Core's globals are the process's, and so is this."""


@dataclass(frozen=True, kw_only=True)
class TrainGroups:
    """Groups the ranks that train the models of one layout together, for one rank.

    Attributes:
        pgs: Megatron-Core's groups, passed explicitly to everything below.
    """

    world: World
    layout: TrainLayout
    pgs: ProcessGroupCollection

    @property
    def of_same_tokens(self) -> tuple[dist.ProcessGroup, ...]:
        """List the groups that together join the ranks with the same tokens: sums over each, one after another, are a
        sum over all of these ranks."""
        return self.pgs.tp, self.pgs.pp, self.pgs.cp

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put this layout into Megatron-Core's globals meanwhile; afterwards they are as before.

        Outside they are those of the first layout, so for it nothing changes. It may be entered within itself, and
        within that of another layout.
        """
        state, before = _STATES[self.layout], _in_place()
        _exchange(before, state)
        try:
            yield
        finally:
            _exchange(state, before)

    def group_in(self, parts: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """Return a group of the ranks of this rank's part. Every rank calls it.

        It is Megatron-Core's where the parts are those of `TrainLayout.model_ranks`; else it is made.

        Args:
            parts: each rank is in one.
        """
        if parts[0] == self.layout.model_ranks(self.layout.ranks.start):
            return self.pgs.mp
        group = self.world.new_groups(parts)
        assert group is not None
        return group


def in_its_layout(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of an object with `groups`: it runs while these are active."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        owner: Any = args[0]
        with owner.groups.active():
            return method(*args, **kwargs)

    return run


def train_groups(world: World, layout: TrainLayout, seed: int = 1) -> TrainGroups:
    """Make the groups of a training layout at the first call; get them afterwards. Every rank must call it.

    Each layout has a tensor-parallel random number tracker of its own, as if it were the only one. The default
    generator serves all layouts; the first one seeds it.

    Args:
        seed: of the layout's tracker (dropout).
    """
    assert layout.ranks == range(world.size), "a layout over some of the ranks has no groups yet"
    if layout not in _STATES:
        _STATES[layout] = _first_state(world, layout, seed) if not _STATES else _further_state(world, layout, seed)
    state = _STATES[layout]
    return TrainGroups(world=world, layout=layout, pgs=state.pgs)


@contextmanager
def stand_in(layout: TrainLayout, rank: int, device: torch.device) -> Iterator[TrainGroups]:
    """Make groups of a rank of a job that does not run: to describe its model, or to run a world of one rank.

    Nothing is sent in these groups: what a collective over several ranks gives means nothing. The process must not be
    in a world already.

    Args:
        device: where the rank's tensors would live; "meta" describes them without memory.
    """
    enable_cpu_ranks()
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
    sys.excepthook = hook  # torch's would go on naming the rank in every traceback of this process
    try:
        yield train_groups(World(device=device, control=dist.group.WORLD), layout)
    finally:
        leave_world()


def leave_groups(world: World) -> None:
    """Leave the groups of all layouts and the world's own; torch's world stays."""
    _forget_layouts()
    world.leave()


def leave_world() -> None:
    """Leave every group and the world, whatever a run left of them."""
    gc.collect()  # a CUDA graph that nobody needs any more would keep its communicator from being left
    _forget_layouts()
    dist.destroy_process_group()


def _forget_layouts() -> None:
    """Reset Megatron-Core's globals to those before any layout; the groups stay."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _STATES.clear()


def _first_state(world: World, layout: TrainLayout, seed: int) -> MegatronState:
    """Create the layout's groups, and put them into Megatron-Core's globals."""
    enable_cpu_ranks()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        **layout.megatron_sizes,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_training_timeout() / timedelta(minutes=1),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    world.note(*(group for group in parallel_state._global_process_group_list or () if group is not None))
    return MegatronState(pgs=ProcessGroupCollection.use_mpu_process_groups())


def _further_state(world: World, layout: TrainLayout, seed: int) -> MegatronState:
    """Create the groups of a layout beside others, and set its state aside."""
    from megatron.core import parallel_state

    present = _in_place()
    present.set_aside, numbers = _megatron_globals(), torch.cuda.get_rng_state()
    parallel_state.destroy_model_parallel()  # forgets the groups; they stay
    state = _first_state(world, layout, seed)
    # one buffer for all layouts: nothing of what a layer gathers into it is needed when another model runs
    parallel_state._GLOBAL_MEMORY_BUFFER = present.set_aside["_GLOBAL_MEMORY_BUFFER"]
    torch.cuda.set_rng_state(numbers)
    _exchange(state, present)
    return state


def _training_timeout() -> timedelta:
    nccl = torch.cuda.is_available() and dist.get_backend() == "nccl"
    return (nccl and distributed_c10d.default_pg_nccl_timeout) or distributed_c10d.default_pg_timeout


def _in_place() -> MegatronState:
    """Find the state that Megatron-Core's globals hold."""
    return next(state for state in _STATES.values() if state.set_aside is None)


def _megatron_globals() -> dict[str, Any]:
    """Collect groups, sizes and ranks of the layout in place, by name, and its tracker's states under "rng"."""
    from megatron.core import parallel_state, tensor_parallel

    values = {
        name: value
        for name, value in vars(parallel_state).items()
        if (name.startswith("_") and name.isupper()) or name == "_global_process_group_list"
    }
    return {**values, "rng": tensor_parallel.get_cuda_rng_tracker().get_states()}


def _exchange(present: MegatronState, wanted: MegatronState) -> None:
    """Set the layout in place aside, and put another one in its place."""
    from megatron.core import parallel_state, tensor_parallel

    if present is wanted:
        return
    assert present.set_aside is None and wanted.set_aside is not None
    present.set_aside, values, wanted.set_aside = _megatron_globals(), wanted.set_aside, None
    tensor_parallel.get_cuda_rng_tracker().set_states(values["rng"])
    vars(parallel_state).update({name: value for name, value in values.items() if name != "rng"})
