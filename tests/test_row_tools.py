"""What rows hold as people have them: tools for the chat template, TRL's messages as completions, nested answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from test_chat_rows import CHATML, load, spelt, write_byte_tokenizer
from test_data import message, write_jsonl
from tiny_run import write_run
from transformers import AutoTokenizer

from megarl.config import load_config
from megarl.config.data import DataConfig
from megarl.data.conversations import conversation_ids
from megarl.data.prompts import PromptSet, load_prompts
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.environments.speech import Speech
from megarl.trainer.admission.checks import check_run

WITH_TOOLS = "{% if tools %}{% for t in tools %}{{ '<tool>' + t | tojson + '</tool>' }}{% endfor %}{% endif %}" + CHATML
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
ASKED: Any = [{"role": "user", "content": "Is it warm in Bern?"}]
SAID = {"role": "assistant", "content": "Yes"}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of tokenizers whose template reads tools, and does not."""
    made = []
    for template in (WITH_TOOLS, CHATML):
        folder = tmp_path_factory.mktemp("tokenizer")
        write_byte_tokenizer(folder, template)
        made.append(str(folder))
    return made


@pytest.fixture(scope="module")
def reads(folders: list[str]) -> Tokenizer:
    return load_tokenizer(folders[0])


def prompts(file: str, tokenizer: Tokenizer, **keys: Any) -> PromptSet:
    return load_prompts(DataConfig.model_validate({"max_prompt_length": 600, **keys}), [file], tokenizer)


def test_tools_go_into_the_template(tmp_path: Path, folders: list[str], reads: Tokenizer) -> None:
    """A list, JSON text, and Parquet's struct, in which fields that are missing are null, as transformers has them."""
    row, two = {"prompt": ASKED, "answer": "Yes"}, [TOOL, {"type": "function", "function": {"name": "now"}}]
    library: Any = AutoTokenizer.from_pretrained(folders[0])
    wanted = [
        library.apply_chat_template(ASKED, tools=tools, add_generation_prompt=True)["input_ids"]
        for tools in (two, two, None, None, None)
    ]
    rows: list[dict[str, object]] = [{**row, "tools": tools} for tools in (two, json.dumps(two), [], None, "")]
    found = prompts(write_jsonl(tmp_path / "rows.jsonl", rows), reads)
    assert [list(prompt.token_ids) for prompt in found] == wanted and wanted[0] != wanted[2]
    parquet.write_table(pa.Table.from_pylist([rows[0], rows[2]]), tmp_path / "rows.parquet")
    table = prompts(str(tmp_path / "rows.parquet"), reads)
    assert [list(prompt.token_ids) for prompt in table] == [wanted[0], wanted[2]]
    ignored = prompts(str(tmp_path / "rows.jsonl"), reads, tools_key="")
    assert [list(prompt.token_ids) for prompt in ignored] == [wanted[2]] * 5
    assert len(prompts(str(tmp_path / "rows.jsonl"), reads, drop_duplicates=True)) == 2


def test_tools_of_demonstrations_and_pairs(tmp_path: Path, reads: Tokenizer) -> None:
    row = {"messages": [*ASKED, SAID], "prompt": ASKED, "chosen": [SAID], "rejected": [CALLED], "tools": [TOOL]}
    long = {"max_prompt_length": 600}
    for format, keys in (("demonstrations", {"messages_key": "messages"}), ("preferences", {})):
        (example,) = load(tmp_path, reads, row, format, **long, **keys)  # type: ignore[arg-type]
        read, learnt = (spelt(reads, turn) for turn in example.sequences[0])
        assert read.startswith("<tool>") and "weather" in read
        assert learnt == "Yes<|im_end|>"


def test_tools_beside_an_observation_and_for_a_reward_model(reads: Tokenizer) -> None:
    speech = Speech(reads, stop_tokens=[], role="user", limit=9)
    observed = spelt(reads, speech.opening(ASKED, "room 1", [1], tools=[TOOL]))
    assert observed.startswith("<tool>") and observed.count("room") == 1
    for ended in (True, False):
        judged = conversation_ids(ASKED, "Yes", "row 1", reads, ended=ended, tools=[TOOL])
        assert spelt(reads, judged).startswith("<tool>") and spelt(reads, judged).endswith("Yes<|im_end|>") == ended


def test_tools_that_would_be_lost(tmp_path: Path, folders: list[str], reads: Tokenizer) -> None:
    deaf = load_tokenizer(folders[1])

    def said(row: dict[str, Any], tokenizer: Tokenizer = reads) -> str:
        file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ASKED, "answer": "Yes", **row}])
        return message(lambda: prompts(file, tokenizer)).removeprefix(f"{file}:1: ")

    assert "the chat template does not write down the tools" in said({"tools": [TOOL]}, deaf)
    learns = {"messages": [*ASKED, SAID], "tools": [TOOL]}
    refused = message(lambda: load(tmp_path, deaf, learns, "demonstrations", messages_key="messages"))
    assert "the chat template does not write down the tools" in refused
    assert said({"tools": [TOOL], "prompt": "text"}).startswith("tools need a prompt of messages, and column 'prompt'")
    assert said({"tools": "[1"}).startswith("the tools in column 'tools' are no JSON")
    assert said({"tools": {"a": 1}}).startswith("the tools in column 'tools' must be a list, or one as JSON, not dict")
    for odd in (["search"], [{"name": "f"}], [TOOL, {"function": {"name": 3}}]):
        assert said({"tools": odd}).endswith("is not; if it is not for the chat template, set data.tools_key=")


def test_messages_as_completions(tmp_path: Path, reads: Tokenizer) -> None:
    """As TRL has them; of several, those of the assistant are learnt."""

    def turns(format: Any = "demonstrations", **row: Any) -> list[str]:
        given = {"prompt": ASKED, "label": True, **row}
        (example,) = load(tmp_path, reads, given, format, answer_key="completion")
        return [spelt(reads, turn).replace("Ġ", " ").replace("Ċ", "\n") for turn in example.sequences[0]]

    start = "<|im_start|>user\nIs it warm in Bern?<|im_end|>\n<|im_start|>assistant\n"
    assert turns(completion=[SAID]) == [start, "Yes<|im_end|>"] == turns("judged", completion=[SAID])
    warm = {"role": "user", "content": "Sure?"}
    longer = turns(completion=[SAID, warm, SAID])
    assert longer[:2] == [start, "Yes<|im_end|>"] and longer[3] == "Yes<|im_end|>" and "Sure?" in longer[2]
    assert "must hold the messages before them" in message(lambda: turns(prompt="text", completion=[SAID]))
    assert "have none of the assistant" in message(lambda: turns(completion=[warm]))
    short = {"prompt": ASKED, "completion": [SAID]}
    many = message(
        lambda: load(tmp_path, reads, short, "demonstrations", answer_key="completion", max_response_length=1)
    )
    assert "with its end token, more than data.max_response_length = 1" in many


def test_a_refusal_names_the_answer_inside_a_column(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    rows: list[dict[str, object]] = [{"prompt": "2+2=", "reward_model": {"style": "rule", "ground_truth": "4"}}]
    write_jsonl(tmp_path / "nested.jsonl", rows)
    words = [f"data.train_files={tmp_path}/nested.jsonl"]
    said = message(lambda: check_run(load_config(str(run), words)))
    assert "there is 'reward_model.ground_truth': set data.answer_key=reward_model.ground_truth" in said
    said = message(lambda: check_run(load_config(str(run), [*words, "data.answer_key=truth"])))
    assert said.endswith(
        "columns: prompt, reward_model.style, reward_model.ground_truth; there is 'reward_model.ground_truth': set "
        "data.answer_key=reward_model.ground_truth"
    )
