"""Writes a SentencePiece model as the tokenizer.json and tokenizer_config.json that transformers and vLLM read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import Split

from megarl.data.tokenizer_huggingface import no_panic
from megarl.data.tokenizer_sentencepiece import SentencePieceTokenizer

_BLANK = "\u2581"
_UNIGRAM, _BPE, _CHAR = 1, 2, 4
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_LONGEST = 1000


def write_huggingface_tokenizer(source: SentencePieceTokenizer, folder: str) -> None:
    """Write both files of a tokenizer, which makes the same ids, also of texts that spell control symbols.

    Raises:
        ValueError: the model does what no tokenizer.json can say.
    """
    proto = _model_proto()
    proto.ParseFromString(source.model_proto)
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE, _CHAR):
        raise ValueError("the SentencePiece model splits text into whole words, as no tokenizer.json does")
    if trainer.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        raise ValueError("the SentencePiece model marks no blanks before words, as every tokenizer.json does")
    if max(len(piece.piece) for piece in proto.pieces) > _LONGEST:
        raise ValueError(f"the SentencePiece model has pieces of more than {_LONGEST} characters")
    names = [_name(piece) for piece in proto.pieces]
    try:
        with no_panic("the SentencePiece model"):
            _tokenizer(proto, names).save(os.path.join(folder, "tokenizer.json"))
    except Exception as e:  # the library raises bare ones
        raise ValueError(f"the SentencePiece model cannot be written as a tokenizer.json: {e}") from e
    roles = {"bos_token": source.bos_id, "eos_token": source.eos_id, "pad_token": source.pad_id}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: names[i] for role, i in roles.items() if i is not None},
        "split_special_tokens": True,  # a control symbol that a text spells is text
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        f.write(json.dumps(config, indent=2) + "\n")


def _model_proto() -> Any:
    try:  # here, since protobuf may be one that nothing else of a run would notice
        from sentencepiece import sentencepiece_model_pb2
    except Exception as e:  # protobuf's own, which it does not export
        raise ValueError(f"the SentencePiece model cannot be read with the protobuf that is installed: {e}") from e
    return sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]


def _tokenizer(proto: Any, names: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(_model(proto, names))
    tokenizer.normalizer, tokenizer.decoder = _normalizer(proto.normalizer_spec), _decoder(proto, names)
    symbols = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
    if symbols and proto.trainer_spec.model_type != _UNIGRAM:
        longest_first = sorted(symbols, key=len, reverse=True)
        tokenizer.pre_tokenizer = Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    control = [name for name, piece in zip(names, proto.pieces, strict=True) if piece.type == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in control])
    return tokenizer


def _name(piece: Any) -> str:
    """Name a piece in the vocabulary: "</s >" for "</s>", which no text spells once its blanks are marks. `tokenizers`
    looks for every piece in texts, SentencePiece not for these."""
    text: str = piece.piece
    return f"{text[:-1]} {text[-1:]}" if piece.type in (_UNKNOWN, _CONTROL, _UNUSED) else text


def _model(proto: Any, names: Sequence[str]) -> BPE | Unigram:
    trainer, pieces = proto.trainer_spec, proto.pieces
    if trainer.model_type == _UNIGRAM:
        return Unigram(list(zip(names, _scores(pieces), strict=True)), trainer.unk_id, trainer.byte_fallback)
    return BPE(
        {name: i for i, name in enumerate(names)},
        _merges(pieces) if trainer.model_type == _BPE else [],
        unk_token=names[trainer.unk_id],
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
        ignore_merges=any(piece.type == _USER_DEFINED for piece in pieces),
    )


def _scores(pieces: Sequence[Any]) -> list[float]:
    """Return the log-probabilities that SentencePiece gives to pieces, also to symbols that a user defined; a byte's
    name is less likely than the six characters of a text that spell it."""
    normal = [piece.score for piece in pieces if piece.type == _NORMAL]
    best, worst = max(normal, default=0.0), min(normal, default=0.0)
    others = {_BYTE: 7 * worst}
    return [
        x.score
        if x.type == _NORMAL
        else len(x.piece.encode()) * best - 0.1
        if x.type == _USER_DEFINED
        else others.get(x.type, worst)
        for x in pieces
    ]


def _merges(pieces: Sequence[Any]) -> list[tuple[str, str]]:
    """List the pairs of pieces that make a third one, the best first."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    return [
        (text[:i], text[i:])
        for text in sorted(scores, key=lambda text: -scores[text])
        for i in range(1, len(text))
        if text[:i] in scores and text[i:] in scores
    ]


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    strips = spec.remove_extra_whitespaces
    if strips:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_BLANK))
    steps.append(normalizers.Replace(" ", _BLANK))
    if strips:  # at the end marks that the text itself spells, too
        steps.append(normalizers.Replace(Regex(rf"{_BLANK}+\z"), ""))
    return normalizers.Sequence(steps)


def _decoder(proto: Any, names: Sequence[str]) -> decoders.Decoder:
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    steps: list[decoders.Decoder] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 2**31 if spec.remove_extra_whitespaces else 1, 0))
    return decoders.Sequence([*steps, decoders.Replace(names[trainer.unk_id], trainer.unk_surface)])
