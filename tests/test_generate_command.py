"""`megarl generate`: the answers that a validation saw, streamed, from files and in a conversation; Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
from chat_tokenizer import write_chat_tokenizer
from ranks import Ranks
from tiny_run import ROOT, TrainedRun, default_interrupt

from megarl.cli.generate import Printed, Turn, Words, _of_row, _prompts
from megarl.cli.main import main, parser_for
from megarl.data.tokenizer import load_tokenizer
from megarl.evaluation.records import read_records


def prompts_of(small: TrainedRun) -> list[str]:
    return [json.loads(line)["prompt"] for line in (small.folder / "val.jsonl").read_text().splitlines()]


def answered(words: list[str], overrides: Sequence[str] = ()) -> tuple[str, list[list[int]]]:
    """`megarl generate` in a rank of the pool; what it printed, and how long the text was at each of its flushes."""
    from megarl.cli import generate
    from megarl.config import Config
    from megarl.parallel.train_groups import leave_groups
    from megarl.parallel.world import World
    from megarl.trainer.admission.checks import check_answering
    from megarl.trainer.answering import Answering

    parser, _ = parser_for(["generate"])
    args = parser.parse_args(["generate", *words])
    recorded = None if args.words else generate.find_subject(args.path).recorded
    config: Config = generate.config_of(args, recorded, overrides)
    prompts = generate._prompts(args, config.data.prompt_key)
    config = generate._for_one_rank(config, args, overrides, requests=len(prompts))
    world = World()
    inputs = check_answering(config)
    answering = Answering(inputs, world)
    said = io.StringIO()
    seen: list[list[int]] = []
    with redirect_stdout(said):
        spoken = generate.Words(inputs.tokenizer, system=args.system, raw=args.raw)
        if args.prompt is not None:
            asked = spoken.token_ids([generate.Turn("user", args.prompt)])
            answering.ask([asked], watch=lambda i, tokens: seen.append(list(tokens)))
            generate.say(answering, spoken, args.prompt)
        else:
            generate.write_answers(answering, spoken, prompts)
    answering.close()
    leave_groups(world)
    return said.getvalue(), seen


def test_answers_are_those_of_the_validation(ranks: Ranks, small: TrainedRun, tmp_path: Path) -> None:
    """Every held-out prompt, on one rank instead of two; as text, and as rows."""
    records = read_records(str(small.folder / "run" / "validation" / "step_000002.jsonl"))
    plain = tmp_path / "prompts.txt"
    plain.write_text("\n".join(prompts_of(small)) + "\n")
    for file in (plain, small.folder / "val.jsonl"):
        out, _ = ranks.run(1, answered, [str(small.folder / "run"), "--prompts", str(file)])[0]
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["response"] for line in lines] == [record.response for record in records]
        assert [line["prompt"] for line in lines] == prompts_of(small)
        assert [(line["finish"], line["tokens"]) for line in lines] == [(r.finish, r.tokens) for r in records]


def test_tokens_come_one_by_one(ranks: Ranks, small: TrainedRun) -> None:
    path = str(small.checkpoint(2) / "huggingface")
    words = [path, "--prompt", "3+4=", "--max-tokens", "6", "--temperature", "1", "--seed", "5"]
    out, seen = ranks.run(1, answered, words)[0]
    assert [len(tokens) for tokens in seen] == list(range(1, len(seen) + 1)) and len(seen) >= 2
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(seen))
    again, _ = ranks.run(1, answered, words)[0]
    assert out == again and out.endswith("\n") and out.count("\n") == 1
    others = {ranks.run(1, answered, [*words[:-1], str(seed)])[0][0] for seed in range(3)}
    assert others != {out}


def _leave_after(path: str, prompt: str, tokens: int) -> tuple[int, str | None, int]:
    """Of an answer that is left early: its tokens, how it ended, and the tokens of the next one."""
    from megarl.cli import generate
    from megarl.parallel.train_groups import leave_groups
    from megarl.parallel.world import World
    from megarl.trainer.admission.checks import check_answering
    from megarl.trainer.answering import Answering

    parser, _ = parser_for(["generate"])
    args = parser.parse_args(["generate", path, "--max-tokens", "20", "--temperature", "2"])
    config = generate._for_one_rank(generate.config_of(args, None, []), args, [], requests=1)
    world = World()
    answering = Answering(check_answering(config), world)
    ids = answering.inputs.tokenizer.encode(prompt)
    seen: list[int] = []
    (left,) = answering.ask([ids], watch=lambda i, so_far: seen.append(len(so_far)), leaves=lambda: len(seen) >= tokens)
    (whole,) = answering.ask([ids])
    same = whole.response.ids[: len(left.response)] == left.response.ids
    answering.close()
    leave_groups(world)
    return len(left.response), left.finish_reason, len(whole.response) if same else -1


def test_an_answer_is_left_in_its_middle(ranks: Ranks, small: TrainedRun) -> None:
    """The next one is whole, and begins alike."""
    left, reason, whole = ranks.run(1, _leave_after, str(small.folder / "run"), "1+1=", 2)[0]
    assert (left, reason) == (2, None) and whole > 2


def test_conversations_use_the_chat_template(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    turns = [Turn("user", "hi"), Turn("assistant", "yo"), Turn("user", "2+2")]
    said = Words(tokenizer, system="be kind", raw=False)
    template = "<system>be kind<end><user>hi<end><assistant>yo<end><user>2+2<end><assistant>"
    assert said.chats and said.token_ids(turns) == tokenizer.encode_template(template)
    plain = Words(tokenizer, system=None, raw=True)
    assert not plain.chats and plain.token_ids(turns) == tokenizer.encode("2+2")
    with pytest.raises(ValueError, match=r"^--system needs a chat template: --raw$"):
        Words(tokenizer, system="be kind", raw=True)


def test_text_grows_by_whole_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """As a byte-level tokenizer decodes: a character of three bytes is there with its last one."""
    printed = Printed(lambda ids: bytes(ids).decode(errors="replace"))
    text = "a€b".encode()
    out = []
    for i in range(1, len(text) + 1):
        printed.show(text[:i])
        out.append(capsys.readouterr().out)
    assert out == ["a", "", "", "€", "b"]
    assert printed.end(text) == "a€b" and capsys.readouterr().out == "\n"


REFUSED = [
    (["--context", "33"], "--context 33 is more than the model's 32 positions"),
    (["--max-tokens", "32"], "--max-tokens 32 leaves no room for a prompt in a context of 32 tokens"),
    (["--max-tokens", "0"], "--max-tokens 0 must be 1 or more"),
    (["--temperature", "-1"], "actor_rollout_ref.rollout.val_kwargs.temperature: input should be greater than or"),
    (["data.max_respons_length=3"], "unknown key 'data.max_respons_length'; did you mean 'data.max_response_length'?"),
    (["a.yaml", "b.yaml"], "'b.yaml' is not of the form key=value"),
    (["--best"], "names no best checkpoint"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words[0] for words, _ in REFUSED])
def test_refusals(small: TrainedRun, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(small.folder / "run"), "--prompt", "1+1=", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("megarl: error: ") and said in err


def test_a_prompt_may_be_a_field_of_a_column() -> None:
    assert _of_row('{"q": {"text": "1+1="}}', "rows.jsonl:1", "q.text") == "1+1="
    for line in ('{"q": {}}', '{"q": ["text"]}', '["q.text"]', '"q.text"', "3"):
        with pytest.raises(ValueError, match=r"rows.jsonl:1: no JSON object with the column 'q.text'"):
            _of_row(line, "rows.jsonl:1", "q.text")


def test_a_mark_of_the_byte_order_is_no_part_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser, _ = parser_for(["generate"])
    for name, text in (("a.txt", "1+1=\n"), ("b.jsonl", '{"prompt": "1+1="}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        args = parser.parse_args(["generate", "path", "--prompts", str(tmp_path / name)])
        assert _prompts(args, "prompt") == ["1+1="]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff1+1=\n"))
    assert _prompts(parser.parse_args(["generate", "path"]), "prompt") == ["1+1="]


def test_bytes_that_are_no_text_are_refused(small: TrainedRun) -> None:
    tokenizer = load_tokenizer(str(small.folder))
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("1+\udc80")
    with pytest.raises(ValueError, match=r"^a prompt or the system message is not UTF-8"):
        Words(tokenizer, system=None, raw=False).token_ids([Turn("user", "1+\udc80")])


def test_files_that_hold_no_prompts(small: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    for text, said in (
        ('{"question": "x"}', f"{rows}:1: no JSON object with the column 'prompt' (data.prompt_key)"),
        ('\n{"prompt": [1]}', f"{rows}:2: 'prompt' is no text"),
        ("[", f"{rows}:1: no JSON object"),
    ):
        rows.write_text(text)
        assert main(["generate", str(small.folder / "run"), "--prompts", str(rows)]) == 2
        assert said in capsys.readouterr().err
    assert main(["generate", str(small.folder / "run"), "--prompts", str(tmp_path / "no.txt")]) == 2
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2


class Terminal:
    """`megarl generate` at a terminal."""

    def __init__(self, *words: str) -> None:
        self.side, theirs = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "megarl.cli.main", "generate", *words]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=default_interrupt,
        )
        os.close(theirs)
        self.said = ""

    def wait_for(self, text: str, count: int = 1, timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while self.said.count(text) < count:
            assert time.monotonic() < end, self.said
            if select.select([self.side], [], [], 1)[0]:
                try:
                    self.said += os.read(self.side, 4096).decode(errors="replace")
                except OSError:  # the process has left
                    assert self.said.count(text) >= count, self.said

    def wait_until_it_reads(self, timeout: float = 120) -> None:
        """Until the main thread sleeps: Python hears of a signal between prompt and read after a line only."""
        end, asleep = time.monotonic() + timeout, 0
        while asleep < 3:
            assert time.monotonic() < end, self.said
            time.sleep(0.1)
            stat = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat").read_text()
            asleep = asleep + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())


@pytest.mark.slow
def test_a_conversation(small: TrainedRun, request: pytest.FixtureRequest) -> None:
    """An answer, /clear, a prompt that is too long, and Ctrl-C at the prompt."""
    terminal = Terminal(str(small.checkpoint(2)), "--temperature", "1", "--max-tokens", "20")
    request.addfinalizer(terminal.process.kill)
    terminal.wait_for("Ctrl-D the conversation")
    assert "no chat template" in terminal.said
    terminal.wait_for("> ")
    terminal.type("1+1=\n")
    terminal.wait_for("> ", 2)
    terminal.type("/clear\n")
    terminal.wait_for("> ", 3)
    terminal.type("1" * 40 + "\n")
    terminal.wait_for("40 tokens leave no room for an answer in 32; raise --context, or /clear")
    terminal.wait_for("> ", 4)
    terminal.wait_until_it_reads()
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(60) == 130
    terminal.wait_for("megarl: SIGINT: stopped")
    assert "Traceback" not in terminal.said and "Warning" not in terminal.said
    assert re.search(r"1\+1=\r\n[^>]*> ", terminal.said)
    assert not os.path.exists(f"/proc/{terminal.process.pid}")


@pytest.mark.slow
def test_prompts_on_stdin(small: TrainedRun) -> None:
    """Nothing but the rows on stdout, nothing on stderr, and the process ends by itself."""
    command = [sys.executable, "-m", "megarl.cli.main", "generate", str(small.folder / "run")]
    asked = "\n".join(prompts_of(small)[:3]) + "\n\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, input=asked, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    records = read_records(str(small.folder / "run" / "validation" / "step_000002.jsonl"))[:3]
    assert [json.loads(line)["response"] for line in done.stdout.splitlines()] == [one.response for one in records]
