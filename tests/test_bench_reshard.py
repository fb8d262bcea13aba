"""tools/bench_reshard.py on CPU ranks: what it counts, that every way is exact, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from training_cases import ARCH

from megarl.models.tensors import volume
from megarl.models.weights import logical_tensors


def _measure(pairs: list[tuple[str, str]], world: int) -> dict[str, Any]:
    import os

    from tools import bench_reshard as bench

    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    try:
        configs = [bench.config_of("tiny", *pair, engine="native", dtype="float32") for pair in pairs]
        return asdict(bench.measure(configs, ARCH, rounds=1, ways=bench.WAYS, sweep=False))
    finally:
        del os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.slow
def test_two_pairs_of_layouts(ranks: Ranks) -> None:
    pairs = [("PP2", "TP2"), ("TP2", "TP1")]
    figures = ranks.run(2, _measure, pairs, 2)
    assert [f["reshards"] for f in figures[1:]] == [figures[0]["reshards"]]  # all ranks have the slowest one's
    first, second = figures[0]["reshards"]
    assert (first["train"], first["generation"]) == ("TP1 x PP2", "TP2 x 1")
    assert (second["train"], second["generation"]) == ("TP2 x PP1", "TP1 x 2")
    whole = 4 * sum(volume(t.box) for t in logical_tensors(ARCH).values())
    assert second["shared_bytes"] + second["local_bytes"] + second["received_bytes"] >= whole
    for reshard in (first, second):
        assert reshard["received_bytes"] > 0 and reshard["pulled_bytes"] == 0
        rate = figures[0]["links"]["exchange"]
        most = max(reshard["received_bytes"], reshard["sent_bytes"])
        assert reshard["bound_milliseconds"] == pytest.approx(1e3 * most / rate)
        assert set(reshard["notes"]) == {"peer", "copy engine", "refit"}  # 61 tokens are padded to 62 for two ranks
        assert [reshard["ways"][name]["exact"] for name in ("collective", "gather")] == [True, True]
        for way in reshard["ways"].values():
            assert way["of_bound"] == pytest.approx(reshard["bound_milliseconds"] / way["milliseconds"])


def test_picture(tmp_path: Path, ranks: Ranks) -> None:
    from tools.reshard_figures import Figures, Reshard, Way, draw
    from tools.reshard_links import Links

    way = Way(
        milliseconds=2.0,
        of_bound=0.5,
        first_milliseconds=9.0,
        extra_allocated_mib=1.0,
        extra_device_mib=2.0,
        exact=True,
    )
    reshard = Reshard(
        train="TP2 x PP1",
        generation="TP1 x 2",
        shared_bytes=1,
        local_bytes=1,
        sent_bytes=1,
        received_bytes=1,
        pulled_bytes=1,
        bound_milliseconds=1.0,
        ways={"peer": way, "refit": way},
        notes={},
        sweep={},
    )
    figures = Figures(model="m", engine="native", ranks=2, device="GPU", links=Links(), reshards=[reshard, reshard])
    draw(figures, str(tmp_path / "f.png"))
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "TP2", "--generation", "TP1", "TP2"], "--generation needs as many layouts as --train"),
        (["--train", "2", "--generation", "TP1"], "layout '2' is not of the form TP2,PP2"),
        (["--train", "TP1", "--generation", "TP1,PP2"], "generation layout 'TP1,PP2' is not of the form TP2"),
        (["--train", "TP3", "--generation", "TP1"], "1 ranks cannot be split into tensor x pipeline x context"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    from tools.bench_reshard import main

    assert main(["--model", "configs/models/tiny_qwen", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"bench_reshard: error: {message}") and printed.count("\n") == 1
