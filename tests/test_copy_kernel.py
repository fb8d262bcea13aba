"""The copy kernel against torch: on a GPU where there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

from multiprocessing import get_context

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton", reason="Triton is not installed")

from copy_cases import random_copies  # noqa: E402

from megarl.reshard.transport import copies as tiling  # noqa: E402
from megarl.reshard.transport import copy_kernel  # noqa: E402
from megarl.reshard.transport.copy_kernel import FusedCopy  # noqa: E402


@pytest.mark.parametrize("seed", range(30))
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(tiling, "TILE_WORDS", 64)
    case = random_copies(seed, device=DEVICE)
    expected = case.expected()
    fused = FusedCopy(case.copies, torch.device(DEVICE))
    fused.place(case.bases)
    fused.run()
    case.check(expected)


def test_shares_make_the_whole_and_memory_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE_WORDS", 16)
    case = random_copies(5, device=DEVICE)
    expected = case.expected()
    fused = FusedCopy(case.copies, torch.device(DEVICE))
    for shift in (0, 16, 3):  # by 3 bytes, words become narrower
        moved = [torch.empty(memory.nbytes + 64, dtype=torch.int8, device=DEVICE) for memory in case.memories]
        held = [room[16 + shift :][: memory.nbytes] for room, memory in zip(moved, case.memories, strict=True)]
        for there, memory in zip(held, case.memories, strict=True):
            there.copy_(memory.view(torch.int8))
        fused.place(np.array([there.data_ptr() for there in held]))
        for share in range(7):
            fused.run(share, 7)
        for there, want in zip(held[1::2], expected, strict=True):
            assert torch.equal(there, want.view(torch.int8))
        assert fused.nbytes > 0


def test_large_tiles() -> None:
    case = random_copies(11, device=DEVICE, count=3, largest=40)
    expected = case.expected()
    fused = FusedCopy(case.copies, torch.device(DEVICE))
    fused.place(case.bases)
    fused.run()
    case.check(expected)


def _ptx() -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language import int64
    from triton.runtime.jit import JITFunction

    names = {"table": "*i64", "tiles": "*i32", "first": "i32"}
    constants = {"WORD": 16, "TYPE": int64, "ELEMENTS": 2, "WORDS": tiling.TILE_WORDS}
    source = ASTSource(
        fn=JITFunction(copy_kernel._copy.fn),
        signature=names | dict.fromkeys(constants, "constexpr"),
        constexprs={(len(names) + i,): value for i, value in enumerate(constants.values())},
    )
    options = {"num_warps": copy_kernel.NUM_WARPS}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


def test_a_thread_loads_sixteen_bytes_at_once_and_eight_times_before_it_stores() -> None:
    """In the PTX for an H100 or H200, for which no GPU is needed."""
    with get_context("spawn").Pool(1) as pool:  # where no test has had kernels interpreted yet
        ptx = pool.apply(_ptx)
    moves = [line for line in ptx.splitlines() if ".global.v2.b64" in line]
    assert ["ld.global" in line for line in moves] == [True] * 8 + [False] * 8
