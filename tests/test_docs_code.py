"""What the pages say can be typed: keys, commands, files, and code that is checked, and in slow tests run."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_tokenizer import SIZE, write_chat_tokenizer
from documents import DOCS, PAGES, ROOT, TEXTS, Block, blocks, commands
from ranks import Ranks
from tiny_run import metrics_of, train, write_run

from megarl.cli.main import main
from megarl.config import build_config, load_config
from megarl.config.load import all_keys
from megarl.flow_kinds import FLOWS
from megarl.trainer.admission.checks import check_run
from megarl.tuning.sweep import Sweep

BLOCKS = [block for page in PAGES for block in blocks(page)]
KEYS = set(all_keys())
SECTIONS = {key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1)}
SHORT = ("actor", "rollout", "model", "ref", "reshard")
"""Sections of actor_rollout_ref that pages name without it."""

PLACEHOLDERS = {"key=value"}
MISSPELT = {"data.train_bach_size"}
"""The key of the refusal that is shown."""
COLUMNS = {"reward_model.ground_truth"}
"""Fields of verl's rows that pages name, whose column is called as a section is."""

RUN_PAGES = [
    page
    for page in PAGES
    if any(block.title and block.language == "python" for block in blocks(page)) and page.stem != "tour"
]


def known(key: str) -> bool:
    """Whether a key or section has the name, or a key that takes any mapping begins it."""
    candidates = [key, f"actor_rollout_ref.{key}"] if key.split(".")[0] in SHORT else [key]
    for name in candidates:
        outer = {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)}
        takes_any = {one for one in outer & KEYS if one.endswith((".args", ".parts", ".override_transformer_config"))}
        if name in KEYS | SECTIONS or takes_any:
            return True
    return False


def here(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", TEXTS, ids=here)
def test_keys_in_the_prose_are_keys(page: Path) -> None:
    sections = {key.split(".")[0] for key in KEYS} | set(SHORT)
    text = page.read_text(encoding="utf-8")
    named = set()
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        for word in re.findall(r"(?<![\w/.-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w/(*{…])", code):
            if word.split(".")[0] in sections and not word.endswith((".py", ".json", ".jsonl", ".yaml", ".model")):
                named.add(word)
    assert sorted(key for key in named - COLUMNS if not known(key)) == []


@pytest.mark.parametrize("page", TEXTS, ids=here)
def test_files_in_the_prose_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:megarl|tests|tools|configs|launch|slurm|docs)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists() and "NAME" not in name] == []


@pytest.mark.parametrize("page", TEXTS, ids=here)
def test_commands_can_be_typed(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "megarl" and words[1:]:
            with pytest.raises(SystemExit) as left:
                main([words[1], "--help"])
            assert left.value.code == 0, line
        for word in words[1:]:
            key, sep, _ = word.partition("=")
            if sep and re.fullmatch(r"[a-z_]+(\.[\w]+)+", key):
                assert known(key) or key in MISSPELT, f"{line}: {key}"
            elif sep and "." not in key and re.fullmatch("[a-z]+", key):
                assert word in PLACEHOLDERS, line
            if re.fullmatch(r"(configs|tools|launch|slurm)/[\w/]+\.(yaml|py|sh|txt|sbatch)", word):
                assert (ROOT / word).is_file(), line


def templates() -> set[str]:
    """The texts in the package's code, with "…" for each value that is put into one."""
    found = set()
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_messages_of_the_troubleshooting_are_those_of_the_code() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").split("## Installing")[0]
    symptoms = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    said = [code for symptom in symptoms for code in re.findall(r"`([^`]+)`", symptom) if " " in code]
    said.remove("train.jsonl:17: …")  # a row's place
    assert len(said) > 12
    code = templates()
    parts = {part.strip(" '") for message in said for part in message.split("…")}
    assert [part for part in parts if not any(part in template for template in code)] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: f"{b.page.stem}-{b.title}")
def test_yaml_is_a_configuration(block: Block) -> None:
    values: dict[str, Any] = yaml.safe_load(block.body)
    if block.title == "sweep.yaml":
        assert {key for key in Sweep.model_validate(values).keys if not known(key)} == set()
        return
    assert build_config(values).model_dump(exclude_unset=True).keys() == values.keys()


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: f"{b.page.stem}-{b.title}"
)
def test_python_compiles(block: Block) -> None:
    compile(block.body, str(block.title), "exec")


def test_refusals_are_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    seen = 0
    for block in BLOCKS:
        found = re.match(r"\$ megarl (.*configs/.*)\n((?:.+\n)+)", block.body) if block.language == "console" else None
        if found:
            assert main(shlex.split(found[1])) == 2
            assert capsys.readouterr().err.split() == found[2].split()
            seen += 1
    assert seen


# ------------------------------------------------------------------------------------------------ files of one's own


def trains(page: Path) -> list[list[str]]:
    """The words after `megarl train` of each such command."""
    return [shlex.split(line)[2:] for line in commands(page) if line.startswith("megarl train")]


def written(page: Path, folder: Path) -> Path:
    """The page's files in a folder, beside a run.yaml."""
    config = write_run(folder, data__max_response_length=8)
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
    return config


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.stem)
def test_files_of_a_page_pass_the_checks_of_its_commands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in trains(page):
        flow = words[words.index("--flow") + 1] if "--flow" in words else "ppo"
        rest = [word for word in words if "=" in word]
        if not (words and "run.yaml" in words):
            continue  # of a configuration of the reader's
        check_run(load_config("run.yaml", [*rest, f"trainer.flow={flow}"]))
        FLOWS.check(flow)


def test_an_agent_passes_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = DOCS / "howto" / "environment.md"
    written(agent, tmp_path)
    write_chat_tokenizer(tmp_path)
    shape = tmp_path / "config.json"
    shape.write_text(shape.read_text().replace('"vocab_size": 18', f'"vocab_size": {SIZE}').replace(": 32,", ": 256,"))
    monkeypatch.chdir(tmp_path)
    words = [
        "environment.agent=my_agent.py:agent",
        f"actor_rollout_ref.model.tokenizer_path={tmp_path}",
        "data.max_prompt_length=32",
        "data.max_response_length=96",
    ]
    check_run(load_config("run.yaml", words))


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run(page: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Every command on run.yaml, to its end."""
    written(page, tmp_path)
    ran = 0
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "python" and (tmp_path / words[1]).is_file():
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, *words[1:]]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            rows = metrics_of(tmp_path)
        elif words[:2] == ["megarl", "train"] and "run.yaml" in words:
            folder = [f"trainer.default_local_dir={tmp_path}/{ran}/run", "trainer.val_before_train=false"]
            overrides = ["trainer.flow=" * (before == "--flow") + word for before, word in pairwise(words[1:])]
            overrides = [word for word in overrides if word not in ("--flow", "run.yaml")]
            ranks.launch(1, train_here, str(tmp_path), [*overrides, *folder])
            rows = metrics_of(tmp_path / str(ran))
        else:
            continue
        assert rows[-1]["step"] >= 1, line
        ran += 1
    assert ran


def train_here(folder: str, overrides: list[str]) -> None:
    """A whole run in the folder of its files."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        train("run.yaml", overrides)
    finally:
        os.chdir(before)
