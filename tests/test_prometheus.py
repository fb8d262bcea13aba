"""The Prometheus sink with real servers; dashboard and alert rules against the registry."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import psutil
import pytest
import yaml
from ranks import free_port

from megarl.config import Config, build_config
from megarl.telemetry.metrics import METRICS
from megarl.telemetry.sinks import open_sinks
from megarl.telemetry.sinks.prometheus import prometheus_name

MONITORING = Path(__file__).parents[1] / "monitoring"


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user of every test."""
    monkeypatch.setenv("LOGNAME", "ada")


def config_of(**settings: Any) -> Config:
    return build_config(
        {
            "trainer": {"project_name": "p", "experiment_name": "e"},
            "telemetry": {"prometheus": settings, "close_timeout": 5},
        }
    )


def got(url: str) -> str:
    with urlopen(url, timeout=500) as answer:
        return str(answer.read().decode())


def needs(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (Debian: apt-get install prometheus prometheus-pushgateway)")
    return path


@contextmanager
def running(*command: str, ready: str) -> Iterator[None]:
    """A server, once the URL answers."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            assert eventually(lambda: bool(got(ready)) or True, 120), f"{command[0]} does not answer"
            yield
        finally:
            server.terminate()


def eventually(what: Any, seconds: float) -> Any:
    """What it returns once that is true; it may fail meanwhile."""
    until = time.monotonic() + seconds
    while True:
        try:
            if found := what():
                return found
        except (OSError, URLError, KeyError, IndexError):
            pass
        if time.monotonic() > until:
            return None
        time.sleep(0.1)


def test_a_scrape_has_the_newest_row(tmp_path: Path) -> None:
    port = free_port()
    (sink,) = open_sinks(
        ["prometheus"], str(tmp_path / "r1"), 1, pytest.fail, config_of(port=port, address="127.0.0.1")
    )
    sink.log(1, {"reward/mean": 0.25, "val/pass@4": 0.5, "actor/loss": float("nan")})
    sink.log(2, {"reward/mean": 0.75})
    text = got(f"http://127.0.0.1:{port}/metrics")
    labels = '{experiment="e",project="p",run="r1",user="ada"}'
    assert f"megarl_reward_mean{labels} 0.75\n" in text and f"megarl_step{labels} 2.0\n" in text
    assert f"megarl_val_pass_4{labels} 0.5\n" in text and f"megarl_actor_loss{labels} NaN\n" in text
    assert "# HELP megarl_reward_mean reward/mean (score): score of the responses that have one\n" in text
    said: list[str] = []
    (other,) = open_sinks(
        ["prometheus"], str(tmp_path / "r2"), 1, said.append, config_of(port=port, address="127.0.0.1")
    )
    assert len(said) == 1 and f"telemetry.prometheus.port = {port} of 127.0.0.1 cannot be used" in said[0]
    other.log(1, {"reward/mean": 0.0})
    other.close()
    assert "0.75" in got(f"http://127.0.0.1:{port}/metrics")
    sink.close()
    with socket.socket() as free:  # the port is given back
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_sources_that_differ_have_gauges_of_their_own(tmp_path: Path) -> None:
    """Prometheus' names have neither hyphens nor Chinese characters."""
    shares = {"gsm-8k": 0.25, "gsm_8k": 0.5, "数学": 0.75, "物理": 1.0}
    file = tmp_path / "megarl.prom"
    (sink,) = open_sinks(
        ["prometheus"], str(tmp_path / "r"), 1, pytest.fail, config_of(mode="textfile", textfile=str(file))
    )
    for step in (1, 2):
        sink.log(step, {f"reward/source/{name}/mean": share for name, share in shares.items()})
    lines = file.read_text().splitlines()
    own = {line.split(" ")[3]: line.split(" ")[2] for line in lines if line.startswith("# HELP")}
    gauges = {line.partition("{")[0]: float(line.split(" ")[-1]) for line in lines if not line.startswith("#")}
    assert {name: gauges[own[f"reward/source/{name}/mean"]] for name in shares} == shares
    assert own["reward/source/gsm-8k/mean"] == "megarl_reward_source_gsm_8k_mean"
    sink.close()


def test_a_text_file_is_whole_and_goes_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "megarl.prom"
    (sink,) = open_sinks(
        ["prometheus"], str(tmp_path / "r"), 1, pytest.fail, config_of(mode="textfile", textfile=str(path))
    )
    sink.log(-1, {"warmup/loss": 2.5})
    assert 'megarl_warmup_loss{experiment="e",project="p",run="r",user="ada"} 2.5\n' in path.read_text()
    sink.log(1, {"reward/mean": 1.0})
    assert 'megarl_reward_mean{experiment="e",project="p",run="r",user="ada"} 1.0\n' in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    sink.close()
    assert not path.exists()


def test_a_pushgateway_gets_rows_and_forgets_a_run_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, port = needs("prometheus-pushgateway"), free_port()
    url = f"http://127.0.0.1:{port}"
    with running(program, f"--web.listen-address=127.0.0.1:{port}", ready=f"{url}/-/ready"):
        (sink,) = open_sinks(
            ["prometheus"], str(tmp_path / "r"), 1, pytest.fail, config_of(mode="pushgateway", gateway=url)
        )
        sink.log(7, {"reward/mean": 0.5})
        line = r'megarl_reward_mean\{experiment="e",instance="",job="megarl",project="p",run="r",user="ada"\} 0\.5'
        assert eventually(lambda: re.search(line, got(f"{url}/metrics")), 120)
        monkeypatch.setenv("LOGNAME", "bob")  # his run has the same names
        (other,) = open_sinks(
            ["prometheus"], str(tmp_path / "r"), 1, pytest.fail, config_of(mode="pushgateway", gateway=url)
        )
        other.log(8, {"reward/mean": 0.25})
        his = line.replace("ada", "bob").replace("5", "25")
        assert eventually(lambda: re.search(his, got(f"{url}/metrics")), 120)
        assert re.search(line, got(f"{url}/metrics"))
        sink.close()
        left = got(f"{url}/metrics")
        assert not re.search(line, left) and re.search(his, left)
        other.close()
        assert "megarl_reward_mean" not in got(f"{url}/metrics")


@pytest.mark.slow
def test_prometheus_scrapes_a_run_and_loads_the_rules(tmp_path: Path) -> None:
    program, port, own = needs("prometheus"), free_port(), free_port()
    settings = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [{"job_name": "megarl", "static_configs": [{"targets": [f"127.0.0.1:{own}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    (sink,) = open_sinks(["prometheus"], str(tmp_path / "r"), 1, pytest.fail, config_of(port=own, address="127.0.0.1"))
    sink.log(3, {"reward/mean": 0.625, "gpu/memory_max": 0.99})
    url = f"http://127.0.0.1:{port}"
    options = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with running(program, *options, f"--web.listen-address=127.0.0.1:{port}", ready=f"{url}/-/ready"):

        def asked(query: str) -> Any:
            return json.loads(got(f"{url}/api/v1/query?query={quote(query)}"))["data"]["result"]

        found = eventually(lambda: asked('megarl_reward_mean{run="r",user="ada"}'), 120)
        assert found[0]["value"][1] == "0.625" and found[0]["metric"]["project"] == "p"
        rules = json.loads(got(f"{url}/api/v1/rules"))["data"]["groups"][0]["rules"]
        assert len(rules) == 10 and all(rule["health"] in ("ok", "unknown") for rule in rules)
        pending = eventually(lambda: asked('ALERTS{alertname="MegarlGpuMemory"}'), 120)
        assert pending[0]["metric"]["alertstate"] == "pending"
    sink.close()


def test_the_rules_hold_their_own_tests() -> None:
    for task in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run([needs("promtool"), *task], cwd=MONITORING, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    tested = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    for case in tested:  # every rule fires in the first case, and is silent in the second
        assert {rule["alert"] for rule in rules} == {one["alertname"] for one in case["alert_rule_test"]}


def test_dashboard_and_rules_name_metrics_that_exist() -> None:
    rules = [rule["expr"] for rule in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]]
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [str(variable["query"]) for variable in dashboard["templating"]["list"]]
    named = set(re.findall(r"\bmegarl_[a-zA-Z0-9_.*]+", " ".join([*rules, *panels, *variables])))
    assert len(named) > 30
    patterns = [re.compile(re.sub(r"\\?\{\w+\\?\}|\{\w+\}", "[a-z_0-9]+", _escaped(spec.name))) for spec in METRICS]
    unknown = [name for name in named if not any(p.fullmatch(name.replace(".*", "x")) for p in patterns)]
    assert unknown == []
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) == 21


def _escaped(name: str) -> str:
    """The Prometheus name of a metric, its placeholders kept."""
    parts = re.split(r"(\{\w+\})", name)
    plain = [part if part.startswith("{") else prometheus_name(part).removeprefix("megarl_") for part in parts]
    return "megarl_" + "".join(plain)


def test_scrapes_are_answered_on_this_machine_alone_and_strangers_take_no_room(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.telemetry.sinks.prometheus._Handler.timeout", 2.0)
    port = free_port()
    (sink,) = open_sinks(["prometheus"], str(tmp_path / "r"), 1, pytest.fail, config_of(port=port))
    sink.log(1, {"reward/mean": 0.25})
    mine = [c.laddr for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"]
    assert [address.ip for address in mine] == ["127.0.0.1"]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for stranger in strangers:
        with suppress(OSError):
            stranger.sendall(b"GET /metrics")
    text = eventually(lambda: got(f"http://127.0.0.1:{port}/metrics"), 60)
    assert text and "megarl_reward_mean" in text
    for stranger in strangers:
        stranger.close()
    sink.close()
    assert capfd.readouterr().err == ""
