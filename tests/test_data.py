"""Readers, tokenizers, prompts, examples, the sampler, and the data that tools/prepare_reasoning_gym.py makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from chat_tokenizer import write_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_rows import read_rows
from pyarrow import parquet
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.config.data import DataConfig
from megarl.data.example_batch import batch_of_examples, mismatched
from megarl.data.example_set import load_examples
from megarl.data.examples import Example, Turns
from megarl.data.prompt_sampler import PromptSampler
from megarl.data.prompts import load_prompts
from megarl.data.readers import Row, require_column
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.trainer.digests import digest
from megarl.trainer.resuming.identity import examples_digest
from tools.prepare_reasoning_gym import main, train_tokenizer

Refusal = Callable[[], object]
PAD = 0
"""The padding token of every SentencePiece model that `train_tokenizer` makes."""


def message(call: Refusal) -> str:
    """What a ValueError says; it must be one line."""
    with pytest.raises(ValueError) as refusal:
        call()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model whose tokens are single characters."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(path, ["0123456789", "a b c", "+ - =\n"], vocab_size=21)
    return str(path)


@pytest.fixture
def tokenizer(model_file: str) -> Tokenizer:
    return load_tokenizer(model_file)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ----------------------------------------------------------------------------------------------------- readers


def test_files_are_read_in_order_and_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"x": 2}, {"x": 3}])
    write_jsonl(tmp_path / "a.jsonl", [{"x": 1}])
    parquet.write_table(pa.table({"x": [4], "meta": [{"k": [1, 2]}]}), tmp_path / "c.parquet")
    rows = read_rows([f"{tmp_path}/c.parquet", f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl"], "data.train_files")
    assert rows == [
        (f"{tmp_path}/c.parquet row 1", {"x": 4, "meta": {"k": [1, 2]}}),
        (f"{tmp_path}/a.jsonl:1", {"x": 1}),
        (f"{tmp_path}/b.jsonl:1", {"x": 2}),
        (f"{tmp_path}/b.jsonl:2", {"x": 3}),
    ]


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    def read(name: str) -> str:
        return message(lambda: read_rows([str(tmp_path / name)], "data.val_files"))

    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"x": 1}\n{"x": \n')
    (tmp_path / "bytes.jsonl").write_bytes(b'{"x": "\xff"}\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "deep.jsonl").write_text('{"x": 1}\n\n' + '{"x": ' + "[" * 100_000 + "\n")
    assert message(lambda: read_rows([], "data.val_files")).startswith("data.val_files is empty")
    assert read("no*.jsonl") == f"data.val_files: no file matches '{tmp_path}/no*.jsonl'"
    assert read("empty.jsonl") == f"data.val_files: '{tmp_path}/empty.jsonl' holds no rows"
    assert "bad.jsonl:2 is not JSON" in read("bad.jsonl")
    assert "bytes.jsonl:1 is not JSON" in read("bytes.jsonl")
    assert "list.jsonl:1 must be an object of columns, not list" in read("list.jsonl")
    assert "is none of .jsonl, .json, .csv" in read("rows.txt")
    assert "is not a readable parquet file" in read("bad.parquet")
    assert "folder.jsonl' has no .jsonl, .json, .csv" in read("folder.jsonl")
    assert read("dangling.jsonl").endswith("dangling.jsonl' cannot be read: No such file or directory")
    assert read("deep.jsonl") == f"data.val_files: {tmp_path}/deep.jsonl:3 is nested too deeply"


def test_a_missing_column_is_named_beside_those_there_are() -> None:
    rows = [Row("a.jsonl:1", {"prompt": 1, "answer": 2}), Row("a.jsonl:7", {"b": 1})]
    assert message(lambda: require_column(rows, "promt", "data.prompt_key")) == (
        "data.prompt_key = 'promt': no such column in a.jsonl:1; columns: prompt, answer"
    )
    assert "in a.jsonl:7; columns: b" in message(lambda: require_column(rows, "answer", "data.answer_key"))


# -------------------------------------------------------------------------------------------------- tokenizers


def test_sentencepiece_gives_the_text_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1 + 23 =\n")
    assert len(ids) == 9 and not {PAD, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == "1 + 23 =\n"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (1, 21)
    padded_vocabulary = [tokenizer.vocab_size, tokenizer.vocab_size + 7]
    assert tokenizer.decode([PAD, *ids, tokenizer.eos_id, *padded_vocabulary]) == "1 + 23 =\n"


def test_huggingface_directory(tmp_path: Path) -> None:
    words = RustTokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("one two") == [2, 3]
    assert tokenizer.decode([2, 3, 1, 99]).split() == ["one", "two"]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 1)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "holds no readable Hugging Face tokenizer" in message(lambda: load_tokenizer(str(tmp_path)))


def test_what_is_decoded_is_what_was_said(tmp_path: Path) -> None:
    """Whatever the tokenizer's files ask for: that would take spaces out of code."""
    write_chat_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(str(tmp_path))
    said = "x = [ 1 , 2 ] ; y ? do n't : z ."
    assert tokenizer.decode(tokenizer.encode(said)) == said


def test_tokenizer_directory_with_only_a_model_file(tokenizer: Tokenizer, model_file: str) -> None:
    found = load_tokenizer(str(Path(model_file).parent))
    assert found.encode("12") == tokenizer.encode("12")


def test_no_tokenizer(tmp_path: Path, model_file: str) -> None:
    garbage = tmp_path / "garbage.model"
    garbage.write_bytes(b"\x00\xffgarbage" * 50)
    assert message(lambda: load_tokenizer(str(garbage))) == f"'{garbage}' is not a readable SentencePiece model"
    assert "no tokenizer at" in message(lambda: load_tokenizer(str(tmp_path / "none")))
    (tmp_path / "empty").mkdir()
    assert message(lambda: load_tokenizer(model_file, {"plain": True})).endswith("has no chat template")
    assert "holds no tokenizer.json" in message(lambda: load_tokenizer(str(tmp_path / "empty")))


def test_chat_prompts_go_through_the_template(tmp_path: Path) -> None:
    words = RustTokenizer(models.WordLevel({"<e>": 0, "u": 1, "a": 2, ":": 3, "7": 4, "+": 5, "?": 6}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", unk_token="?")
    template = "{% for m in messages %}{{ m['role'][0] }} : {{ m['content'] }} {% endfor %}a :"
    fast.chat_template = template + "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}"
    fast.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    chat = [{"role": "user", "content": "7 + 7"}]
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat}])
    (prompt,) = load_prompts(DataConfig(), [file], tokenizer)
    assert prompt.token_ids == (1, 3, 4, 5, 4, 2, 3)
    whole = fast.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert list(prompt.token_ids) == list(whole)
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat * 3}])
    assert "p.jsonl:1: the chat template refuses the messages: too long" in message(
        lambda: load_prompts(DataConfig(), [file], tokenizer)
    )


# ---------------------------------------------------------------------------------------------------- prompts


def test_prompts_keep_their_index_and_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"q": "1+2", "a": "3"}, {"q": "12+34", "a": "46"}, {"q": "4", "a": "4"}])
    data = DataConfig(prompt_key="q", answer_key="a", max_prompt_length=3, filter_overlong_prompts=True)
    prompts = load_prompts(data, [file], tokenizer)
    assert [p.index for p in prompts] == [0, 2]
    assert tokenizer.decode(prompts[0].token_ids) == "1+2"
    assert prompts[0].row == {"q": "1+2", "a": "3", "answer": "3"}  # verifiers look under "answer"


@pytest.mark.parametrize(("truncation", "left"), [("left", "6789"), ("right", "1234"), ("middle", "1289")])
def test_truncation(tmp_path: Path, tokenizer: Tokenizer, truncation: str, left: str) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "123456789"}])
    data = DataConfig.model_validate({"max_prompt_length": 4, "truncation": truncation})
    (prompt,) = load_prompts(data, [file], tokenizer)
    assert tokenizer.decode(prompt.token_ids) == left


def test_prompts_that_cannot_be_used(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def load(*prompts: object, drop: bool = False) -> str:
        file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": prompt} for prompt in prompts])
        data = DataConfig(max_prompt_length=4, filter_overlong_prompts=drop)
        return message(lambda: load_prompts(data, [file], tokenizer, "data.val_files"))

    first, second = f"{tmp_path}/p.jsonl:1", f"{tmp_path}/p.jsonl:2"
    assert load("1", "12345").startswith(
        f"{second}: the prompt has 5 tokens, more than data.max_prompt_length = 4; raise"
    )
    assert load("1", "") == f"{second}: the prompt in column 'prompt' is empty"
    assert load(["chat"]) == (
        f"{first}: column 'prompt' must hold text or a list of messages with role and content, not list"
    )
    chat = [{"role": "user", "content": "1"}]
    assert load(chat) == f"{first}: a SentencePiece model has no chat template: give prompts as plain text"
    assert load("1", "2\ud800") == f"data.val_files: {second} holds half of a surrogate pair, which is no text"
    assert load("12345", "123456", drop=True) == (
        "data.val_files: none of the 2 prompts has at most data.max_prompt_length = 4 tokens"
    )


def test_a_misspelt_answer_key_does_not_mean_another_column(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "1", "answer": "wrong", "solution": "2"}])
    assert load_prompts(DataConfig(answer_key="solution"), [file], tokenizer)[0].row["answer"] == "2"
    assert "data.answer_key = 'solutoin': no such column in" in message(
        lambda: load_prompts(DataConfig(answer_key="solutoin"), [file], tokenizer)
    )


def test_examples_end_with_the_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "1+2", "answer": 3}, {"prompt": "4+5", "answer": "10"}])
    prompts = load_prompts(DataConfig(), [file], tokenizer)
    examples = load_examples(DataConfig(max_response_length=3), "demonstrations", [file], tokenizer)
    ((prompt_ids, response_ids),) = examples[0].sequences
    assert prompt_ids == prompts[0].token_ids
    assert response_ids == (*tokenizer.encode("3"), tokenizer.eos_id)
    assert message(lambda: load_examples(DataConfig(max_response_length=2), "demonstrations", [file], tokenizer)) == (
        f"{file}:2: the answer in column 'answer' has 3 tokens with its end token, "
        "more than data.max_response_length = 2"
    )
    assert f"data.answer_key = 'solution': no such column in {file}:1; columns: prompt, answer" in message(
        lambda: load_examples(DataConfig(answer_key="solution"), "demonstrations", [file], tokenizer)
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "the answer in column 'answer' must be text or a number, not null"),
        (["3"], "the answer in column 'answer' must be text or a number, not list"),
    ],
)
def test_answers_that_nothing_can_be_learnt_from(
    tmp_path: Path, tokenizer: Tokenizer, answer: object, said: str
) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "1", "answer": 0.5}, {"prompt": "2", "answer": answer}])
    assert message(lambda: load_examples(DataConfig(), "demonstrations", [file], tokenizer)) == f"{file}:2: {said}"


# ---------------------------------------------------------------------------------------------------- examples

LETTERS = {"<e>": 0, "u": 1, "a": 2, ":": 3, "7": 4, "+": 5, "?": 6, "8": 7, "s": 8, "/": 9}
TURNS = "{% for m in messages %}{{ m['role'][0] }} : {{ m['content'] }} <e> / {% endfor %}"
REPLY = "{% if add_generation_prompt %}a : {% endif %}"


def chat_tokenizer(folder: Path, template: str) -> Tokenizer:
    """Tokens are the words of `LETTERS`; a turn ends with <e>, and "/" stands where templates have a newline."""
    words = RustTokenizer(models.WordLevel(LETTERS, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", unk_token="?")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(str(folder))


def spelled(turns: Turns) -> list[str]:
    names = {number: name for name, number in LETTERS.items()}
    return [" ".join(names[i] for i in turn) for turn in turns]


def chat(*contents: str, system: bool = False) -> list[dict[str, str]]:
    roles = ["system"] * system + ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_examples_that_are_left_out_are_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "1+2", "answer": "3"}, {"prompt": "1+2+3", "answer": "6"}, {"prompt": "1+1", "answer": "23456"}]
    file, data = write_jsonl(tmp_path / "p.jsonl", rows), DataConfig(max_prompt_length=4, max_response_length=3)
    keep = data.model_copy(update={"filter_overlong_prompts": True})
    assert load_examples(DataConfig(), "demonstrations", [file], tokenizer).remarks == ()
    assert "more than data.max_prompt_length = 4" in message(
        lambda: load_examples(data, "demonstrations", [file], tokenizer)
    )
    examples = load_examples(keep, "demonstrations", [file], tokenizer, "warmup.train_files")
    assert [example.source for example in examples] == [f"{file}:1"]
    assert examples.remarks == (
        "warmup.train_files: 2 of 3 rows left out: 2 over data.max_prompt_length = 4 or data.max_response_length = 3 "
        "tokens",
    )


def test_every_turn_of_the_assistant_is_learnt(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, TURNS + REPLY)
    rows: list[dict[str, object]] = [
        {"chat": chat("7", "8 8", "7 + 7", "8")},
        {"chat": chat("+", "7", "8", "7 7", system=True)},  # ends with the user, whom nobody answers
    ]
    file = write_jsonl(tmp_path / "c.jsonl", rows)
    data = DataConfig(messages_key="chat")
    first, second = load_examples(data, "demonstrations", [file], tokenizer)
    assert spelled(first.sequences[0]) == ["u : 7 <e> / a :", "8 8 <e>", "/ u : 7 + 7 <e> / a :", "8 <e>"]
    assert spelled(second.sequences[0]) == ["s : + <e> / u : 7 <e> / a :", "8 <e>"]
    batch = batch_of_examples([first, second])
    learnt = [[LETTERS[word] for word in text.split()] for text in ("8 8 <e> 8 <e>", "8 <e>")]
    assert batch.tokens[batch.response_mask].tolist() == [*learnt[0], *learnt[1]]
    assert batch.response_lengths.tolist() == [5, 2] and batch.groups.tolist() == [0, 1]
    whole = tokenizer.encode_chat(chat("7", "8 8", "7 + 7", "8"), reply=False)
    assert batch.tokens[: first.tokens].tolist() == whole[:-1]  # all but what follows the last end token


def test_the_template_is_told_more_than_the_messages(tmp_path: Path) -> None:
    """Of prompts and of whole conversations; what it does not read is refused, and what it is told anyway."""
    template = TURNS + "{% if add_generation_prompt %}a : {% if not plain %}+ {% endif %}{% endif %}"
    usual = chat_tokenizer(tmp_path, template)
    told = load_tokenizer(str(tmp_path), {"plain": True})
    asked = chat("7")[:1]
    assert [spelled([one.encode_chat(asked)]) for one in (usual, told)] == [["u : 7 <e> / a : +"], ["u : 7 <e> / a :"]]
    for name in ("plan", "messages", "tokenize"):
        said = f"data.apply_chat_template_kwargs: the chat template in '{tmp_path}' reads no '{name}' from there"
        assert message(lambda name=name: load_tokenizer(str(tmp_path), {name: True})) == said  # type: ignore[misc]


@pytest.mark.parametrize(
    ("template", "rows", "said"),
    [
        (TURNS + REPLY, chat("7"), "the conversation in column 'chat' has no message of the assistant"),
        (TURNS + REPLY, chat("7", *"8" * 9), "the conversation in column 'chat' has 49 tokens, more than data.max_pr"),
        (TURNS + REPLY, "7", "column 'chat' must hold a list of messages with role and content, not str"),
        (
            "{% for m in messages %}{% if loop.last %}+ {% endif %}{{ m['role'][0] }} : {{ m['content'] }} <e> "
            "{% endfor %}" + REPLY,
            chat("7", "8", "7", "8"),
            "the chat template writes what comes before message 2 otherwise than in the whole conversation",
        ),
        ("{% if messages[0] %}u{% endif %}", chat("7", "8"), "the chat template writes nothing for message 2"),
    ],
)
def test_conversations_that_cannot_be_learnt(tmp_path: Path, template: str, rows: object, said: str) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    file = write_jsonl(tmp_path / "c.jsonl", [{"chat": rows}])
    data = DataConfig(messages_key="chat", max_prompt_length=10, max_response_length=10)
    assert message(lambda: load_examples(data, "demonstrations", [file], tokenizer)).startswith(f"{file}:1: {said}")


def test_pairs_of_conversations(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, TURNS + REPLY)
    before = chat("7", "8", "7")
    rows: list[dict[str, object]] = [
        {"chosen": chat("7", "8", "7", "8 8"), "rejected": chat("7", "8", "7", "+"), "by": 2},
        {"prompt": before, "chosen": chat("", "8 8")[1:], "rejected": chat("", "+")[1:], "by": 0.5},
    ]
    file = write_jsonl(tmp_path / "p.jsonl", rows)
    one, other = load_examples(DataConfig(margin_key="by"), "preferences", [file], tokenizer)
    within = [{**rows[1], "prompt": {"messages": before}}]
    nested = load_examples(
        DataConfig(prompt_key="prompt.messages"), "preferences", [write_jsonl(tmp_path / "n.jsonl", within)], tokenizer
    )
    assert nested[0].sequences == other.sequences
    assert one.sequences == other.sequences and (one.label, other.label) == (2.0, 0.5)
    prompt = "u : 7 <e> / a : 8 <e> / u : 7 <e> / a :"
    assert [spelled(turns) for turns in one.sequences] == [[prompt, "8 8 <e>"], [prompt, "+ <e>"]]
    batch = batch_of_examples([one, other])
    assert batch.groups.tolist() == [0, 0, 1, 1] and batch.labels is not None
    assert batch.labels.tolist() == [2.0, 2.0, 0.5, 0.5]
    rows[1] = {"chosen": chat("7", "8"), "rejected": chat("8", "8")}
    assert (
        "p.jsonl:2: the conversations in columns 'chosen' and 'rejected' differ before their last message"
        in message(
            lambda: load_examples(DataConfig(), "preferences", [write_jsonl(tmp_path / "p.jsonl", rows)], tokenizer)
        )
    )
    cut = load_examples(DataConfig(max_prompt_length=3, truncation="left"), "preferences", [file], tokenizer)
    assert spelled(cut[0].sequences[1]) == ["/ a :", "+ <e>"]


def test_judged_answers_and_mismatched_ones(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "1+2", "answer": 3, "label": True},
        {"prompt": "4", "answer": "56", "label": 0},
        {"prompt": "78", "answer": "9", "label": 1.0},
    ]
    examples = load_examples(DataConfig(), "judged", [write_jsonl(tmp_path / "j.jsonl", rows)], tokenizer)
    assert [example.label for example in examples] == [1.0, 0.0, 1.0]
    others = mismatched(batch_of_examples(examples))
    lengths = others.lengths.tolist()
    parts = zip(others.tokens.split(lengths), others.response_mask.split(lengths), strict=True)
    told = [(tokenizer.decode(t[~learnt].tolist()), tokenizer.decode(t[learnt].tolist())) for t, learnt in parts]
    assert told == [("4", "3"), ("78", "56"), ("1+2", "9")]


def test_digests_of_demonstrations_are_those_of_prompt_and_answer() -> None:
    """As checkpoints have recorded them: what a run began with is the same."""
    example = Example(sequences=(((1, 2), (3,)),), source="a.jsonl:1")
    assert examples_digest([example]) == digest([b"[[1, 2], [3]]"])
    others = [replace(example, label=1.0), replace(example, sequences=example.sequences * 2)]
    assert len({examples_digest([one]) for one in (example, *others)}) == 3


# ---------------------------------------------------------------------------------------------------- sampler


def test_an_epoch_draws_every_row_once_in_a_new_order() -> None:
    sampler = PromptSampler(12, 4, True, 7)
    epochs = [[i for _ in range(3) for i in sampler.next()] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1] and epochs[0] != list(range(12))
    plain = PromptSampler(5, 2, False, 7)
    assert [plain.next() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.booleans(), st.integers(0, 2**31), st.integers(0, 30))
def test_resuming_continues_the_same_order(rows: int, size: int, shuffle: bool, seed: int, drawn: int) -> None:
    rows = max(rows, size)
    first = PromptSampler(rows, size, shuffle, seed)
    for _ in range(drawn):
        first.next()
    second = PromptSampler(rows, size, shuffle, seed)
    second.load_state(json.loads(json.dumps(first.state())))
    assert [second.next() for _ in range(10)] == [first.next() for _ in range(10)]


def test_sampler_refusals() -> None:
    assert message(lambda: PromptSampler(3, 4, True, 1)) == (
        "data.train_batch_size = 4 exceeds the 3 rows of data.train_files"
    )
    other = PromptSampler(3, 2, True, 1)
    assert "does not say where its data stood" in message(lambda: other.load_state({"epoch": 0, "position": 2}))


@pytest.mark.parametrize(
    ("now", "said", "part"),
    [
        ((13, 4, True, 7), "rows of data.train_files = 12, now it is 13", "data"),
        ((12, 4, False, 7), "data.shuffle = 1, now it is 0", "seed"),
        ((12, 3, True, 7), "data.train_batch_size = 4, now it is 3", "batch"),
        ((12, 4, True, 8), "data.seed = 7, now it is 8", "seed"),
    ],
)
def test_a_position_in_another_order_is_refused(now: tuple[int, int, bool, int], said: str, part: str) -> None:
    state = PromptSampler(12, 4, True, 7).state()
    assert message(lambda: PromptSampler(*now).load_state(state)) == (
        f"the checkpoint was made with {said}: resume with what the run began with, or set "
        f"trainer.resume_allow=[{part}]"
    )
    changed, expected = PromptSampler(*now, allow=[part]), PromptSampler(*now)
    changed.load_state(state)
    for _ in range(now[0] // now[1]):
        expected.next()
    assert changed.next() == expected.next()  # the next epoch, from its beginning


# --------------------------------------------------------------------------------------------- reasoning-gym data


def prepare(out: Path, *args: str) -> int:
    small = ["--train", "60", "--val", "20", "--vocab-size", "64", "--config", '{"max_terms": 2, "max_digits": 2}']
    return main(["--out", str(out), *small, *args])


def test_prepared_data_is_disjoint_and_reproducible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(tmp_path / "a", "--template", "{expression} =") == 0
    train = read_rows([str(tmp_path / "a" / "train.jsonl")], "data.train_files")
    val = read_rows([str(tmp_path / "a" / "val.jsonl")], "data.val_files")
    assert (len(train), len(val)) == (60, 20)
    assert len({row.columns["question"] for row in train + val}) == 80
    first = train[0].columns
    assert first["prompt"] == f"{first['metadata']['expression']} ="
    tokenizer = load_tokenizer(str(tmp_path / "a" / "tokenizer.model"))
    assert tokenizer.eos_id == 1
    for row in train:
        assert tokenizer.decode(tokenizer.encode(row.columns["prompt"])) == row.columns["prompt"]
    assert "80 different questions" in capsys.readouterr().out

    prepare(tmp_path / "b", "--template", "{expression} =")
    for name in ("train.jsonl", "val.jsonl", "tokenizer.model"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    capsys.readouterr()
    prepare(tmp_path / "a", "--template", "{expression} =")
    assert capsys.readouterr().out == f"{tmp_path / 'a'} is up to date\n"
    prepare(tmp_path / "a")
    assert read_rows([str(tmp_path / "a" / "train.jsonl")], "")[0].columns["prompt"] == first["question"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--task", "chan_sum"], "reasoning-gym has no 'chan_sum'; nearest of its"),
        (["--config", '{"terms": 2}'], "'terms' is no setting of chain_sum; it has"),
        (["--config", '{"min_terms": 9}'], "chain_sum refuses its settings"),
        (["--template", "{expresion}"], "--template '{expresion}' does not fit; its fields can be"),
        (["--train", "200000"], "different questions in"),
        (["--vocab-size", "5"], "--vocab-size 5 does not work for this text"),
        (["--task", "composite"], "--task composite mixes other tasks: prepare each of them apart, and name all"),
        (["--val", "0"], "--train and --val must be 1 or more"),
    ],
)
def test_prepare_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    if "--train" in args:
        args = [*args, "--config", '{"max_terms": 2, "max_digits": 1}', "--train", "300"]
    assert prepare(tmp_path, *args) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
