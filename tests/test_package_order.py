"""The packages' total order: each may import only those before it."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "megarl"
CELLS = re.findall(r"^\| (`megarl/.*?) \|", (ROOT.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE)
ORDER = re.findall(r"`(?:megarl/)?(\w+)", " ".join(CELLS))
"""Packages and modules, from the first on: those of the map of the house."""
TORCH_FREE = [
    "version.py",
    "plain.py",
    "hub.py",
    "loopback.py",
    "private_folder.py",
    "processes.py",
    "endings.py",
    "restarts.py",
    "host.py",
    "debugging.py",
    "phases.py",
    "role_kinds.py",
    "own_code.py",
    "registry.py",
    "flow_kinds.py",
    "rollout/kinds.py",
    "rollout/vllm/kind.py",
    "isolation",
    "workers",
    "algorithms/overlong.py",
    "rewards/arguments.py",
    "rewards/code.py",
    "rewards/exact_match.py",
    "rewards/format.py",
    "rewards/gsm8k.py",
    "rewards/http.py",
    "rewards/length.py",
    "rewards/latex_number.py",
    "rewards/math_answer.py",
    "rewards/math_verify.py",
    "rewards/multiple_choice.py",
    "rewards/openai_judge.py",
    "rewards/outside",
    "rewards/outsiders.py",
    "rewards/overlong.py",
    "rewards/post.py",
    "rewards/reasoning_gym.py",
    "rewards/regex.py",
    "rewards/registry.py",
    "rewards/rows.py",
    "rewards/sandbox.py",
    "config",
    "migration",
    "parallel/context.py",
    "parallel/experts.py",
    "parallel/layout.py",
    "trainer/layouts.py",
    "telemetry/earlier.py",
    "telemetry/metrics.py",
    "evaluation",
    "telemetry/lines.py",
    "telemetry/sinks/jsonl.py",
    "telemetry/spans.py",
    "telemetry/samples.py",
    "report",
    "cli/report.py",
    "models/architecture.py",
    "models/parameter_names.py",
    "models/placements.py",
    "models/sizes.py",
    "models/tensors.py",
    "models/families",
    "checkpoint/folder.py",
    "checkpoint/manifest.py",
    "checkpoint/huggingface_folder.py",
    "checkpoint/hub_download.py",
    "checkpoint/megatron_lm.py",
    "checkpoint/safetensors_file.py",
    "checkpoint/file_slice.py",
    "reshard/plan.py",
    "reshard/repeat.py",
    "reshard/traffic.py",
    "reshard/sharing.py",
    "reshard/sides.py",
    "reshard/transport/copies.py",
    "estimate",
    "trainer/resuming/best.py",
    "trainer/subject.py",
    "trainer/trust.py",
    "trainer/stop.py",
    "trainer/run_lock.py",
    "trainer/starts.py",
    "trainer/run_folder.py",
    "trainer/less_memory.py",
]


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module or "")
    return names


def _files(place: str = "") -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def test_imports_follow_the_order() -> None:
    assert len(_files()) > 50
    for file in _files():
        own = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in ORDER, f"{file}: its package is not in the order"
        for name in _imports(file):
            parts = name.split(".")
            if parts[0] == "megarl" and len(parts) > 1:
                assert ORDER.index(parts[1]) <= ORDER.index(own), f"{file} imports {name}, which comes after {own}"


def test_the_command_line_alone_migrates() -> None:
    users = [file.relative_to(ROOT).parts[0] for file in _files() for name in _imports(file) if "migration" in name]
    assert set(users) == {"migration", "cli"}


def _targets(file: Path) -> set[tuple[str, ...]]:
    """Modules and packages of ours that a file imports, as parts of their names; imports for types count."""
    targets: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megarl":
            package = tuple(str(node.module).split(".")[1:])
            for alias in node.names:
                module = ROOT.joinpath(*package, alias.name)
                is_module = module.is_dir() or module.with_suffix(".py").exists()
                targets.add((*package, alias.name) if is_module else package)
    return targets


def test_no_circle_inside_any_package() -> None:
    """The modules and folders of each folder can be put into an order in which each imports only those before it."""
    neighbours: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for file in _files():
        own = file.relative_to(ROOT).with_suffix("").parts
        if own[-1] == "__init__":
            continue
        for target in _targets(file):
            depth = len([*takewhile(lambda names: names[0] == names[1], zip(own, target, strict=False))])
            if depth < min(len(own), len(target)):  # else one of the two lies in the other
                children = neighbours.setdefault(own[:depth], {})
                children.setdefault(own[depth], set()).add(target[depth])
    assert len(neighbours) > 20
    for folder, imports in neighbours.items():
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as e:
            pytest.fail(f"a circle in megarl/{'/'.join(folder)}: {' -> '.join(e.args[1])}")


def test_parallel_state_has_one_door() -> None:
    users = []
    for file in _files():
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        if any(name.startswith("megatron.core.parallel_state") for name in names | _imports(file)):
            users.append(file)
    assert users == [ROOT / "parallel" / "train_groups.py"]


def test_plans_and_configuration_import_no_torch() -> None:
    for place in TORCH_FREE:
        for file in _files(place):
            assert not {name.split(".")[0] for name in _imports(file)} & {"torch", "megatron"}, file
