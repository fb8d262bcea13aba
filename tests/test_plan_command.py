"""`megarl plan`: exit codes, and that it needs nothing but the configuration and config.json."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
from tiny_run import ROOT, megarl

from megarl.cli.main import main
from megarl.cli.plan import bytes_of, size

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
TP2 = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
PPO = str(ROOT / "configs" / "ppo_smollm2_135m.yaml")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A configuration of Llama-3-8B without weights, tokenizer and data."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128_256,
                "max_position_embeddings": 8192,
            }
        )
    )
    path = tmp_path / "run.yaml"
    path.write_text(
        f"actor_rollout_ref: {{model: {{path: {tmp_path}}}, rollout: {{name: vllm, tensor_model_parallel_size: 2}}}}"
    )
    return str(path)


def test_the_quickstart() -> None:
    done = megarl("plan", QUICKSTART)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "qwen3, 101 thousand parameters, on 4 GPUs: training TP2 x PP2 x DP1, generation TP2 x 2 replicas (native)\n"
    )
    for said in ("training weights", "KV cache of a replica: 8,192 tokens, 256 sequences of 22", "received", "update"):
        assert said in done.stdout


def test_a_model_without_weights(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--network-rate", "100GB", llama, "--gpus", "16", TP2]) == 0
    out = capsys.readouterr().out
    assert "llama, 8.03 billion parameters, on 16 GPUs: training TP2 x PP1 x DP8" in out
    assert "100 GB/s from other nodes" in out
    assert re.search("from other nodes +│ +0[^│]+│ +0[^│]+│", out)  # the ranks of a model are of one node


def test_replicas_of_a_node_share_what_comes_from_the_other(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage on each node, four replicas: a rank lacks the other stage's half of its half, and takes a quarter."""
    layout = ["tensor_model_parallel_size=8", "pipeline_model_parallel_size=2"]
    assert main(["plan", llama, "--gpus", "16", *(f"actor_rollout_ref.actor.megatron.{x}" for x in layout)]) == 0
    out = capsys.readouterr().out
    stages = [float(x) for x in re.findall(r"from other nodes +│ +([0-9.]+) MiB │ +([0-9.]+) MiB", out)[0]]
    assert stages == pytest.approx([8.03e9 / 2 * 2 / 4 / 2 / 2**20] * 2, rel=0.02)


def test_a_run_with_a_critic(capsys: pytest.CaptureFixture[str]) -> None:
    """A Llama-3-8B over TP8, and a critic that begins as it in a layout of its own, over PP2 x DP4."""
    words = [
        f"actor_rollout_ref.model.path={ROOT / 'configs' / 'models' / 'llama3_8b'}",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8",
        "critic.megatron.tensor_model_parallel_size=1",
        "critic.megatron.pipeline_model_parallel_size=2",
        "critic.megatron.optimizer_offload=true",
    ]
    assert main(["plan", PPO, "--gpus", "8", *words]) == 0
    out = capsys.readouterr().out
    tables = _cells(out)
    rows = {cells[0]: cells[1:] for cells in tables}
    assert tables[0][1:] == ["reshard", "generate", "log_probs", "values", "update_critic", "update"]
    elements = (8_030_261_248 - 2 * 128_256 * 4096 - 4096) / 2 + 128_256 * 4096
    weights, gradients, optimizer = (size(n * elements) for n in (2, 4, 3))
    assert rows["critic weights"] == [weights] * 6
    assert rows["critic gradients"] == [gradients] * 6
    assert rows["critic optimizer state"] == ["", "", "", "", optimizer, ""]
    assert f"Pinned host memory per GPU: {optimizer} for what leaves the GPU" in out
    assert [len(rows[phase]) for phase in ("values", "update_critic")] == [1, 1]  # their times


def _of_answers(llama: str, flow: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, list[str]]]:
    words = [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "data.train_batch_size=64",
        "trainer.test_freq=-1",
    ]
    assert main(["plan", llama, "--mfu", "0.01", "--gpus", "8", f"trainer.flow={flow}", *words]) == 0
    out = capsys.readouterr().out
    rows: dict[str, list[str]] = {}
    for name, *cells in _cells(out):
        rows.setdefault(name, []).extend(cells)
    return out, rows


def test_runs_that_learn_from_answers(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No engine; a reference where the loss has one, and twice as many sequences of pairs."""
    out, sft = _of_answers(llama, "sft", capsys)
    assert "training TP2 x PP1 x DP4, 64 sequences a step" in out
    assert sft[""][0] == "update" and "KV cache" not in sft and "reference weights" not in sft
    out, pairs = _of_answers(llama, "preference", capsys)
    assert "128 sequences a step" in out and pairs[""][:2] == ["ref", "update"]
    assert pairs["reference weights"] == pairs["training weights"] == 2 * sft["training weights"]
    assert float(pairs["update"][0].split()[0]) == pytest.approx(2 * float(sft["update"][0].split()[0]), rel=0.1)
    _, judged = _of_answers(llama, "kto", capsys)
    assert judged[""][:3] == ["log_probs", "ref", "update"] and "reference weights" in judged


MEGATRON = "actor_rollout_ref.actor.megatron"


def test_80_layers_on_6_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3-70B over TP8 x PP6 x DP2."""
    recipe, shape = (
        ROOT / "configs" / "recipes" / "math_grpo_llama3_70b.yaml",
        ROOT / "configs" / "models" / "llama3_70b",
    )
    words = ["plan", str(recipe), "--gpus", "96", f"actor_rollout_ref.model.path={shape}"]
    words += [f"{MEGATRON}.pipeline_model_parallel_size=6"]
    ends = [f"{MEGATRON}.num_layers_in_first_pipeline_stage=12", f"{MEGATRON}.num_layers_in_last_pipeline_stage=12"]
    written = [f"{MEGATRON}.pipeline_model_parallel_layout=Et*12|(t*14|)*4,t*12L"]
    outputs = []
    for keys, layers in (([], "13 + 13 + 13 + 14 + 14 + 13"), (ends, "12 + 14 + 14 + 14 + 14 + 12"), (written, "")):
        assert main([*words, *keys]) == 0
        outputs.append(capsys.readouterr().out)
        assert f"training TP8 x PP6 x DP2, {layers}" in outputs[-1]
    assert outputs[0] != outputs[1] == outputs[2]


def test_a_better_split_is_named(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An output layer of 128,256 tokens is as much work as 2.2 layers; the first stage keeps most activations."""
    words = ["plan", llama, "--gpus", "8", "actor_rollout_ref.rollout.tensor_model_parallel_size=8"]
    words += [f"{MEGATRON}.pipeline_model_parallel_size=4", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048"]
    assert main(words) == 0
    (hint,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint: ")]
    keys, now = re.match(r"hint: (.*) would balance the stages: update ([0-9.]+) s instead of ", hint).groups()
    assert (
        keys == "actor.megatron.num_layers_in_first_pipeline_stage=7 actor.megatron.num_layers_in_last_pipeline_stage=7"
    )
    assert main([*words, *(f"actor_rollout_ref.{key}" for key in keys.split())]) == 0
    out = capsys.readouterr().out
    assert "hint" not in out and f"{float(now):.1f} s" in str(_cells(out))
    assert main(words[:-2]) == 0  # without stages there is nothing to split
    assert "hint" not in capsys.readouterr().out


def _cells(out: str) -> list[list[str]]:
    """The cells of all tables' rows; a column that is too narrow ends its text with "…"."""
    lines = (re.split("[│┃]", line)[1:-1] for line in out.splitlines())
    return [[cell.strip() for cell in line] for line in lines if line]


def test_other_accelerators(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", llama, "--gpus", "8", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"]
    assert main([*words, "--accelerator", "B200"]) == 0
    out = capsys.readouterr().out
    assert "of 178.00 GiB" in out and "2250 TFLOP/s" in out and "748 GB/s from the node's GPUs" in out
    main([*words, "--accelerator", "A100", "--gpu-memory", "40GiB"])
    out = capsys.readouterr().out
    assert "of 40.00 GiB" in out and "312 TFLOP/s" in out and "1,795 GB/s memory" in out
    with pytest.raises(SystemExit):
        main([*words, "--accelerator", "TPU"])


def test_what_the_whole_run_costs(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", llama, "--gpus", "16", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    (seconds,) = re.findall(r"all +│ +([0-9.]+) s", out)
    assert "One step: " in out and "trainer.total_training_steps, which says how many there are, is not set" in out
    assert main([*words, "trainer.total_training_steps=5000"]) == 0
    said = re.search(r"5,000 steps: ([0-9,.]+) h on 16 GPUs, ([0-9,.]+) GPU-hours", capsys.readouterr().out)
    assert said is not None
    hours = 5000 * float(seconds) / 3600
    assert [float(x.replace(",", "")) for x in said.groups()] == pytest.approx([hours, 16 * hours], rel=0.01)


def test_the_largest_token_budget_leaves_a_fifth_of_the_memory(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    words = ["plan", llama, "--gpus", "8", TP2]
    assert main(words) == 0
    (text,) = re.findall(r"Largest actor.ppo_max_token_len_per_gpu .* free: ([0-9,]+) ", capsys.readouterr().out)
    tokens = int(text.replace(",", ""))
    for more, warned in ((0, False), (1024, True)):
        assert main([*words, f"{key}={tokens + more}"]) == 0
        out = capsys.readouterr().out
        assert f"free: {tokens:,} (here {tokens + more:,})" in out
        assert ("warning: update leaves 19.7% of the memory" in out) == warned, out


def test_the_longest_sequence_and_what_makes_it_longer(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> tuple[int, dict[str, int]]:
        assert main(["plan", llama, "--gpus", "8", TP2, *words]) == 0
        out = " ".join(capsys.readouterr().out.split())
        found = re.search(
            r"of the memory free: ([\d,]+) tokens(?: or more)?((?:; [\d,]+ with [^;]+?)*)\. The model has", out
        )
        assert found is not None, out
        others = (part.split(" with ") for part in found[2].split("; ") if part)
        return int(found[1].replace(",", "")), {key: int(tokens.replace(",", "")) for tokens, key in others}

    tokens, others = planned()
    recomputed, over_two = "model.enable_gradient_checkpointing=true", "actor.megatron.context_parallel_size=2"
    assert others.keys() == {recomputed, over_two} and others[recomputed] == 8 * 8192 > 2 * tokens
    assert others[over_two] == pytest.approx(2 * tokens, rel=0.02)
    for key, more in others.items():
        assert planned(f"actor_rollout_ref.{key}")[0] == more  # what is promised is what the key gives
    small = (f"actor_rollout_ref.{recomputed}", "data.max_response_length=1024", "--gpu-memory", "64GB")
    offloaded = "model.enable_activation_offload=true"
    tokens, others = planned(*small)
    assert others.keys() == {offloaded, over_two} and others[offloaded] > 1.2 * tokens
    assert planned(*small, f"actor_rollout_ref.{offloaded}")[0] == others[offloaded]
    parts = "actor_rollout_ref.model.recompute_modules"
    _, others = planned(f"{parts}=[mlp]")
    assert others[f"{recomputed} and model.recompute_modules=[]"] == planned(f"actor_rollout_ref.{recomputed}")[0]
    alone, _ = planned()
    critic = ("algorithm.adv_estimator=gae", "critic.megatron.param_offload=true", "critic.megatron.grad_offload=true")
    tokens, _ = planned(*critic, "critic.megatron.optimizer_offload=true")  # on one rank each, the actor on two
    assert 0 < tokens < 0.7 * alone


def test_longer_sequences_where_heads_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 28 heads over four ranks each has seven, which two ranks cannot have equally many of."""
    roles = "actor_rollout_ref"
    size = "tensor_model_parallel_size=4"
    keys = [f"{roles}.model.path={ROOT}/configs/models/qwen2.5_7b", f"{roles}.actor.megatron.{size}"]
    assert main(["plan", QUICKSTART, "--gpus", "16", *keys, f"{roles}.rollout.{size}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    over_two = "actor.megatron.context_parallel_size=2"
    found = re.search(
        rf"free: ([\d,]+) tokens;.* ([\d,]+) with {over_two} and actor.megatron.cp_comm_type=all_gath", out
    )
    assert found is not None, out
    tokens, more = (int(text.replace(",", "")) for text in found.groups())
    assert 1.5 * tokens < more < 2 * tokens  # copies of keys take some
    padded = f"{roles}.model.use_remove_padding=false"
    assert main(["plan", QUICKSTART, "--gpus", "16", *keys, f"{roles}.rollout.{size}", padded]) == 0
    assert "all_gather" not in capsys.readouterr().out


def test_a_model_that_does_not_fit(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--gpus", "2", "--gpu-memory", "80GB"]) == 1
    assert "does not fit: generate needs " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "6"], "6 ranks cannot be split into tensor x pipeline x context = 2 x 2 x 1; use a multiple of 4"),
        (["--gpus", "12"], "--gpus 12 is no multiple of 8; set --gpus-per-node"),
        (["trainer.flow=eval"], "megarl plan predicts steps of training, and trainer.flow = eval has none"),
        (["data.train_bach_size=64"], "unknown key 'data.train_bach_size'; did you mean 'data.train_batch_size'?"),
        (["actor_rollout_ref.rollout.n=1"], "rollout.n = 1 leaves nothing to compare within a group"),
        (["actor_rollout_ref.model.path=/nowhere"], "actor_rollout_ref.model.path: no config.json in '/nowhere'"),
        (
            [
                "algorithm.adv_estimator=gae",
                "critic.megatron.tensor_model_parallel_size=1",
                "critic.megatron.pipeline_model_parallel_size=4",
            ],
            "critic: pipeline_model_parallel_size = 4 is more than the model's 2 layers",
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.megatron.pipeline_model_parallel_layout=Et|t|L"],
            "critic: pipeline_model_parallel_layout = Et|t|L has 3 stages; write pipeline_model_parallel_size = ",
        ),
        (
            ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_layout=Et*9|L"],
            "pipeline_model_parallel_layout = Et*9|L has 9 layers (t), and the model 2",
        ),
        (["algorithm.adv_estimator=gae", "critic.model.path=/nowhere"], "critic: model.path: no config.json in '/nowh"),
        (["data.max_response_length=200"], "data.max_prompt_length + data.max_response_length = 216 is more than the"),
        (
            ["--gpus", "8", "actor_rollout_ref.rollout.tensor_model_parallel_size=8"],
            "rollout.tensor_model_parallel_size = 8 does not divide the model's 4 attention heads",
        ),
    ],
)
def test_refusals_are_those_of_train(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", QUICKSTART, *words])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"megarl: error: {said}")


def test_an_option_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", QUICKSTART, "--gpu", "8", "--nproc", "2"])
    assert left.value.code == 2
    assert "megarl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", QUICKSTART, "--mfu", "50"])
    assert "--mfu: '50' is more than 1; write 0.5 for 50 %" in capsys.readouterr().err


def test_sizes() -> None:
    assert (bytes_of("141GiB"), bytes_of("80GB"), bytes_of("1.5 kib")) == (141 * 2**30, 80e9, 1536)
    for wrong, said in (("GB", "size"), ("80GX", "size"), ("1.2.3GB", "number above 0"), ("0GB", "number above 0")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"is no {said}"):
            bytes_of(wrong)
    assert [size(n) for n in (0, 1023, 2048, 3 * 2**20, 1.5 * 2**30)] == ["0 B", "1023 B", "2 KiB", "3 MiB", "1.50 GiB"]
