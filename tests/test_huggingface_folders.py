"""Import from and export to Hugging Face folders: bits in every layout, a real model's logits, refusals."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from full_weights import random_weights
from huggingface_cases import (
    assert_same_weights,
    import_and_export,
    log_probs,
    read_weights,
    text_batch,
    write_folder,
    write_weights,
)
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from selection import quick
from tiny_families import ARCHITECTURES, CONFIGS
from tiny_run import TrainedRun, metrics_of, train_in, write_run
from training_cases import Case

from megarl.checkpoint.file_slice import file_slice
from megarl.checkpoint.huggingface_folder import check_weights, refuse_remote_code
from megarl.models.tensors import Box, LogicalTensor

CASES = [
    (Case(), torch.bfloat16),
    (Case(tp=2), torch.float32),
    (Case(pp=2), torch.bfloat16),
    (Case(tp=2, pp=2), torch.bfloat16),
    (Case(tp=4), torch.float32),
    (Case(tp=2, dp=2), torch.bfloat16),
]


@pytest.mark.parametrize(("case", "dtype"), quick(CASES), ids=lambda x: getattr(x, "name", x))
def test_bits_survive_any_layout(ranks: Ranks, tmp_path: Path, case: Case, dtype: torch.dtype) -> None:
    """4 query and 2 KV heads, so fewer than TP=4; a vocabulary of 61; tied and untied; experts."""
    folders = []
    for i, name in enumerate(CONFIGS):
        source, target = write_folder(tmp_path / name, name, dtype=dtype, files=1 + i % 3), tmp_path / "out" / name
        target.mkdir(parents=True)
        folders.append((str(source), str(target)))
    import_and_export(ranks, case, folders, str(dtype).removeprefix("torch."), 20_000)
    for source, target in folders:
        assert_same_weights(read_weights(Path(source)), read_weights(Path(target)))
        index = json.loads(Path(target, "model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 1 and files == {file.name for file in Path(target).glob("*.safetensors")}
        weights = read_weights(Path(target))
        assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())


def test_transformers_reads_an_export(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = write_folder(tmp_path / "source", "qwen2"), tmp_path / "target"
    target.mkdir()
    import_and_export(ranks, Case(pp=2), [(str(source), str(target))], "float32", 30_000)
    (target / "config.json").write_text((source / "config.json").read_text())
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    assert_same_weights(
        {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"},
        random_weights(ARCHITECTURES["qwen2"], 1),
    )


@st.composite
def boxes(draw: st.DrawFn) -> tuple[LogicalTensor, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    cut = draw(st.integers(1, len(shape)))
    hf_shape = (math.prod(shape[:cut]), *([math.prod(shape[cut:])] if shape[cut:] else []))
    box = []
    for n in shape:
        lo = draw(st.integers(0, n - 1))
        box.append((lo, draw(st.integers(lo + 1, n))))
    return LogicalTensor(name="t", shape=shape, hf_shape=hf_shape, kind="matrix"), tuple(box)


@given(boxes())
def test_a_box_is_cut_from_the_file(case: tuple[LogicalTensor, Box]) -> None:
    tensor, box = case
    whole = torch.arange(math.prod(tensor.shape))
    at = file_slice(tensor, box)
    read = whole.view(tensor.hf_shape)[tuple(slice(*r) for r in at.ranges)]
    assert torch.equal(
        read.view(at.view)[tuple(slice(*i) for i in at.index)],
        whole.view(tensor.shape)[tuple(slice(*i) for i in box)],
    )


# ------------------------------------------------------------------------------------------------- a real model

REAL_CASES = [Case(), Case(pp=2), Case(tp=3), Case(pp=4), Case(tp=3, pp=2)]


@pytest.fixture(scope="module")
def wanted(smollm2: str) -> torch.Tensor:
    """Log-probabilities by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    batch, out = text_batch(), []
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:stop]
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0], -1)
        out.append(torch.cat([torch.zeros(1), log_p[:-1].gather(-1, tokens[1:, None])[:, 0]]))
    return torch.cat(out)


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL_CASES, ids=lambda case: case.name)
def test_a_real_model_agrees_with_transformers(ranks: Ranks, smollm2: str, wanted: torch.Tensor, case: Case) -> None:
    assert wanted.std() > 0.5
    for got in ranks.run(case.world, log_probs, case, smollm2):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- refusals


def _weights() -> dict[str, torch.Tensor]:
    return random_weights(ARCHITECTURES["qwen2"], 1)  # tied


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _missing_file(folder: Path) -> None:
    _no_file(folder)
    write_weights(folder, _weights(), files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def _two_models(folder: Path) -> None:
    write_weights(folder, {name: tensor + 1 for name, tensor in _weights().items()}, files=2)


def _no_index(folder: Path) -> None:
    _no_file(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": 3}}))


def _another_span(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "BF16"
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _nested(folder: Path) -> None:
    text = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def _fewer(folder: Path) -> None:
    write_weights(folder, {k: v for k, v in _weights().items() if ".1.self_attn" not in k})


def _more(folder: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.layers.0.mlp.gate": torch.ones(2)}
    write_weights(folder, _weights() | buffers)


def _another_shape(folder: Path) -> None:
    write_weights(folder, _weights() | {"model.norm.weight": torch.ones(33)})


def _another_head(folder: Path) -> None:
    embedding = _weights()["model.embed_tokens.weight"]
    write_weights(folder, _weights() | {"lm_head.weight": embedding + 1})


def _eight_bits(folder: Path) -> None:
    write_weights(folder, {k: v.to(torch.float8_e4m3fn) if "mlp" in k else v for k, v in _weights().items()})


def _cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def _no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a model at all")


def _remote_code(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen2"] | {"auto_map": {"AutoModel": "x.Model"}}))


REFUSALS: list[tuple[Callable[[Path], None], str]] = [
    (_no_file, "has no weights: neither model.safetensors nor model.safetensors.index.json"),
    (_pickled, "has only pickled weights (pytorch_model.bin), which can run code when they are read; convert them to"),
    (_two_models, "has both model.safetensors and model.safetensors.index.json, which names other files; delete what"),
    (_no_index, "is not an index of safetensors files: "),
    (_another_span, "is not a safetensors file: model.norm.weight of shape [32] would be bytes "),
    (_nested, "is not a safetensors file: maximum recursion depth"),
    (_missing_file, "model.safetensors.index.json names missing model-00002-of-00003.safetensors"),
    (
        _fewer,
        "the files lack model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.bias, "
        "model.layers.1.self_attn.k_proj.weight and 4 more",
    ),
    (_more, "the architecture has no model.layers.0.mlp.gate"),
    (_another_shape, "does not fit config.json: model.norm.weight (file [33], model [32])"),
    (_another_head, "lm_head.weight differs from model.embed_tokens.weight although config.json says tie_word_embed"),
    (
        _eight_bits,
        "only F32, BF16, F16 can be read (no quantised weights), not model.layers.0.mlp.gate_proj.weight (",
    ),
    (_cut_short, "is cut short: "),
    (_garbage, "is not a safetensors file"),
    (_remote_code, "Python code of its own (trust_remote_code), which is never run"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSALS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bad_folder_is_refused(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    folder = write_folder(tmp_path / "model", "qwen2")
    spoil(folder)
    with pytest.raises(ValueError, match="model") as refusal:
        refuse_remote_code(str(folder))
        check_weights(str(folder), ARCHITECTURES["qwen2"])
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen2")
    weight_map = dict.fromkeys(_weights(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_weights(str(folder), ARCHITECTURES["qwen2"])


def test_keys_that_mean_nothing_are_left_out(ranks: Ranks, tmp_path: Path) -> None:
    """A tied model's copy of its embedding, and rotary buffers."""
    source, target = write_folder(tmp_path / "source", "qwen2"), tmp_path / "target"
    target.mkdir()
    weights = _weights()
    extra = {
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    write_weights(source, weights | extra)
    check_weights(str(source), ARCHITECTURES["qwen2"])
    import_and_export(ranks, Case(), [(str(source), str(target))], "float32", 10**9)
    assert_same_weights(weights, read_weights(target))


# ---------------------------------------------------------------------------------------------------- during a run


@pytest.mark.slow
def test_a_run_exports_what_another_imports(tmp_path: Path, ranks: Ranks, trained: TrainedRun) -> None:
    """huggingface/ is made of four ranks' checkpoint; the next run starts from it and answers the same."""
    checkpoint = trained.checkpoint(4)
    exported = checkpoint / "huggingface"
    configs = {"config.json", "generation_config.json", "tokenizer.json"}
    assert {file.name for file in exported.iterdir()} == {"model.safetensors", "tokenizer"} | configs
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"

    config = write_run(
        tmp_path,
        actor_rollout_ref__model__path=str(exported),
        actor_rollout_ref__model__random_init=False,
        reward__name=trained.reward,
        trainer__total_training_steps=1,
    )
    train_in(ranks, 1, config)
    assert metrics_of(tmp_path)[0]["val/reward"] == trained.rows[-1]["val/reward"] != trained.rows[3]["val/reward"]

    from tools.convert import main as convert

    assert convert(["megatron-to-hf", str(checkpoint), str(tmp_path / "converted"), "--verify"]) == 0
    assert_same_weights(read_weights(exported), read_weights(tmp_path / "converted"))
    assert (tmp_path / "converted" / "tokenizer" / "tokenizer.model").is_file()
