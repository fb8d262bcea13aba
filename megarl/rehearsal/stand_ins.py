"""Makes what a rehearsal needs and this machine has not: a tokenizer, rows; and a reward that varies."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config import Config
from megarl.flow_kinds import format_of, generates

ROLES = ("system", "user", "assistant", "tool")
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
VARIED = """import zlib


def score(response, row):
    return zlib.crc32(response.encode()) / 2**32
"""
"""A reward function that scores two responses differently: a random model gives no right answer to learn from."""


def write_tokenizer(folder: str, template_arguments: Sequence[str]) -> int:
    """Write a Hugging Face tokenizer with a token per byte and a chat template; returns its number of tokens.

    Args:
        template_arguments: names that the chat template must read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = [f"<{role}>" for role in ROLES]
    tokens = ["<pad>", "<end>", *marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>", "pad_token": "<pad>", "additional_special_tokens": marks}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = "".join(f"{{# {name} #}}" for name in template_arguments) + _TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def rows_of(config: Config, count: int, *, demonstrations: bool = False) -> list[dict[str, Any]]:
    """Make rows with the columns that the configuration names: sums, or conversations about them.

    Args:
        demonstrations: as a warm-up reads them.
    """
    data, rows = config.data, list[dict[str, Any]]()
    format = "demonstrations" if demonstrations else format_of(config)
    sources = [source for part in config.reward.parts.values() for source in part.data_sources] or ["stand-in"]
    for i in range(count):
        question, answer, wrong = f"What is {i} + {i % 7}?", str(i + i % 7), str(i + i % 7 + 1)
        row: dict[str, Any] = {}
        _put(row, data.prompt_key, question)
        _put(row, data.answer_key, answer)
        if format == "demonstrations" and data.messages_key:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            _put(row, data.messages_key, messages)
        if format == "preferences":
            _put(row, data.chosen_key, answer)
            _put(row, data.rejected_key, wrong)
            if data.margin_key:
                _put(row, data.margin_key, 1.0)
        if format == "judged":
            _put(row, data.label_key, bool(i % 2))
        if generates(config):
            _put(row, data.source_key, sources[i % len(sources)])
            if data.curriculum and ":" not in data.curriculum:
                _put(row, data.curriculum, i)
        rows.append(row)
    return rows


def absent(entry: str) -> bool:
    """Say whether an entry of `data.train_files` names no file that is here."""
    path = entry.removeprefix("file://")
    return "://" not in path and not glob.glob(path, recursive=True)


def _put(row: dict[str, Any], key: str, value: Any) -> None:
    """Put a value into a column, or into a field of one: "reward_model.ground_truth"."""
    name, dot, rest = key.partition(".")
    if not dot:
        row[name] = value
        return
    inner = row.setdefault(name, {})
    assert isinstance(inner, Mapping)
    _put(row[name], rest, value)
