"""`megarl algorithms`, and that every algorithm declares itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megarl.algorithms.declaration import about_of
from megarl.algorithms.methods import METHODS
from megarl.cli.algorithms import REGISTRIES, first_line
from megarl.cli.main import main
from megarl.config.load import all_keys, load_config
from megarl.flow_kinds import FLOWS
from megarl.rewards import load_reward
from megarl.rewards.registry import names
from megarl.trainer.needs import needs_of

ALL = [(key, name) for key, registry in REGISTRIES.items() for name in registry.names()]
KEYS = set(all_keys())


def known(key: str) -> bool:
    """Also without "actor_rollout_ref."."""
    return key in KEYS or f"actor_rollout_ref.{key}" in KEYS


def load(key: str, name: str) -> Any:
    return REGISTRIES[key].load(name)


@pytest.mark.parametrize(("key", "name"), ALL, ids=[name for _, name in ALL])
def test_it_says_what_it_is_and_where_it_comes_from(key: str, name: str) -> None:
    algorithm = load(key, name)
    assert algorithm.__name__ == name
    assert 10 < len(first_line(algorithm)) < 120
    about = about_of(algorithm)
    assert any(part.replace(".", "").isdigit() for part in about.paper.replace(",", "").replace(";", "").split())
    assert all(map(known, about.keys))


@pytest.mark.parametrize("key", REGISTRIES)
def test_the_keys_that_name_algorithms_exist(key: str) -> None:
    assert known(key)


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for key, name in ALL:
        about = about_of(load(key, name))
        (line,) = [line for line in lines if line.startswith(f"│ {name} ")]
        for text in (first_line(load(key, name)), about.paper, *about.keys, *about.needs.words()):
            assert text in line
    assert "2 samples per prompt" in "\n".join(lines)


def test_methods_are_listed_with_what_chooses_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, method in METHODS.items():
        (line,) = [line for line in lines if line.startswith(f"│ {name} ")]
        assert f"│ {method.what} " in line and f"│ {' '.join(method.settings)} " in line
    assert not set(METHODS) & {*names(), *(name for _, name in ALL)}
    assert main(["algorithms", "kto"]) == 0
    assert capsys.readouterr().out == (
        "trainer.flow=kto\n\nLearning from single answers that are said to be good or bad, without pairs.\n\n"
        "paper: KTO, arXiv 2402.01306, eq. 8\n"
        f"keys: {', '.join(METHODS['kto'].about.keys)}\n"
        "needs: reference\n"
    )


def test_methods_are_every_flow_and_their_settings_are_configurations() -> None:
    chosen = {name: load_config(None, [s.replace("=N", "=8") for s in m.settings]) for name, m in METHODS.items()}
    assert {config.trainer.flow for config in chosen.values()} == set(FLOWS.names())
    assert chosen["dapo"].algorithm.filter_groups.enable and needs_of(chosen["distillation"]).teacher
    unknown = [key for method in METHODS.values() for key in method.about.keys if not known(key)]
    assert unknown == []


def test_one_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "gae"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("algorithm.adv_estimator=gae\n\nCompute decaying sums of the critic's errors")
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
