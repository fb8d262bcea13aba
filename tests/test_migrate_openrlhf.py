"""OpenRLHF's scripts as configurations of MegaRL: every option has an entry, and what comes out is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tiny_run import ROOT

from megarl.cli.main import main
from megarl.config import Config, build_config
from megarl.migration import Migrated, convert, entry_of, read_written

MODEL = ROOT / "configs" / "models" / "qwen2_1.5b"
PPO = "python3 -m openrlhf.cli.train_ppo_ray"


def _converted(folder: Path, text: str) -> Migrated:
    (folder / "run.sh").write_text(text)
    return convert(read_written([str(folder / "run.sh")], "openrlhf"), "openrlhf")


def _migrated(words: str) -> Config:
    return build_config(convert(read_written(words.split(), "openrlhf"), "openrlhf").tree)


def _refused(words: str) -> dict[str, str]:
    made = convert(read_written(words.split(), "openrlhf"), "openrlhf")
    return {change.key: change.why for change in made.of("refused")}


def test_every_option_has_an_entry() -> None:
    lines = (ROOT / "tests" / "data" / "openrlhf_options.txt").read_text().splitlines()
    uses = {option: int(count) for count, option in (line.split() for line in lines if not line.startswith("#"))}
    assert len(uses) > 250
    kinds = {"carried": 0, "translated": 0, "refused": 0}
    for option, count in uses.items():
        entry = entry_of(option, "openrlhf")
        assert entry is not None, option
        kinds[entry.kind] += count
    assert kinds["translated"] / sum(kinds.values()) > 0.85, kinds


def test_ppo_with_groups_and_a_reward_model(tmp_path: Path) -> None:
    text = f"""set -x
ARGS=(
   --pretrain {MODEL}
   # --critic_pretrain nothing
   --n_samples_per_prompt 8
)
ray job submit --address="http://127.0.0.1:8265" -- {PPO} \\
   --actor_num_gpus_per_node 8 --colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \\
   --reward_pretrain {MODEL} --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --advantage_estimator group_norm \\
   --eps_clip_low_high 0.2 0.27 --rollout_batch_size 128 --train_batch_size 512 --micro_train_batch_size 2 \\
   --prompt_max_len 1024 --generate_max_len 512 --zero_stage 2 --bf16 --actor_learning_rate 5e-7 --save_steps -1 \\
   --eval_steps -1 --prompt_data a.jsonl,b.jsonl --input_key context --enable_vllm_is_correction --use_icepop \\
   --deepspeed_enable_sleep --use_tensorboard runs ${{ARGS[@]}} &>> log
"""
    made = _converted(tmp_path, text)
    config = build_config(made.tree)
    assert made.of("refused") == []
    data, roles, actor = config.data, config.actor_rollout_ref, config.actor_rollout_ref.actor
    assert (data.train_batch_size, actor.ppo_mini_batch_size, roles.rollout.n) == (128, 64, 8)
    assert (data.train_files, data.prompt_key) == (["a.jsonl", "b.jsonl"], "context")
    assert (data.max_prompt_length, data.max_response_length, actor.ppo_max_token_len_per_gpu) == (1024, 512, 3072)
    assert (actor.use_kl_loss, actor.kl_loss_type, config.algorithm.use_kl_in_reward) == (True, "k3", False)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, config.algorithm.adv_estimator) == (0.2, 0.27, "grpo")
    assert (actor.optim.lr, actor.optim.min_lr, actor.optim.lr_decay_style) == (5e-7, 5e-8, "cosine")
    weights = config.algorithm.rollout_correction
    assert (weights.rollout_is, weights.rollout_rs, weights.rollout_rs_threshold_lower) == ("token", "token", 0.5)
    assert (config.reward.name, config.trainer.save_freq, config.trainer.test_freq) == ("model", -1, 0)
    assert actor.megatron.param_offload and "tensorboard" in config.trainer.logger


def test_a_critic_by_default() -> None:
    config = _migrated(f"{PPO} --pretrain m --train_batch_size 128 --max_epochs 2 --critic_learning_rate 1e-5")
    assert (config.algorithm.adv_estimator, config.critic.ppo_epochs, config.critic.optim.lr) == ("gae", 2, 1e-5)
    assert (config.algorithm.use_kl_in_reward, config.algorithm.kl_ctrl.kl_coef) == (True, 0.01)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 1024)


def test_older_and_newer_names_are_the_same_options() -> None:
    old = "--pretrain m --actor_learning_rate 1e-6 --l2 0.1 --ring_attn_size 2 --vllm_tensor_parallel_size 2"
    new = "--actor.model_name_or_path m --actor.adam.lr 1e-6 --actor.adam.weight_decay 0.1 --ds.ring_attn_size 2"
    assert _migrated(f"{PPO} {old}") == _migrated(f"{PPO} {new} --vllm.tensor_parallel_size 2")
    sft = "openrlhf.cli.train_sft --max_len 64"
    assert _migrated(f"{sft} --learning_rate 1e-6 --param_dtype bf16") == _migrated(
        f"{sft} --adam.lr 1e-6 --fsdp.param_dtype bf16"
    )


@pytest.mark.parametrize(
    ("trainer", "options", "flow"),
    [
        ("sft", "--dataset a.jsonl --input_key question --output_key response", "sft"),
        ("rm", "--dataset a.jsonl --margin_loss", "reward_model"),
        ("dpo", "--dataset a.jsonl --beta 0.2 --nll_loss_coef 0.1 --chosen_key good", "preference"),
        ("kto", "--dataset a.jsonl --label_key score --output_key response", "kto"),
    ],
)
def test_trainers_of_examples_are_planned(
    trainer: str, options: str, flow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a document that `deepspeed --module` is given."""
    options += " --max_len 2048 --train_batch_size 64 --micro_train_batch_size 1 --max_epochs 3 --learning_rate 5e-7"
    words = (
        f"openrlhf.cli.train_{trainer} \\\n   --pretrain {MODEL} \\\n   {options} --save_path out --bf16 --flash_attn"
    )
    made = _converted(
        tmp_path, f"read -r -d '' commands <<EOF\n{words}\nEOF\n# --packing\ndeepspeed --module $commands\n"
    )
    assert made.of("refused") == [] and made.tree["trainer"]["flow"] == flow
    assert (made.tree["trainer"]["total_epochs"], made.tree["data"]["train_batch_size"]) == (3, 64)
    out = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.create(made.tree), out)
    assert main(["plan", str(out)]) == 0
    assert "sequences a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--zero_stage 3", "there is no DeepSpeed"),
        ("--adam_offload", "optimizer_offload"),
        ("--async_train", "rollout.carry_over"),
        ("--agent_func_path a.py", "environment.agent"),
        ("--remote_rm_url http://localhost:5000", "reward.name=path"),
        ("--normalize_reward", "rewards are not normalized"),
        ("--stop_properly_penalty_coef 0.0", "finish_reason"),
        ("--lora_rank 8", "there are no adapters"),
        ("--prompt_data OpenRLHF/prompts", "rows are files"),
        ("--ref_pretrain other", "the reference is the policy as it begins"),
        ("--nobody_knows 1", "not known here"),
        ("--save_path $OUT", "say what it comes to, save_path=..."),
    ],
)
def test_refusals_say_what_to_use_here(options: str, said: str) -> None:
    (why,) = _refused(f"{PPO} --pretrain m {options}").values()
    assert said in why


def test_a_command_in_one_word_and_an_account(tmp_path: Path) -> None:
    """`bash -c "..."`, as schedulers are given it; the key of an account is in no output."""
    made = _converted(
        tmp_path, f'srun bash -c \\\n"pip install x \\\n&& {PPO} --pretrain m --use_wandb secret" &>> log\n'
    )
    values: dict[str, Any] = {change.key: change.value for change in made.changes}
    assert values == {"trainer": "ppo", "pretrain": "m", "use_wandb": True}


def test_trainers_without_a_counterpart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"OpenRLHF's train_kd has no counterpart here; those that have: ppo, sft"):
        _migrated("openrlhf.cli.train_kd --pretrain m")
    with pytest.raises(ValueError, match=r"names none of OpenRLHF's trainers .*; it runs serve_rm, which trains"):
        _converted(tmp_path, "python -m openrlhf.cli.serve_rm --port 5000\n")


def test_a_text_in_a_variable_is_one_command_and_other_programs_are_named(tmp_path: Path) -> None:
    text = """read -r -d '' rewards <<EOF
openrlhf.cli.batch_inference
   --eval_task rm
EOF
read -r -d '' commands <<EOF
../train_sft.py \\
   --pretrain m \\
   --load_model sft.pt
   --max_epochs 2 \\
   --learning_rate 1e-6
EOF
echo $commands
deepspeed $rewards
deepspeed --num_gpus 4 $commands
"""
    (tmp_path / "run.sh").write_text(text)
    written = read_written([str(tmp_path / "run.sh")], "openrlhf")
    own = {"pretrain": "m", "load_model": "sft.pt", "max_epochs": 2, "learning_rate": 1e-6}
    assert written == {"trainer": "sft", "num_gpus": 4, **own}
    (remark,) = written.remarks
    assert "also runs batch_inference, which trains nothing" in remark


def test_options_that_begin_a_line_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"python -m {PPO} \\\n  --pretrain m\n  --use_wandb x\n")
    written = read_written([str(tmp_path / "run.sh")], "openrlhf")
    assert written == {"trainer": "ppo", "pretrain": "m"}
    (remark,) = written.remarks
    assert remark.endswith("run.sh leaves --use_wandb out: end the line before these with \\")


def test_a_command_in_quotation_marks(tmp_path: Path) -> None:
    text = (
        'srun bash -c "pip install ray \\\n&& ray job submit -- python3 examples/train_ppo_ray.py --pretrain m" &>> log'
    )
    assert _converted(tmp_path, text).tree["actor_rollout_ref"]["model"]["path"] == "m"


def test_older_and_other_options() -> None:
    config = _migrated(f"{PPO} --init_kl_coef 1e-3 --use_kl_loss --use_kl_estimator_k3 --backend fsdp2")
    assert config.actor_rollout_ref.actor.kl_loss_type == "k3"
    assert "backend" in _refused(f"{PPO} --backend other")
    assert _migrated(f"{PPO} --max_len 96 --max_new_tokens 32").data.max_response_length == 32
    assert _refused(f"{PPO} --ptx_coef 0.05 --use_ds_universal_ckpt --pretrain_split train").keys() == {
        "use_ds_universal_ckpt"
    }
    assert _refused(f"{PPO} --ptx_coef 0.05 --pretrain_data a.jsonl").keys() == {"ptx_coef", "pretrain_data"}


def test_a_default_in_place_of_a_refused_option_says_so() -> None:
    made = convert(read_written(f"{PPO} --advantage_estimator disco".split(), "openrlhf"), "openrlhf")
    whys = {key: change.why for change in made.added for key in change.values}
    assert whys["algorithm.adv_estimator"] == "OpenRLHF's default; advantage_estimator is refused"
    assert whys["trainer.total_epochs"] == "OpenRLHF's default"
