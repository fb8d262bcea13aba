"""Configurations of other programs as ones of MegaRL: every key has an entry, and what comes out is planned."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_run import ROOT, write_run

from megarl.cli.main import main
from megarl.cli.migrate import add_arguments, migrate
from megarl.config import Config, ConfigError, build_config, load_config
from megarl.config.load import all_keys
from megarl.migration import convert, entries, entry_of, read_written
from megarl.rewards.parts import parts_of
from megarl.trainer.admission.checks import check_run

SHIPPED = ROOT / "tests" / "migration"
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def _uses() -> dict[str, int]:
    lines = (ROOT / "tests" / "data" / "verl_keys.txt").read_text().splitlines()
    pairs = [line.split() for line in lines if not line.startswith("#")]
    return {key: int(count) for count, key in pairs}


def _value(config: Config, key: str) -> Any:
    at: Any = config
    for name in key.split("."):
        at = at[name] if isinstance(at, dict) else getattr(at, name)
    return at


def _migrated(*words: str, source: str = "verl") -> Config:
    return build_config(convert(read_written(words, source), source).tree)


def _reason(word: str) -> str:
    (change,) = convert(read_written([word])).changes
    assert change.kind == "refused" and not change.values
    return change.why


def test_every_key_of_the_shipped_scripts_has_an_entry() -> None:
    uses = _uses()
    assert (len(uses), sum(uses.values())) == (304, 6077)
    kinds = {"carried": 0, "translated": 0, "refused": 0}
    for key, count in uses.items():
        entry = entry_of(key)
        assert entry is not None, key
        kinds[entry.kind] += count
    assert (kinds["carried"] + kinds["translated"]) / 6077 >= 0.97, kinds


@pytest.mark.parametrize("source", ["verl", "trl", "openrlhf"])
def test_entries_say_what_becomes_of_a_key(source: str) -> None:
    known, seen = set(all_keys()), set()
    for entry in entries(source):
        assert entry.key not in seen, entry.key
        seen.add(entry.key)
        assert entry.kind == "carried" or entry.why, entry.key
        assert entry.kind != "refused" or not entry.to, entry.key
        if entry.kind == "carried" and "*" not in entry.key:
            assert entry.to in known, entry
    assert len(seen) > 90


def test_the_first_entry_that_matches_is_not_hidden_by_a_pattern() -> None:
    for source in ("verl", "trl", "openrlhf"):
        for entry in entries(source):
            found = entry_of(entry.key.replace("*", "x.y"), source)
            assert found is not None
            if "*" not in entry.key:
                assert found is entry, (entry.key, found.key)


@pytest.mark.parametrize("file", sorted(path.name for path in SHIPPED.iterdir()))
def test_whole_runs_are_planned(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    source = ["--from", "trl"] if file.startswith("trl_") else []
    code = migrate(parser.parse_args([*source, "--out", str(out), str(SHIPPED / file)]))
    said = capsys.readouterr()
    assert said.out == "" and code == (1 if "refused: these" in said.err else 0)
    assert main(["plan", str(out)]) in (0, 1)  # 1: the GPUs' memory is too small, as that script's is
    assert "parameters, on" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, link, pipe = tmp_path / "verl.yaml", tmp_path / "link.yaml", tmp_path / "pipe"
    source.write_text("data: {train_batch_size: 8}")
    link.symlink_to(tmp_path / "nowhere.yaml")
    os.mkfifo(pipe)
    for out in (source, link, pipe):
        assert main(["config", "migrate", str(source), "--out", str(out)]) == 2
        error = f"megarl: error: --out '{out}' is there already, and nothing is overwritten: name a new file\n"
        assert capsys.readouterr().err == error
    assert source.read_text() == "data: {train_batch_size: 8}" and link.is_symlink() and pipe.is_fifo()


def test_a_script_with_variables_and_sums() -> None:
    config = _migrated(str(SHIPPED / "dapo_qwen2.5_32b.sh"))
    data, actor, trainer = config.data, config.actor_rollout_ref.actor, config.trainer
    assert (data.max_prompt_length, data.max_response_length, data.gen_batch_size) == (2048, 20480, 1536)
    assert (trainer.nnodes, config.reward.overlong_buffer.len, config.reward.name) == (16, 4096, "math_verify")
    megatron = actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.context_parallel_size) == (1, 4)  # of Ulysses
    assert actor.ppo_max_token_len_per_gpu == 22528
    assert megatron.param_offload and megatron.optimizer_offload and actor.clip_ratio_c == 10.0


def test_dapo_as_people_write_it_down(tmp_path: Path) -> None:
    """With everything under `algorithm`."""
    block = """algorithm: {
        clip_ratio_low: 0.2, clip_ratio_high: 0.28, use_token_level_loss: true, dynamic_sampling: true,
        overlong_buffer: {enable: true, len: 4096, penalty_factor: 1.0},
        filter_groups: {enable: true, metric: acc, max_num_gen_batches: 10}}"""
    (tmp_path / "dapo.yaml").write_text(block)
    migrated = convert(read_written([str(tmp_path / "dapo.yaml")], "verl"), "verl")
    config = build_config(migrated.tree)
    refused = {change.key: change.why for change in migrated.changes if change.kind == "refused"}
    assert refused == {
        "algorithm.dynamic_sampling": "verl's key is not known here; leave it out, or set algorithm.filter_groups, "
        "if it means that"
    }
    actor, buffer = config.actor_rollout_ref.actor, config.reward.overlong_buffer
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 4096, 1.0)
    assert config.algorithm.filter_groups.max_num_gen_batches == 10


def test_values_of_other_names() -> None:
    config = _migrated(
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        "data.train_files=[a.parquet,b.parquet]",
        "+data.val_files='c.parquet'",
        "++algorithm.adv_estimator=rloo_vectorized",
        f"{A}.use_kl_loss=True",
        f"{A}.kl_loss_type=low_var_kl",
        f"{A}.policy_loss.loss_mode=gpg",
        f"{A}.grad_clip=0.5",
        f"{A}.ppo_micro_batch_size_per_gpu=4",
        f"{R}.name=sglang",
        f"{R}.n=4",
        f"{R}.val_kwargs.n=4",
        f"{R}.val_kwargs.temperature=0.7",
        f"{R}.checkpoint_engine.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.nccl_timeout=3600",
        "trainer.logger=[console,file,swanlab]",
        "trainer.max_actor_ckpt_to_keep=3",
        "algorithm.kl_penalty=low_var_kl",
        f"{A}.fsdp_config.forward_prefetch=True",
        "~algorithm.kl_penalty",
    )
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_files, config.data.val_files) == (["a.parquet", "b.parquet"], ["c.parquet"])
    assert (config.algorithm.adv_estimator, config.algorithm.kl_penalty) == ("rloo", "k1")
    assert (actor.kl_loss_type, actor.policy_loss.loss_mode, actor.optim.clip_grad) == ("k3", "reinforce", 0.5)
    assert (actor.ppo_max_token_len_per_gpu, actor.clip_ratio_c) == (4 * 1024, 3.0)
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.val_kwargs.n) == ("vllm", 2, 1)
    assert rollout.val_kwargs.temperature == 0.0  # verl's do_sample is off
    assert config.actor_rollout_ref.reshard.bucket_bytes == 64 * 2**20
    assert (config.trainer.timeout_minutes, config.trainer.max_ckpt_to_keep) == (60.0, 3)
    assert config.trainer.logger == ["console", "jsonl"]
    assert actor.megatron.overlap_param_gather and actor.megatron.overlap_grad_reduce


def test_what_relies_on_defaults() -> None:
    config = _migrated("data.max_prompt_length=256")
    assert (config.algorithm.adv_estimator, config.trainer.n_gpus_per_node) == ("gae", 8)
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (1024, 256)
    assert (config.actor_rollout_ref.rollout.n, config.data.answer_key) == (1, "reward_model.ground_truth")


def test_ranks_of_sequences_and_experts_stay_what_they_are() -> None:
    own = f"{A}.megatron"
    cp = _migrated(f"{own}.tensor_model_parallel_size=2", f"{own}.context_parallel_size=2")
    megatron = cp.actor_rollout_ref.actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.context_parallel_size) == (2, 2)
    experts = [f"{own}.expert_model_parallel_size=8", f"{own}.expert_tensor_parallel_size=1"]
    megatron = _migrated(f"{own}.tensor_model_parallel_size=2", *experts).actor_rollout_ref.actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.sequence_parallel) == (2, True)
    assert (megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size) == (8, 1)
    dense = [f"{own}.sequence_parallel=false", f"{own}.expert_model_parallel_size=1"]
    assert not _migrated(
        f"{own}.tensor_model_parallel_size=2", *dense
    ).actor_rollout_ref.actor.megatron.sequence_parallel
    z = _migrated(f"{own}.override_transformer_config.moe_z_loss_coeff=0.01").actor_rollout_ref.actor.megatron
    assert z.moe_z_loss_coeff == 0.01
    engine = "actor_rollout_ref.rollout"
    for keys in ([f"{engine}.expert_parallel_size=4"], [f"{engine}.enable_expert_parallel=true"]):
        rollout = _migrated(f"{engine}.tensor_model_parallel_size=4", *keys).actor_rollout_ref.rollout
        assert (rollout.tensor_model_parallel_size, rollout.enable_expert_parallel) == (4, True)


@pytest.mark.parametrize("section", [A, "critic"])
def test_stages_keep_their_layers(section: str) -> None:
    there, here = f"{section}.megatron.override_transformer_config", f"{section}.megatron"
    values = {
        "num_layers_in_first_pipeline_stage": 3,
        "num_layers_in_last_pipeline_stage": 5,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
        "pipeline_model_parallel_layout": "Ett|tL",
    }
    for key, value in values.items():
        (change,) = [change for change in convert({f"{there}.{key}": value}).changes if change.key == f"{there}.{key}"]
        assert change.kind == "translated" and change.values == {f"{here}.{key}": value}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.model.lora_rank=32", "there are no adapters"),
        ("data.image_key=images", "rows of text"),
        (f"{A}.strategy=fsdp2", "there is no FSDP"),
        (f"{R}.multi_turn.tool_config_path=x.yaml", "environment.name"),
        (f"{A}.optim.override_optimizer_config.optimizer_cpu_offload=True", "steps are taken on the GPU"),
        ("algorithm.adv_estimator=gdpo", "megarl algorithms"),
        ("actor_rollout_ref.model.trust_remote_code=True", "no code of a model's folder"),
        ("nobody.knows_this=1", "not known here"),
        (f"{A}.megatron.override_transformer_config.moe_aux_loss_coeff=0.01", "idle there unless"),
        ("data.train_batch_size=many", "should be a valid integer"),
    ],
)
def test_refusals_say_what_to_use_here(word: str, said: str) -> None:
    assert said in _reason(word)


def test_what_asks_for_nothing_is_not_refused() -> None:
    words = ["actor_rollout_ref.model.lora_rank=0", f"{A}.megatron.context_parallel_size=1"]
    words += ["actor_rollout_ref.model.trust_remote_code=False", f"{R}.multi_turn.enable=False", "data.image_key=null"]
    assert convert(read_written(words)).of("refused") == []


def test_a_profile_is_the_runs() -> None:
    words = [f"{A}.profiler.enable=True", f"{A}.profiler.ranks=[0,1]", f"{A}.profiler.all_ranks=False"]
    migrated = convert(read_written(words))
    there = "profiler.tool" in set(all_keys())
    assert bool(migrated.of("refused")) != there
    assert migrated.tree.get("profiler", {}).get("tool") == ("torch" if there else None)


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [1\n", "a: ${nothing.here}\n", "\x00", "data: 3\n"])
def test_nonsense_is_one_line(text: str, tmp_path: Path) -> None:
    for suffix in ("yaml", "sh"):
        (tmp_path / f"x.{suffix}").write_text(text)
        try:
            build_config(convert(read_written([str(tmp_path / f"x.{suffix}")])).tree)
        except ConfigError:
            raise
        except ValueError as e:
            assert "\n" not in str(e) and len(str(e)) < 400


NONSENSE = [
    "",
    "null",
    "True",
    "-1",
    "1e400",
    "9" * 400,
    "nan",
    "[1,2]",
    "{a: 1}",
    "x",
    "${x}",
    "[console,wandb]",
    "\0",
    "-",
]


@pytest.mark.parametrize("source", ["verl", "trl", "openrlhf"])
def test_any_value_of_any_key_is_carried_translated_or_refused(source: str) -> None:
    rng = random.Random(0)
    for entry in entries(source):
        key = entry.key.replace("*", "some.x")
        try:
            settings = read_written([f"{key}={rng.choice(NONSENSE)}"])
            migrated = convert(settings, source)
        except ValueError:  # no setting, or no trainer of TRL's
            continue
        assert len(migrated.changes) == len(settings)
        build_config(migrated.tree)


def test_files_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"'no\.yaml' cannot be read: No such file"):
        read_written(["no.yaml"])
    with pytest.raises(ValueError, match="name a YAML file, a shell script, or key=value"):
        read_written(["verl.trainer.main_ppo"])


def test_trl_grpo() -> None:
    config = _migrated(str(SHIPPED / "trl_grpo.yaml"), source="trl")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.trainer.flow, config.algorithm.adv_estimator) == ("ppo", "grpo")
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (32, 32, 8)  # 8 x 4 x 8 / 8
    assert (actor.loss_agg_mode, actor.kl_loss_coef, actor.clip_high) == ("seq-mean-token-sum-norm", 0.04, 0.28)
    assert actor.optim.lr_warmup_steps_ratio == 0.1 and not config.algorithm.norm_adv_by_std_in_grpo


def test_trl_preferences_and_demonstrations() -> None:
    dpo = _migrated("beta=0.2", "loss_type=ipo", "rpo_alpha=0.5", "per_device_train_batch_size=4", source="trl")
    preference = dpo.algorithm.preference
    assert (dpo.trainer.flow, dpo.data.train_batch_size) == ("preference", 4)
    assert (preference.beta, preference.loss_mode, preference.sft_coef) == (0.2, "ipo", 0.5)
    assert _migrated("learning_rate=1e-5", "packing=true", source="trl").trainer.flow == "sft"


def test_steps_of_trl_are_counted_in_generated_batches() -> None:
    """Sixteen processes on two machines; a batch of 512 responses serves 2 x 2 optimizer steps."""
    words = ["num_processes=16", "num_machines=2", "per_device_train_batch_size=16", "num_generations=8"]
    words += ["num_iterations=2", "steps_per_generation=2", "max_steps=200", "save_steps=40", "eval_steps=3"]
    (refused,) = convert(read_written(words, "trl"), "trl").of("refused")
    assert refused.key == "eval_steps" and refused.why.endswith("in data.val_files, and set trainer.test_freq=1")
    made = _migrated(*words, source="trl")
    trainer, actor = made.trainer, made.actor_rollout_ref.actor
    assert (trainer.nnodes, trainer.n_gpus_per_node) == (2, 8)
    assert (made.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs) == (64, 32, 2)
    assert (trainer.total_training_steps, trainer.save_freq) == (50, 10)
    same = _migrated(*words[:-4], "generation_batch_size=512", source="trl")
    assert (same.data.train_batch_size, same.actor_rollout_ref.actor.ppo_mini_batch_size) == (64, 32)


def test_trainers_of_trl_are_told_apart() -> None:
    grpo = _migrated("num_iterations=2", "scale_rewards=false", "temperature=0.9", source="trl")
    assert grpo.trainer.flow == "ppo" and grpo.algorithm.adv_estimator == "grpo"
    ppo = _migrated("reward_model_path=models/rm", "response_length=64", source="trl")
    assert ppo.algorithm.adv_estimator == "gae" and ppo.actor_rollout_ref.rollout.n == 1
    kl = ppo.algorithm.kl_ctrl
    assert (ppo.algorithm.use_kl_in_reward, kl.kl_coef, ppo.algorithm.lam, ppo.critic.ppo_epochs) == (
        True,
        0.05,
        0.95,
        4,
    )
    assert not _migrated("kl_coef=0.0", "response_length=64", source="trl").algorithm.use_kl_in_reward
    with pytest.raises(ValueError, match="RLOO, DPO, ORPO and KTO have a beta: say which, trainer=dpo for one"):
        _migrated("beta=0.1", source="trl")
    with pytest.raises(
        ValueError, match="TRL's trainer 'gkd' has no counterpart here; those that have: ppo, rloo, grpo"
    ):
        _migrated("trainer=gkd", source="trl")


def test_defaults_of_trl_s_trainers() -> None:
    """Learning rates, KL and responses to a prompt that nobody wrote."""
    made = {name: _migrated(f"trainer={name}", "loss_type=simpo" if name == "cpo" else "seed=1", source="trl")
            for name in ("grpo", "rloo", "ppo", "dpo", "orpo", "cpo", "kto", "reward", "sft")}  # fmt: skip
    rates = {name: one.actor_rollout_ref.actor.optim.lr for name, one in made.items()}
    assert rates == {"grpo": 1e-6, "rloo": 1e-6, "ppo": 3e-6, "dpo": 1e-6, "orpo": 1e-6, "cpo": 1e-6, "kto": 1e-6,
                     "reward": 1e-4, "sft": 2e-5}  # fmt: skip
    flows = [one.trainer.flow for one in made.values()]
    assert flows == ["ppo"] * 3 + ["preference"] * 3 + ["kto", "reward_model", "sft"]
    assert [made[name].algorithm.preference.loss_mode for name in ("dpo", "orpo", "cpo")] == ["dpo", "orpo", "simpo"]
    rloo, ppo = made["rloo"], made["ppo"]
    assert (rloo.algorithm.adv_estimator, rloo.algorithm.kl_ctrl.kl_coef, rloo.actor_rollout_ref.rollout.n) == (
        "rloo",
        0.05,
        2,
    )
    assert rloo.data.train_batch_size == 4  # 8 responses
    assert (ppo.critic.optim.lr, ppo.actor_rollout_ref.rollout.temperature) == (3e-6, 0.7)
    assert _migrated("trainer=ppo", "learning_rate=1e-5", source="trl").critic.optim.lr == 1e-5
    assert not _migrated("trainer=rloo", "beta=0.0", source="trl").algorithm.use_kl_in_reward


def test_losses_of_trl_s_grpo() -> None:
    sapo = _migrated("loss_type=sapo", "sapo_temperature_neg=1.2", source="trl").actor_rollout_ref.actor
    assert (sapo.policy_loss.loss_mode, sapo.policy_loss.tau_neg) == ("sapo", 1.2)
    cispo = _migrated("loss_type=cispo", "epsilon_high=5.0", source="trl").actor_rollout_ref.actor
    assert (cispo.policy_loss.loss_mode, cispo.clip_high) == ("cispo", 4.0)  # 1 + 4 is the largest weight
    kl = _migrated("trainer=grpo", "beta=0.1", source="trl").actor_rollout_ref.actor
    assert (kl.use_kl_loss, kl.kl_loss_type) == (True, "k3+")
    own = _migrated("trainer=grpo", "beta=0.1", "use_bias_correction_kl=false", source="trl").actor_rollout_ref.actor
    assert own.kl_loss_type == "k3"
    for loss in ("vespo", "luspo"):
        (change,) = convert({"loss_type": loss}, "trl").of("refused")
        assert change.key == "loss_type"


def test_the_engine_s_distribution_in_trl() -> None:
    """TRL weighs for it without being told, if vLLM generates."""
    default = _migrated("trainer=grpo", "use_vllm=true", source="trl").algorithm.rollout_correction
    assert (default.rollout_is, default.rollout_rs, default.rollout_rs_threshold) == ("sequence", "sequence", 3.0)
    assert default.rollout_rs_threshold_lower == 1e-9  # no lower bound
    mode, most = "vllm_importance_sampling_mode=token_truncate", "vllm_importance_sampling_clip_max=2.0"
    tokens = _migrated("trainer=grpo", "use_vllm=true", mode, most, source="trl").algorithm.rollout_correction
    assert (tokens.rollout_is, tokens.rollout_is_threshold, tokens.rollout_rs) == ("token", 2.0, None)
    off = _migrated("use_vllm=true", "vllm_importance_sampling_correction=false", most, source="trl")
    assert off.algorithm.rollout_correction.rollout_is is None
    assert _migrated("trainer=grpo", mode, source="trl").algorithm.rollout_correction.rollout_is is None  # no vLLM


def test_commands_of_trl() -> None:
    words = "accelerate launch --num_processes=16 --num_machines 2 examples/scripts/grpo_agent.py --learning-rate 2e-6"
    words += " --bf16 --report_to tensorboard csv --no_gradient_checkpointing num_generations=4 --beta 0.1 > log 2>&1"
    made = _migrated(*words.split(), source="trl")
    assert (made.trainer.nnodes, made.trainer.n_gpus_per_node, made.trainer.logger[2:]) == (
        2,
        8,
        ["tensorboard", "csv"],
    )
    roles = made.actor_rollout_ref
    assert (roles.actor.optim.lr, roles.rollout.n, roles.actor.kl_loss_coef) == (2e-6, 4, 0.1)
    assert not roles.model.enable_gradient_checkpointing
    torchrun = ["torchrun", "--nproc_per_node", "4", "--nnodes", "2", "dpo.py", "--beta", "0.3"]
    dpo = _migrated(*torchrun, source="trl")
    assert (dpo.trainer.n_gpus_per_node, dpo.algorithm.preference.beta) == (4, 0.3)
    assert _migrated("--packing", "--max_steps", "5", source="trl").trainer.flow == "sft"


def test_accelerate_s_and_trl_s_own_files(tmp_path: Path) -> None:
    accelerate, own = tmp_path / "zero3.yaml", tmp_path / "sft.yaml"
    accelerate.write_text("distributed_type: DEEPSPEED\nnum_processes: 8\nnum_machines: 1\n")
    own.write_text("learning_rate: 1.0e-4\nmax_steps: 7\n")
    words = f"accelerate launch --config_file {accelerate} sft.py --config {own} --max_steps 9".split()
    made = _migrated(*words, source="trl")
    assert (made.trainer.n_gpus_per_node, made.trainer.total_training_steps) == (8, 9)
    assert made.actor_rollout_ref.actor.optim.lr == 1e-4
    accelerate.unlink()
    (change,) = convert(read_written(words, "trl"), "trl").of("refused")
    assert change.key == "accelerate_config" and "num_processes" in change.why


def test_trl_in_python() -> None:
    file = str(SHIPPED / "trl_grpo_lora.py")
    config = _migrated(file, source="trl")
    roles = config.actor_rollout_ref
    assert (config.reward.name, roles.model.path) == ("math_verify", "configs/models/qwen2_1.5b")
    assert (roles.actor.optim.lr, config.data.train_batch_size, roles.rollout.n) == (1e-5, 2, 8)
    found = convert(read_written([file, "run_name=x"], "trl"), "trl")
    assert [change.key for change in found.of("refused")] == ["dataset_name", "peft_config"]
    by_command = read_written(["accelerate", "launch", file, "--learning_rate", "3e-6"], "trl")
    assert by_command["learning_rate"] == 3e-6 and by_command["num_generations"] == 8


def test_what_a_file_tells_a_trainer_of_trl_is_named(tmp_path: Path) -> None:
    text = """
rows, others = load_dataset("trl/a"), load_dataset("trl/b")
training_args.seed = 4
tokenizer.pad_token = "x"
GRPOTrainer(args.model, ref, train_dataset=rows, eval_dataset=rows["test"], tools=[search], args=training_args)
"""
    (tmp_path / "grpo.py").write_text(text)
    words = [str(tmp_path / "grpo.py"), "--learning_rate", "5e-7", "--model_name_or_path", "m"]
    written = read_written(words, "trl")
    made = convert(written, "trl")
    refused = {change.key: change.why for change in made.of("refused")}
    assert sorted(refused) == ["dataset_name", "datasets", "eval_dataset", "tools"]
    assert "data.val_files" in refused["eval_dataset"] and "environment.agent" in refused["tools"]
    assert (written["seed"], written["learning_rate"], made.tree["actor_rollout_ref"]["model"]["path"]) == (
        4,
        5e-7,
        "m",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("GRPOConfig(", "is not valid Python"),
        (f"x = {'-' * 100_000}1", "is not valid Python"),
        ("a = 1", "no configuration"),
        ("SFTConfig(seed=1)\nDPOConfig(seed=1)", "has several trainers: dpo, sft; leave one in it"),
    ],
)
def test_python_without_a_trainer(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_written([str(tmp_path / "train.py")], "trl")


def test_a_computed_value_is_asked_for(tmp_path: Path) -> None:
    text = "import trl, os\nN = 4\nN = 5\ntrl.DPOConfig(seed=int(os.environ['S']), beta=BETA, max_steps=N, **more)\n"
    (tmp_path / "train.py").write_text(text)
    found = convert(read_written([str(tmp_path / "train.py")], "trl"), "trl").of("refused")
    assert [change.key for change in found] == ["seed", "beta", "max_steps", "**more"]
    assert found[0].why == "it is computed: say what it comes to, seed=..."


def test_scripts_with_several_of_trl_s_commands(tmp_path: Path) -> None:
    script = tmp_path / "both.sh"
    script.write_text("trl sft --seed 1\ntrl dpo --seed 1\n")
    with pytest.raises(ValueError, match=r"both\.sh' starts 2 of TRL's trainers: leave one command in it"):
        read_written([str(script)], "trl")


def test_a_variable_with_several_values_is_remarked_on(tmp_path: Path) -> None:
    text = """
if [ "$1" = large ]; then
    LR=1e-6
else
    LR=2e-6
fi
EXTRA=data.seed=3
EXTRA="$EXTRA"
UNUSED=1
UNUSED=2
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=$LR $EXTRA
"""
    (tmp_path / "run.sh").write_text(text)
    written = read_written([str(tmp_path / "run.sh")])
    assert written == {"actor_rollout_ref.actor.optim.lr": 2e-6, "data.seed": 3}
    (remark,) = written.remarks
    assert remark.endswith("sets LR more than once, in branches of an if, say: its last value, '2e-6', is taken")


def test_what_scripts_do_to_their_arguments(tmp_path: Path) -> None:
    text = """
ARGS+=" data.seed=3"
MORE="data.max_prompt_length=64 data.max_response_length=32"
if true; then LIST+=(actor_rollout_ref.rollout.n=4); fi
python3 -m verl.trainer.main_ppo data.train_batch_size=64 algorithm.gamma=$GAMMA_OF_NOBODY
python3 -m verl.trainer.main_ppo data.train_batch_size=32 $ARGS $MORE "${LIST[@]}" \\
    trainer.experiment_name=run-$(date +%s)
"""
    (tmp_path / "run.sh").write_text(text)
    written = read_written([str(tmp_path / "run.sh")])
    assert written == {
        "data.train_batch_size": 32,
        "algorithm.gamma": "$GAMMA_OF_NOBODY",
        "data.seed": 3,
        "data.max_prompt_length": 64,
        "data.max_response_length": 32,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.experiment_name": "run-$(date+%s)",
    }
    (remark,) = written.remarks
    assert remark.endswith("sets data.train_batch_size in several commands: the last one's value, 32, is taken")
    found = convert(written).of("refused")
    assert [change.key for change in found] == ["algorithm.gamma", "trainer.experiment_name"]
    assert found[0].why == "it is computed: say what it comes to, algorithm.gamma=..."


def test_a_command_after_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "migrate", "--from", "trl", "--", "trl", "dpo", "--learning_rate", "5e-7"]) == 0
    assert "lr: 5.0e-07" in capsys.readouterr().out
    assert main(["config", "migrate", "--from", "trl", "dpo.py", "--learning_rate", "5e-7", "--quiet"]) == 0
    assert "lr: 5.0e-07" in capsys.readouterr().out
    yaml = str(SHIPPED / "trl_grpo.yaml")
    assert read_written([yaml, "--learning_rate", "5e-7", "--new", "1"], "trl")["learning_rate"] == 5e-7
    assert main(["config", "migrate", "data.seed=1", "--quite"]) == 2
    assert capsys.readouterr().err == "megarl: error: unrecognized arguments: --quite\n"


def test_units_of_verl() -> None:
    """Training steps, KL per token and characters are not what is counted here."""
    actor = "actor_rollout_ref.actor"
    words = ["data.train_batch_size=512", f"{actor}.ppo_mini_batch_size=32", f"{actor}.optim.lr_warmup_steps=10"]
    assert _migrated(*words).actor_rollout_ref.actor.optim.lr_warmup_steps == 160
    critic = _migrated(*words, f"{actor}.ppo_epochs=2", "critic.optim.lr_warmup_steps=3").critic
    assert (critic.ppo_epochs, critic.optim.lr_warmup_steps) == (2, 96)
    for kind, refused in (("adaptive", True), ("fixed", False)):
        keys = {"algorithm.kl_ctrl.type": kind, "algorithm.kl_ctrl.target_kl": 0.1}
        found = convert(keys, "verl").of("refused")
        assert [change.key for change in found] == ["algorithm.kl_ctrl.target_kl"] * refused


def test_warm_up_as_a_share_of_all_steps() -> None:
    optim = Config().actor_rollout_ref.actor.optim
    assert optim.model_copy(update={"lr_warmup_steps_ratio": 0.05}).warmup_of(210) == 10
    assert optim.model_copy(update={"lr_warmup_steps_ratio": 0.05, "lr_warmup_steps": 3}).warmup_of(210) == 3


def _verl_rows(folder: Path) -> str:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 10 * a + b, "split": "train"},
        }
        for a in range(5)
        for b in range(5)
    ]
    file = folder / "verl.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    right = solution_str.strip() == ground_truth
    return {"score": right + bonus + extra_info["index"] / 100, "acc": right, "pred": solution_str}

def of_lists(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]
"""


def test_rows_and_rewards_of_verl(tmp_path: Path) -> None:
    """Parquet rows and a reward function as verl has them go through every check, and the function is called."""
    from chat_tokenizer import write_chat_tokenizer

    from megarl.rewards.call import Caller
    from megarl.rewards.results import Response, result_of_value

    (tmp_path / "mine.py").write_text(REWARD)
    own = read_written(
        [
            f"data.train_files={_verl_rows(tmp_path)}",
            "data.train_batch_size=8",
            "data.max_prompt_length=24",
            "data.max_response_length=4",
            "algorithm.adv_estimator=grpo",
            f"{A}.ppo_mini_batch_size=8",
            f"{A}.ppo_micro_batch_size_per_gpu=2",
            f"{R}.n=2",
            "trainer.n_gpus_per_node=1",
            "trainer.test_freq=-1",
            f"trainer.default_local_dir={tmp_path / 'run2'}",
            f"custom_reward_function.path={tmp_path / 'mine.py'}",
            "custom_reward_function.name=compute_score",
            "+custom_reward_function.reward_kwargs.bonus=1.0",
        ]
    )
    tree = convert(own).tree
    write_run(tmp_path)
    write_chat_tokenizer(tmp_path)
    architecture = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(architecture | {"vocab_size": 96}))
    model = {"path": str(tmp_path), "tokenizer_path": str(tmp_path), "random_init": True, "dtype": "float32"}
    tree["actor_rollout_ref"]["model"] = model
    tree["actor_rollout_ref"]["rollout"] |= {"name": "native", "tensor_model_parallel_size": 1}
    inputs = check_run(build_config(tree))
    prompt = inputs.train_prompts[7]
    assert (prompt.row["answer"], prompt.data_source, prompt.row["extra_info"]["index"]) == ("3", "sums", 12)
    (part,) = parts_of(inputs.config.reward)
    judged = result_of_value(Caller(part.reward, part.args).one(Response(text="3"), prompt.row))
    assert judged.score == pytest.approx(2.12) and judged.metrics == {"acc": 1.0}
    lists = inputs.config.reward.model_copy(update={"name": f"{tmp_path / 'mine.py'}:of_lists", "args": {}})
    with pytest.raises(ValueError, match=r"takes lists: set reward\.batch_size"):
        parts_of(lists)
    (part,) = parts_of(lists.model_copy(update={"batch_size": 4}))
    many = Caller(part.reward, {}).many([Response(text="3"), Response(text="4")], [prompt.row] * 2)
    assert [one.score for one in many] == [1.0, 0.0]


def test_a_misspelt_place_of_the_answer(tmp_path: Path) -> None:
    run = write_run(tmp_path, data__answer_key="reward_model.truth")
    with pytest.raises(
        ValueError, match=r"data\.answer_key = 'reward_model\.truth': no such column in .*train\.jsonl:1"
    ):
        check_run(load_config(str(run)))


@pytest.mark.parametrize(
    "words",
    ["python bco.py --beta 1", "python examples/dpo_online.py --beta 1", "trl distillation --lr 1", "trl gkd --lr 1"],
)
def test_other_trainers_of_trl_are_none_of_ours(words: str) -> None:
    with pytest.raises(ValueError, match="has no counterpart here; those that have: ppo"):
        convert(read_written(words.split(), "trl"), "trl")


def test_classes_of_trl_that_are_others_or_inherited(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from trl.experimental.a import AsyncGRPOConfig, AsyncGRPOTrainer\n"
        "t = AsyncGRPOTrainer(model='m', args=AsyncGRPOConfig(max_steps=2))\n"
    )
    with pytest.raises(ValueError, match="'AsyncGRPO' has no counterpart"):
        convert(read_written([str(script)], "trl"), "trl")
    script.write_text(
        "from trl import GRPOConfig, GRPOTrainer as Base\n"
        "class Mine(GRPOConfig): pass\n"
        "class Trainer(Base): pass\n"
        "t = Trainer(policy='m', config=Mine(epsilon=0.3, **more))\n"
    )
    written = read_written([str(script)], "trl")
    assert dict(written) == {"trainer": "grpo", "model_name_or_path": "m", "epsilon": 0.3, "**more": "more"}


def test_a_file_that_takes_options_says_so(tmp_path: Path) -> None:
    script = tmp_path / "sft.py"
    script.write_text("args = TrlParser((SFTConfig,)).parse_args_and_config()\nt = SFTTrainer(model, args=args)\n")
    alone = convert(read_written([str(script)], "trl"), "trl")
    assert "name them behind it" in {one.key: one.why for one in alone.of("refused")}["command_line"]
    words = ["CUDA_VISIBLE_DEVICES=1", "python", str(script), "--learning_rate", "1e-6", "--model_name_or_path", "m"]
    assert not convert(read_written(words, "trl"), "trl").of("refused")


def _of_trl(words: str, *more: str) -> tuple[Config, list[str]]:
    made = convert(read_written([*words.split(), *more], "trl"), "trl")
    return build_config(made.tree), [change.key for change in made.of("refused")]


def test_trl_in_its_units() -> None:
    config, refused = _of_trl(
        "trl sft --max_length 4096 --lr_scheduler_type cosine_with_min_lr --learning_rate 1e-5 --lr_scheduler_kwargs",
        '{"min_lr_rate": 0.1}',
    )
    assert not refused
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 2048)
    optim = config.actor_rollout_ref.actor.optim
    assert (optim.lr_decay_style, optim.min_lr) == ("cosine", pytest.approx(1e-6))
    config, refused = _of_trl("trl dpo --max_length 1000 --max_prompt_length 300")
    assert (config.data.max_prompt_length, config.data.max_response_length) == (300, 700)
    config, refused = _of_trl("trl rloo --rloo_k 4 --per_device_train_batch_size 16 --sft_model_path m")
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (4, 4)
    config, refused = _of_trl("trl ppo --sft_model_path policy --model_name_or_path tokenizer")
    assert config.actor_rollout_ref.model.path == "policy"


def test_what_trl_has_and_nothing_here_is() -> None:
    assert _of_trl("trl grpo --scale_rewards mean")[1] == ["scale_rewards"]
    assert _of_trl("trl cpo --learning_rate 1e-6")[1] == ["trainer"]
    assert _of_trl("trl cpo --loss_type simpo")[1] == []
    assert _of_trl("trl ppo --batch_size 8 --optim_args x")[1] == ["batch_size", "optim_args"]
    made = convert(
        read_written(["trl", "dpo", "--loss_type", "sigmoid", "sft", "--loss_weights", "0.8", "0.2"], "trl"), "trl"
    )
    assert [change.why.partition(":")[0] for change in made.of("refused")] == [
        "megarl algorithms lists the losses on pairs",
        "one loss on pairs; algorithm.preference.sft_coef adds cross-entropy",
    ]


def test_newer_names_of_trl_and_variables_of_the_environment() -> None:
    config, refused = _of_trl("OMP_NUM_THREADS=1 python grpo.py --activation_checkpointing --trackio_space_id me/x")
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing and refused == []
    with pytest.raises(ValueError, match="no configuration"):
        read_written(["CUDA_VISIBLE_DEVICES=1", "python", "absent.py"], "trl")
