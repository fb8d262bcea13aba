"""Stop strings: the windowed search against the whole response's text, with both kinds of tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rollout.stop_strings import StopStrings
from tools.prepare_reasoning_gym import train_tokenizer

TEXT = ["so the sum is 12 + 30 = 42.\n", "naïve Grüße, 東京 🙂🙃", "</answer> and </think>\n\n"]


@pytest.fixture(params=["sentencepiece", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "sentencepiece":
        train_tokenizer(tmp_path / "tokenizer.model", [t.strip() for t in TEXT], vocab_size=64)
        return load_tokenizer(str(tmp_path))
    bytes_ = RustTokenizer(models.BPE())  # its tokens end within a character of several bytes
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"])
    )
    PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<eos>").save_pretrained(tmp_path)
    return load_tokenizer(str(tmp_path))


def test_found_at_the_token_at_which_the_whole_text_first_has_one(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    ends = []
    for _ in range(200):
        text = "".join(draw.choices(TEXT, k=3))
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        at = draw.randrange(len(whole))
        strings = (whole[at : at + draw.randint(1, 12)], "nowhere")
        wanted = next((n for n in range(1, len(ids) + 1) if strings[0] in tokenizer.decode(ids[:n])), None)
        stops = StopStrings(strings, tokenizer.decode)
        found = next((n for n in range(1, len(ids) + 1) if stops.found(ids[:n])), None)
        assert found == wanted
        ends.append(found)
    assert len(set(ends)) > 15 and None not in ends


def test_no_strings_decode_nothing() -> None:
    assert StopStrings((), lambda ids: pytest.fail("decoded")).found([1, 2]) is None
