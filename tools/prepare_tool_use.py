"""Make prompts that a tiny model answers well only with a tool, demonstrations of its use, and a tokenizer.

    python tools/prepare_tool_use.py --out runs/tools/calculator --tool calculator

writes to --out:

    train.jsonl, val.jsonl   columns prompt ("37*48=") and answer ("1776")
    demonstrations.jsonl     columns prompt and answer: in --share of them the tool is asked and its answer is repeated
                             ("<calc>37*48</calc>=1776;1776"), in the others a number of as many digits is guessed
    tokenizer.model          SentencePiece, a token for each character and for each word of the tool

The tool's answer in a demonstration is what `environment.args.answer: "={result};"` makes of it. The same arguments
give the same files.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import sentencepiece

Row = dict[str, str]

TOOLS: Mapping[str, Callable[[str], str]] = {
    "calculator": lambda expression: f"<calc>{expression}</calc>",
    "python": lambda expression: f"<python>print({expression})</python>",
}
WORDS = ["<calc>", "</calc>", "<python>", "</python>", "print(", ")", "=", ";"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("--tool", choices=sorted(TOOLS), default="calculator", help="what the demonstrations use")
    parser.add_argument("--train", default=2048, type=int, help="training rows")
    parser.add_argument("--val", default=128, type=int, help="validation rows")
    parser.add_argument("--demonstrations", default=8192, type=int, help="rows of them")
    parser.add_argument("--share", default=0.3, type=float, help="share of them that uses the tool")
    parser.add_argument("--seed", default=1, type=int)
    return parser.parse_args(argv)


def rows(count: int, seed: int) -> list[Row]:
    """Products of two numbers below 100, all different."""
    pairs = [(a, b) for a in range(2, 100) for b in range(2, 100)]
    chosen = random.Random(seed).sample(pairs, count)
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in chosen]


def demonstrations(questions: list[Row], count: int, share: float, tool: str, seed: int) -> list[Row]:
    """Answers of which a share asks the tool; the others are guesses."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        row = questions[i % len(questions)]
        digits = len(row["answer"])
        answer = str(rng.randrange(10 ** (digits - 1), 10**digits))
        if rng.random() < share:
            answer = f"{TOOLS[tool](row['prompt'][:-1])}={row['answer']};{row['answer']}"
        made.append({"prompt": row["prompt"], "answer": answer})
    return made


def train_tokenizer(path: Path) -> None:
    """Write a SentencePiece model that spells everything in characters, but for `WORDS`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["0123456789*-.", "error: abcdfgijklmnpqstuvwxyz"]),
        model_writer=model,
        model_type="char",
        vocab_size=64,
        hard_vocab_limit=False,
        character_coverage=1.0,
        user_defined_symbols=WORDS,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


def write_jsonl(path: Path, lines: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def prepare(args: argparse.Namespace) -> None:
    """Do what the module says; raises ValueError, in one line, for arguments that do not work."""
    if args.train < 1 or args.val < 1 or args.train + args.val > 98 * 98:
        raise ValueError(f"--train and --val must be 1 or more, and at most {98 * 98} together")
    if args.demonstrations < 1 or not 0 <= args.share <= 1:
        raise ValueError("--demonstrations must be 1 or more, --share between 0 and 1")
    args.out.mkdir(parents=True, exist_ok=True)
    questions = rows(args.train + args.val, args.seed)
    val, train = questions[: args.val], questions[args.val :]
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "val.jsonl", val)
    shown = demonstrations(train, args.demonstrations, args.share, args.tool, args.seed)
    write_jsonl(args.out / "demonstrations.jsonl", shown)
    train_tokenizer(args.out / "tokenizer.model")
    print(f"{args.out}: {len(train)} training rows, {len(val)} validation rows, {len(shown)} demonstrations")


def main(argv: list[str] | None = None) -> int:
    try:
        prepare(parse(argv))
    except (OSError, ValueError) as e:
        print(f"prepare_tool_use: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
