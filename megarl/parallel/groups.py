"""Process groups of the training and generation layouts. The only place that touches Megatron-Core's `parallel_state`.

Megatron-Core knows one training layout: parts of it read its groups and sizes from module globals, whatever they are
passed. A second model may have a layout of its own over the same ranks; while it is built or runs, the globals are
those of its layout (`Groups.active`).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl.parallel import control
from megarl.parallel.cpu import enable_cpu_ranks
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.parallel.watch import Watch

if TYPE_CHECKING:  # Megatron-Core is imported where ranks begin: after the CPU redirection, which changes torch
    from megatron.core.process_groups_config import ProcessGroupCollection

P = ParamSpec("P")
T = TypeVar("T")

NCCL_GRACE = timedelta(minutes=5)
"""How much longer NCCL waits than `trainer.timeout_minutes`."""


@dataclass(kw_only=True)
class MegatronState:
    """What Megatron-Core has of one training layout.

    Attributes:
        pgs: its groups.
        set_aside: what its modules' globals are in this layout, while they are those of another; None: they are in
            place.
    """

    pgs: ProcessGroupCollection
    set_aside: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Who talks to whom, for one rank and the models of one training layout.

    Attributes:
        rank: this process's global rank.
        device: where its tensors live.
        train, generation: the two layouts.
        layouts: of every training layout over these ranks, `train` among them.
        ranks_per_node: consecutive ranks that share a machine.
        generation_tp: the ranks of this rank's generation replica.
        control: all ranks, over gloo: small Python objects (token ids, scores), never weights.
    """

    rank: int
    device: torch.device
    train: TrainLayout
    generation: GenerationLayout
    ranks_per_node: int
    layouts: dict[TrainLayout, MegatronState] = field(repr=False)
    generation_tp: dist.ProcessGroup
    control: dist.ProcessGroup

    @property
    def watch(self) -> Watch:
        """Notes what this rank waits for in `control`."""
        return control.watch_of(self.control)

    @property
    def pgs(self) -> ProcessGroupCollection:
        """Megatron-Core's groups of the training layout, passed explicitly to everything below."""
        return self.layouts[self.train].pgs

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it Megatron-Core's globals are those of this layout; afterwards those of before again.

        Outside they are those of the first layout, so for it nothing changes. It may be entered within itself, and
        within that of another layout.
        """
        own = self.layouts[self.train]
        before = _in_place(self.layouts)
        _exchange(before, own)
        try:
            yield
        finally:
            _exchange(own, before)

    @property
    def model(self) -> dist.ProcessGroup:
        """The ranks that hold one whole model: same data-parallel index, every tensor and pipeline index."""
        return self.pgs.mp

    def all_gather(self, value: Any, what: str = "an exchange") -> list[Any]:
        """One Python object of every rank, in rank order.

        Args:
            what: what a rank waits for here, as it is told if others do not come: "all scores".
        """
        return control.all_gather(self.control, value, what)

    def broadcast(self, value: T | None, what: str = "an exchange") -> T:
        """Rank 0's Python object, on every rank; what the others give is passed over."""
        return control.broadcast(self.control, value, what)

    def maximum(self, value: int, what: str = "an exchange") -> int:
        """The largest value of any rank."""
        return control.maximum(self.control, value, what)

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        control.barrier(self.control, what)


def in_its_layout(method: Callable[P, T]) -> Callable[P, T]:
    """A method of an object with `groups` that runs while these are active."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        owner: Any = args[0]
        with owner.groups.active():
            return method(*args, **kwargs)

    return run


def init_distributed(timeout_minutes: float = 30) -> None:
    """Join the job's ranks (environment set by the launcher, torchrun or srun): NCCL where there is a GPU, else gloo.

    A communicator of NCCL's takes half a GiB even if it has one rank. Megatron-Core makes more than a dozen groups, and
    a run uses some of them, so every group gets its own at its first collective: `init_process_group` is not told the
    device, which would give one to each at once.

    Args:
        timeout_minutes: how long a rank waits for others in any group, also in those that are made later.
    """
    enable_cpu_ranks()
    timeout = timedelta(minutes=timeout_minutes)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # what groups get whose maker, vLLM for one, names no limit; NCCL's own end comes after that of the watch, which
    # knows who is late
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout + NCCL_GRACE
    if backend == "nccl":
        timeout += NCCL_GRACE
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # without a launcher this process is a world of its own
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def build_groups(train: TrainLayout, generation: GenerationLayout, seed: int = 1) -> Groups:
    """Create the groups of the two layouts in the already initialised world. Every rank must call it.

    The groups wait as long as `init_distributed` was told.

    Args:
        seed: of Megatron-Core's tensor-parallel random number tracker (dropout).
    """
    assert dist.get_world_size() == train.world_size == generation.world_size
    layouts = {train: MegatronState(pgs=_megatron_groups(train, seed))}
    rank = dist.get_rank()
    on_gpu = torch.cuda.is_available()
    replicas = [dist.new_group(generation.ranks(i)) for i in range(generation.replicas)]
    return Groups(
        rank=rank,
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        train=train,
        generation=generation,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", train.world_size)),
        layouts=layouts,
        generation_tp=replicas[generation.coords(rank).replica],
        control=dist.new_group(backend="gloo"),
    )


def control_of_replica(groups: Groups) -> dist.ProcessGroup | None:
    """The ranks of this rank's generation replica, over gloo; None where it is alone. Every rank calls it."""
    generation = groups.generation
    if generation.tp == 1:
        return None
    if groups.device.type == "cpu":
        return groups.generation_tp
    made = [dist.new_group(generation.ranks(i), backend="gloo") for i in range(generation.replicas)]
    return made[generation.coords(groups.rank).replica]


def add_layout(groups: Groups, train: TrainLayout, seed: int = 1) -> Groups:
    """The same ranks in another training layout, for a model beside the first. Every rank must call it.

    Only the groups of the training layout are made; one that is there already is used again. The layout has its own
    tensor-parallel random number tracker, as if it were the only one. The default generator serves all layouts and
    stays as it is.

    Args:
        seed: of the layout's tracker (dropout).
    """
    from megatron.core import parallel_state

    if train not in groups.layouts:
        assert train.world_size == groups.train.world_size
        present = _in_place(groups.layouts)
        present.set_aside, numbers = _megatron_globals(), torch.cuda.get_rng_state()
        parallel_state.destroy_model_parallel()  # forgets the groups; they stay
        made = groups.layouts[train] = MegatronState(pgs=_megatron_groups(train, seed))
        # one buffer for all layouts: nothing of what a layer gathers into it is needed when another model runs
        parallel_state._GLOBAL_MEMORY_BUFFER = present.set_aside["_GLOBAL_MEMORY_BUFFER"]
        torch.cuda.set_rng_state(numbers)
        _exchange(made, present)
    return groups if train == groups.train else replace(groups, train=train)


@contextmanager
def stand_in(train: TrainLayout, rank: int, device: torch.device) -> Iterator[Groups]:
    """Groups of a rank of a job that does not run: to describe its model, or to run a world of one rank.

    Nothing is sent in these groups: what a collective over several ranks gives means nothing. The process must not be
    in a world already.

    Args:
        device: where the rank's tensors would live; "meta" describes them without memory.
    """
    enable_cpu_ranks()
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=train.world_size)
    sys.excepthook = hook  # torch's would go on naming the rank in every traceback of this process
    try:
        pgs = _megatron_groups(train, seed=1)
        generation = GenerationLayout(world_size=train.world_size)
        yield Groups(
            rank=rank,
            device=device,
            train=train,
            generation=generation,
            ranks_per_node=train.world_size,
            layouts={train: MegatronState(pgs=pgs)},
            generation_tp=pgs.tp,
            control=pgs.tp,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _megatron_groups(train: TrainLayout, seed: int) -> ProcessGroupCollection:
    enable_cpu_ranks()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=train.tp,
        pipeline_model_parallel_size=train.pp,
        virtual_pipeline_model_parallel_size=train.chunks if train.chunks > 1 else None,
        context_parallel_size=train.cp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_training_timeout() / timedelta(minutes=1),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def _training_timeout() -> timedelta:
    nccl = torch.cuda.is_available() and dist.get_backend() == "nccl"
    return (nccl and distributed_c10d.default_pg_nccl_timeout) or distributed_c10d.default_pg_timeout


def _in_place(layouts: dict[TrainLayout, MegatronState]) -> MegatronState:
    """The one that Megatron-Core's globals hold."""
    return next(state for state in layouts.values() if state.set_aside is None)


def _megatron_globals() -> dict[str, Any]:
    """Groups, sizes and ranks of the layout in place, by name, and its tracker's states under "rng"."""
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


def join(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give the group its communicator; every rank of it calls this.

    A batch of sends and receives, from which ranks may stay away, must not be the first to need it.
    """
    dist.all_reduce(torch.zeros((), device=device), group=group)


def leave_world() -> None:
    """Leave every group and the world, whatever a run left of them."""
    from megatron.core import parallel_state

    gc.collect()  # a CUDA graph that nobody needs any more would keep its communicator from being left
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def destroy_groups(groups: Groups) -> None:
    """Leave the groups of all layouts; the world stays.

    On all ranks in the order in which they were made: NCCL's communicators are left together, and two ranks that begin
    with different ones wait for each other forever.
    """
    from megatron.core import parallel_state

    made: list[dist.ProcessGroup] = []
    for state in groups.layouts.values():
        values = vars(parallel_state) if state.set_aside is None else state.set_aside
        made += [group for group in values["_global_process_group_list"] or () if group is not None]
    parallel_state.destroy_model_parallel()  # forgets them: their communicators would stay
    for group in dict.fromkeys([*made, groups.generation_tp, groups.control]):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
