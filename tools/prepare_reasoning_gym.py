"""Make training and validation prompts from a reasoning-gym task, and a tokenizer that fits them.

    python tools/prepare_reasoning_gym.py --out runs/sums/data --task chain_sum --config '{"max_terms": 3}'

writes to --out:

    train.jsonl, val.jsonl   columns prompt, answer, data_source, question, metadata; for `reward.name: reasoning_gym`.
                             Answers and metadata as megarl/rewards/reasoning_gym_json.py writes them: every row's own
                             answer scores what it scored before it was written
    demonstrations.jsonl     with --demonstrations N: every training prompt N times, with its answer; in --slip of them,
                             drawn at random, the answer is one too high, as by a careless teacher
    pairs_*.jsonl            with --pairs, of training and validation prompts: the answer, chosen, and one that is one
                             or two off, rejected
    judged_*.jsonl           with --pairs: one of these two, and a label
    tokenizer.model          without --chat: SentencePiece, trained on the training text alone; pad 0, eos 1, unk 2
    manifest.json            the arguments; a second call with the same ones does nothing

No question appears twice, neither within a file nor across the two. The same arguments give the same files.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import io
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megarl.rewards.outside.reasoning_gym import verifier_of
from megarl.rewards.reasoning_gym_json import decode, encode

Row = dict[str, Any]
REPORT_EVERY = 10.0  # seconds between two lines of progress where there is no terminal
FORMAT = 2  # of the rows: files of another one are made again
DRAWS_PER_ROW = 50  # how often a small task may repeat itself before it is said to have too few questions


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("--task", default="chain_sum", help="name of a reasoning-gym dataset")
    parser.add_argument("--config", default="{}", type=json_object, help="the generator's settings, a JSON object")
    parser.add_argument("--train", default=4096, type=int, help="training rows")
    parser.add_argument("--val", default=256, type=int, help="validation rows")
    parser.add_argument("--seed", default=1, type=int, help="seeds the generator")
    parser.add_argument("--vocab-size", default=256, type=int, help="tokens at most; small texts may need fewer")
    parser.add_argument("--chat", action="store_true", help="prompts as chat messages, and no tokenizer: the model's")
    parser.add_argument("--demonstrations", default=0, type=int, help="demonstrations per training row")
    parser.add_argument("--slip", default=0.0, type=float, help="share of them that is one too high")
    parser.add_argument("--pairs", action="store_true", help="pairs and labelled answers too")
    parser.add_argument("--template", default="{question}", help="the prompt; fields: question, and those of metadata")
    return parser.parse_args(argv)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"not JSON: {e}") from e
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"max_terms": 3}')
    return value


def questions(task: str, config: dict[str, Any], seed: int, draws: int) -> Iterator[Row]:
    """Entries (question, answer, metadata) as the task generates them, `draws` at most; raises ValueError."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.0)
        raise ValueError(f"--task: reasoning-gym has no '{task}'; nearest of its {len(DATASETS)}: {', '.join(near)}")
    if task == "composite":
        raise ValueError("--task composite mixes other tasks: prepare each of them apart, and name all their files")
    known = {field.name for field in fields(DATASETS[task][1])} - {"seed", "size"}
    for key in config:
        if key not in known:
            raise ValueError(f"--config: '{key}' is no setting of {task}; it has {', '.join(sorted(known))}")
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=draws, **config)
    except (AssertionError, TypeError, ValueError) as e:
        raise ValueError(f"--config: {task} refuses its settings: {e}") from e
    yield from dataset


def distinct_rows(args: argparse.Namespace) -> list[Row]:
    """args.val + args.train rows with different questions, in order of generation; raises ValueError."""
    wanted = args.val + args.train
    rows: list[Row] = []
    seen: set[str] = set()
    repeated = 0
    with progress(args.task, wanted) as done:
        for entry in questions(args.task, args.config, args.seed, DRAWS_PER_ROW * wanted):
            if entry["question"] in seen:
                repeated += 1
                continue
            seen.add(entry["question"])
            rows.append(to_row(entry, args.task, args.template, chat=args.chat))
            done(len(rows))
            if len(rows) == wanted:
                break
    if len(rows) == wanted:
        print(f"{wanted} different questions of {args.task}; {repeated} repeated ones left out")
        return rows
    raise ValueError(
        f"{args.task} made only {len(rows)} different questions in {DRAWS_PER_ROW * wanted} draws, but --train and "
        f"--val want {wanted}: lower them, or widen --config"
    )


def to_row(entry: Row, task: str, template: str, *, chat: bool) -> Row:
    """One line of the files.

    Raises:
        ValueError: a template that names an unknown field, or an entry whose answer scores another way once it has been
            in a file.
    """
    values = {**entry["metadata"], "question": entry["question"]}
    try:
        prompt = template.format(**values)
    except (KeyError, IndexError, ValueError) as e:
        raise ValueError(f"--template '{template}' does not fit; its fields can be {', '.join(values)}") from e
    row = {
        "prompt": [{"role": "user", "content": prompt}] if chat else prompt,
        "answer": encoded(task, entry["answer"]),
        "data_source": task,
        "question": entry["question"],
        "metadata": encoded(task, entry["metadata"]),
    }
    read = json.loads(json.dumps(row))
    before = own_score(task, entry)
    after = own_score(task, {**read, "answer": decode(read["answer"]), "metadata": decode(read["metadata"])})
    if before != after:
        raise ValueError(f"--task {task}: its own answer scores {before}, but {after} after reading it from a file")
    return row


def encoded(task: str, value: Any) -> Any:
    try:
        return encode(value)
    except ValueError as e:
        raise ValueError(f"--task {task}: its rows cannot be written to a file: {e}") from e


def own_score(task: str, entry: Mapping[str, Any]) -> float | str:
    """What the task's verifier says of the entry's own answer: a score, or the exception's name."""
    question, answer, metadata = (copy.deepcopy(entry[key]) for key in ("question", "answer", "metadata"))
    try:
        return float(verifier_of(task)(answer, {"question": question, "answer": answer, "metadata": metadata}))
    except Exception as e:  # without an answer of their own, some verifiers raise
        return type(e).__name__


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere a line now and then. Some tasks take seconds per row."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    said = time.monotonic()

    def line(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > REPORT_EVERY:
            said = time.monotonic()
            print(f"{what}: {done} of {total} questions", file=sys.stderr, flush=True)

    yield line


def demonstrations(rows: list[Row], copies: int, slip: float, seed: int) -> list[Row]:
    """Prompts with answers of which a share is one too high; raises ValueError if answers are no whole numbers."""
    rng = random.Random(seed)
    try:
        return [
            {"prompt": row["prompt"], "answer": str(int(row["answer"]) + (rng.random() < slip))}
            for _ in range(copies)
            for row in rows
        ]
    except (TypeError, ValueError) as e:
        raise ValueError(f"--demonstrations needs whole numbers as answers: {e}") from e


def pairs(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Right and wrong answers to the same prompts, and one of each two with a label.

    Raises:
        ValueError: answers that are no whole numbers.
    """
    rng = random.Random(seed)
    both, judged = [], []
    for row in rows:
        try:
            right = int(row["answer"])
        except (TypeError, ValueError) as e:
            raise ValueError(f"--pairs needs whole numbers as answers: {e}") from e
        wrong, label = right + rng.choice((-2, -1, 1, 2)), rng.random() < 0.5
        both.append({"prompt": row["prompt"], "chosen": str(right), "rejected": str(wrong)})
        judged.append({"prompt": row["prompt"], "answer": str(right if label else wrong), "label": label})
    return both, judged


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(path: Path, texts: list[str], vocab_size: int) -> int:
    """Write a SentencePiece model; returns how many tokens it has. Raises ValueError if there are too few for them.

    Text is kept as it is, line breaks and repeated blanks included, so that decoding gives the encoded text back; and
    every digit is a token, so that numbers of any length are spelled the same way.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            required_chars="\n",  # the trainer drops a line break that ends a text, and would not know it
            byte_fallback=False,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,  # the result must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as e:
        reason = str(e).rpartition("] ")[2]  # after the place in the library's source
        raise ValueError(f"--vocab-size {vocab_size} does not work for this text: {reason}") from e
    path.write_bytes(model.getvalue())
    return int(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size())


def prepare(args: argparse.Namespace) -> None:
    """Do what the module says; raises ValueError, in one line, for arguments that do not work."""
    if args.train < 1 or args.val < 1:
        raise ValueError("--train and --val must be 1 or more")
    if not 0 <= args.slip <= 1 or args.demonstrations < 0:
        raise ValueError("--slip must be between 0 and 1, and --demonstrations 0 or more")
    arguments = {key: value for key, value in vars(args).items() if key != "out"}
    arguments["reasoning_gym"] = version("reasoning-gym")  # another release may ask other questions
    arguments["format"] = FORMAT
    manifest = args.out / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text()) == arguments:
        print(f"{args.out} is up to date")
        return
    rows = distinct_rows(args)
    # validation is drawn first: it stays a fair sample of the task, which what is left after training rows is not
    val, train = rows[: args.val], rows[args.val :]
    args.out.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "val.jsonl", val)
    if args.demonstrations:
        made = demonstrations(train, args.demonstrations, args.slip, args.seed)
        write_jsonl(args.out / "demonstrations.jsonl", made)
    if args.pairs:
        for name, part in (("train", train), ("val", val)):
            both, judged = pairs(part, args.seed)
            write_jsonl(args.out / f"pairs_{name}.jsonl", both)
            write_jsonl(args.out / f"judged_{name}.jsonl", judged)
    made_tokenizer = ""
    if not args.chat:
        texts = [text for row in train for text in (row["prompt"], row["answer"]) if isinstance(text, str)]
        made_tokenizer = f", {train_tokenizer(args.out / 'tokenizer.model', texts, args.vocab_size)} tokens"
    manifest.write_text(json.dumps(arguments, indent=2) + "\n")
    print(f"{args.out}: {len(train)} training rows, {len(val)} validation rows{made_tokenizer}")


def main(argv: list[str] | None = None) -> int:
    try:
        prepare(parse(argv))
    except (OSError, ValueError) as e:
        print(f"prepare_reasoning_gym: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
