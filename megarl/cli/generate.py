"""Talk to a checkpoint, or have prompts answered, on one rank of this machine.

PATH is what `megarl eval` takes. With --prompt the answer goes to stdout as it comes; with --prompts, or with prompts
on stdin, one JSON line per prompt, in their order. With neither, at a terminal, it is a conversation: Ctrl-C ends an
answer, Ctrl-D the conversation, /clear begins anew. A tokenizer's chat template is used where it has one.
Sampling is that of rollout.val_kwargs: greedy, unless the run or an option says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from megarl.cli.words import add_words, split_words
from megarl.config import Config, ConfigError
from megarl.data.readers import value_at
from megarl.models.families import read_architecture
from megarl.plain import plain
from megarl.processes import signals_handled
from megarl.trainer.subject import answering_config, evaluation_config, find_subject

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer
    from megarl.trainer.answering import Answering
    from megarl.trainer.inputs import Inputs
    from megarl.types import Completion

EXAMPLE = "megarl generate runs/math/run --temperature 1 --prompt 'What is 7 times 8?'"
ENGINE_KEY = "actor_rollout_ref.rollout.name="
SAMPLING = "actor_rollout_ref.rollout.val_kwargs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `megarl generate`."""
    parser.add_argument("path", help="checkpoint (global_step_N), run folder (its newest one), or Hugging Face folder")
    add_words(parser)
    parser.add_argument("--best", action="store_true", help="of a run the checkpoint that its best.json names")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="one prompt; its answer is all that goes to stdout")
    source.add_argument(
        "--prompts", metavar="FILE", help="a prompt per line; of a .jsonl file the column data.prompt_key"
    )
    parser.add_argument("--system", help="a system message, for a tokenizer with a chat template")
    parser.add_argument("--raw", action="store_true", help="prompts are continued as they are, without chat template")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, help="of sampling; default data.seed")
    parser.add_argument("--max-tokens", type=int, help="of an answer; default data.max_response_length")
    parser.add_argument("--context", type=int, help="tokens of prompt and answer together; default 4096, or less")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Exit code 0 once everything is answered, 130 after Ctrl-C.

    Raises:
        ValueError: it cannot work, in one line.
    """
    talks = args.prompt is None and args.prompts is None and sys.stdin.isatty()
    file, overrides = split_words([*args.words, *rest])
    config = config_of(args, file, overrides)
    prompts = [] if talks else _prompts(args, config.data.prompt_key)
    config = _for_one_rank(config, args, overrides, requests=1 if talks else max(1, len(prompts)))
    from megarl.trainer.admission.checks import check_answering  # imports torch: a misspelt key is refused sooner

    inputs = check_answering(config)
    if not talks and not prompts:
        return 0
    with _one_rank(config) as answering_of:
        answering = answering_of(inputs)
        words = Words(inputs.tokenizer, system=args.system, raw=args.raw)
        if talks:
            return converse(answering, words)
        if args.prompt is not None:
            return say(answering, words, args.prompt)
        return write_answers(answering, words, prompts)


def config_of(args: argparse.Namespace, file: str | None, overrides: Sequence[str]) -> Config:
    """What the run says, then what is asked for here."""
    subject = find_subject(args.path, best=args.best)
    asked = {
        f"{SAMPLING}.temperature": args.temperature,
        f"{SAMPLING}.top_p": args.top_p,
        f"{SAMPLING}.top_k": args.top_k,
        "data.seed": args.seed,
    }
    options = [f"{key}={value}" for key, value in asked.items() if value is not None]
    for name in ("max_tokens", "context"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be 1 or more")
    return evaluation_config(subject, file or subject.recorded, [*overrides, *options], "", 1)


def _for_one_rank(config: Config, args: argparse.Namespace, overrides: Sequence[str], requests: int) -> Config:
    return answering_config(
        config,
        positions=read_architecture(config.actor_rollout_ref.model.path).max_position_embeddings,
        requests=requests,
        max_tokens=args.max_tokens,
        context=args.context,
        keep_engine=any(word.startswith(ENGINE_KEY) for word in overrides),
    )


@contextmanager
def _one_rank(config: Config) -> Iterator[Callable[..., Answering]]:
    """This process as a rank of a world of its own."""
    import torch.distributed as dist

    from megarl.parallel.cpu import enable_cpu_ranks

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # of a job that this was started in
        os.environ.pop(name, None)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    enable_cpu_ranks()  # before Megatron-Core is imported
    from megarl.parallel.meeting import follow_launcher
    from megarl.parallel.train_groups import leave_groups
    from megarl.parallel.world import World, init_distributed
    from megarl.trainer.answering import Answering

    follow_launcher()
    init_distributed(config.trainer.timeout_minutes)
    world = World()
    made: list[Answering] = []

    def answering_of(inputs: Inputs) -> Answering:
        made.append(Answering(inputs, world))
        return made[-1]

    yield answering_of
    for answering in made:  # after an error the process ends, and what it held with it
        answering.close()
    leave_groups(world)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Turn:
    """What somebody said in a conversation."""

    role: str
    content: str


class Words:
    """Conversations as token ids, and back.

    Args:
        system: what the conversation begins with.
        raw: no chat template, even if there is one.

    Raises:
        ValueError: a system message without a chat template.
    """

    def __init__(self, tokenizer: Tokenizer, *, system: str | None, raw: bool) -> None:
        self.decode, self._tokenizer = tokenizer.decode, tokenizer
        self._system = [Turn("system", system)] if system is not None else []
        self.chats, self.why_not = not raw, "--raw"
        if not raw:
            try:
                tokenizer.encode_chat([{"role": "user", "content": "x"}])
            except ValueError as e:
                self.chats, self.why_not = False, str(e)
        if self._system and not self.chats:
            raise ValueError(f"--system needs a chat template: {self.why_not}")

    def token_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Of a conversation up to where the answer begins; without a template, of what was said last."""
        if not self.chats:
            return self._tokenizer.encode(turns[-1].content)
        messages = [{"role": turn.role, "content": turn.content} for turn in [*self._system, *turns]]
        return self._tokenizer.encode_chat(messages)


class Printed:
    """Writes a text as it grows; characters of which only some bytes are there yet wait."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._length = decode, 0

    def show(self, tokens: Sequence[int]) -> None:
        text = self._decode(tokens).rstrip("\ufffd")
        if len(text) > self._length:
            sys.stdout.write(plain(text[self._length :]))
            sys.stdout.flush()
            self._length = len(text)

    def end(self, tokens: Sequence[int]) -> str:
        """The whole text; the line is ended."""
        text = self._decode(tokens)
        sys.stdout.write(plain(text[self._length :]) + "\n")
        sys.stdout.flush()
        return text


def say(answering: Answering, words: Words, prompt: str) -> int:
    """The answer to one prompt on stdout, as it comes."""
    printed = Printed(words.decode)
    token_ids = words.token_ids([Turn("user", prompt)])
    (made,) = answering.ask([token_ids], watch=lambda i, tokens: printed.show(tokens))
    printed.end(made.token_ids)
    return 0


def write_answers(answering: Answering, words: Words, prompts: Sequence[str]) -> int:
    """A JSON line per prompt, in their order, each as soon as those before it are there."""
    waiting: dict[int, Completion] = {}
    written = 0

    def finished(i: int, made: Completion) -> None:
        nonlocal written
        waiting[i] = made
        while written in waiting:
            line = _line(prompts[written], waiting.pop(written), words)
            print(plain(json.dumps(line, ensure_ascii=False)), flush=True)
            written += 1

    answering.ask([words.token_ids([Turn("user", prompt)]) for prompt in prompts], finished=finished)
    return 0


def _line(prompt: str, made: Completion, words: Words) -> dict[str, object]:
    response = words.decode(made.token_ids)
    return {"prompt": prompt, "response": response, "finish": made.finish_reason, "tokens": len(made.token_ids)}


def converse(answering: Answering, words: Words) -> int:
    """Until Ctrl-D, or Ctrl-C while nothing is being answered."""
    import readline  # noqa: F401 (line editing and history in input())

    how = "chat template" if words.chats else f"no chat template ({words.why_not}): each prompt is continued by itself"
    print(f"megarl: {how}; Ctrl-C ends an answer, Ctrl-D the conversation, /clear begins anew", file=sys.stderr)
    turns: list[Turn] = []
    number = 0
    while True:
        try:
            asked = input("> ")
        except EOFError:
            print()
            return 0
        if not asked.strip():
            continue
        if asked.strip() == "/clear":
            turns = []
            continue
        turns.append(Turn("user", asked))
        printed = Printed(words.decode)
        try:
            with _noted_interrupt() as interrupted:
                (made,) = answering.ask(
                    [words.token_ids(turns)],
                    first=number,
                    watch=lambda i, tokens, printed=printed: printed.show(tokens),  # type: ignore[misc]
                    leaves=lambda interrupted=interrupted: bool(interrupted),  # type: ignore[misc]
                )
        except ValueError as e:  # too long by now, or a template that refuses it
            turns.pop()
            print(f"megarl: {plain(str(e))}, or /clear", file=sys.stderr)
            continue
        turns.append(Turn("assistant", printed.end(made.token_ids)))
        number += 1


@contextmanager
def _noted_interrupt() -> Iterator[list[int]]:
    """Ctrl-C is noted; a second one ends the command."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    with signals_handled([signal.SIGINT], note):
        yield noted


def _prompts(args: argparse.Namespace, column: str) -> list[str]:
    """Those of the command line, the file or stdin.

    Raises:
        ValueError: a file that cannot be read, or a line that is no prompt.
    """
    if args.prompt is not None:
        return [args.prompt]
    if args.prompts is None or args.prompts == "-":
        return [line.rstrip("\n") for line in sys.stdin if line.strip()]
    try:
        with open(args.prompts, encoding="utf-8") as f:
            lines = [line.rstrip("\n") for line in f]
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--prompts: '{args.prompts}' cannot be read: {e}") from e
    if not args.prompts.endswith(".jsonl"):
        return [line for line in lines if line.strip()]
    return [_of_row(line, f"{args.prompts}:{i}", column) for i, line in enumerate(lines, 1) if line.strip()]


def _of_row(line: str, where: str, column: str) -> str:
    try:
        prompt = value_at(json.loads(line), column)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{where}: no JSON object with the column '{column}' (data.prompt_key)") from e
    if not isinstance(prompt, str):
        raise ValueError(f"{where}: '{column}' is no text; conversations are for `megarl eval`")
    return prompt
