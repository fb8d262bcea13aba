"""`megarl rehearse`: small models for every layout, small runs of every recipe, and whole rehearsals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from tiny_families import CONFIGS
from tiny_run import FOUR_RANKS, ROOT, default_interrupt, megarl, write_run

from megarl.cli.main import main
from megarl.config import load_config
from megarl.models.families import FAMILIES, read_architecture
from megarl.models.parts.gated_delta import GatedDelta
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.parallel.experts import TensorSplit
from megarl.parallel.layout import TrainLayout
from megarl.rehearsal.room import layouts
from megarl.rehearsal.small_model import Splits, small_config
from megarl.rehearsal.small_run import SmallRunMaker
from megarl.trainer.admission.checks import check_run
from megarl.trainer.layouts import train_layout, with_ranks

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


def shape_of(recipe: Path) -> str:
    found = re.search(r"configs/models/[a-z0-9_.]+[a-z0-9]", recipe.read_text())
    assert found is not None
    return str(ROOT / found[0])


@pytest.mark.parametrize(
    ("shape", "tensor", "chunks", "layers", "heads", "groups"),
    [
        ("llama3_70b", {8}, 4, 4, 16, 8),
        ("llama3_70b", {2, 4}, 3, 4, 8, 4),  # 80 layers are no multiple of 3: a stage has one more
        ("llama3_70b", {16}, 1, 2, 16, 8),  # two ranks share a group, as in the real model
        ("qwen2.5_7b", {2}, 1, 2, 14, 2),
        ("qwen3_30b_a3b", {4}, 2, 2, 8, 4),
    ],
)
def test_a_small_model_is_split_as_the_real_one(
    shape: str, tensor: set[int], chunks: int, layers: int, heads: int, groups: int
) -> None:
    config = json.loads((ROOT / "configs" / "models" / shape / "config.json").read_text())
    splits = Splits(tensor=frozenset(tensor), chunks=chunks, sequence_parallel=True)
    small = small_config(config, splits, 300, lambda arch: True)
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [small[name] for name in names] == [layers, heads, groups, 300]
    arch, real = FAMILIES[small["architectures"][0]](small), FAMILIES[config["architectures"][0]](config)
    for tp in tensor:
        arch.check_training(TrainLayout(ranks=range(tp * chunks), tp=tp, pp=chunks), sequence_parallel=True)
        arch.check_generation(TensorSplit(tp=tp))
    assert (arch.family, arch.output, arch.moe is None) == (real.family, real.output, real.moe is None)
    assert arch.hidden_size < 300 and small_config(config, splits, None, lambda a: True)["vocab_size"] > 100_000


def test_a_small_model_has_heads_for_the_ranks_of_a_sequence(tmp_path: Path) -> None:
    """Four ranks of a sequence on each of two tensor-parallel ranks want eight heads, where the latter want two."""
    config = json.loads((ROOT / "configs" / "models" / "llama3_8b" / "config.json").read_text())
    for splits_of_heads, heads in (({(2, 4)}, 8), (set(), 4)):
        splits = Splits(tensor=frozenset({1, 2}), chunks=1, sequence_parallel=True, heads=frozenset(splits_of_heads))
        assert small_config(config, splits, 300, lambda arch: True)["num_attention_heads"] == heads
    keys = ["actor_rollout_ref.actor.megatron.context_parallel_size=4", "trainer.n_gpus_per_node=8"]
    small = with_ranks(load_config(str(write_run(tmp_path)), keys), 1)
    assert small is not None and (train_layout(small).cp, train_layout(small).dp) == (4, 1)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("changes", [{}, {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}])
def test_a_small_model_has_layers_of_both_kinds(family: str, changes: dict[str, int]) -> None:
    experts = {"n_routed_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 46}
    config = CONFIGS[family] | experts | changes
    splits = Splits(tensor=frozenset({2}), chunks=2, sequence_parallel=True, experts=2)
    arch = FAMILIES[config["architectures"][0]](small_config(config, splits, 300, lambda arch: True))
    assert arch.num_layers == 2 and len(arch.kinds) == 2
    assert arch.moe is not None and arch.moe.num_experts == 4 and arch.moe.grouped == bool(changes)


def test_a_small_model_has_whole_experts_with_biases() -> None:
    changes = {"num_hidden_layers": 24, "layer_types": ["sliding_attention", "full_attention"] * 12}
    config = (
        CONFIGS["gpt_oss"] | {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880} | changes
    )
    splits = Splits(tensor=frozenset({1, 2}), chunks=1, sequence_parallel=True)
    arch = FAMILIES[config["architectures"][0]](small_config(config, splits, 300, lambda arch: True))
    assert [layer.attention.sliding_window for layer in arch.each_layer] == [4, None]
    assert arch.moe is not None and arch.moe.num_experts == 4


@pytest.mark.parametrize("listed", [True, False])
def test_a_small_model_has_layers_with_windows_and_without(listed: bool) -> None:
    types = [*["sliding_attention"] * 5, "full_attention"]
    changes = {"layer_types": types * 4} if listed else {"sliding_window_pattern": 6}
    config = CONFIGS["gemma3_text"] | {"num_hidden_layers": 24} | changes
    splits = Splits(tensor=frozenset({2}), chunks=1, sequence_parallel=True)
    arch = FAMILIES[config["architectures"][0]](small_config(config, splits, 300, lambda arch: True))
    assert [layer.attention.sliding_window for layer in arch.each_layer] == [4, None]


def test_a_small_model_of_latent_attention_is_narrow() -> None:
    """DeepSeek-V3's widths, for ranks that divide neither 32 nor each other."""
    widths = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    config = CONFIGS["deepseek_v3"] | widths | {"num_attention_heads": 126, "num_key_value_heads": 126}
    splits = Splits(tensor=frozenset({2, 3}), chunks=1, sequence_parallel=True)
    small = small_config(config, splits, 300, lambda arch: True)
    assert (small["num_attention_heads"], small["kv_lora_rank"], small["qk_rope_head_dim"]) == (6, 36, 72)
    FAMILIES["DeepseekV3ForCausalLM"](small).check_training(TrainLayout(ranks=range(3), tp=3), sequence_parallel=True)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_small_model_has_linear_attention(family: str) -> None:
    types = [*["linear_attention"] * 3, "full_attention"]
    changes = {"layer_types": types * 12} if "layer_types" in CONFIGS[family] else {"full_attention_interval": 4}
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128}
    config = CONFIGS[family] | {"num_hidden_layers": 48} | heads | changes
    splits = Splits(tensor=frozenset({2, 4}), chunks=1, sequence_parallel=True)
    arch = FAMILIES[config["architectures"][0]](small_config(config, splits, 300, lambda arch: True))
    linear, full = (layer.attention for layer in arch.each_layer)
    assert isinstance(linear, GatedDelta) and isinstance(full, GroupedQuery)
    assert (linear.num_key_heads, linear.num_value_heads, linear.key_head_dim) == (4, 12, 8)


def test_an_engine_may_want_wider_heads() -> None:
    config = json.loads((ROOT / "configs" / "models" / "llama3_8b" / "config.json").read_text())
    splits = Splits(tensor=frozenset({1}), chunks=1, sequence_parallel=False)
    wide = small_config(config, splits, 300, lambda arch: arch.attention.cache_shape(1)[-1] >= 32)
    assert wide["head_dim"] == 32
    with pytest.raises(ValueError, match="no small model has heads for tensor-parallel sizes"):
        small_config(config, splits, 300, lambda arch: False)


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_every_recipe_has_a_small_run(tmp_path: Path, recipe: Path) -> None:
    """Without its model, its tokenizer and its rows, which are not here."""
    config = load_config(str(recipe), [f"actor_rollout_ref.model.path={shape_of(recipe)}"])
    layout = next(layouts(config, None))
    small = SmallRunMaker(layout, str(tmp_path / "small"), engine="native").make()
    inputs = check_run(small.config)
    assert inputs.total_steps == 3 and inputs.config.trainer.run_dir.startswith(str(tmp_path))
    one, other = train_layout(small.config), train_layout(config)
    assert (one.tp, one.pp, one.chunks) == (other.tp, other.pp, other.chunks) and one.dp == min(2, other.dp)
    arch, real = read_architecture(str(tmp_path / "small" / "policy")), read_architecture(shape_of(recipe))
    assert arch.family == real.family and arch.num_layers == max(2, one.pp * one.chunks)
    assert any("tokenizer of bytes" in line for line in small.differences)
    again = load_config(small.file)
    assert again.model_dump() == small.config.model_dump()


def test_ranks_that_gather_keys_want_no_heads(tmp_path: Path) -> None:
    """Qwen2.5-7B's 28 heads over TP4: none is the same for two ranks of a sequence."""
    recipe = ROOT / "configs" / "recipes" / "math_grpo_llama3_70b.yaml"
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1, "context_parallel_size": 2}
    keys = [f"actor_rollout_ref.actor.megatron.{key}={size}" for key, size in sizes.items()]
    keys += ["actor_rollout_ref.actor.megatron.cp_comm_type=all_gather", "actor_rollout_ref.model.path="]
    keys[-1] += str(ROOT / "configs" / "models" / "qwen2.5_7b")
    keys += ["actor_rollout_ref.rollout.tensor_model_parallel_size=4"]
    layout = next(layouts(load_config(str(recipe), keys), None))
    small = SmallRunMaker(layout, str(tmp_path / "small"), engine="native").make()
    assert str(train_layout(small.config)) == "TP4 x PP1 x CP2 (gathered keys) x DP2"


def test_stages_keep_the_layers_that_keys_give_them(tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "recipes" / "math_grpo_llama3_70b.yaml"
    split = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_layout=Et*18|(t*21|)*2,t*20L"
    config = load_config(str(recipe), [f"actor_rollout_ref.model.path={shape_of(recipe)}", split])
    small = SmallRunMaker(next(layouts(config, None)), str(tmp_path / "small"), engine="native").make()
    arch, layout = read_architecture(str(tmp_path / "small" / "policy")), train_layout(small.config)
    assert layout.with_layers(arch.num_layers) == "TP8 x PP4 x DP2, 18 + 21 + 21 + 20 layers"
    assert arch.hidden_size < 300 and load_config(small.file).model_dump() == small.config.model_dump()


def test_rows_and_tokenizer_that_are_here_are_taken(tmp_path: Path) -> None:
    """The shortest rows, in files of the same names."""
    config = load_config(str(write_run(tmp_path, trainer__logger=["wandb"])))
    small = SmallRunMaker(config, str(tmp_path / "small"), engine="native").make()
    inputs = check_run(small.config)
    assert {prompt.data_source for prompt in inputs.train_prompts} == {"train"}
    assert inputs.arch.vocab_size == 18 and inputs.tokenizer.vocab_size < 18
    assert small.config.data.max_prompt_length == 4 and small.config.trainer.logger == ["console", "jsonl"]
    assert small.differences == (
        "a function that differs between responses is added to the score",
        "nothing is sent to wandb",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["actor_rollout_ref.model.path=nowhere"], "no config.json in 'nowhere', and a rehearsal takes the model's sh"),
        (["data.train_batch_size=7"], "data.train_batch_size = 7 is not a multiple of actor.ppo_mini_batch_size = 8"),
        (["--ranks", "3", "data.seed=1"], "--ranks 3 is too few: the layout needs 4 ranks at least"),
        (["--keep", "{folder}", "data.seed=1"], "it is there already; name another folder"),
        (["trainer.flow=eval"], "megarl rehearse plays runs that train, and trainer.flow = eval does not"),
        (["data.val_files=[{folder}/bad.jsonl]"], "bad.jsonl:1 is not JSON"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    config = write_run(tmp_path, **FOUR_RANKS)
    assert main(["rehearse", str(config), *(word.format(folder=tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_what_memory_does_not_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megarl.rehearsal import room

    monkeypatch.setattr(room, "free_memory", lambda: 2**30)
    recipe = ROOT / "configs" / "recipes" / "math_grpo_llama3_70b.yaml"
    assert main(["rehearse", str(recipe), f"actor_rollout_ref.model.path={shape_of(recipe)}"]) == 2
    assert re.search(r"32 ranks take about 4\.\d GiB, and 1\.0 GiB of this machine's", capsys.readouterr().err)


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):  # the command sets them for its ranks
        monkeypatch.setenv(name, os.environ.get(name, ""))
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    sizes = {"trainer__n_gpus_per_node": 4, "trainer__total_training_steps": 50}
    config = write_run(tmp_path, actor_rollout_ref__actor__megatron=split, **sizes)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = main(["rehearse", str(config), "--ranks", "2"])
    said, err = capsys.readouterr()
    assert code == 0, said + err
    assert "rehearsing TP2 x PP1 x DP1 on 2 CPU ranks" in said and "the run has TP2 x PP1 x DP2" in said
    assert re.search(r"the run, left alone: 3 steps, each saved and exported in \d+\.\d MiB", said)
    assert re.search(r"rank 1 killed: SIGKILL after a step; global_step_[12] is whole", said)
    assert re.search(r"goes on: from global_step_[12]; the same numbers in 4 rows, the same weights", said)
    assert "not rehearsed: data parallelism" in said and "50 steps on 4 GPUs" in said
    assert not list(tmp_path.glob("megarl-rehearsal-*"))


@pytest.mark.slow
def test_a_rehearsal_that_fails_shows_what_the_ranks_said(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def score(response, row):\n    raise RuntimeError('the judge is out')\n")
    config = write_run(tmp_path, reward__name=f"{reward}:score")
    done = megarl("rehearse", str(config), timeout=550, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert "megarl: the run failed: rank 0, code 1" in done.stderr and "the judge is out" in done.stderr
    assert "--keep FOLDER keeps the runs" in done.stderr
    assert not list(tmp_path.glob("megarl-rehearsal-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_rank_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    config, log = write_run(tmp_path), tmp_path / "kept" / "alone.log"
    command = [sys.executable, "-m", "megarl.cli.main", "rehearse", str(config), "--keep", str(log.parent)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ}, stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupt
    )
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(started, timeout=100)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
