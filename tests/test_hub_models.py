"""Models of the Hugging Face Hub: what is fetched from a server of its API, what is refused, and what a run keeps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hub_server import GATED, PRIVATE, Hub, hub_server
from huggingface_cases import write_folder
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny_run import ROOT, default_interrupt, megarl, write_run

from megarl.checkpoint.hub_download import Wanted, fetch, pin
from megarl.hub import HubModel, folder_of, hub_model

LAST = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub of which this process, and those that it starts, know nothing yet."""
    with hub_server() as shown:
        for name, value in (("HF_ENDPOINT", shown.endpoint), ("HF_HOME", str(tmp_path / "home"))):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", shown.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{shown.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        yield shown


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in two files, with a tokenizer and with what nobody needs."""
    folder = write_folder(tmp_path_factory.mktemp("model"), "qwen2", files=2)
    more = ("tokenizer.json", "modeling_evil.py", "pytorch_model.bin", "onnx/model.safetensors", "../x", "/tmp/x")
    return {path.name: path.read_bytes() for path in folder.iterdir()} | dict.fromkeys(more, b"{}")


def child(model: str) -> subprocess.Popen[str]:
    """A process of its own that fetches a model."""
    code = "import sys; from megarl.checkpoint.hub_download import *; local_folder(sys.argv[1], Wanted.WEIGHTS)"
    return subprocess.Popen(
        [sys.executable, "-c", code, model],
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=default_interrupt,
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", HubModel("Qwen/Qwen2.5-0.5B")),
        ("a/b@refs/pr/1", HubModel("a/b", "refs/pr/1")),
        ("runs/a", None),
        *(
            (path, None)
            for path in ("", "gpt2", "/a/b", "a/b/c", "./a/b", "../b", "a/b@", "a/../b", "a/b@../c", "~/b", "a/b\n")
        ),
    ],
)
def test_which_paths_are_names(path: str, name: HubModel | None) -> None:
    assert hub_model(path) == name


def test_a_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    commit = "0123456789" * 4
    assert hub_model("a/b") is None and folder_of("a/b") == "a/b"
    assert folder_of(f"a/b@{commit}").endswith(f"models--a--b/snapshots/{commit}")
    assert folder_of("a/c") == "a/c"


def test_only_what_is_needed_is_fetched(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    commit = hub.push("org/tiny", files)
    model = pin(HubModel("org/tiny"))
    assert model == HubModel("org/tiny", commit)
    fetch(model, Wanted.CONFIG)
    assert hub.fetched() == ["config.json"]
    fetch(model, Wanted.TOKENIZER)
    assert hub.fetched() == ["config.json", "tokenizer.json"]
    fetch(model, Wanted.WEIGHTS)
    wanted = {"config.json", "tokenizer.json", "model.safetensors.index.json", LAST, LAST.replace("2-", "1-")}
    assert set(os.listdir(model.folder)) == wanted == set(hub.fetched())
    assert all(Path(model.folder, name).read_bytes() == files[name] for name in wanted)
    hub.asked.clear()
    fetch(model, Wanted.WEIGHTS)
    assert hub.asked == []
    assert not (tmp_path / "home" / "hub" / "x").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({LAST: None}, f"has no {LAST}"),
        ({"model.safetensors.index.json": None}, r"has no model.safetensors, but pickled ones \('pytorch_model.bin'\)"),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": "../../x.safetensors"}}'}, "names files elsewhere"),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": "x.py"}}'}, "no safetensors file"),
        ({"config.json": None}, "has no config.json"),
        ({"config.json": b'{"architectures": ["StrangeModel"]}'}, "StrangeModel is not supported"),
        ({"tokenizer.json": None}, "has no tokenizer"),
    ],
)
def test_a_model_that_cannot_be_read(
    hub: Hub, files: dict[str, bytes], change: dict[str, bytes | None], line: str
) -> None:
    changed = files | change
    hub.push("org/tiny", {name: data for name, data in changed.items() if data is not None})
    with pytest.raises(ValueError, match=line) as refused:
        fetch(pin(HubModel("org/tiny")), Wanted.WEIGHTS, own_tokenizer=True)
    assert "\n" not in str(refused.value)
    assert LAST not in hub.fetched()


def test_a_model_that_the_hub_does_not_give(hub: Hub, files: dict[str, bytes]) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(ValueError) as refused:
            fetch(pin(HubModel(*name.split("@"))), Wanted.CONFIG)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    for kind in (GATED, PRIVATE):
        hub.push(f"org/{kind}", files)
        hub.errors[f"org/{kind}"] = kind
    hub.push("org/tiny", files)
    assert refusal("org/none").startswith(f"there is no folder 'org/none', and {hub.endpoint} shows no such model")
    assert "set HF_TOKEN if the model is private" in refusal("org/private")
    assert f"accept its terms on its page at {hub.endpoint}/org/gated, and set HF_TOKEN" in refusal("org/gated")
    assert refusal("org/tiny@v9") == f"org/tiny has no revision 'v9' on {hub.endpoint}"
    assert f"has no revision '{'a' * 40}'" in refusal(f"org/tiny@{'a' * 40}")


def test_a_full_disk(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/tiny", files)
    model = pin(HubModel("org/tiny"))
    hub.sizes["tokenizer.json"] = 2**60
    with pytest.raises(ValueError, match=r"takes 1152921504.6 GB, and the disk of the cache .* has .* GB left: make"):
        fetch(model, Wanted.WEIGHTS)


def test_without_a_network(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.push("org/tiny", files)
    pin(HubModel("org/tiny"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert pin(HubModel("org/tiny")).revision == commit
    by_hand = f"run `hf download org/tiny --revision {commit}`"
    with pytest.raises(ValueError, match=rf"has no model.safetensors, and no request is made here .*{by_hand}"):
        fetch(HubModel("org/tiny", commit), Wanted.WEIGHTS)
    with pytest.raises(
        ValueError, match=r"it is not in the cache .*, and HF_HUB_OFFLINE is set: .*`hf download org/no`"
    ):
        pin(HubModel("org/no"))
    assert hub.asked == []


def test_two_starts_and_a_kill(hub: Hub, files: dict[str, bytes]) -> None:
    """A killed download keeps its whole files; two processes that start at once fetch what is left once."""
    hub.push("org/tiny", files)
    hub.hold[LAST] = threading.Event()
    killed = child("org/tiny")
    assert hub.sending.wait(60)
    killed.kill()
    killed.communicate()
    hub.hold.pop(LAST).set()
    hub.asked.clear()
    both = [child("org/tiny") for _ in range(2)]
    assert [(one.communicate()[1], one.returncode) for one in both] == [("", 0)] * 2
    assert hub.fetched() == [LAST]
    folder = Path(pin(HubModel("org/tiny")).folder)
    assert (folder / LAST).read_bytes() == files[LAST]


def test_an_interruption_ends_a_download(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.push("org/tiny", files)
    hub.hold[LAST] = threading.Event()
    interrupted = child("org/tiny")
    assert hub.sending.wait(60)
    interrupted.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in interrupted.communicate(timeout=60)[1]
    assert not list((tmp_path / "home").rglob("*.incomplete"))


def test_a_connection_that_breaks(hub: Hub, files: dict[str, bytes]) -> None:
    """The library asks for the rest; where nothing more comes, one line says so."""
    hub.push("org/tiny", files)
    hub.cut[LAST] = len(files[LAST]) // 2
    fetch(pin(HubModel("org/tiny")), Wanted.WEIGHTS)
    folder = Path(pin(HubModel("org/tiny")).folder)
    assert (folder / LAST).read_bytes() == files[LAST]
    assert hub.fetched().count(LAST) == 2


def write_hub_run(folder: Path, hub: Hub, **sections: object) -> tuple[Path, str]:
    """A run whose model and tokenizer are the Hub's; returns its YAML and the commit."""
    folder.mkdir()
    path = write_run(
        folder, actor_rollout_ref__model={"path": "org/policy", "dtype": "float32"}, trainer__save_freq=1, **sections
    )
    return path, hub.push("org/policy", model_files(folder))


def model_files(folder: Path, scale: float = 1.0) -> dict[str, bytes]:
    from full_weights import random_weights

    from megarl.models.families import read_architecture

    weights = {name: scale * value for name, value in random_weights(read_architecture(str(folder)), 1).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.model", "model.safetensors")}


@pytest.mark.slow
def test_a_run_keeps_its_commit(hub: Hub, tmp_path: Path) -> None:
    """Ranks make no request; a resume takes the commit of the start, although the branch has moved."""
    config, commit = write_hub_run(tmp_path / "run", hub, trainer__n_gpus_per_node=2)
    done = megarl("train", str(config), "trainer.total_training_steps=1")
    assert done.returncode == 0, done.stderr
    assert "there is no folder org/policy here: it is looked for on the Hugging Face Hub" in done.stderr
    recorded = yaml.safe_load((tmp_path / "run" / "run" / "config.yaml").read_text())
    assert recorded["actor_rollout_ref"]["model"]["path"] == f"org/policy@{commit}"
    assert sum(request.startswith("HEAD") and "/resolve/main/" in request for request in hub.asked) == 1
    moved = hub.push("org/policy", model_files(tmp_path / "run", scale=2.0))
    hub.asked.clear()
    done = megarl("train", str(config))
    assert done.returncode == 0, done.stderr
    assert f"the run goes on with org/policy@{commit}" in done.stderr and moved != commit
    assert not [request for request in hub.asked if "org/policy" in request]
    again = yaml.safe_load((tmp_path / "run" / "run" / "config.yaml").read_text())
    assert again["actor_rollout_ref"]["model"]["path"] == f"org/policy@{commit}"
    fresh = megarl("train", str(config), f"trainer.default_local_dir={tmp_path / 'other'}", HF_HUB_OFFLINE="1")
    assert fresh.returncode == 0, fresh.stderr


@pytest.mark.slow
def test_torchrun(hub: Hub, tmp_path: Path) -> None:
    """Local rank 0 fetches, once; the others wait. A refusal reaches all ranks."""
    config, commit = write_hub_run(tmp_path / "run", hub, trainer__n_gpus_per_node=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "megarl.train", str(config), "trainer.total_training_steps=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def torchrun(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    done = torchrun()
    assert done.returncode == 0, done.stderr
    assert hub.fetched().count("model.safetensors") == 1
    recorded = yaml.safe_load((tmp_path / "run" / "run" / "config.yaml").read_text())
    assert recorded["actor_rollout_ref"]["model"]["path"] == f"org/policy@{commit}"
    refused = torchrun("actor_rollout_ref.model.path=org/none", f"trainer.default_local_dir={tmp_path / 'other'}")
    assert refused.returncode and "there is no folder 'org/none'" in refused.stderr


@pytest.mark.slow
def test_the_commands(hub: Hub, tmp_path: Path) -> None:
    config, commit = write_hub_run(tmp_path / "run", hub)
    plan = megarl("plan", str(config))
    assert plan.returncode in (0, 1), plan.stderr
    assert hub.fetched() == ["config.json"]
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    done = megarl("convert", "hf-to-megatron", "org/policy", str(megatron))
    assert done.returncode == 0, done.stderr
    done = megarl(
        "convert", "megatron-to-hf", str(megatron), str(back), "--model", f"org/policy@{commit}", "--answers-below=0"
    )
    assert done.returncode == 0, done.stderr
    assert load_file(back / "model.safetensors").keys() == load_file(tmp_path / "run" / "model.safetensors").keys()
    answer = megarl("generate", "org/policy", str(config), "--prompt", "1+2=", "--max-tokens=4")
    assert answer.returncode == 0, answer.stderr
    done = megarl("eval", "org/policy", str(config), "--out", str(tmp_path / "eval"))
    assert done.returncode == 0, done.stderr
    recorded = (tmp_path / "eval" / "config.yaml").read_text()
    assert re.findall(r"path: (org/.*)", recorded) == [f"org/policy@{commit}"] * 2
