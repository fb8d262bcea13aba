"""Talk to a checkpoint, or let it answer prompts, on one rank of this machine.

PATH is a path that `megarl eval` takes. With --prompt the answer is written to stdout while it is generated; with
--prompts, or with prompts on stdin, stdout gets one JSON line per prompt, in their order. With neither, a terminal
holds a conversation: Ctrl-C ends an answer, Ctrl-D the conversation, /clear starts a new one. The tokenizer's chat
template is used if it has one. Sampling is that of rollout.val_kwargs: greedy, unless the run or an option says
otherwise.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from megarl.cli.words import add_checkpoint, add_words, split_words
from megarl.config import Config, ConfigError
from megarl.data.readers import value_at
from megarl.models.families import read_architecture
from megarl.models.families.of_user import use_family
from megarl.plain import plain
from megarl.processes import signals_handled
from megarl.trainer.subject import answering_config, evaluation_config, find_subject
from megarl.trainer.trust import check_family_trusted

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer
    from megarl.trainer.answering import Answering
    from megarl.trainer.inputs import Inputs
    from megarl.types import Completion

EXAMPLE = "megarl generate runs/math/run --temperature 1 --prompt 'What is 7 times 8?'"
ENGINE_KEY = "actor_rollout_ref.rollout.name="
SAMPLING = "actor_rollout_ref.rollout.val_kwargs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl generate`."""
    add_checkpoint(parser)
    add_words(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="one prompt; stdout gets only its answer")
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help="a file with a prompt per line; a .jsonl file has them in the column data.prompt_key",
    )
    parser.add_argument("--system", help="a system message, for a tokenizer with a chat template")
    parser.add_argument("--raw", action="store_true", help="continue prompts as plain text, without chat template")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, help="seed of sampling; default data.seed")
    parser.add_argument("--max-tokens", type=int, help="tokens of an answer; default data.max_response_length")
    parser.add_argument("--context", type=int, help="tokens of prompt and answer together; default 4096, or less")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Answer the prompts, or hold a conversation; returns the exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: the command cannot work, in one line.
    """
    talks = args.prompt is None and args.prompts is None and sys.stdin.isatty()
    file, overrides = split_words([*args.words, *rest])
    config = config_of(args, file, overrides)
    prompts = [] if talks else _prompts(args, config.data.prompt_key)
    check_family_trusted(config, [*rest, *overrides] if file is None else None)
    use_family(config.actor_rollout_ref.model.family)
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
    """Resolve the run's configuration, which the command line overrides."""
    subject = find_subject(args.path, best=args.best)
    values = {
        f"{SAMPLING}.temperature": args.temperature,
        f"{SAMPLING}.top_p": args.top_p,
        f"{SAMPLING}.top_k": args.top_k,
        "data.seed": args.seed,
    }
    options = [f"{key}={value}" for key, value in values.items() if value is not None]
    for name in ("max_tokens", "context"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be 1 or more")
    return evaluation_config(subject, file or subject.recorded, [*overrides, *options], "", 1)


def _for_one_rank(config: Config, args: argparse.Namespace, overrides: Sequence[str], requests: int) -> Config:
    return answering_config(
        config,
        positions=read_architecture(config.actor_rollout_ref.model.folder).max_position_embeddings,
        requests=requests,
        max_tokens=args.max_tokens,
        context=args.context,
        keep_engine=any(word.startswith(ENGINE_KEY) for word in overrides),
    )


@contextmanager
def _one_rank(config: Config) -> Iterator[Callable[..., Answering]]:
    """Make this process the only rank of a world; yields a function that builds the `Answering`."""
    from megarl.parallel.one_rank import one_rank

    with one_rank(config.trainer.timeout_minutes) as world:
        from megarl.trainer.answering import Answering  # imports Megatron-Core, which must find a world of CPU ranks

        built: list[Answering] = []

        def answering_of(inputs: Inputs) -> Answering:
            built.append(Answering(inputs, world))
            return built[-1]

        yield answering_of
        for answering in built:  # not after an error, which ends the process
            answering.close()


@dataclass(frozen=True)
class Turn:
    """Holds a message of a conversation."""

    role: str
    content: str


class Words:
    """Converts conversations to token ids, and token ids to text.

    Args:
        system: the system message, with which a conversation begins.
        raw: use no chat template, even if the tokenizer has one.

    Raises:
        ValueError: there is a system message and no chat template.
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
        """Encode a conversation up to the start of the answer; without a template, encode the last message.

        Raises:
            ValueError: a message holds bytes that were no UTF-8, or the template refuses the conversation.
        """
        messages = [{"role": turn.role, "content": turn.content} for turn in [*self._system, *turns]]
        try:
            "".join(message["content"] for message in messages).encode()
        except UnicodeEncodeError as e:
            raise ValueError("a prompt or the system message is not UTF-8: write it in UTF-8") from e
        if not self.chats:
            return self._tokenizer.encode(turns[-1].content)
        return self._tokenizer.encode_chat(messages)


class Printed:
    """Writes a growing text to stdout. A character waits until all its bytes are there."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._length = decode, 0

    def show(self, tokens: Sequence[int]) -> None:
        text = self._decode(tokens).rstrip("\ufffd")
        if len(text) > self._length:
            sys.stdout.write(plain(text[self._length :]))
            sys.stdout.flush()
            self._length = len(text)

    def end(self, tokens: Sequence[int]) -> str:
        """Write the rest and end the line; returns the whole text."""
        text = self._decode(tokens)
        sys.stdout.write(plain(text[self._length :]) + "\n")
        sys.stdout.flush()
        return text


def say(answering: Answering, words: Words, prompt: str) -> int:
    """Write the answer to one prompt to stdout while it is generated."""
    printed = Printed(words.decode)
    token_ids = words.token_ids([Turn("user", prompt)])
    (completion,) = answering.ask([token_ids], watch=lambda i, tokens: printed.show(tokens))
    printed.end(completion.response.ids)
    return 0


def write_answers(answering: Answering, words: Words, prompts: Sequence[str]) -> int:
    """Write a JSON line per prompt, in their order, each as soon as the earlier ones are written."""
    waiting: dict[int, Completion] = {}
    next_prompt = 0

    def finished(i: int, completion: Completion) -> None:
        nonlocal next_prompt
        waiting[i] = completion
        while next_prompt in waiting:
            line = _line(prompts[next_prompt], waiting.pop(next_prompt), words)
            print(plain(json.dumps(line, ensure_ascii=False)), flush=True)
            next_prompt += 1

    answering.ask([words.token_ids([Turn("user", prompt)]) for prompt in prompts], finished=finished)
    return 0


def _line(prompt: str, completion: Completion, words: Words) -> dict[str, object]:
    response, tokens = words.decode(completion.response.ids), len(completion.response)
    return {"prompt": prompt, "response": response, "finish": completion.finish_reason, "tokens": tokens}


def converse(answering: Answering, words: Words) -> int:
    """Hold a conversation until Ctrl-D, or until Ctrl-C while no answer is generated."""
    import readline  # noqa: F401 (line editing and history in input())

    how = "chat template" if words.chats else f"no chat template ({words.why_not}): each prompt is continued by itself"
    print(f"megarl: {how}; Ctrl-C ends an answer, Ctrl-D the conversation, /clear begins anew", file=sys.stderr)
    turns: list[Turn] = []
    number = 0
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        if not text.strip():
            continue
        if text.strip() == "/clear":
            turns = []
            continue
        turns.append(Turn("user", text))
        printed = Printed(words.decode)
        try:
            with _noted_interrupt() as interrupted:
                (completion,) = answering.ask(
                    [words.token_ids(turns)],
                    first=number,
                    watch=lambda i, tokens, printed=printed: printed.show(tokens),  # type: ignore[misc]
                    leaves=lambda interrupted=interrupted: bool(interrupted),  # type: ignore[misc]
                )
        except ValueError as e:  # the conversation is too long, or the template refuses it
            turns.pop()
            print(f"megarl: {plain(str(e))}, or /clear", file=sys.stderr)
            continue
        turns.append(Turn("assistant", printed.end(completion.response.ids)))
        number += 1


@contextmanager
def _noted_interrupt() -> Iterator[list[int]]:
    """Note a Ctrl-C in the yielded list. A second Ctrl-C raises KeyboardInterrupt."""
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    with signals_handled([signal.SIGINT], note):
        yield interrupts


def _prompts(args: argparse.Namespace, column: str) -> list[str]:
    """Read the prompts from the command line, the file or stdin.

    Raises:
        ValueError: the file cannot be read, or a line is no prompt.
    """
    if args.prompt is not None:
        return [args.prompt]
    if args.prompts is None or args.prompts == "-":
        return [line.rstrip("\n").removeprefix("\ufeff") for line in sys.stdin if line.strip()]
    try:
        with open(args.prompts, encoding="utf-8-sig") as f:
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
