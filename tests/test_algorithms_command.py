"""`megarl algorithms`, and that every algorithm declares itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megarl.algorithms.declaration import about_of
from megarl.cli.algorithms import REGISTRIES, first_line
from megarl.cli.main import main
from megarl.config.load import all_keys
from megarl.rewards import load_reward
from megarl.rewards.registry import names

ALL = [(key, name) for key, registry in REGISTRIES.items() for name in registry.names()]
KEYS = set(all_keys())


def load(key: str, name: str) -> Any:
    return REGISTRIES[key].load(name)


@pytest.mark.parametrize(("key", "name"), ALL, ids=[name for _, name in ALL])
def test_it_says_what_it_is_and_where_it_comes_from(key: str, name: str) -> None:
    algorithm = load(key, name)
    assert algorithm.__name__ == name
    assert 10 < len(first_line(algorithm)) < 120
    about = about_of(algorithm)
    assert any(part.replace(".", "").isdigit() for part in about.paper.replace(",", "").replace(";", "").split())
    unknown = [named for named in about.keys if named not in KEYS and f"actor_rollout_ref.{named}" not in KEYS]
    assert not unknown


@pytest.mark.parametrize("key", REGISTRIES)
def test_the_keys_that_name_algorithms_exist(key: str) -> None:
    assert key in KEYS or f"actor_rollout_ref.{key}" in KEYS


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for key, name in ALL:
        about = about_of(load(key, name))
        (line,) = [line for line in lines if line.startswith(f"│ {name} ")]
        for text in (first_line(load(key, name)), about.paper, *about.keys, *about.needs.words()):
            assert text in line
    assert "2 samples per prompt" in "\n".join(lines)


def test_one_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "gae"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("algorithm.adv_estimator=gae\n\nDecaying sums of the critic's errors")
    assert out.splitlines()[-3:] == [
        "paper: GAE, arXiv 1506.02438, eq. 16; decoupled from the critic's: VC-PPO, 2503.01491",
        "keys: algorithm.gamma, algorithm.lam, critic.lam",
        "needs: critic",
    ]


def test_rewards_are_listed_with_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in names():
        (line,) = [line for line in lines if line.startswith(f"│ {name} ")]
        assert first_line(load_reward(name).function) in line
    (line,) = [line for line in lines if line.startswith("│ length ")]
    assert "│ target, width, shorter_is_fine=True " in line
    assert main(["algorithms", "format"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("reward.name=format\n\nMatch the whole response against a pattern")
    assert out.endswith("reward.args: pattern=..., timeout=5.0\n")


def test_an_unknown_name_or_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "rlo"]) == 2
    assert capsys.readouterr().err == "megarl: error: no algorithm is called 'rlo'; did you mean 'rloo'?\n"
    assert main(["algorithms", "zzzzzzzz"]) == 2
    assert capsys.readouterr().err == (
        "megarl: error: no algorithm is called 'zzzzzzzz'; `megarl algorithms` lists them\n"
    )
    for words in (["rloo", "grpo"], ["rloo", "--all"]):
        with pytest.raises(SystemExit):
            main(["algorithms", *words])
        assert f"unrecognized arguments: {words[1]}" in capsys.readouterr().err


def test_the_list_needs_no_megatron() -> None:
    code = "import sys; from megarl.cli.main import main; main(['algorithms'])\n"
    code += "assert not [name for name in sys.modules if name.startswith('megatron')]"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
