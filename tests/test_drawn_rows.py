"""Rows with answers that are tokenised when they are drawn: the same batches as of rows that are tokenised at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chat_tokenizer import SIZE, TEMPLATE, write_chat_tokenizer
from kill_and_resume import tensors_of
from prompt_rows import write_rows
from pyarrow import parquet
from ranks import Ranks
from run_cases import run_here
from selection import quick
from test_offline import even_over_odd, offline_run
from tiny_run import numbers_of

import megarl.data.example_set
import megarl.data.index_making
from megarl.config import load_config
from megarl.config.data import DataConfig
from megarl.data.example_set import ExampleSet, fits_of, load_examples
from megarl.data.prompt_sampler import PromptSampler
from megarl.data.row_files import RowRefused, RowsChanged
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokenizer_huggingface import HuggingFaceTokenizer
from megarl.trainer.admission.checks import check_run

ROWS = 30


def said(*texts: str, first: str = "user") -> list[dict[str, Any]]:
    """Messages of a user and the assistant in turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def conversation(i: int) -> dict[str, Any]:
    """A conversation of another form for each of six rows: more turns, parts of text, a tool's name, calls, tools."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": str(i)}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": f"Bern {i}"}}}
    forms: list[list[dict[str, Any]]] = [
        said(f"{i}?", "yes"),
        said(f"{i}?", "yes", "why?", f"{i} < 9"),
        [{"role": "system", "content": "be brief"}, *said("?", f"{i}")],
        [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[1:]}],
        [*said(f"{i}?"), {"role": "tool", "content": "rain"}, *said("wet", first="assistant")],
        [*said("?"), {"role": "assistant", "content": "", "tool_calls": [call]}, *said("", f"wet {i}")],
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    return {"messages": forms[i % 6], **({"tools": tools} if i % 6 == 5 else {})}


FORMS: dict[str, tuple[Any, dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "texts": ("demonstrations", {}, lambda i: {"prompt": f"{i}+{i}=", "answer": 2 * i if i % 2 else f" {2 * i}"}),
    "conversations": ("demonstrations", {"messages_key": "messages"}, conversation),
    "completions": (
        "demonstrations",
        {"answer_key": "completion"},
        lambda i: {"prompt": said(f"{i}?"), "completion": said("a", *["b", "c"] * (i % 2), first="assistant")},
    ),
    "pairs of texts": (
        "preferences",
        {"margin_key": "by"},
        lambda i: {"prompt": f"{i}", "chosen": "7", "rejected": "87" if i % 4 else "7", "by": i / 8},
    ),
    "pairs of conversations": (
        "preferences",
        {},
        lambda i: {"chosen": said(f"{i}?", "yes"), "rejected": said(f"{i}?", "no")},
    ),
    "pairs of last messages": (
        "preferences",
        {},
        lambda i: {"prompt": said(f"{i}?"), "chosen": said("", "yes")[1:], "rejected": said("", "no")[1:]},
    ),
    "judged texts": ("judged", {}, lambda i: {"prompt": f"{i}", "answer": f"{i}", "label": i % 3 == 0}),
    "judged messages": (
        "judged",
        {},
        lambda i: {"prompt": said(f"{i}?"), "answer": said("", "yes")[1:], "label": i % 2},
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of characters, with a chat template that reads tools."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_chat_tokenizer(folder)
    return str(folder)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any size are only looked at."""
    monkeypatch.setattr(megarl.data.example_set, "LATER_BYTES", -1)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files go by way of the cache, in short stretches."""
    monkeypatch.setattr(megarl.data.index_making, "STRETCH_BYTES", 512)
    monkeypatch.setattr(megarl.data.example_set, "SMALL_BYTES", -1)


def load(tokenizer: str, file: str, format: Any, *, what: str = "data.train_files", **keys: Any) -> ExampleSet:
    cache = str(Path(file).parent / "cache")
    data = DataConfig.model_validate({"filter_overlong_prompts": True, "cache_dir": cache, **keys})
    return load_examples(data, format, [file], load_tokenizer(tokenizer), what, tokenizer_key=tokenizer)


def batches(examples: ExampleSet, count: int, state: dict[str, Any] | None = None) -> list[list[Any]]:
    """The next batches of four, as a run draws them."""
    sampler = PromptSampler(len(examples), 4, True, 7, fits=fits_of(examples))
    if state is not None:
        sampler.load_state(state)
    return [[examples[i] for i in sampler.next()] for _ in range(count)]


@pytest.mark.parametrize("form", FORMS)
def test_drawn_rows_are_the_rows_that_are_tokenised_at_once(
    tmp_path: Path, tokenizer: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over three epochs, of a file of lines and of a table, and both kinds say which rows the other has."""
    format, keys, row = FORMS[form]
    rows = [row(i) for i in range(ROWS)]
    lines = write_rows(tmp_path / "a.jsonl", rows)
    if form in ("texts", "conversations"):  # whose columns have no one type
        other = tmp_path / "a.json"
        other.write_text(json.dumps(rows))
    else:
        other = tmp_path / "a.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), other, row_group_size=7)
    at_once = load(tokenizer, lines, format, **keys)
    assert not at_once.drawn and fits_of(at_once) is None
    expected = batches(at_once, 20)
    monkeypatch.setattr(megarl.data.example_set, "LATER_BYTES", -1)
    drawn, table = (load(tokenizer, file, format, **keys) for file in (lines, str(other)))
    assert drawn.drawn and batches(drawn, 20) == expected
    assert [[e.sequences for e in batch] for batch in batches(table, 20)] == [
        [e.sequences for e in batch] for batch in expected
    ]
    assert drawn.digest == table.digest != at_once.digest and drawn.remarks == at_once.remarks
    half = load(tokenizer, write_rows(tmp_path / "b.jsonl", rows[::2]), format, what="data.val_files", **keys)
    assert not half.drawn and half.in_common(drawn) == half.in_common(at_once) == len(half)
    assert drawn.in_common(half) == at_once.in_common(half) >= len(half)


@pytest.mark.parametrize("form", quick(["conversations", "texts", "pairs of texts"], 0))
def test_the_same_by_way_of_the_cache(
    tmp_path: Path, tokenizer: str, form: str, later: None, request: pytest.FixtureRequest
) -> None:
    """Other processes look at the rows; the next start opens what they wrote, and another limit is another index."""
    format, keys, row = FORMS[form]
    file = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(ROWS)])
    here = load(tokenizer, file, format, **keys)
    request.getfixturevalue("cached")
    there, again = (load(tokenizer, file, format, **keys) for _ in range(2))
    assert batches(here, 20) == batches(there, 20) == batches(again, 20)
    assert here.digest == there.digest == again.digest and here.remarks == there.remarks == again.remarks
    assert load(tokenizer, file, format, **keys, max_prompt_length=400).digest != here.digest
    entries = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(entries) == 2 and all((entry / "tokens.bin").stat().st_size == 0 for entry in entries)


def test_rows_that_are_too_long_are_passed_over(
    tmp_path: Path, tokenizer: str, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch is full, a state in the middle of an epoch gives what follows it, and nothing is tokenised twice."""
    rows = [{"prompt": "7" * (1 + i % 5), "answer": f"{i}"} for i in range(ROWS)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    examples = load(tokenizer, file, "demonstrations", max_prompt_length=4)
    assert len(examples) == ROWS and [examples.fits(i) for i in range(ROWS)] == [i % 5 < 4 for i in range(ROWS)]
    assert examples.remarks == (
        "remark: data.train_files: 6 of 30 rows that were tried are over data.max_prompt_length = 4 or "
        "data.max_response_length = 512 tokens; such rows are left out when they are drawn",
    )
    sampler = PromptSampler(ROWS, 4, True, 7, fits=fits_of(examples))
    states, drawn = [], []
    for _ in range(13):
        states.append(sampler.state())
        drawn.append([examples[i] for i in sampler.next()])
    assert [state["epoch"] for state in states] == [0] * 7 + [1] * 6  # 24 rows, 6 batches an epoch; the state before
    assert all(len(e.sequences[0][0]) <= 4 for batch in drawn for e in batch)
    assert len({e.source for batch in drawn[:6] for e in batch}) == 24
    assert all(batches(examples, 13 - i, state) == drawn[i:] for i, state in enumerate(states))

    texts: list[str] = []
    original = HuggingFaceTokenizer.encode
    monkeypatch.setattr(HuggingFaceTokenizer, "encode", lambda self, text: texts.append(text) or original(self, text))
    assert batches(load(tokenizer, file, "demonstrations", max_prompt_length=4), 6) == drawn[:6]
    assert len(texts) == 2 * (30 + 24)  # prompts and, where they are short enough, answers: when tried, and when drawn
    monkeypatch.setattr(megarl.data.example_set, "HELD_NUMBERS", 20)
    assert batches(load(tokenizer, file, "demonstrations", max_prompt_length=4), 13) == drawn


def test_too_few_rows_fit(tmp_path: Path, tokenizer: str, later: None, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": "7" * (9 - (i == 4)), "answer": "7"} for i in range(ROWS)])
    with pytest.raises(
        ValueError, match=r"train_files: none of the 30 rows that were tried keeps to data.max_prompt_l"
    ):
        load(tokenizer, file, "demonstrations", max_prompt_length=7)
    with pytest.raises(RowRefused) as refused:
        batches(load(tokenizer, file, "demonstrations", max_prompt_length=8), 1)
    text = str(refused.value)
    assert text.startswith(
        "data.train_batch_size = 4 is more than the rows of data.train_files that keep to data.max_p"
    )
    assert "were tried, 1 do; raise a length, or lower data.train_batch_size" in text or ", 0 do;" in text
    monkeypatch.setattr(megarl.data.prompt_sampler, "MOST_TRIED", 0)
    sampler = PromptSampler(1000, 4, False, 0, fits=lambda rows: [i % 200 == 0 for i in rows])
    with pytest.raises(RowRefused, match=r"400 of 1000 were tried, 2 do; raise a length"):
        sampler.next()
    monkeypatch.setattr(megarl.data.example_set, "TRIED", 2)
    with pytest.raises(ValueError, match="none of the 2 rows that were tried"):
        load(tokenizer, file, "demonstrations", max_prompt_length=8)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if 'bad' in m.content %}{{ raise_exception('bad word') }}{% endif %}{% endfor %}" + TEMPLATE
)


@pytest.mark.parametrize(
    ("format", "keys", "row", "refusal"),
    [
        ("judged", {}, {"prompt": "7", "answer": "7", "label": "x"}, "FILE:4: the label in column 'label' must be"),
        ("judged", {}, {"prompt": "7", "label": 1}, "data.answer_key = 'answer': no such column in FILE:4; columns: "),
        ("judged", {}, {"prompt": "", "answer": "7", "label": 1}, "FILE:4: the prompt in column 'prompt' is empty"),
        ("judged", {}, {"prompt": "7", "answer": None, "label": 1}, "FILE:4: the answer in column 'answer' must be te"),
        ("preferences", {}, {"chosen": said("7", "8"), "rejected": said("8", "8")}, "FILE:4: the conversations in col"),
        (
            "preferences",
            {"margin_key": "by"},
            {"prompt": "7", "chosen": "7", "rejected": "8"},
            "data.margin_key = 'by'",
        ),
        (
            "demonstrations",
            {"messages_key": "m"},
            {"m": [{"role": "system", "content": "7"}, *said("7", "8")]},
            "FILE:4: the chat template refuses the messages: no system",
        ),
        (
            "demonstrations",
            {"messages_key": "m"},
            {"m": said("7")},
            "FILE:4: the conversation in column 'm' has no mes",
        ),
        (
            "demonstrations",
            {"messages_key": "m"},
            {"m": [*said("7", "8"), {"role": "user", "content": 8}, *said("8", first="assistant")]},
            "FILE:4: message 3: its content must be text, or a list of parts of text, not int",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_run(
    tmp_path: Path, later: None, format: str, keys: dict[str, Any], row: dict[str, Any], refusal: str
) -> None:
    good = {"judged": {"prompt": "7", "answer": "7", "label": 1}, "preferences": {"chosen": said("7", "8"), "by": 1}}
    good["preferences"]["rejected"] = said("7", "9")
    good["demonstrations"] = {"m": said("7", "8")}
    write_chat_tokenizer(tmp_path, STRICT)
    file = write_rows(tmp_path / "a.jsonl", [good[format]] * 3 + [row] + [good[format]])
    with pytest.raises(ValueError) as refused:
        load(str(tmp_path), file, format, **keys)
    assert str(refused.value).startswith(refusal.replace("FILE", file)) and "\n" not in str(refused.value)


def test_the_first_row_of_a_form_that_the_template_refuses_is_named(tmp_path: Path, later: None, cached: None) -> None:
    """Whichever process looked at it, and at others of its form, behind rows of forms that it takes."""
    write_chat_tokenizer(tmp_path, STRICT)
    good, bad = {"m": said("7", "8")}, {"m": [{"role": "system", "content": "7"}, *said("7", "8")]}
    file = write_rows(tmp_path / "a.jsonl", [good] * 50 + [bad] * 50)
    with pytest.raises(ValueError, match=r"a.jsonl:51: the chat template refuses the messages: no system$"):
        load(str(tmp_path), file, "demonstrations", messages_key="m")


def test_tools_that_the_template_drops_are_refused_before_the_run(tmp_path: Path, later: None) -> None:
    """However many conversations with the same roles, and no tools, came before."""
    write_chat_tokenizer(tmp_path, TEMPLATE.partition("{% endif %}")[2])
    plain, row = conversation(0), conversation(0)
    row["tools"] = conversation(5)["tools"]
    file = write_rows(tmp_path / "a.jsonl", [plain, plain, row])
    with pytest.raises(ValueError, match=r"a.jsonl:3: the chat template does not write down the tools"):
        load(str(tmp_path), file, "demonstrations", messages_key="messages")


def test_a_row_that_the_template_refuses_when_it_is_drawn(
    tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names it, whether it is asked for its length first or not; rows that are tried are refused before."""
    write_chat_tokenizer(tmp_path, STRICT)
    rows = [{"m": said("7", "bad" if i == 5 else "8")} for i in range(9)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=r"a.jsonl:6: the chat template refuses the messages: bad word$"):
        load(str(tmp_path), file, "demonstrations", messages_key="m")
    monkeypatch.setattr(megarl.data.example_set, "TRIED", 2)
    examples = load(str(tmp_path), file, "demonstrations", messages_key="m")
    line = (
        f"{file}:6: the chat template refuses the messages: bad word; it was looked at and not tokenised before it was "
        "drawn: mend it and go on with trainer.resume_allow=[data]"
    )
    for call in (examples.fits, examples.__getitem__):
        assert examples.fits(4)
        with pytest.raises(RowRefused) as refused:
            call(5)
        assert str(refused.value) == line


def test_a_row_that_is_changed_after_the_look_is_refused(tmp_path: Path, tokenizer: str, later: None) -> None:
    rows = [{"prompt": f"{i}", "answer": "7"} for i in range(9)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    examples = load(tokenizer, file, "demonstrations")
    rows[3]["answer"] = "8"
    write_rows(tmp_path / "a.jsonl", rows)
    assert examples.fits(2) and examples[2].source == f"{file}:3"
    for call in (examples.fits, examples.__getitem__):
        with pytest.raises(
            RowsChanged, match=r"a.jsonl:4 is no longer what it was when the run began; put the file back"
        ):
            call(3)


def test_special_tokens_are_counted(tmp_path: Path, tokenizer: str, later: None) -> None:
    """Whichever column has them; one that is none of the texts does not count."""
    rows = [{"prompt": f"7{'<end>' * (i == 1)}", "answer": f"7{'<user>' * (i == 2)}", "id": "<end>"} for i in range(9)]
    examples = load(tokenizer, write_rows(tmp_path / "a.jsonl", rows), "demonstrations")
    assert examples.remarks[0].startswith("remark: data.train_files: 2 of 9 rows spell special tokens of the tokenizer")


@pytest.mark.parametrize("filter_overlong", quick([False, True], 1))
def test_a_long_wait_says_what_would_shorten_it(
    tmp_path: Path,
    tokenizer: str,
    cached: None,
    later: None,
    filter_overlong: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, of training rows."""
    monkeypatch.setattr(megarl.data.index_making, "SAY_EVERY_SECONDS", 0.0)
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": "7" * 90, "answer": "7"} for _ in range(60)])
    keys = {"filter_overlong_prompts": filter_overlong}
    load(tokenizer, file, "demonstrations", **keys)
    lines = [line for line in capsys.readouterr().err.splitlines() if "looked at" in line]
    hint = "; data.filter_overlong_prompts=true has rows tokenised when they are drawn"
    assert len(lines) > 3 and [line.endswith(hint) for line in lines] == [not filter_overlong] + [False] * (
        len(lines) - 1
    )
    load(tokenizer, file, "demonstrations", what="data.val_files", **keys)
    assert "drawn" not in capsys.readouterr().err


def test_pairs_that_nobody_has_tokenised_need_room_for_the_longest(tmp_path: Path, later: None) -> None:
    config = str(offline_run(tmp_path, "preference", even_over_odd))
    keys = ["data.filter_overlong_prompts=true", "data.max_prompt_length=8", "data.max_response_length=8"]
    limit = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    inputs = check_run(load_config(config, [*keys, f"{limit}=32"]))
    assert isinstance(inputs.train_examples, ExampleSet) and inputs.train_examples.drawn
    assert isinstance(inputs.val_examples, ExampleSet) and not inputs.val_examples.drawn
    with pytest.raises(ValueError) as refused:
        check_run(load_config(config, [*keys, f"{limit}=31"]))
    assert str(refused.value).startswith(
        "a pair, tokenised when it is drawn, may have 2 x (data.max_prompt_length + data.max_response_length) = 32 "
        "tokens, more than actor.ppo_max_token_len_per_gpu = 31"
    )


def test_drawn_rows_train_the_same_weights(ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks, each of which tokenises them."""
    tensors, numbers = [], []
    config = offline_run(tmp_path, "sft", even_over_odd, trainer__total_training_steps=6)
    keys = ["data.filter_overlong_prompts=true", "data.max_response_length=8"]
    for fault in ("", "rows_are_drawn"):
        ends = ranks.run(2, run_here, str(config), keys, fault)
        assert [end for end, _ in ends] == ["", ""], ends
        tensors.append(tensors_of(str(tmp_path / "run" / "checkpoints" / "train_step_6")))
        numbers.append(numbers_of(tmp_path))
        shutil.rmtree(tmp_path / "run")
    assert tensors[0].keys() == tensors[1].keys() and numbers[0] == numbers[1]
    assert all(bool((tensors[0][name] == tensors[1][name]).all()) for name in tensors[0])


def test_a_row_that_is_refused_when_it_is_drawn_loses_no_step(ranks: Ranks, tmp_path: Path) -> None:
    """The steps before it are saved; with the row mended, the run goes on."""

    def rows(read: list[dict[str, Any]]) -> None:
        read[:] = [{"m": said("7", "bad" if i == bad and len(read) == 80 else str(i))} for i in range(len(read))]

    sampler = PromptSampler(80, 20, True, 1)
    bad = next(i for i in [sampler.next() for _ in range(3)][-1] if 0 < i < 79)
    settings = {"data__messages_key": "m", "data__max_prompt_length": 80, "trainer__total_training_steps": 4}
    config = offline_run(tmp_path, "sft", rows, **settings)
    (tmp_path / "tokenizer.model").unlink()
    write_chat_tokenizer(tmp_path, STRICT)
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"vocab_size": SIZE, "max_position_embeddings": 256}))
    keys = ["data.filter_overlong_prompts=true"]
    for end, out in ranks.run(2, run_here, str(config), keys, "rows_are_drawn"):
        assert end.startswith(f"refused: {tmp_path}/train.jsonl:{bad + 1}: the chat template refuses the messages: bad")
        saved = tmp_path / "run" / "checkpoints" / "train_step_2"
        line = f"step 3 lacks rows that can be used; checkpoint {saved}"
        assert line in out or "megarl: " not in out
    bad = -1
    rows(read := [{}] * 80)
    write_rows(tmp_path / "train.jsonl", read)
    ends = ranks.run(2, run_here, str(config), [*keys, "trainer.resume_allow=[data]"], "rows_are_drawn")
    assert [end for end, _ in ends] == ["", ""] and numbers_of(tmp_path)[-1]["step"] == 4


def test_a_step_whose_validation_cannot_be_read_keeps_its_row(ranks: Ranks, tmp_path: Path) -> None:
    """The step is saved, so that nothing would write its row again."""
    config = offline_run(tmp_path, "sft", lambda rows: None, trainer__total_training_steps=3, trainer__test_freq=1)
    for end, out in ranks.run(2, run_here, str(config), [], "held_out_rows_are_gone_after_two_steps"):
        assert end == "refused: held out, and gone"
        saved = tmp_path / "run" / "checkpoints" / "train_step_2"
        assert (
            f"the validation of step 2 lacks rows that can be used; checkpoint {saved}" in out or "megarl: " not in out
        )
    assert ranks.run(2, run_here, str(config))[0][0] == ""
    rows = numbers_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["val/loss" in row for row in rows] == [True, True, False, True] and "train/loss" in rows[2]
