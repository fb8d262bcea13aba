"""W&B and MLflow with their own packages; servers that are dead or hang; sinks that raise; refusals."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from ranks import free_port
from tiny_run import megarl, metrics_of, write_run

from megarl.config import Config, ConfigError, build_config
from megarl.config.telemetry import TelemetryConfig
from megarl.telemetry import sinks
from megarl.telemetry.samples import Sample
from megarl.telemetry.sinks import background, open_sinks
from megarl.telemetry.sinks.background import Background, Row
from megarl.trainer.admission.telemetry import check_telemetry
from megarl.trainer.records.report import Report

SAMPLE = Sample(prompt="1 + 1 =", response="zwölf", answer="2", reward=None)


def config_of(folder: Path, **telemetry: Any) -> Config:
    trainer = {"project_name": "p", "experiment_name": "e", "default_local_dir": str(folder)}
    return build_config({"trainer": trainer, "telemetry": {"close_timeout": 60, **telemetry}})


def logged(name: str, folder: Path, config: Config, first_step: int | None, steps: range) -> None:
    """One process' part of a run."""
    (sink,) = open_sinks([name], str(folder), first_step, pytest.fail, config)
    (folder / "config.yaml").write_text("trainer: {}\n")
    sink.artifact(str(folder / "config.yaml"))  # type: ignore[attr-defined]
    for step in steps:
        sink.log(step, {"reward/mean": step / 8, "val/pass@4": 0.5})
        sink.rollouts(step, [SAMPLE])  # type: ignore[attr-defined]
    sink.close()


def records(file: Path) -> Iterator[Any]:
    """Of a .wandb file: LevelDB's log format around W&B's own protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):  # W&B's process is still writing it
            return
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(part)
            yield record
            part = b""


def rows_of(file: Path) -> list[dict[str, Any]]:
    history = [record.history for record in records(file) if record.HasField("history")]
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in one.item}
        for one in history
    ]  # fmt: skip


@pytest.mark.usefixtures("at_once")
def test_wandb_goes_on_in_the_same_run_and_shows_a_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "config.yaml", "reward.args.api_key=typed-secret"])
    config = config_of(tmp_path, wandb={"mode": "offline", "tags": ["t"], "group": "g"})
    logged("wandb", tmp_path, config, None, range(1, 4))
    known = (tmp_path / "wandb_run.txt").read_text()
    logged("wandb", tmp_path, config, 2, range(2, 4))
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{known}.wandb"] * 2
    until = time.monotonic() + 120
    while sum(1 for file in files for one in records(file) if one.HasField("exit")) < 2:  # W&B's process writes them
        assert time.monotonic() < until
        time.sleep(0.1)
    everything = [path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert everything and not any(b"typed-secret" in content for content in everything)
    rows = [row for file in files for row in rows_of(file)]
    assert [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row] == [
        (1, 0.125), (2, 0.25), (3, 0.375), (2, 0.25), (3, 0.375)
    ]  # fmt: skip
    assert sum(row.get("rollouts/nrows") == 1 for row in rows) == 5
    (run,) = [record.run for record in records(files[0]) if record.HasField("run")][:1]
    assert (run.project, run.display_name, run.run_group, list(run.tags)) == ("p", "e", "g", ["t"])
    settings = {i.key: json.loads(i.value_json) for i in run.config.update}
    assert settings["data"]["train_batch_size"] == config.data.train_batch_size
    axes = [record.metric for record in records(files[0]) if record.HasField("metric")]
    assert any(axis.glob_name == "*" and axis.step_metric == "step" for axis in axes)
    tables = (tmp_path / "wandb").glob("offline-run-*/files/media/table/rollouts_*.json")
    shown = [row for table in tables for row in json.loads(table.read_text())["data"]]
    assert sorted(row[0] for row in shown) == [1, 2, 2, 3, 3]
    assert {tuple(row[1:]) for row in shown} == {("1 + 1 =", "zwölf", "2", None)}


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts
    store = f"sqlite:///{tmp_path / 'ml.db'}"
    config = config_of(tmp_path / "run", mlflow={"tracking_uri": store, "tags": ["t"]})
    (tmp_path / "run").mkdir()
    logged("mlflow", tmp_path / "run", config, None, range(1, 4))
    longer = config_of(tmp_path / "run", mlflow={"tracking_uri": store, "tags": ["t", "u"]})  # another parameter
    logged("mlflow", tmp_path / "run", longer, 2, range(2, 4))
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.run_id == (tmp_path / "run" / "mlflow_run.txt").read_text()
    assert (run.info.run_name, run.info.status, run.data.tags["t"]) == ("e", "FINISHED", "true")
    points = sorted(client.get_metric_history(run.info.run_id, "reward/mean"), key=lambda point: point.timestamp)
    assert sorted((point.step, point.value) for point in points) == [
        (1, 0.125), (2, 0.25), (2, 0.25), (3, 0.375), (3, 0.375)
    ]  # fmt: skip
    assert run.data.metrics["val/pass_4"] == 0.5
    assert run.data.params["data.train_batch_size"] == str(config.data.train_batch_size)
    assert "u" not in run.data.params["telemetry.mlflow.tags"]  # parameters of a run cannot change
    kept = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert kept == {"config.yaml", "rollouts"}
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "rollouts/step_000003.json")).read_text())
    assert table["columns"][:2] == ["step", "prompt"] and table["data"] == [[3, "1 + 1 =", "zwölf", "2", None]]


@pytest.mark.usefixtures("at_once")
def test_mlflow_tells_sources_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path / 'ml.db'}"
    (tmp_path / "run").mkdir()
    config = config_of(tmp_path / "run", mlflow={"tracking_uri": store})
    (sink,) = open_sinks(["mlflow"], str(tmp_path / "run"), 1, pytest.fail, config)
    sink.log(1, {"val/数学/mean": 0.25, "val/物理/mean": 0.5, "val/a/mean": 0.75})
    sink.close()
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert sorted(run.data.metrics.values()) == [0.25, 0.5, 0.75] and run.data.metrics["val/a/mean"] == 0.75


class TrackingServer:
    """MLflow's own server, which keeps rows and files in a folder; it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={self._port}", "--workers=1"]
        command += [f"--backend-store-uri=sqlite:///{self._folder / 'server.db'}", "--serve-artifacts"]
        command += ["--default-artifact-root=mlflow-artifacts:/", f"--artifacts-destination={self._folder / 'files'}"]
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=self._folder)
        until = time.monotonic() + 300
        while not self._answers():
            assert time.monotonic() < until and self._process.poll() is None, (self._folder / "server.log").read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with suppress(OSError), urlopen(f"{self.url}/health", timeout=500) as answer:
            return bool(answer.status == 200)
        return False


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_an_mlflow_server_that_is_killed_and_comes_back_has_everything(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, the configuration and a table of rollouts, over HTTP."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(background, "PAUSES", (0.2, 0.5, *[1.0] * 60))
    server, said = TrackingServer(tmp_path), list[str]()
    request.addfinalizer(server.kill)
    server.start()
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("trainer: {}\n")
    settings = config_of(run, close_timeout=600, mlflow={"tracking_uri": server.url})
    (sink,) = open_sinks(["mlflow"], str(run), None, said.append, settings)
    sink.log(1, {"reward/mean": 0.5})
    until = time.monotonic() + 300
    while not (run / "mlflow_run.txt").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    server.kill()
    sink.log(2, {"reward/mean": 1.5})
    sink.rollouts(2, [SAMPLE])  # type: ignore[attr-defined]
    sink.artifact(str(run / "config.yaml"))  # type: ignore[attr-defined]
    while not said:  # the sink has met the dead server
        assert time.monotonic() < until
        time.sleep(0.1)
    server.start()
    sink.close()
    assert len(said) == 1 and said[0].startswith("trainer.logger=mlflow: ")
    client, known = MlflowClient(server.url), (run / "mlflow_run.txt").read_text()
    points = {(point.step, point.value) for point in client.get_metric_history(known, "reward/mean")}
    assert points == {(1, 0.5), (2, 1.5)} and client.get_run(known).info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(known)} == {"config.yaml", "rollouts"}
    table = json.loads(Path(client.download_artifacts(known, "rollouts/step_000002.json")).read_text())
    assert table["data"] == [[2, "1 + 1 =", "zwölf", "2", None]]


@pytest.fixture
def hanging() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("how", ["dead", "hanging"])
@pytest.mark.parametrize("name", ["mlflow", "prometheus", "wandb"])
def test_a_server_that_is_away_costs_a_step_nothing(
    name: str, how: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, said, before = request.getfixturevalue(how), list[str](), services()
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    settings = {"mlflow": {"tracking_uri": url}, "prometheus": {"mode": "pushgateway", "gateway": url}}
    config = config_of(tmp_path, close_timeout=1, queue=50, **settings, wandb={"mode": "online"})
    (sink,) = open_sinks([name], str(tmp_path), None, said.append, config)
    for step in range(200):  # waiting for the server each time would take longer than a test may
        sink.log(step, {"reward/mean": 1.0})
    sink.close()
    assert said[-1] == f"trainer.logger={name}: 200 of 200 records were not sent"
    assert len(said) == 2 and said[0].startswith(f"trainer.logger={name}: ")  # one for what went wrong first
    until = time.monotonic() + 400
    while services() - before and time.monotonic() < until:
        time.sleep(0.1)
    assert not services() - before


def services() -> set[psutil.Process]:
    """W&B's, of this process."""
    return {one for one in psutil.Process().children() if one.name() == "wandb-core" and alive(one)}


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Flaky:
    """A remote that is away for its first calls."""

    def __init__(self, failures: int) -> None:
        self.failures, self.got = failures, list[int]()

    def open(self) -> None:
        self._fail()

    def log(self, rows: Sequence[Row]) -> None:
        self._fail()
        self.got += [step for step, _ in rows]

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None: ...
    def artifact(self, path: str) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("away")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PERIOD", 0.0)
    monkeypatch.setattr(background, "TABLE_PERIOD", 0.0)


@pytest.mark.usefixtures("at_once")
def test_rows_wait_for_a_server_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES", (0.01, 0.01, 0.01))
    said: list[str] = []
    remote = Flaky(3)
    sink = Background("x", remote, TelemetryConfig(close_timeout=300), said.append)
    for step in range(5):
        sink.log(step, {})
    time.sleep(0.2)
    sink.close()
    assert remote.got == [0, 1, 2, 3, 4]
    assert said == ["trainer.logger=x: ConnectionError: away; the run goes on, and tries again"]


@pytest.mark.usefixtures("at_once")
def test_a_record_that_no_server_takes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES", (0.01,))

    class Picky(Flaky):
        def log(self, rows: Sequence[Row]) -> None:
            if 2 in (steps := [step for step, _ in rows]):
                raise ValueError("no such step")
            self.got += steps

    remote, said = Picky(0), list[str]()
    sink = Background("x", remote, TelemetryConfig(close_timeout=300), said.append)
    for step in range(5):
        sink.log(step, {})
    sink.close()
    assert remote.got == [0, 1, 3, 4]
    assert said[-1] == "trainer.logger=x: 1 of 5 records were not sent" and len(said) == 2


RAISING = """
class Closed:
    def __init__(self, run_dir, first_step, say):
        raise OSError("no such host")

class Waits:
    def __init__(self, run_dir, first_step, say): ...
    async def log(self, step, metrics): ...
    def close(self): ...

class Raising:
    def __init__(self, run_dir, first_step, say):
        self.rows = 0
    def log(self, step, metrics):
        self.rows += 1
        if self.rows % 2:
            raise OSError("disk of the server full")
        raise TypeError("no number")
    def close(self):
        raise KeyError("closed")
"""


def test_a_sink_that_raises_is_named_once_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sinks.py").write_text(RAISING)
    names = [f"{tmp_path / 'sinks.py'}:{name}" for name in ("Closed", "Raising", "Waits")]
    config = build_config({"trainer": {"default_local_dir": str(tmp_path), "logger": [*names, "jsonl"]}})
    inputs: Any = SimpleNamespace(config=config)
    report = Report(inputs, rank=0, first_step=None)
    report.begin()
    for step in range(1, 5):
        report.step(step, {"reward/mean": 0.5}, {})
    report.rewind(3)
    report.step(3, {"reward/mean": 0.5}, {})
    report.close()
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "cannot be opened" in line] == [
        f"megarl: warning: trainer.logger={names[0]} cannot be opened, and gets nothing: OSError: no such host",
        f"megarl: warning: trainer.logger={names[2]} cannot be opened, and gets nothing: OwnCodeError: its method log "
        "is an async def, which nothing would await: make it a def",
    ] * 2  # again after the run has gone back
    first = "Raising of trainer.logger failed at metrics of step 1: OSError: disk of the server full; the run goes on"
    assert said.count(f"megarl: warning: {first}") == 1
    assert sum("failed at" in line for line in said) == 2 and sum("metrics are lost" in line for line in said) == 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_ends_well_without_any_of_its_servers(tmp_path: Path, dead: str) -> None:
    (tmp_path / "sinks.py").write_text(RAISING)
    config = write_run(
        tmp_path,
        trainer__logger=["console", "jsonl", "wandb", "mlflow", "prometheus", f"{tmp_path / 'sinks.py'}:Raising"],
        telemetry={
            "close_timeout": 1,
            "mlflow": {"tracking_uri": dead},
            "prometheus": {"mode": "pushgateway", "gateway": dead},
        },
    )
    done = megarl("train", str(config), WANDB_BASE_URL=dead, WANDB_API_KEY="0" * 40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2]
    said = done.stdout + done.stderr
    for name in ("wandb", "mlflow", "prometheus"):
        assert len([line for line in said.splitlines() if f"trainer.logger={name}: " in line]) in (1, 2), said
        assert f"trainer.logger={name}: " in said and "records were not sent" in said
    assert said.count("Raising of trainer.logger failed") == 1 and "Traceback" not in said


def test_values_of_verl_work_and_others_are_refused(tmp_path: Path) -> None:
    def checked(*names: str) -> Config:
        config = build_config({"trainer": {"logger": list(names)}})
        for name in names:
            sinks.SINKS.check(name)
        check_telemetry(config)
        return config

    assert checked("console", "wandb").trainer.logger == ["console", "wandb"]
    assert checked("console", "mlflow", "tensorboard", "prometheus")
    with pytest.raises(ValueError, match=r"trainer\.logger = 'swanlab' is not known; use .*wandb"):
        checked("console", "swanlab")


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "pushgateway"}, "telemetry.prometheus.gateway = ''; set it to a URL such as http://host:9091"),
    ({"mode": "pushgateway", "gateway": "host:9091"}, "gateway = 'host:9091'; set it to a URL"),
    ({"mode": "textfile", "textfile": "/x/megarl.txt"}, "textfile = '/x/megarl.txt'; set it to a file NAME.prom"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_prometheus_without_its_key_is_refused(settings: dict[str, Any], message: str) -> None:
    trainer = {"logger": ["prometheus"]}
    with pytest.raises(ValueError) as refused:
        check_telemetry(build_config({"trainer": trainer, "telemetry": {"prometheus": settings}}))
    assert message in str(refused.value) and "\n" not in str(refused.value)
    check_telemetry(build_config({"telemetry": {"prometheus": settings}}))  # nobody asked for it
    with pytest.raises(ConfigError, match=r"telemetry\.prometheus\.port"):
        build_config({"telemetry": {"prometheus": {"port": 70000}}})


def test_a_missing_package_is_refused_even_beside_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_PACKAGES", {"wandb": "wandb_that_is_nowhere"})
    (tmp_path / "wandb_that_is_nowhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as refused:
        check_telemetry(build_config({"trainer": {"logger": ["console", "wandb"]}}))
    assert str(refused.value) == (
        "trainer.logger names wandb, and the package wandb_that_is_nowhere is not installed: pip install "
        "'megarl[loggers]', or leave wandb out"
    )
