"""Exports become versions of a model in MLflow's own registry: in a file, and behind a server, which takes no path."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_sinks import TrackingServer, config_of

from megarl.telemetry.sinks import background, open_sinks


def export(folder: Path, step: int) -> Path:
    """A checkpoint's Hugging Face folder."""
    path = folder / "run" / "checkpoints" / f"global_step_{step}" / "huggingface"
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def check_versions(folder: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(background, "PERIOD", 0.0)
    monkeypatch.chdir(folder)  # where MLflow puts artifacts
    registry = {"tracking_uri": store, "registered_model": "math-policy"}
    config = config_of(folder / "run", close_timeout=600, mlflow=registry)
    paths = [export(folder, step) for step in (2, 4)]
    (sink,) = open_sinks(["mlflow"], str(folder / "run"), None, pytest.fail, config)
    for step, path in zip((2, 4), paths, strict=True):
        sink.log(step, {"reward/mean": step / 8, "val/pass@4": 0.5, "tokens_per_s": 3.0})
        sink.log(step + 1, {"reward/mean": 0.0})  # the checkpoint is written behind the next step
        sink.artifact(str(path))  # type: ignore[attr-defined]
    sink.close()
    client = MlflowClient(store)
    versions = sorted(client.search_model_versions("name='math-policy'"), key=lambda found: int(found.version))
    assert [found.tags for found in versions] == [
        {
            "megarl.path": str(path),
            "megarl.checkpoint": f"global_step_{step}",
            "reward/mean": reward,
            "val/pass_4": "0.5",
        }
        for step, path, reward in zip((2, 4), paths, ("0.25", "0.5"), strict=True)
    ]
    assert {found.run_id for found in versions} == {(folder / "run" / "mlflow_run.txt").read_text()}
    for found in versions:
        kept = [file.path for file in client.list_artifacts(found.run_id, f"models/{found.tags['megarl.checkpoint']}")]
        assert kept == [f"models/{found.tags['megarl.checkpoint']}/config.json"]
        assert found.source.endswith(f"models/{found.tags['megarl.checkpoint']}")


def test_versions_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_versions(tmp_path, f"sqlite:///{tmp_path / 'ml.db'}", monkeypatch)


@pytest.mark.slow
def test_versions_behind_a_server(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TrackingServer(tmp_path)
    request.addfinalizer(server.kill)
    server.start()
    check_versions(tmp_path, server.url, monkeypatch)


def test_nothing_is_registered_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(background, "PERIOD", 0.0)
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path / 'ml.db'}"
    path, config = export(tmp_path, 2), config_of(tmp_path / "run", close_timeout=600, mlflow={"tracking_uri": store})
    (sink,) = open_sinks(["mlflow"], str(tmp_path / "run"), None, pytest.fail, config)
    sink.artifact(str(path))  # type: ignore[attr-defined]
    sink.close()
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.data.tags["megarl.model"] == str(path) and client.search_registered_models() == []
