"""Commands beside train, plan, eval, compare and generate: what they print, refuse, and how they end."""

from __future__ import annotations

import json
import os
import pkgutil
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_cases import write_folder
from tiny_run import ROOT, TrainedRun, default_interrupt, write_run

import megarl.cli
from megarl.cli.main import COMMANDS, GROUPS, main
from megarl.cli.runs import FoundRun, read_run, run_folders
from megarl.config.load import all_keys
from megarl.trainer.run_lock import RunLock

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "megarl.cli.main"]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def lines_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[str]:
    """What a command prints, its error line if it is refused."""
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    if code == 2:
        assert out == "" and err.count("\n") == 1 and err.startswith("megarl: error: "), err
        return [err]
    return out.splitlines()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and all(f"\n{title}:\n" in out for title in GROUPS)
    for command in COMMANDS.values():
        assert re.search(rf"^  {command.name} +{re.escape(command.help)}$", out, re.MULTILINE)
    modules = {command.module or command.name for command in COMMANDS.values()}
    assert modules <= {module.name for module in pkgutil.iter_modules(megarl.cli.__path__)}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and "--debug" in out
    assert re.search(rf"\nexample:\n  .*megarl {name}", out)


def test_words_that_are_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["frobnicate"], ["runs", "a", "b"], ["completion", "fish"], []):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2 and "megarl" in capsys.readouterr().err


def test_help_and_completion_are_quick() -> None:
    """What takes seconds to import is not."""
    for words, environment in (
        (["--help"], {}),
        (["config", "explain", "data.seed"], {}),
        (["runs", str(ROOT / "configs")], {}),
        ([], {"_ARGCOMPLETE": "1", "COMP_LINE": "megarl train x.yaml data.", "COMP_POINT": "25"}),
    ):
        code = f"""
import os, sys
sys.argv[1:] = {words!r}
os.environ.update({environment!r})
real, os._exit = os._exit, lambda code: sys.exit(code)
from megarl.cli.main import main
try:
    main()
finally:
    slow = {{"torch", "megatron", "transformers", "pyarrow", "vllm", "matplotlib", "wandb", "mlflow"}}
    assert not slow & set(sys.modules), slow & set(sys.modules)
"""
        script = f"exec 8>/dev/null 9>/dev/null; exec {shlex.join([sys.executable, '-c', code])}"
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", (words, done.stderr)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `megarl` of this repository, for PATH."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "megarl").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (folder / "megarl").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("megarl co", ["compare", "config", "completion", "convert"]),
        ("megarl train --n", ["--nproc", "--nnodes", "--node-rank"]),
        ("megarl train a.yaml data.train_b", ["data.train_batch_size="]),
        ("megarl plan --gpus 8 a.yaml actor_rollout_ref.rollout.val_kwargs.t", ["temperature=", "top_p=", "top_k="]),
        ("megarl train a.yaml profiler.tool=n", ["none", "nsight"]),
        ("megarl config explain trainer.log", ["trainer.logger", "trainer.log_rollouts", "trainer.log_level"]),
        ("megarl completion ", ["bash", "zsh", "--debug", "--help", "-h"]),
    ],
)
def test_bash_completes(shell: Path, line: str, offered: list[str]) -> None:
    """In a real bash, as it asks when someone presses the tab key."""
    script = f"""
source <(megarl completion bash)
COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
_python_argcomplete megarl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    path = f"{shell}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env={**ENVIRONMENT, "PATH": path}, capture_output=True, text=True)
    given = {word.strip().rpartition(".")[2] if "val_kwargs" in line else word.strip() for word in done.stdout.split()}
    assert given == set(offered), done


def test_every_key_is_offered(shell: Path) -> None:
    from megarl.cli.words import keys

    seen, asked = set[str](), [""]
    while asked:
        for word in keys(asked.pop()):
            if word.endswith("."):
                asked.append(word)
            else:
                seen.add(word.removesuffix("="))
    assert seen == set(all_keys())


def test_configurations_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "config", "print", QUICKSTART, "data.seed=77", "trainer.experiment_name=x")
    (tmp_path / "all.yaml").write_text("\n".join(lines) + "\n")
    assert "  seed: 77" in lines
    assert lines_of(capsys, "config", "diff", str(tmp_path / "all.yaml"), QUICKSTART) == [
        "data.seed: 77 | 1",
        "trainer.experiment_name: x | run",
    ]
    assert lines_of(capsys, "config", "diff", QUICKSTART, QUICKSTART) == []
    different = lines_of(capsys, "config", "diff", QUICKSTART)
    assert "data.train_batch_size: 32 | 64" in different and not any(
        line.startswith("environment") for line in different
    )


@pytest.mark.slow
def test_a_run_s_configuration_is_compared(small: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "config", "diff", str(small.folder / "run"), str(small.config))
    assert lines == []
    assert "no run's folder" in lines_of(capsys, "config", "diff", str(small.folder), QUICKSTART, code=2)[0]


def test_keys_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "config", "explain", "actor_rollout_ref.actor.clip_ratio")
    assert lines == [
        "actor_rollout_ref.actor.clip_ratio",
        "  PPO clip range of both sides",
        "  type     number, more than 0",
        "  default  0.2",
        "  section  actor_rollout_ref.actor: Sets how the policy is updated.",
    ]
    section = lines_of(capsys, "config", "explain", "profiler")
    assert section[0].startswith("profiler: Chooses the steps and ranks") and len(section) == 6
    assert (
        lines_of(capsys, "config", "explain", "trainer.resume_mode=auto")[2] == "  type     auto, disable, resume_path"
    )
    said = lines_of(capsys, "config", "explain", "trainer.resum_mode", code=2)[0]
    assert said == "megarl: error: unknown key 'trainer.resum_mode'; did you mean 'trainer.resume_mode'?\n"
    table = "\n".join(lines_of(capsys, "config", "keys"))
    assert all(f" {key} " in table for key in all_keys())
    assert "did you mean 'profiler'?" in lines_of(capsys, "config", "keys", "profilr", code=2)[0]
    assert "one word too many" in lines_of(capsys, "config", "explain", "data.seed", "data.seed=1", code=2)[0]


def test_every_key_has_a_type_that_people_read() -> None:
    from megarl.config.describe import describe_all

    words = r"((list|mapping) of: )?(text|whole number|number|true or false|null|mapping|[\w+, -]+)(( or |, ).*)?"
    for one in describe_all():
        assert re.fullmatch(words, one.kind) and "typing" not in one.kind and "<" not in one.kind, (one.key, one.kind)


def only(folder: Path) -> FoundRun:
    (found,) = run_folders(str(folder))
    return read_run(found)


def test_runs_are_listed(small: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "runs", str(small.folder), "--json")
    (row,) = [json.loads(line) for line in lines]
    assert (row["state"], row["step"], row["steps"], row["flow"]) == ("finished", 2, 2, "ppo")
    assert row["checkpoints"] == 2 and row["model"] == small.folder.name and time.time() - row["changed"] < 3600
    files = (small.folder / "run" / "checkpoints").rglob("*")
    assert row["size"] == sum(file.stat().st_size for file in files if file.is_file())
    assert row["metrics"]["reward"] == small.rows[-1]["reward/mean"]
    table = "\n".join(lines_of(capsys, "runs", str(small.folder)))
    assert re.search(r"run +│ ppo +│ \w+ +│ finished │ 2/2 +│ reward 0\.", table)
    assert lines_of(capsys, "runs", str(tmp_path)) == [f"no runs in {tmp_path}"]
    assert "no folder at" in lines_of(capsys, "runs", str(tmp_path / "none"), code=2)[0]


def test_states_of_runs(tmp_path: Path) -> None:
    """While a run holds its folder, and after each way to end; with a metric line that is only half written."""
    lock = RunLock(str(tmp_path / "a" / "b"), steps=9)
    (tmp_path / "a" / "b" / "metrics.jsonl").write_text(
        '{"step": 3, "val/accuracy": 0.5}\n{"step": 4}\n{"step": 5, "re'
    )
    found = only(tmp_path)
    assert found.state == f"running on {socket.gethostname()} (pid {os.getpid()})"
    assert (found.step, found.steps, found.metrics, found.checkpoints) == (4, 9, {"accuracy": 0.5}, 0)
    lock.release()
    assert only(tmp_path).state == "ended without a word"
    for name in ("global_step_4", "global_step_4-huggingface", "global_step_2.damaged", ".global_step_5.partial"):
        (tmp_path / "a" / "b" / "checkpoints" / name).mkdir(parents=True)
    assert only(tmp_path).checkpoints == 1
    lock = RunLock(str(tmp_path / "a" / "b"), steps=9)
    lock.note_end("stopped by SIGTERM")
    assert only(tmp_path).state.startswith("running on")  # what it started may still be there
    lock.release()
    assert only(tmp_path).state == "stopped by SIGTERM"
    RunLock(str(tmp_path / "a" / "b"), steps=4).release()
    assert only(tmp_path).state == "finished"
    (tmp_path / "a" / "b" / "lock").write_text("[1")
    (tmp_path / "a" / "b" / "config.yaml").write_text("trainer: [")
    assert only(tmp_path).state == "not running" and only(tmp_path).flow == ""
    (tmp_path / "a" / "b" / "eval.json").write_text("{}")
    assert list(run_folders(str(tmp_path))) == []


def test_odd_runs_hide_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that look like markup, settings and steps that are no numbers."""
    odd = {
        "a[lr=1e-6]": ('trainer: {total_training_steps: "abc"}', '{"step": 3, "reward/mean": NaN}'),
        "d[": ("trainer: {total_training_steps: .inf}", '{"step": NaN}'),
        "b": ("trainer: {total_training_steps: 4}", '{"step": 4, "reward/mean": 0.5}'),
        "e": ("trainer: {}", f'{{"step": {"9" * 400}, "reward/mean": {"9" * 400}}}'),
    }
    for name, (config, row) in odd.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(config)
        (tmp_path / name / "metrics.jsonl").write_text(f"{row}\n")

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    rows = [json.loads(line, parse_constant=refused) for line in lines_of(capsys, "runs", str(tmp_path), "--json")]
    found = {os.path.basename(row["folder"]): (row["step"], row["metrics"], row["state"]) for row in rows}
    assert found["a[lr=1e-6]"] == (3, {"reward": None}, "not running") and found["d["][0] is None
    assert found["b"] == (4, {"reward": 0.5}, "finished")
    table = "\n".join(lines_of(capsys, "runs", str(tmp_path)))
    assert all(name in table for name in odd) and "reward nan" in table


def test_runs_on_a_narrow_terminal(tmp_path: Path) -> None:
    """State, step and last metrics are what people look for."""
    run = tmp_path / "grpo_qwen2.5_1.5b_math_lr1e-6_kl0.001_seed1"
    run.mkdir()
    (run / "config.yaml").write_text("trainer: {total_training_steps: 400, flow: ppo}")
    (run / "metrics.jsonl").write_text('{"step": 400, "reward/mean": 0.8125, "val/accuracy": 0.75}\n')
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*COMMAND, "runs", str(tmp_path)], {**ENVIRONMENT, "COLUMNS": "80", "TERM": "xterm"})
    out = b""
    with suppress(OSError):  # EIO: the other end is closed
        while part := os.read(terminal, 4096):
            out += part
    assert os.waitpid(pid, 0)[1] == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.decode()).split("\r\n")
    assert max(map(len, lines)) <= 80 and any("finished" in line and "400/400" in line for line in lines), lines
    text = "".join("".join(line.split("│")[1:2]).strip() for line in lines)
    assert run.name in text and "0.8125" in out.decode()


def test_the_line_for_vllm(small: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hugging Face folder as it is; a checkpoint's own; one that is made for a converted checkpoint, once."""
    source = write_folder(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "llama", "dtype": "float32"}))
    length = str(config["max_position_embeddings"])
    words = ["vllm", "serve", str(source), "--served-model-name", "source", "--dtype", "float32"]
    words += ["--tensor-parallel-size", "1", "--max-model-len", length, "--generation-config", "auto"]
    assert [shlex.split(line) for line in lines_of(capsys, "serve", str(source))] == [words]
    assert main(["convert", "hf-to-megatron", str(source), str(tmp_path / "made"), "--tp=2"]) == 0
    capsys.readouterr()
    made = tmp_path / "made-huggingface"
    for _ in range(2):
        (line,) = lines_of(capsys, "serve", str(tmp_path / "made"), "--tp", "2")
        assert shlex.split(line)[2] == str(made) and "--tensor-parallel-size 2" in line
        written = (made / "model.safetensors").stat().st_mtime_ns
    lines_of(capsys, "serve", str(tmp_path / "made"))
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    assert "has no Hugging Face folder" not in capsys.readouterr().err
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    (line,) = lines_of(capsys, "serve", str(source), "--chat-template", str(template))
    assert line.endswith(f"--chat-template {template}")
    for options, said in (
        (["--tp", "0"], "--tp 0 must be 1 or more"),
        (["--max-model-len", "0"], "--max-model-len 0: the model has"),
        (["--tp", "3"], "rollout.tensor_model_parallel_size = 3 does not divide the model's 4 attention heads"),
        (["--max-model-len", "1000000"], "--max-model-len 1000000: the model has"),
        (["--chat-template", "no.jinja"], "--chat-template: no file at 'no.jinja'"),
    ):
        assert said in lines_of(capsys, "serve", str(source), *options, code=2)[0]
    said = lines_of(capsys, "serve", str(small.folder), code=2)[0]
    assert "vLLM needs the field model_type" in said
    (line,) = lines_of(capsys, "serve", str(small.folder / "run"))
    exported = small.checkpoint(2) / "huggingface"
    assert shlex.split(line)[2] == str(exported) and line.endswith(f"--tokenizer {exported / 'tokenizer'}")


def test_another_checkpoint_s_export_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither at --out, nor at the usual place after the checkpoint was written anew."""
    for seed, name in enumerate("ab"):
        source = write_folder(tmp_path / f"source_{name}", "llama", seed=seed, model_type="llama")
        assert main(["convert", "hf-to-megatron", str(source), str(tmp_path / name)]) == 0
    capsys.readouterr()
    a, b, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    lines_of(capsys, "serve", a, "--out", out)
    lines_of(capsys, "serve", a, "--out", out)
    (said,) = lines_of(capsys, "serve", b, "--out", out, code=2)
    assert f"'{out}' was not made from '{b}' as that is now: delete it" in said
    lines_of(capsys, "serve", a)
    shutil.rmtree(a)
    os.rename(b, a)
    (said,) = lines_of(capsys, "serve", a, code=2)
    assert f"'{a}-huggingface' was not made from '{a}' as that is now" in said


def test_a_line_that_cannot_be_printed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = lines_of(capsys, "serve", str(write_folder(tmp_path / "a\x1b[2J", "llama", model_type="llama")), code=2)
    assert "a name in the command has control characters" in said and "\x1b" not in said


def test_the_line_for_vllm_has_the_run_s_sampling(
    small: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints" / "model"
    folder.parent.mkdir()
    write_folder(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    text = (small.folder / "run" / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(
        text.replace("    top_k: -1\n    stop_token_ids: []", "    top_k: 5\n    stop_token_ids: [3]")
    )
    assert main(["serve", str(folder)]) == 0
    out, err = capsys.readouterr()
    words = shlex.split(out)
    sampling = json.loads(words[words.index("--override-generation-config") + 1])
    assert sampling == {"temperature": 1.0, "top_k": 5} and words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "ask with stop_token_ids=[3]" in err and "no chat template" in err


@pytest.mark.slow
def test_vllm_takes_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own parser, and its own reading of the folder's configuration."""
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    source = write_folder(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "llama", "dtype": "bfloat16"}))
    (line,) = lines_of(capsys, "serve", str(source))
    args = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(shlex.split(line)[2:])
    assert (args.model_tag, args.dtype, args.tensor_parallel_size) == (str(source), "bfloat16", 1)
    assert args.max_model_len == config["max_position_embeddings"] and args.generation_config == "auto"


def test_debug_shows_where_an_error_is_from() -> None:
    """One line without it; with it the traceback, too, wherever it stands."""
    words = ["plan", "no.yaml"]
    plain = subprocess.run([*COMMAND, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert (plain.returncode, plain.stderr) == (2, "megarl: error: no config file at 'no.yaml'\n")
    for where in (["--debug", *words], [*words, "--debug"]):
        done = subprocess.run([*COMMAND, *where], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" in done.stderr and "megarl/config/load.py" in done.stderr
        assert done.stderr.endswith("megarl: error: no config file at 'no.yaml'\n")


def test_a_working_directory_that_was_deleted_is_said(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {shlex.join([*COMMAND, 'train', 'no.yaml'])}"
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    said = "megarl: error: the working directory has been deleted: change to one that is there\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_debug_reaches_the_ranks(tmp_path: Path) -> None:
    """A rank refuses a run with a traceback then, and its libraries are not hushed."""
    code = "import sys; from megarl.rank import main; sys.exit(main(['no.yaml']))"
    for debug in ("", "1"):
        environment = {**ENVIRONMENT, "MEGARL_DEBUG": debug}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.endswith("megarl: error: no config file at 'no.yaml'\n")
        assert ("Traceback" in done.stderr) == bool(debug)


def test_ctrl_c_ends_a_command(small: TrainedRun, tmp_path: Path) -> None:
    """One line, 130, and no process: while torch is imported, while stdin is waited for, while data is read."""
    config = str(write_run(tmp_path))
    waiting = ["generate", str(small.folder / "run"), "--prompts", "-"]
    started = {
        tuple(words): subprocess.Popen(
            [*COMMAND, *words],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=default_interrupt,
        )
        for words in (waiting, ["plan", config], ["doctor"], ["train", config])
    }
    early = dict(started)
    while early:
        for words, process in list(early.items()):
            library = "pydantic_core" if words[0] == "generate" else "libtorch"
            if library in Path(f"/proc/{process.pid}/maps").read_text():
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                del early[words]
        time.sleep(0.01)
    for words, process in started.items():
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (130, "megarl: SIGINT: stopped\n"), (words, out, err)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation(small: TrainedRun, tmp_path: Path) -> None:
    """Whose ranks run: its folder goes, too."""
    (tmp_path / "slow.py").write_text("import time\ndef score(response, row):\n    time.sleep(60)\n    return 1.0\n")
    words = ["eval", str(small.folder / "run"), "--out", str(tmp_path / "out"), f"reward.name={tmp_path}/slow.py:score"]
    command = [*COMMAND, *words, "actor_rollout_ref.rollout.val_kwargs.n=1"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_interrupt,
    )
    assert process.stdout is not None and "evaluating" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err.count("\n") == 1 and "SIGINT" in err, err
    assert not (tmp_path / "out").exists()
