"""Runs that a script or a notebook starts: dictionaries, quiet libraries, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import ROOT, megarl, metrics_of, write_run

import megarl as program

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SCRIPT = """
import json, sys
import megarl
if __name__ == "__main__":
    megarl.train(json.loads(sys.argv[1]), callbacks=[lambda loop, step, row: print("done", step, flush=True)])
"""


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    return yaml.safe_load(write_run(folder, **sections).read_text())


def script(folder: Path, **sections: Any) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    return [sys.executable, str(folder / "script.py"), json.dumps(settings(folder, **sections))]


def ending_of(folder: Path) -> str:
    (line,) = megarl("runs", str(folder), "--json").stdout.splitlines()
    return str(json.loads(line)["state"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"trainer": {"stepz": 1}}, "unknown key 'trainer.stepz'"),
        ({"trainer": 3}, "trainer: "),
        ({"trainer": {"total_training_steps": object()}}, "the configuration is not valid YAML: "),
        (["trainer.total_training_steps=1"], "a configuration is a Config, a dictionary or a path, not list"),
        (Path("none.yaml"), "no config file at 'none.yaml'"),
    ],
)
def test_what_is_no_configuration_is_refused_in_a_line(config: Any, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        program.train(config)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_script_hears_of_its_run_alone(tmp_path: Path) -> None:
    """No warnings of the libraries below; no rollouts are named where none are kept."""
    done = subprocess.run(
        script(tmp_path, trainer__log_rollouts=0), env=ENVIRONMENT, capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("done ")] == ["done 0", "done 1", "done 2"]
    assert lines[-1].startswith("metrics are in ")
    assert not any("Warning" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step(tmp_path: Path, number: signal.Signals) -> None:
    """As a terminal's Ctrl-C sends it: to all processes of the script."""
    command = script(tmp_path, trainer__total_training_steps=10_000, trainer__save_freq=-1)
    running = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("done 2"):
            break
    os.killpg(running.pid, number)
    said = running.communicate(timeout=300)[1]
    assert f"megarl: {number.name}: saving after this step" in said
    if number == signal.SIGINT:
        assert running.returncode and said.splitlines()[-1].endswith("KeyboardInterrupt")
    else:
        assert running.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    steps = len(metrics_of(tmp_path)) - 1
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("global_step_*")
    assert checkpoint.name == f"global_step_{steps}"
    assert ending_of(tmp_path) == f"stopped by {number.name}"


@pytest.mark.slow
def test_a_notebook(tmp_path: Path) -> None:
    """Twice in one kernel, the second time interrupted and then to its end; progress has a place of its own."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel are not installed")
    import nbformat

    config = settings(tmp_path)
    long = {**config, "trainer": {**config["trainer"], "default_local_dir": str(tmp_path / "long" / "run")}}
    interrupt = "lambda loop, step, row: step == 1 and os.kill(os.getpid(), signal.SIGINT)"
    cells = [
        f"import megarl, os, signal\nmegarl.train({config!r})['reward/mean']",
        f"try:\n    megarl.train({long!r}, callbacks=[{interrupt}])\nexcept KeyboardInterrupt:\n    print('ended')",
        f"megarl.train({long!r})['reward/mean']",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert all(output.get("name") != "stderr" or output.text.startswith("megarl: ") for o in outputs for output in o)
    shown = [[out.data["text/plain"] for out in o if out.output_type == "display_data"] for o in outputs]
    assert [texts[-1].split(" | ")[0] for texts in shown] == ["RL 2/2", "RL 1/2", "RL 2/2"]
    assert "ended\n" in "".join(output.text for output in outputs[1] if output.output_type == "stream")
    assert len(metrics_of(tmp_path / "long")) == 3
