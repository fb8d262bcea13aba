"""Process groups of both layouts. The only place that touches Megatron-Core's `parallel_state`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl.parallel.cpu import enable_cpu_ranks
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.parallel.watch import Watch

if TYPE_CHECKING:  # Megatron-Core is imported where ranks begin: after the CPU redirection, which changes torch
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Who talks to whom, for one rank.

    Attributes:
        rank: this process's global rank.
        device: where its tensors live.
        train, generation: the two layouts.
        pgs: Megatron-Core's groups of the training layout, passed explicitly to everything below.
        ranks_per_node: consecutive ranks that share a machine.
        generation_tp: the ranks of this rank's generation replica.
        control: all ranks, over gloo: small Python objects (token ids, scores), never weights.
        watch: notes what this rank waits for in `control`.
    """

    rank: int
    device: torch.device
    train: TrainLayout
    generation: GenerationLayout
    ranks_per_node: int
    pgs: ProcessGroupCollection
    generation_tp: dist.ProcessGroup
    control: dist.ProcessGroup
    watch: Watch = field(default_factory=Watch)

    @property
    def model(self) -> dist.ProcessGroup:
        """The ranks that hold one whole model: same data-parallel index, every tensor and pipeline index."""
        return self.pgs.mp

    def all_gather(self, value: Any, what: str = "an exchange") -> list[Any]:
        """One Python object of every rank, in rank order.

        Args:
            what: what a rank waits for here, as it is told if others do not come: "all scores".
        """
        out: list[Any] = [None] * self.train.world_size
        with self.watch.waiting(what):
            dist.all_gather_object(out, value, group=self.control)
        return out

    def maximum(self, value: int, what: str = "an exchange") -> int:
        """The largest value of any rank."""
        most = torch.tensor(value, dtype=torch.int64)
        with self.watch.waiting(what):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control)
        return int(most)

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        with self.watch.waiting(what):
            dist.barrier(self.control)


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
    # what groups get whose maker, vLLM for one, names no limit
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # without a launcher this process is a world of its own
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def build_groups(train: TrainLayout, generation: GenerationLayout, seed: int = 1) -> Groups:
    """Create the groups of both layouts in the already initialised world. Every rank must call it.

    The groups wait as long as `init_distributed` was told.

    Args:
        seed: of Megatron-Core's tensor-parallel random number tracker (dropout).
    """
    assert dist.get_world_size() == train.world_size == generation.world_size
    pgs = _megatron_groups(train, seed)
    rank = dist.get_rank()
    on_gpu = torch.cuda.is_available()
    replicas = [dist.new_group(generation.ranks(i)) for i in range(generation.replicas)]
    return Groups(
        rank=rank,
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        train=train,
        generation=generation,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", train.world_size)),
        pgs=pgs,
        generation_tp=replicas[generation.coords(rank).replica],
        control=dist.new_group(backend="gloo"),
    )


def another_layout(groups: Groups, train: TrainLayout, seed: int = 1) -> Groups:
    """Placeholder."""
    assert train == groups.train
    return groups


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
            pgs=pgs,
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
        distributed_timeout_minutes=distributed_c10d.default_pg_timeout / timedelta(minutes=1),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def join(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give the group its communicator; every rank of it calls this.

    A batch of sends and receives, from which ranks may stay away, must not be the first to need it.
    """
    dist.all_reduce(torch.zeros((), device=device), group=group)


def leave_world() -> None:
    """Leave every group and the world, whatever a run that failed left of them."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def destroy_groups(groups: Groups) -> None:
    """Leave the groups of both layouts; the world stays."""
    from megatron.core import parallel_state

    made = {group for group in parallel_state._global_process_group_list or () if group is not None}
    parallel_state.destroy_model_parallel()  # forgets them: their communicators would stay
    for group in made | {groups.generation_tp, groups.control}:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
