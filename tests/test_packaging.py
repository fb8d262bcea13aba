"""The wheel holds what the program needs, extras name what is there, and the changelog knows the version."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_launch import declared, pins

import megarl

ROOT = Path(__file__).parents[1]
ON_THIS_MACHINE = {"dev", "docs"}
"""Extras that every environment of the tests has; the others are for GPUs, or for a choice of `trainer.logger`."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git knows, as a clean clone would be."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if name.startswith("megarl/") or name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = ["pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    known = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "megarl"], cwd=ROOT, text=True)
    assert set(known.split()) - held == set()
    assert "megarl/py.typed" in held
    assert not [name for name in held if name.startswith(("tests/", "docs/", "tools/"))]


@pytest.mark.slow
def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In a folder of its own, which is looked at before the environment; the dependencies are the environment's."""
    target = tmp_path / "site-packages"
    command = ["pip", "install", str(wheel), "--no-deps", "--target", str(target)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}

    def output(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = output(sys.executable, "-c", "import megarl; print(megarl.__file__)").strip()
    assert Path(place).is_relative_to(target)
    script = str(target / "bin" / "megarl")
    assert output(sys.executable, script, "--version") == f"megarl {megarl.__version__}\n"
    model = f"actor_rollout_ref.model.path={ROOT / 'configs' / 'models' / 'tiny_qwen'}"
    said = output(sys.executable, script, "plan", str(ROOT / "configs" / "quickstart.yaml"), model)
    assert said.startswith("qwen3, 101 thousand parameters, on 4 GPUs: training TP2 x PP2 x DP1")
    assert "grpo_passk" in output(sys.executable, script, "algorithms")


def test_a_clone_says_of_which_commit_it_is(tmp_path: Path) -> None:
    def ran(*words: str) -> str:
        return subprocess.check_output(words, cwd=tmp_path, text=True, stderr=subprocess.STDOUT, timeout=500).strip()

    (tmp_path / "megarl").mkdir()
    for name in ("__init__.py", "version.py"):
        (tmp_path / "megarl" / name).write_bytes((ROOT / "megarl" / name).read_bytes())
    release, said = megarl.__version__, (sys.executable, "-c", "import megarl.version as v; print(v.version())")
    assert ran(*said) == release  # whatever else is installed under the name
    ran("git", "init", "-q")
    assert ran(*said) == release  # no commit yet
    ran("git", "add", "megarl/__init__.py", "megarl/version.py")
    ran("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    commit = ran("git", "rev-parse", "--short=7", "HEAD")
    assert ran(*said) == f"{release}+g{commit}"
    with (tmp_path / "megarl" / "__init__.py").open("a") as file:
        file.write("# changed\n")
    assert ran(*said) == f"{release}+g{commit}.dirty"
    ran("git", "tag", f"v{release}")
    assert ran(*said) == f"{release}+g{commit}.dirty"
    ran("git", "checkout", "-q", "megarl/__init__.py")
    assert ran(*said) == release


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_documentation_s_tools_are_the_docs_extra(python: str) -> None:
    _, extras = declared()
    pinned = pins("requirements-docs.txt", python)
    assert pinned.keys() == {Requirement(line).name for line in extras["docs"]}
    for line in extras["docs"]:
        assert Requirement(line).specifier.contains(pinned[Requirement(line).name]), line


def test_extras_name_packages_that_are_there() -> None:
    """One that is installed has an admitted version; those of the tests and of the documentation are installed."""
    _, extras = declared()
    assert extras.keys() > ON_THIS_MACHINE
    for extra, lines in extras.items():
        for line in lines:
            requirement = Requirement(line)
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                assert extra not in ON_THIS_MACHINE, f"{extra}: {line} is not installed"
                continue
            assert requirement.specifier.contains(version, prereleases=True), f"{extra}: {line}, installed {version}"


def test_what_an_extra_brings_is_imported_somewhere() -> None:
    """An extra that no code asks for is dead."""
    modules = {
        "gpu": ["transformer_engine"],
        "vllm": ["vllm"],
        "docs": ["latex2mathml"],
        "loggers": ["prometheus_client", "wandb", "mlflow"],
        "tune": ["optuna"],
    }
    _, extras = declared()
    assert extras.keys() == {*modules, "dev"}
    files = [path for folder in ("megarl", "docs") for path in (ROOT / folder).rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    for extra, named in modules.items():
        for name in named:
            assert re.search(rf"\b(?:import|from) {name}\b|[\"']{name}[\"'.]", code), f"{extra}: {name}"


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", megarl.__version__]


@pytest.mark.parametrize(
    ("name", "python", "left_out"), [("requirements", "3.11", {"torch"}), ("requirements-gpu", "3.12", set())]
)
def test_a_locked_installation_has_the_pins_and_a_hash_for_each_package(
    name: str, python: str, left_out: set[str]
) -> None:
    text = (ROOT / "launch" / f"{name}.lock").read_text().replace("\\\n", " ")
    locked: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        requirement, *hashes = line.split(" --hash=")
        package = Requirement(requirement.strip())
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest.strip()) for digest in hashes), line
        assert str(package.specifier).startswith("=="), line
        if package.marker is None or package.marker.evaluate({"python_version": python, "python_full_version": python}):
            locked[package.name] = str(package.specifier).removeprefix("==")
    pinned = {package: version for package, version in pins(f"{name}.txt", python).items() if package not in left_out}
    assert {package: locked.get(package) for package in pinned} == pinned
