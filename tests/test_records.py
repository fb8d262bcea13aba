"""What a run records for its report: spans of every rank, rollouts with their tokens, predicted memory."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks
from run_cases import run_here
from small_disk import fill, small_disk
from test_agreement import QUIET, TENSOR_PARALLEL
from tiny_run import write_run

from megarl.data.pieces import Pieces
from megarl.data.tokenizer import load_tokenizer
from megarl.estimate.accelerator import H200
from megarl.estimate.budget import StageBudget
from megarl.estimate.budget_file import write_budget
from megarl.parallel.watch import Wait
from megarl.phases import Phase
from megarl.telemetry.samples import Sample, TokenColumns, chosen, write_samples
from megarl.telemetry.spans import SpanFile, newest, read_spans, span_files
from megarl.telemetry.timers import PhaseTimers, Span, seconds_by_phase


def test_spans_are_in_order_and_add_up() -> None:
    timers = PhaseTimers(torch.device("cpu"))
    began = time.perf_counter()
    with timers(Phase.GENERATE):
        inside = time.perf_counter()
        time.sleep(0.02)
        with timers(Phase.RESHARD):
            time.sleep(0.03)
    time.sleep(0.02)
    with timers(Phase.UPDATE):
        pass
    spans = timers.spans()
    assert [span.phase for span in spans] == ["generate", "reshard", "generate", "update"]
    assert began <= spans[0].start <= inside and spans[1].start - inside >= 0.02
    for one, other in itertools.pairwise(spans):
        assert one.start + one.seconds <= other.start + 1e-4
    assert spans[3].start - spans[2].start - spans[2].seconds >= 0.0199
    assert seconds_by_phase(spans)["generate"] == spans[0].seconds + spans[2].seconds
    assert timers.spans() == []


PHASES = ("generate", "wait")
SPANS = [[(0, 0.0, 1.5), (1, 1.0, 0.5)], [(0, 0.25, 1.25)]]


def steps_in(run: Path) -> list[int]:
    lines = [line for path in span_files(str(run)) for line in Path(path).read_bytes().splitlines(keepends=True)]
    return [row["step"] for line in lines if (row := read_spans(line)) is not None]


def test_the_timeline_is_bounded_and_goes_back(tmp_path: Path) -> None:
    one = SpanFile(str(tmp_path), most_bytes=1000)
    for step in range(1, 41):
        one.write(step, "rl", 100.0 + step, PHASES, SPANS)
    kept = steps_in(tmp_path)
    assert kept == list(range(kept[0], 41)) and 5 < len(kept) < 25
    assert sum(Path(path).stat().st_size for path in span_files(str(tmp_path))) < 2 * 1200
    row = json.loads(Path(span_files(str(tmp_path))[0]).read_bytes().splitlines()[0])
    assert row["ranks"] == [[0, 0.0, 1.5, 1, 1.0, 0.5], [0, 0.25, 1.25]] and row["began"] == 100.0 + kept[0]
    one.close()  # the run goes back to step 30
    one.write(30, "rl", 7.0, PHASES, SPANS)
    one.close()
    assert steps_in(tmp_path) == [*range(kept[0], 30), 30]
    with open(span_files(str(tmp_path))[-1], "a") as f:
        f.write('{"step": 31, "ran')  # killed while writing
    two = SpanFile(str(tmp_path), most_bytes=1000)
    two.write(31, "rl", 8.0, PHASES, SPANS)
    two.close()
    assert steps_in(tmp_path) == [*range(kept[0], 30), 30, 31]
    two.write(kept[0], "rl", 8.0, PHASES, SPANS)
    assert steps_in(tmp_path) == [kept[0]]


def test_lines_that_are_no_spans() -> None:
    good: dict[str, Any] = {"step": 1, "began": 5.0, "phases": ["a"], "ranks": [[0, 0.0, 1.0]]}
    assert read_spans(json.dumps(good).encode()) == good
    wrong: list[dict[str, Any]] = [
        *({"ranks": [[1, 0.0, 1.0]]}, {"ranks": [[0, 0.0]]}, {"ranks": [[0, "x", 1.0]]}, {"ranks": [[0.0, 0.0, 1.0]]}),
        *({"began": None}, {"phases": {}}, {"step": "1"}, {"ranks": 3}, {"ranks": [None]}, {"began": 1e300}),
    ]
    assert [read_spans(json.dumps(good | change).encode()) for change in wrong] == [None] * len(wrong)
    rows = [{"step": step, "at": i} for i, step in enumerate((1, 2, 3, 2))]
    assert newest(iter(rows), 2) == [{"step": 3, "at": 2}, {"step": 2, "at": 3}]


def test_a_full_disk_loses_no_step_of_the_timeline(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        file = SpanFile(str(disk))
        file.write(1, "rl", 1.0, PHASES, SPANS)
        ballast, failed = fill(disk), 0
        for step in range(2, 20):
            try:
                file.write(step, "rl", 1.0, PHASES, SPANS * 20)
            except OSError:
                failed += 1
        assert failed
        ballast.unlink()
        file.write(20, "rl", 1.0, PHASES, SPANS)
        file.close()
        assert steps_in(disk) == list(range(1, 21))


def late_rank(folder: str) -> tuple[float, float]:
    """Rank 1 works longer than rank 0, which waits in an agreement."""
    import torch.distributed as dist

    from megarl.config.trainer import TrainerConfig
    from megarl.parallel.world import World
    from megarl.trainer.records.timeline import Timeline

    world = World()
    timers, trainer = PhaseTimers(world.device), TrainerConfig(default_local_dir=folder, logger=["jsonl"])
    timeline = Timeline(trainer, world, print)
    time.sleep(0.5)  # models are built
    timeline.begin()
    begun = time.perf_counter()
    with timers(Phase.GENERATE):
        time.sleep(0.4 * dist.get_rank())
        came = time.perf_counter()
        world.barrier("the test")
    timeline.step(1, "rl", world.all_gather(timeline.own(timers.spans(), world.watch.collect_waits())))
    with timers(Phase.UPDATE):
        time.sleep(0.01)
    timeline.step(2, "rl", world.all_gather(timeline.own(timers.spans(), world.watch.collect_waits())))
    timeline.close()
    quiet = Timeline(TrainerConfig(default_local_dir=folder + "/quiet", logger=["console"]), world, print)
    quiet.step(1, "rl", [quiet.own([Span(Phase.UPDATE, 0.0, 1.0)], [])])
    world.leave()
    return begun, came


def test_a_late_rank_is_seen(ranks: Ranks, tmp_path: Path) -> None:
    begun, came = zip(*ranks.run(2, late_rank, str(tmp_path)), strict=True)
    one, two = (read_spans(line) for line in (tmp_path / "timeline" / "newer.jsonl").read_bytes().splitlines(True))
    assert one is not None and two is not None and (one["step"], two["step"]) == (1, 2)
    names = one["phases"]
    spans = [{names[of[i]]: of[i + 1 : i + 3] for i in range(0, len(of), 3)} for of in one["ranks"]]
    ends = [{phase: start + seconds for phase, (start, seconds) in of_rank.items()} for of_rank in spans]
    rounded = 1e-3  # seconds
    for rank in (0, 1):  # nobody is through before the late one comes; processes of a host share a clock
        assert begun[rank] + ends[rank]["generate"] >= came[1] - rounded
    assert begun[0] + ends[0]["wait"] >= came[1] - rounded
    assert all(start >= 0 for of_rank in spans for start, _ in of_rank.values())
    assert "wait" not in spans[1] or spans[1]["wait"][0] >= came[1] - begun[1] - rounded
    assert spans[0]["wait"][1] > spans[1].get("wait", [0, 0])[1]
    assert ends[1]["generate"] >= 0.4 and two["began"] - one["began"] >= 0.4 and spans[1]["generate"][0] >= 0
    assert two["phases"][two["ranks"][1][0]] == "update" and two["ranks"][1][2] >= 0.01
    assert not (tmp_path / "quiet").exists()


def test_a_rank_tells_its_longest_spans(tmp_path: Path) -> None:
    """In order, however many there are: as many updates as waits, one in three too short to be seen."""
    from megarl.config.trainer import TrainerConfig
    from megarl.trainer.records.timeline import MOST_SPANS, Timeline

    watch = SimpleNamespace(collect_waits=list)
    one_of_two: Any = SimpleNamespace(rank=1, size=2, barrier=lambda what: None, watch=watch)
    timeline = Timeline(TrainerConfig(default_local_dir=str(tmp_path), logger=["jsonl"]), one_of_two, pytest.fail)
    timeline.begin()
    began = time.perf_counter()
    seconds = [(1e-6, 0.01, 0.02)[i % 3] for i in range(300)]
    spans = [Span(Phase.UPDATE, began + i, s) for i, s in enumerate(seconds)]
    waits = [Wait("update", began + i, s) for i, s in enumerate(seconds)]
    told = timeline.own(spans, waits)
    assert len(told) == MOST_SPANS == 96 and {s for _, _, s in told} == {0.02}
    assert timeline.own([Span("verify", began, 9.0)], [])[0][::2] == ("verify", 9.0)  # a phase of the flow's own
    assert [start for _, start, _ in told] == sorted(start for _, start, _ in told)
    assert [s for _, _, s in timeline.own(spans[:4], waits[:2])] == [0.01, 0.02, 0.01]
    alone: Any = SimpleNamespace(rank=0, size=1, barrier=lambda what: None)
    timeline = Timeline(TrainerConfig(default_local_dir=str(tmp_path), logger=["jsonl"]), alone, pytest.fail)
    assert timeline.own([], waits) == []


def test_whole_groups_are_shown() -> None:
    groups = [[4 * g + s for s in range(4)] for g in range(16)]
    assert chosen(groups, 10) == [0, 1, 2, 3, 20, 21, 22, 23, 40, 41]
    assert chosen(groups, 8) == [*range(4), *range(32, 36)]
    assert chosen(groups, 2) == [0, 1] and chosen(groups, 0) == []
    assert chosen(groups, 64) == chosen(groups, -1) == chosen(groups, 1000) == list(range(64))
    mixed = [[0, 3], [1], [2, 4, 5]]  # a conversation that became several sequences, and groups that lie mixed
    assert chosen(mixed, -1) == [0, 3, 1, 2, 4, 5] and sorted(chosen(mixed, 5)) == sorted(chosen(mixed, 6)[:5])
    for wanted in range(7):
        assert len(set(chosen(mixed, wanted))) == wanted


def byte_tokenizer(folder: Path) -> None:
    """A token for each byte, as a byte-level vocabulary ends up with for rare characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=AddedToken("<|end|>", special=True))
    fast.save_pretrained(folder)


def test_pieces_joined_are_the_text(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    pieces = Pieces(tokenizer)
    ids = [*tokenizer.encode("a €é b"), tokenizer.eos_id, 10_000]
    assert pieces.of(ids) == ["a", " ", "€é", "", "", "", "", " ", "b", "<|end|>", ""]
    assert pieces.of(ids[:4]) == ["a", " ", "\ufffd", ""]  # cut off within a character
    text = "多 words,\n\tand 🙂 too"
    assert "".join(pieces.of(tokenizer.encode(text))) == text


def test_pieces_of_sentencepiece_keep_their_spaces(tmp_path: Path) -> None:
    write_run(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    ids = tokenizer.encode("7+8=15")
    assert Pieces(tokenizer).of([*ids, tokenizer.eos_id]) == ["7", "+", "8", "=", "1", "5", "</s>"]


def test_samples_say_what_is_known(tmp_path: Path) -> None:
    sample = Sample(prompt="p", response="r\ud800", answer="", reward=None, index=0, parts={"part/a": 0.5})
    columns = TokenColumns(texts=["r", "s"], logp=[-0.5, None], gap=[0.0, 0.0])
    path = write_samples(str(tmp_path), 3, [sample, sample.with_tokens(columns)])
    first, second = map(json.loads, Path(path).read_text().splitlines())
    shown = {"prompt": "p", "response": "r?", "answer": "", "reward": None}
    assert first == shown | {"index": 0, "parts": {"part/a": 0.5}}
    assert second == first | {"tokens": ["r", "s"], "logp": [-0.5, None], "gap": [0.0, 0.0]}


def rollouts_of(folder: Path, step: int) -> list[dict[str, Any]]:
    text = (folder / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


TWO_PARTS = """
def first(response, row):
    return {"score": float(response[:1] == row["answer"][:1]), "beside": 0.25}
def short(response, row):
    return 1.0 / (1 + len(response))
"""


def test_a_run_records_tokens_parts_and_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(TWO_PARTS)
    parts = {
        "right": {"name": f"{tmp_path / 'parts.py'}:first"},
        "short": {"name": f"{tmp_path / 'parts.py'}:short", "weight": 0.5},
    }
    config = write_run(tmp_path, **QUIET, reward={"parts": parts}, trainer__log_rollouts=-1, trainer__save_freq=1)
    for total in (2, 3):  # it resumes
        ended = ranks.run(2, run_here, str(config), [f"trainer.total_training_steps={total}"])
        assert [how for how, _ in ended] == ["", ""]
    for step in (1, 2, 3):
        records = rollouts_of(tmp_path, step)
        assert len(records) == 64
        by_group: dict[int, list[dict[str, Any]]] = {}
        for record in records:
            by_group.setdefault(record["group"], []).append(record)
            columns = [record[name] for name in ("tokens", "logp", "advantage", "gap")]
            assert {len(column) for column in columns} == {record["length"]} and 0 < record["length"] <= 4
            said = [token for token in record["tokens"] if token not in ("<pad>", "</s>")]
            assert "".join(said).strip() == record["response"].strip()
            total = record["parts"]["part/right"] + 0.5 * record["parts"]["part/short"]
            assert record["reward"] == pytest.approx(total, abs=1e-3) and record["parts"]["part/right/beside"] == 0.25
            assert max(map(abs, record["gap"])) < 1e-3 and max(record["logp"]) < 0
            assert record["finish"] in ("stop", "length") and record["source"] == "train" and record["index"] < 80
        assert len(by_group) == 16
        for group in by_group.values():
            assert [record["sample"] for record in group] == [0, 1, 2, 3]
            assert len({record["prompt"] for record in group}) == 1
            best = max(group, key=lambda record: record["reward"])  # its advantage in the group is the highest
            assert best["advantage"][0] == max(record["advantage"][0] for record in group)
    assert steps_in(tmp_path / "run") == [1, 2, 3]
    row = json.loads((tmp_path / "run" / "timeline" / "newer.jsonl").read_text().splitlines()[1])
    for of_rank in row["ranks"]:
        names = {row["phases"][place] for place in of_rank[::3]}
        assert {"generate", "reward", "log_probs", "update"} <= names and all(s < 60 for s in of_rank[2::3])
    assert len(row["ranks"]) == 2 and math.isclose(row["began"], time.time(), abs_tol=600)


def test_a_step_that_ends_badly_has_left_its_rollouts(ranks: Ranks, tmp_path: Path) -> None:
    keys = {"trainer__agreement_freq": 2, "trainer__total_training_steps": 5}
    config = write_run(tmp_path, **QUIET, **keys, **TENSOR_PARALLEL)
    ended = ranks.run(2, run_here, str(config), [], "another_advantage_on_rank_1")
    assert all(how.startswith("RunStopped: step 2: ") for how, _ in ended)
    assert all("advantage" in record for record in rollouts_of(tmp_path, 1))
    left = rollouts_of(tmp_path, 2)
    assert len(left) == 8 and all(record["length"] and "advantage" not in record for record in left)
    assert steps_in(tmp_path / "run") == [1]


@pytest.mark.slow
def test_a_run_that_rolls_back_has_each_step_once_in_its_timeline(ranks: Ranks, tmp_path: Path) -> None:
    keys = {**QUIET, "trainer__save_freq": 1, "trainer__on_nonfinite": "rollback", "trainer__total_training_steps": 3}
    ended = ranks.run(2, run_here, str(write_run(tmp_path, **keys)), [], "nan_in_the_second_step")
    assert [how for how, _ in ended] == ["", ""]
    assert steps_in(tmp_path / "run") == [1, 2, 3]


def test_the_predicted_memory_is_written(tmp_path: Path) -> None:
    """Of each phase the stage that needs most."""
    generate, update = {"weights": 5, "KV cache": 9}, {"weights": 6, "gradients": 0}
    first = StageBudget(stage=0, phases={Phase.GENERATE: generate, Phase.UPDATE: {"weights": 5}})
    second = StageBudget(stage=1, phases={Phase.GENERATE: {"weights": 5, "KV cache": 2}, Phase.UPDATE: update})
    write_budget(str(tmp_path), [first, second], H200)
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["phases"] == {"generate": {"weights": 5, "KV cache": 9}, "update": {"weights": 6}}
    assert found["accelerator"] == H200.name and found["bytes"] == H200.memory


def test_a_report_is_told_of_tokens_without_having_shown_any(tmp_path: Path) -> None:
    from megarl.config import Config
    from megarl.config.trainer import TrainerConfig
    from megarl.trainer.records.report import Report

    trainer = TrainerConfig(default_local_dir=str(tmp_path / "run"), logger=["console", "jsonl"], log_rollouts=0)
    inputs: Any = SimpleNamespace(config=Config(trainer=trainer))
    report = Report(inputs, rank=0, first_step=None)
    report.begin()
    batch: Any = None
    report.trained_on(batch)
    assert not (tmp_path / "run" / "rollouts").exists()
