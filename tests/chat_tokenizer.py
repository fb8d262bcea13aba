"""A tiny Hugging Face tokenizer with a chat template: a token for each character, and for the marks of a turn."""

from __future__ import annotations

import string
from pathlib import Path

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{{ '<end>' }}{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}"
    '{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) '
    "+ '}</tool_call>' }}{% endfor %}"
    "{{ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MARKS = ["<end>", "<system>", "<user>", "<assistant>", "<tool>"]
CHARACTERS = string.ascii_letters + string.digits + " .,:;?!+-*/=_<>{}()[]\"'\n"
SIZE = 2 + len(MARKS) + len(CHARACTERS)


def write_chat_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json; <end> ends a turn, token 0 is <pad>, 1 <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", *MARKS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=MARKS[1:],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
