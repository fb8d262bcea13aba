"""Who reads whose memory, agreed between real gloo ranks. A file stands for a rank's memory."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.distributed as dist
from ranks import Ranks
from reshard_cases import architecture
from test_reshard_execute import build

from megarl.parallel.layout import TrainLayout
from megarl.reshard.transport.direct_reads import Agreement, Offer, agree, first_in_job, host_identity

HOSTS = ["a", "a", "a", "b"]


def read_each_other(folder: str) -> tuple[Agreement, dict[int, str]]:
    """Every rank wants to read all others. Rank 1's file is missing, rank 2 has nothing to offer."""
    rank = dist.get_rank()
    path = Path(folder) / str(rank)
    if rank != 1:
        path.write_text(f"of rank {rank}")
    dist.barrier()
    assert dist.group.WORLD is not None
    offer = Offer(host=HOSTS[rank], handles=(str(path).encode(),), refusal="expandable segments" if rank == 2 else "")

    def read(_: int, offer: Offer) -> str:
        return Path(offer.handles[0].decode()).read_text()

    return agree(offer, [r for r in range(4) if r != rank], read, dist.group.WORLD)


def test_both_ends_of_every_pair_know(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(4, read_each_other, str(tmp_path))
    agreement = answers[0][0]
    assert all(other == agreement for other, _ in answers)
    assert agreement.direct == {(0, 1), (0, 2)}
    assert set(agreement.refused) == {(1, 0), (1, 2), (2, 0), (2, 1)}  # and not those between hosts
    assert agreement.refused[2, 0] == "expandable segments"
    assert "No such file" in agreement.refused[1, 2]
    assert [opened for _, opened in answers] == [{}, {0: "of rank 0"}, {0: "of rank 0"}, {}]


def say_it_twice() -> tuple[str, list[bool]]:
    said = [first_in_job("one thing"), first_in_job("another"), first_in_job("one thing")]
    return host_identity(), said


def test_a_job_hears_everything_once(ranks: Ranks) -> None:
    for _ in range(2):  # the next job hears it again
        answers = ranks.run(3, say_it_twice)
        assert len({host for host, _ in answers}) == 1
        assert [sum(said) for said in zip(*(said for _, said in answers), strict=True)][2] == 0
        assert sum(said[0] for _, said in answers) == sum(said[1] for _, said in answers) == 1


def reshard_on_cpus() -> tuple[int, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world = build(architecture(num_layers=2), TrainLayout(ranks=range(2), pp=2), 2)
        world.resharder.run()
        world.resharder.release()
        world.resharder.run()
    world.check()
    assert world.resharder.peer is None
    moved = world.resharder.statistics
    return moved.pulled, moved.received, moved.buffers


def test_cpu_ranks_take_buckets_without_a_word(ranks: Ranks) -> None:
    for pulled, received, buffers in ranks.run(2, reshard_on_cpus):
        assert pulled == 0 and 0 < received <= buffers
