"""Launch scripts: syntax, the commands that they would start, and requirements that agree with setup.py."""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), *sorted((ROOT / "slurm").glob("*")), ROOT / ".ci" / "run"]
LAUNCH = ROOT / "launch"


def run(script: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with this Python, on a machine without GPUs or a Slurm job of its own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        ["bash", script, *args],
        env={**inherited, "MEGARL_PYTHON": sys.executable, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def dry_run(script: str, *args: str, **environment: str) -> list[str]:
    """The command that a script would start, as words."""
    result = run(script, *args, DRY_RUN="1", **environment)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) or script.name in ("environment.sh", "job.sh")


def test_train_on_one_node() -> None:
    command = dry_run("launch/train.sh", "pyproject.toml", "data.prompt_key=a b", NPROC_PER_NODE="2")
    assert command[:4] == [sys.executable, "-m", "megarl.cli.main", "train"]
    assert command[4:9] == [
        "--nnodes=1", "--node-rank=0", "--nproc=2", "--master-addr=127.0.0.1", "--master-port=29500"
    ]  # fmt: skip
    assert command[9:] == [str(ROOT / "pyproject.toml"), "data.prompt_key=a b"]


def test_train_on_several_nodes() -> None:
    node = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "head", "MASTER_PORT": "1234", "NPROC_PER_NODE": "8"}
    command = dry_run("launch/train.sh", "a.yaml", **node)
    for option in ("--nnodes=4", "--node-rank=3", "--nproc=8", "--master-addr=head", "--master-port=1234"):
        assert option in command


def test_slurm_without_slurm() -> None:
    """Without GPUs the number of ranks is the configuration's."""
    command = dry_run("slurm/train.sbatch", "configs/a.yaml", "data.seed=3")
    assert command[:5] == ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    assert command[8:12] == [sys.executable, "-m", "megarl.cli.main", "train"]
    assert command[12:15] == ["--nnodes=1", "--master-addr=127.0.0.1", "--master-port=20000"]
    assert command[15:] == [str(ROOT / "configs" / "a.yaml"), "data.seed=3"]


def test_slurm_starts_failed_ranks_again_where_that_is_asked() -> None:
    command = dry_run("slurm/train.sbatch", "a.yaml", RESTARTS="3")
    assert command[11:15] == ["train", "--restarts", "3", "--nnodes=1"]


def test_slurm_takes_the_job_s_numbers() -> None:
    job = {"SLURM_NNODES": "16", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "123456", "MASTER_ADDR": "n7"}
    command = dry_run("slurm/train.sbatch", "a.yaml", **job)
    for option in ("--ntasks=16", "--nnodes=16", "--nproc=4", "--master-addr=n7", "--master-port=23456"):
        assert option in command
    assert "--nproc=2" in dry_run("slurm/train.sbatch", "a.yaml", **job, NPROC_PER_NODE="2")


def test_slurm_asks_for_no_gpus_by_itself() -> None:
    """A cluster without GPUs would refuse the job."""
    for name in ("train.sbatch", "array.sbatch"):
        options = [line for line in (ROOT / "slurm" / name).read_text().splitlines() if line.startswith("#SBATCH")]
        assert "#SBATCH --requeue" in options and not [line for line in options if "gpu" in line or "gres" in line]


def test_a_line_of_a_sweep_is_a_run(tmp_path: Path) -> None:
    """Its words are split as in a shell, and none is run or expanded."""
    sweep = tmp_path / "rates.txt"
    sweep.write_text("data.seed=1\nactor_rollout_ref.actor.optim.lr=1e-6 trainer.project_name='a $(touch hacked) *'\n")
    command = dry_run("slurm/array.sbatch", "a.yaml", str(sweep), "data.seed=9", SLURM_ARRAY_TASK_ID="2")
    assert command[-5:] == [
        "data.seed=9",
        "trainer.experiment_name=rates-2",
        "trainer.default_local_dir=runs/rates/2",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "trainer.project_name=a $(touch hacked) *",
    ]
    result = run("slurm/array.sbatch", "a.yaml", str(sweep), SLURM_ARRAY_TASK_ID="3")
    assert result.returncode == 1
    assert result.stderr == f"megarl: {sweep} has no line 3, or an empty one; submit with --array=1-2\n"
    assert not (ROOT / "hacked").exists()


def test_variables_of_a_file_are_defaults(tmp_path: Path) -> None:
    (tmp_path / "file.env").write_text("# a comment\n#NCCL_A=1\nNCCL_B=a $HOME b\nNCCL_C=2\nrm=-r\n")
    (tmp_path / "uses.sh").write_text(
        f'source "{LAUNCH}/environment.sh"; defaults "$1"; env | grep -E "^(NCCL_.|rm)=" | sort'
    )
    assert run(str(tmp_path / "uses.sh"), str(tmp_path / "file.env"), NCCL_C="own").stdout == (
        "NCCL_B=a $HOME b\nNCCL_C=own\n"
    )
    result = run(str(tmp_path / "uses.sh"), "no.env")
    assert (result.returncode, result.stderr) == (1, "megarl: there is no file no.env\n")


def test_each_variable_of_nccl_env_is_explained_and_none_is_set() -> None:
    lines = (LAUNCH / "nccl.env").read_text().splitlines()
    named = [line for line in lines if re.match(r"#?[A-Z]+_[A-Z_]+=", line)]
    assert len(named) > 12 and all(line.startswith("#") for line in named)
    for i, line in enumerate(lines):
        if line in named:
            assert lines[i - 1].startswith("# ") or lines[i - 1] in named, line


@pytest.mark.parametrize("script", ["launch/train.sh", "slurm/train.sbatch"])
def test_a_missing_config_is_one_line(script: str) -> None:
    result = run(script)
    assert result.returncode != 0
    assert re.search(r"usage: .*train\.\w+ CONFIG \[key=value \.\.\.\]$", result.stderr.strip())


@pytest.mark.parametrize("submitted", [True, False])
def test_a_job_from_another_folder_is_one_line(submitted: bool, tmp_path: Path) -> None:
    """Slurm runs a copy of the script."""
    copy = shutil.copy(ROOT / "slurm" / "train.sbatch", tmp_path / "slurm_script")
    (tmp_path / "a.yaml").touch()
    place = {"SLURM_SUBMIT_DIR": str(tmp_path)} if submitted else {}
    ran = subprocess.run(
        ["bash", copy, "a.yaml"],
        env={"PATH": os.environ["PATH"], **place},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"megarl: {tmp_path} is not the repository's root") and ran.stderr.count("\n") == 1


def test_a_wrong_interpreter_is_one_line() -> None:
    result = run("launch/train.sh", "a.yaml", MEGARL_PYTHON="/no/python")
    assert result.returncode == 1
    assert result.stderr == "megarl: MEGARL_PYTHON = '/no/python' is no executable\n"


def without_python(folder: Path) -> Path:
    """A PATH of what the scripts need beside Python."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "grep", "mkdir", "realpath", "tr"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    return tools


def test_an_environment_that_was_moved_is_not_used(tmp_path: Path) -> None:
    """Its scripts, and what it installed as editable, are those of its first place."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    shutil.copy(ROOT / "setup.py", tmp_path)
    tools = without_python(tmp_path)
    environment = tmp_path / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (environment / "bin" / "python").chmod(0o755)
    marked = "cat launch/requirements.txt launch/requirements-base.txt setup.py | cksum > .venv/.megarl-run"
    subprocess.run(["bash", "-c", marked], cwd=tmp_path, check=True)
    (tmp_path / "uses.sh").write_text('source "$(dirname "$0")/launch/environment.sh"; echo "$PYTHON"')
    for place, said in ((None, ""), (environment, ""), (tmp_path / "before" / ".venv", "no Python 3.10 or newer")):
        if place is not None:
            (environment / ".megarl-place").write_text(f"{place}\n")
        result = run(str(tmp_path / "uses.sh"), MEGARL_PYTHON="", PATH=str(tools))
        assert result.stdout == ("" if said else f"{environment}/bin/python\n") and said in result.stderr, result


def test_the_environment_of_another_repository_is_not_emptied_through_a_link(tmp_path: Path) -> None:
    shutil.copytree(LAUNCH, tmp_path / "here" / "launch")
    other = tmp_path / "other" / ".venv"
    other.mkdir(parents=True)
    (other / ".megarl-place").write_text(f"{other}\n")
    (tmp_path / "here" / ".venv").symlink_to(other)
    (tmp_path / "here" / "uses.sh").write_text('source "$(dirname "$0")/launch/environment.sh"')
    result = run(str(tmp_path / "here" / "uses.sh"), MEGARL_PYTHON="")
    assert result.returncode == 1 and ".venv is a link" in result.stderr, result
    assert [path.name for path in other.iterdir()] == [".megarl-place"]


PYTHON_THAT_INSTALLS = """#!/bin/bash
# Python, as far as making an environment goes: says when each installation begins and ends.
case "$*" in
    "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip install"*) echo "begin $PPID" >>said && sleep 0.1 && echo "end $PPID" >>said ;;
esac
"""


def test_of_two_starts_at_once_one_installs(tmp_path: Path) -> None:
    tools = without_python(tmp_path)
    for name in ("cp", "flock", "sleep"):
        (tools / name).symlink_to(shutil.which(name) or pytest.skip(f"needs {name}"))
    (tools / "python3.11").write_text(PYTHON_THAT_INSTALLS)
    (tools / "python3.11").chmod(0o755)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "uses.sh").write_text('set -e; source "$(dirname "$0")/launch/environment.sh"; echo "$PYTHON"')
    (tmp_path / ".cache").mkdir()
    with (tmp_path / ".cache" / "install.log.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command, environment = ["bash", str(tmp_path / "uses.sh")], {"PATH": str(tools)}
        starts = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for start in starts:
            assert start.stdout is not None
            assert start.stdout.readline() == "megarl: another start makes .venv; waiting for it\n"
    first, second = sorted((start.communicate(timeout=500)[0] for start in starts), key=len, reverse=True)
    python = f"{tmp_path}/.venv/bin/python\n"
    assert first.endswith(f"megarl: installing megarl\n{python}") and second == python
    said = (tmp_path / "said").read_text().split()
    assert said[::2] == ["begin", "end"] * 3 and len(set(said[1::2])) == 1


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("", 0), ("1", 1), ("GPU-8d2a-1,GPU-77-0", 2), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0)],
)
def test_gpus_that_a_start_may_use(visible: str | None, count: int, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\necho "GPU 0: NVIDIA H200 (UUID: GPU-8d2a-1)"\necho "GPU 1: NVIDIA H200"\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "count.sh").write_text(f'source "{LAUNCH}/environment.sh"; gpu_count')
    devices = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert run(str(tmp_path / "count.sh"), PATH=f"{tmp_path}:{os.environ['PATH']}", **devices).stdout == f"{count}\n"


def test_no_python_at_all_is_one_line(tmp_path: Path) -> None:
    tools = without_python(tmp_path)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    result = run(str(tmp_path / "launch" / "train.sh"), "a.yaml", MEGARL_PYTHON="", PATH=str(tools))
    assert result.returncode == 1
    assert result.stderr.startswith("megarl: no Python 3.10 or newer") and result.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------ requirements


def pins(file: str, python: str) -> dict[str, str]:
    """Package -> version as a requirements file pins it for a Python version."""
    found: dict[str, str] = {}
    for line in (LAUNCH / file).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line[3:], python)
        elif line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                (specifier,) = requirement.specifier
                assert specifier.operator == "==" and requirement.name not in found, line
                found[requirement.name] = specifier.version
    return found


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """install_requires and extras_require of setup.py, read without running it."""
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)]
    (setup,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "setup")
    values = {k.arg: k.value for k in setup.keywords}
    return ast.literal_eval(values["install_requires"]), ast.literal_eval(values["extras_require"])


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
@pytest.mark.parametrize("file", ["requirements.txt", "requirements-gpu.txt"])
def test_pins_are_the_declared_dependencies(file: str, python: str) -> None:
    """Triton is declared for later versions of Megatron-Core beside torch's build for CPUs, which no file pins."""
    install_requires, _ = declared()
    pinned = pins(file, python)
    required = {r.name: r for r in map(Requirement, install_requires) if r.name != "triton"}
    assert pinned.keys() == required.keys()
    for name, requirement in required.items():
        assert requirement.specifier.contains(pinned[name]), name


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_test_tools_are_the_dev_extra(python: str) -> None:
    _, extras = declared()
    pinned = pins("requirements-dev.txt", python)
    assert pinned.keys() == {Requirement(line).name for line in extras["dev"]}
    for line in extras["dev"]:
        assert Requirement(line).specifier.contains(pinned[Requirement(line).name]), line


def test_version_is_the_package_s() -> None:
    import megarl

    said = subprocess.check_output([sys.executable, "setup.py", "--version"], cwd=ROOT, text=True)
    assert re.fullmatch(rf"{re.escape(megarl.__version__)}(\+g[0-9a-f]{{7,}}(\.dirty)?)?", said.strip())
