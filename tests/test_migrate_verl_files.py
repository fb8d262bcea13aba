"""verl's scripts with the YAML files that they name, its trainers of demonstrations, and files of its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, build_config
from megarl.migration import convert, read_written

A = "actor_rollout_ref.actor"
TURNS = "actor_rollout_ref.rollout.multi_turn"
PPO = "python3 -m verl.trainer.main_ppo"


def _written(folder: Path, text: str) -> dict[str, Any]:
    script = folder / "examples" / "turns" / "run.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    return read_written([str(script)])


def _refused(written: dict[str, Any]) -> dict[str, str]:
    return {change.key: change.why for change in convert(written).of("refused")}


def _migrated(*words: str) -> Config:
    return build_config(convert(read_written(words)).tree)


def _files(folder: Path) -> None:
    config = folder / "examples" / "turns" / "config"
    (config / "actor").mkdir(parents=True)
    (config / "turns.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [ppo_trainer, base, actor@actor_rollout_ref.actor: mine, override model_engine: megatron, _self_]\n"
        "data: {train_batch_size: 64}\n"
        "actor_rollout_ref: {rollout: {multi_turn: {enable: true, max_assistant_turns: 5}}}\n"
    )
    (config / "base.yaml").write_text("data: {train_batch_size: 8, max_prompt_length: 99}\n")
    (config / "actor" / "mine.yaml").write_text("clip_ratio: 0.1\n")


def test_the_file_that_a_script_names_is_read_with_what_it_includes(tmp_path: Path) -> None:
    _files(tmp_path)
    start = 'PROJECT="$(pwd)"\nCONFIG="$PROJECT/examples/turns/config"\n'
    written = _written(
        tmp_path,
        f"{start}{PPO} --config-path=\"$CONFIG\" --config-name='turns' data.max_prompt_length=7 trainer.nnodes=2",
    )
    assert written == {
        "data.train_batch_size": 64,
        "data.max_prompt_length": 7,
        "actor_rollout_ref.actor.clip_ratio": 0.1,
        f"{TURNS}.enable": True,
        f"{TURNS}.max_assistant_turns": 5,
        "model_engine": "megatron",
        "trainer.nnodes": 2,
    }
    assert list(_refused(written)) == [f"{TURNS}.enable"]
    as_file = read_written([str(tmp_path / "examples" / "turns" / "config" / "turns.yaml"), "trainer.nnodes=2"])
    assert as_file == written | {"data.max_prompt_length": 99}


def test_files_that_a_script_names_and_that_are_not_there(tmp_path: Path) -> None:
    _files(tmp_path)
    missing = _refused(_written(tmp_path, f"{PPO} --config-path config --config-name other data.seed=1"))
    assert list(missing) == ["--config-name"] and "name it before the script" in missing["--config-name"]
    (tmp_path / "examples" / "turns" / "config" / "base.yaml").write_text(
        "defaults: [rollout: gone]\ndata: {seed: 3}\n"
    )
    assert "defaults" in _refused(_written(tmp_path, f"{PPO} --config-path config --config-name turns"))
    for own in ("ppo_trainer", "ppo_megatron_trainer.yaml"):  # verl's defaults
        assert _written(tmp_path, f"{PPO} --config-path=config --config-name={own} data.seed=1") == {"data.seed": 1}


def test_a_file_that_includes_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").write_text("defaults: [loop]\ndata: {seed: 1}\n")
    with pytest.raises(ValueError, match="includes more than 32 files, or itself"):
        read_written([str(tmp_path / "loop.yaml")])


def test_bare_keys_are_named(tmp_path: Path) -> None:
    text = f"HYDRA_FULL_ERROR=1 {PPO} model_engine=veomni data.seed=1 +mode=fast hydra.run.dir=x\nother=1 command\n"
    written = _written(tmp_path, text)
    assert written == {"model_engine": "veomni", "data.seed": 1, "mode": "fast", "hydra.run.dir": "x"}
    assert list(_refused(written)) == ["model_engine", "mode"]


OLD = "-m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet"


def test_demonstrations_are_no_ppo(tmp_path: Path) -> None:
    text = f"""torchrun --standalone --nnodes=1 --nproc_per_node=4 {OLD} \\
    data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] \\
    +data.response_dict_keys=['answer'] optim.lr=1e-4 data.micro_batch_size_per_gpu=4 data.max_length=2048 \\
    model.partial_pretrain=models/qwen ulysses_sequence_parallel_size=2 use_remove_padding=true \\
    model.fsdp_config.model_dtype=bf16 trainer.default_hdfs_dir=null
"""
    made = convert(_written(tmp_path, text))
    config = build_config(made.tree)
    assert made.of("refused") == [] and config.trainer.flow == "sft"
    data, roles = config.data, config.actor_rollout_ref
    assert (data.prompt_key, data.answer_key) == ("extra_info.question", "extra_info.answer")
    assert (data.max_prompt_length, data.max_response_length, data.train_batch_size) == (1024, 1024, 256)
    assert (roles.model.path, roles.actor.optim.lr, roles.actor.optim.lr_warmup_steps_ratio) == (
        "models/qwen",
        1e-4,
        0.1,
    )
    assert roles.actor.ppo_max_token_len_per_gpu == 4 * 2048 / 2
    assert roles.actor.megatron.context_parallel_size == 2 and config.trainer.n_gpus_per_node == 4
    assert "critic" not in made.tree and "algorithm" not in made.tree


def test_the_newer_trainer_of_demonstrations() -> None:
    words = "-m verl.trainer.sft_trainer engine=megatron optim=megatron optim.betas=[0.9,0.95] optim.min_lr=1e-6"
    words += " engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2 model.path=m data.pad_mode=x"
    words += " data.max_token_len_per_gpu=8192 data.use_dynamic_bsz=True trainer.total_epochs=2 trainer.seed=4"
    made = convert(read_written(words.split()))
    config = build_config(made.tree)
    actor = config.actor_rollout_ref.actor
    assert made.of("refused") == [] and (config.trainer.flow, config.data.messages_key) == ("sft", "messages")
    assert (actor.megatron.pipeline_model_parallel_size, actor.ppo_max_token_len_per_gpu) == (2, 8192)
    assert (actor.optim.adam_beta2, actor.optim.min_lr, config.data.seed) == (0.95, 1e-6, 4)


def test_a_command_that_trains_nothing() -> None:
    assert "megarl eval" in _refused(read_written(["-m", "verl.trainer.main_eval", "data.path=x"]))["-m"]


def test_what_is_off_or_verl_s_own_default_is_no_wish() -> None:
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    words = [f"{actor}.fsdp_config.qat.enable=False", f"{actor}.fsdp_config.qat.mode=w4a16", f"{actor}.strategy=fsdp"]
    words += [f"{model}.lora_rank=0", f"{model}.lora_alpha=16", f"{model}.lora.type=lora", "distillation.enabled=false"]
    words += ["distillation.distillation_loss.topk=32", "data.image_key=images", "data.video_key=videos"]
    words += ["algorithm.rollout_correction.rollout_rs_threshold=null", "nobody.knows_this=null"]
    assert _refused(read_written(words)) == {}
    wishes = [f"{actor}.fsdp_config.qat.enable=True", f"{actor}.fsdp_config.qat.mode=w4a16", f"{actor}.strategy=fsdp2"]
    wishes += [f"{model}.lora_rank=8", f"{model}.lora_alpha=16", "distillation.distillation_loss.topk=32"]
    assert list(_refused(read_written(wishes))) == [word.partition("=")[0] for word in wishes]


def test_weights_that_are_chosen_stay_where_carried_responses_are_weighed() -> None:
    over, weights = "actor_rollout_ref.rollout.over_sample_rate=0.1", "algorithm.rollout_correction.rollout_is"
    assert _migrated(over).algorithm.rollout_correction.rollout_is == "token"
    for words in ([over, f"{weights}=sequence"], [f"{weights}=sequence", over]):
        assert _migrated(*words).algorithm.rollout_correction.rollout_is == "sequence"


def test_newer_places_of_rewards() -> None:
    words = [
        "reward.custom_reward_function.path=r.py",
        "reward.custom_reward_function.name=score",
        "reward.num_workers=4",
    ]
    made = convert(read_written([*words, "reward.reward_manager.name=dapo"]))
    reward = build_config(made.tree).reward
    assert (made.of("refused"), reward.name, reward.workers) == ([], "r.py:score", 4)


@pytest.mark.parametrize(
    "text",
    [
        f"{PPO} trainer.nnodes=2 data.seed=3 $@ \\",
        f'ARGS="\n    trainer.nnodes=2 \\\n    data.seed=3 \\\n"\n{PPO} $ARGS',
        f'B=a\nif [ "$B" = "a" ]; then\n  N=2\nelse\n  N=4\nfi\n{PPO} trainer.nnodes=$N data.seed=3',
        "B=a\nif [[ $B == b ]]; then\n  X=(trainer.nnodes=9)\nelse\n  X=(trainer.nnodes=2)\nfi\nX+=(data.seed=3)\n"
        f'{PPO} "${{X[@]}}"',
        f'srun bash -c "\n  export A=1\n  {PPO} \\\n  trainer.nnodes=2 \\\n  data.seed=3\n"',
        f'N=4\nif [ $N -ge 4 ]; then N=3; fi\nif [ $N -gt 8 ]; then\n  M=1\nelif [ -n "$N" ]; then\n  M=2\nfi\n'
        f"{PPO} trainer.nnodes=$M data.seed=3",
        f'A="actor.x.nnodes=2 actor.x.seed=3"\nB="${{A//actor.x./data.}}"\n{PPO} ${{B/data./trainer.}}',
    ],
    ids=["backslash at the end", "text over lines", "branch", "arrays of branches", "in quotation marks", "numbers",
         "texts replaced"],
)  # fmt: skip
def test_commands_are_read_as_the_shell_runs_them(text: str, tmp_path: Path) -> None:
    assert _written(tmp_path, text) == {"trainer.nnodes": 2, "data.seed": 3}


def test_a_quotation_that_does_not_end_hides_no_setting(tmp_path: Path) -> None:
    written = _written(tmp_path, f"{PPO} data.seed=3 \\\n trainer.logger=['console','wandb] \\\n trainer.nnodes=2\n")
    assert written == {"data.seed": 3, "trainer.logger": "['console','wandb]", "trainer.nnodes": 2}
    assert "tensorboard, csv" in _refused(written)["trainer.logger"]


def test_comments_between_settings_hide_none(tmp_path: Path) -> None:
    text = f"""{PPO} trainer.experiment_name=run#1 data.seed=3 \\
    \\
    `# a batch's size: don't change it` \\
    data.train_batch_size=8 # an answer's tokens \\
    trainer.project_name=`date +%s` data.max_prompt_length=$(((1+2))) \\
    trainer.nnodes=2 # the last one's comment
"""
    assert _written(tmp_path, text) == {
        "trainer.experiment_name": "run#1",
        "data.seed": 3,
        "data.train_batch_size": 8,
        "trainer.project_name": "$(date+%s)",
        "data.max_prompt_length": 3,
        "trainer.nnodes": 2,
    }


def test_what_verl_does_not_read_or_has_and_nothing_here_is() -> None:
    words = f"algorithm.adv_estimator=mine {A}.policy_loss.loss_mode=dppo_tv algorithm.rollout_is=true"
    words += " actor_rollout_ref.rollout.load_format=flash_rl"
    words += " trainer.resume_mode=auto trainer.resume_from_path=a trainer.save_freq=after_each_epoch"
    made = convert(read_written(words.split()))
    assert build_config(made.tree).trainer.resume_from_path == ""
    assert [change.why.partition(":")[0] for change in made.of("refused")] == [
        "there is no 'mine' here",
        "there is no 'dppo_tv' here",
        "algorithm.rollout_correction has rollout_is, which weighs, and rollout_rs",
        "the engine's weights are the actor's, bit for bit",
        "steps are counted; -1 is one at the end of the run",
    ]
    assert _migrated("trainer.resume_mode=resume_path", "trainer.resume_from_path=a").trainer.resume_from_path == "a"


def test_the_smaller_number_of_turns_counts() -> None:
    for words in (("max_user_turns=4", "max_assistant_turns=9"), ("max_assistant_turns=5", "max_user_turns=8")):
        assert _migrated(*(f"{TURNS}.{word}" for word in words)).environment.max_turns == 5


def test_older_profiles_are_of_all_roles_ranks() -> None:
    words = f"{A}.profile_ranks=[0,2] critic.profile_ranks=[0,1] critic.profile_ranks_all=false"
    config = _migrated(*words.split(), "trainer.profile_steps=[2,4]")
    assert (config.profiler.tool, config.profiler.steps, config.profiler.ranks) == ("nsight", [2, 4], [0, 1, 2])
    assert _migrated(*words.split()).profiler.tool == "none"


def test_a_critic_s_folder_without_a_critic() -> None:
    words = ["critic.model.path=m", "algorithm.adv_estimator=grpo"]
    assert "critic" not in convert(read_written(words)).tree
    assert _migrated(words[0]).critic.model.path == "m"


def test_of_two_settings_with_one_counterpart_both_show_what_counts() -> None:
    words = "trainer.max_actor_ckpt_to_keep=3 trainer.max_critic_ckpt_to_keep=5"
    first, second = convert(read_written(words.split())).changes
    assert first.values == second.values == {"trainer.max_ckpt_to_keep": 5}
    assert first.why.endswith("stay; trainer.max_critic_ckpt_to_keep counts") and second.why.endswith("stay")


def test_a_reward_model_s_micro_batches_have_tokens_where_they_are_dynamic() -> None:
    words = "reward_model.forward_max_token_len_per_gpu=98304 reward_model.micro_batch_size_per_gpu=32"
    for dynamic, tokens in (("true", 98304), ("false", 32 * 1024)):
        made = convert(read_written([*words.split(), f"reward_model.use_dynamic_bsz={dynamic}"]))
        assert made.tree["reward_model"]["ppo_max_token_len_per_gpu"] == tokens


def test_a_job_of_slurm_with_paths_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    job = tmp_path / "job.slurm"
    job.write_text(f"#SBATCH --nodes=2\nFILE=~/a.parquet\nsrun {PPO} data.train_files=$FILE\n")
    assert read_written([str(job)]) == {"data.train_files": "/home/me/a.parquet"}


def test_what_is_no_setting_is_named_too(tmp_path: Path) -> None:
    written = _written(
        tmp_path, f"export NCCL_DEBUG=WARN HOSTS=2\nexport N=3\n{PPO} --config my.yaml trainer.nnodes=$N"
    )
    assert written == {"--config": "my.yaml", "trainer.nnodes": 3}
    assert "not known" in _refused(written)["--config"]
    (remark,) = written.remarks  # type: ignore[attr-defined]
    assert "exports NCCL_DEBUG, HOSTS:" in remark


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("critic.model.use_rmpad=true", "critic.model.use_remove_padding=true"),
        ("actor_rollout_ref.actor.profile_ranks=[0]", "actor_rollout_ref.actor.profiler.ranks=[0]"),
        ("reward_model.overlong_buffer.len=9", "reward_model.reward_kwargs.overlong_buffer_cfg.len=9"),
        ("reward_model.sandbox_fusion_url=http://a", "reward_model.sandbox_fusion.url=http://a"),
        ("actor_rollout_ref.rollout.max_batch_size=7", "actor_rollout_ref.rollout.max_num_seqs=7"),
        ("trainer.val_generations_to_log_to_wandb=7", "trainer.log_val_generations=7"),
        ("trainer.rollout_trace.backend=weave", "actor_rollout_ref.rollout.trace.backend=weave"),
        (
            "algorithm.rollout_correction.bypass_old_logprob_for_rollout=true",
            "algorithm.rollout_correction.bypass_mode=true",
        ),
        ("actor_rollout_ref.actor.use_gpg_loss=true", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"),
    ],
)
def test_older_names_come_to_the_same(older: str, newer: str) -> None:
    made, other = convert(read_written([older])), convert(read_written([newer]))
    assert made.tree == other.tree
    assert len(made.of("refused")) == len(other.of("refused"))
