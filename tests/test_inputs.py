"""What a run reads before it starts: what ends a response, rows that cannot be scored, remarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_tokenizer import SIZE, write_chat_tokenizer
from tiny_run import write_run
from training_cases import LATENT, WITH_EXPERTS

from megarl.checkpoint.huggingface_folder import end_tokens
from megarl.config import load_config
from megarl.models.gpt import transformer_config
from megarl.models.overrides import check_overrides
from megarl.parallel.layout import TrainLayout
from megarl.trainer.admission.checks import check_layouts, check_run
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import train_layout


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Inputs]:
    """`check_run` of the tiny run with some overrides."""
    path = str(write_run(tmp_path))
    return lambda *overrides: check_run(load_config(path, overrides))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_ends_a_response(tmp_path: Path, check: Callable[..., Inputs]) -> None:
    assert check().stop_tokens == (1,)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1, 99]}')  # 99 is beyond the vocabulary
    inputs = check("actor_rollout_ref.rollout.stop_token_ids=[7,3]")
    assert inputs.stop_tokens == inputs.sampling(validation=False).stop_token_ids == (1, 7, 5, 3)
    spelled = [inputs.tokenizer.token(i) for i in (7, 5, 3)]
    assert inputs.describe_stop_tokens() == "</s> (1), {} (7), {} (5), {} (3)".format(*spelled)
    assert inputs.tokenizer.token(17) == ""

    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer.model").rename(tmp_path / "tokenizer" / "tokenizer.model")
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 4}')
    inputs = check(f"actor_rollout_ref.model.tokenizer_path={tmp_path}/tokenizer")
    assert inputs.stop_tokens == (1, 7, 5, 4)


def test_a_stop_string_that_no_text_can_hold(tmp_path: Path, check: Callable[..., Inputs]) -> None:
    write_chat_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": SIZE}))
    stop = "actor_rollout_ref.rollout.stop"
    assert refusal(lambda: check(f"{stop}=['x<user>']")) == (
        "rollout.stop: <user> in 'x<user>' is a special token, which leaves no text in a response, so that the string "
        "would never be found; name the token instead: rollout.stop_token_ids=[4]"
    )
    assert check(f"{stop}=['x<user>','<end>']", f"{stop}_token_ids=[4]").stop_tokens == (2, 4)  # which end it anyway


@pytest.mark.parametrize("ids", ['"2"', "[2, null]", "true", "2.0", "{}"])
def test_end_tokens_that_are_none(tmp_path: Path, ids: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    assert refusal(lambda: end_tokens(str(tmp_path), 10)) == (
        f"'{tmp_path}/generation_config.json': eos_token_id must be a token id or a list of them, "
        f"not {json.loads(ids)!r}"
    )


def test_generation_configs_that_are_none(tmp_path: Path) -> None:
    assert end_tokens(str(tmp_path), 10) == []
    for text in ("[]", "{", ""):
        (tmp_path / "generation_config.json").write_text(text)
        assert "generation_config.json' is not a JSON object" in refusal(lambda: end_tokens(str(tmp_path), 10))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert end_tokens(str(tmp_path), 10) == []


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_row_that_cannot_be_scored_is_found_before_the_start(
    tmp_path: Path, check: Callable[..., Inputs], name: str
) -> None:
    check()
    file = tmp_path / f"{name}.jsonl"
    with file.open("a") as f:
        f.write('\n{"prompt": "1+1=", "answer": null}\n')
    line = len(file.read_text().splitlines())
    assert refusal(check) == f"{file}:{line}: reward exact_match needs an answer, and the row's is null"
    assert refusal(lambda: check("reward.name=reasoning_gym")).startswith(
        f"{tmp_path}/train.jsonl:1: reward reasoning_gym needs the columns data_source, question, metadata; the row has"
    )


def test_held_out_prompts_that_are_trained_on_are_remarked(tmp_path: Path, check: Callable[..., Inputs]) -> None:
    assert check().remarks == ()
    with (tmp_path / "val.jsonl").open("a") as f:
        f.writelines((tmp_path / "train.jsonl").read_text().splitlines(keepends=True)[:3])
    assert check().remarks == ("remark: 3 of the 23 prompts of data.val_files are training prompts",)


@pytest.mark.parametrize("flow", ["sft", "kto", "preference", "warm-up"])
def test_examples_that_are_left_out_are_remarked(tmp_path: Path, check: Callable[..., Inputs], flow: str) -> None:
    """Longer than a response may be: with a label, and a worse answer."""
    row = {"label": True, "chosen": "3", "rejected": "4"}
    for name in ("train", "val"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()[:20]
        rows = [{**json.loads(line), **row} for line in lines]
        rows[1]["label"] = False
        rows[2] |= {"answer": "1" * 300, "rejected": "1" * 300}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ["data.filter_overlong_prompts=true", "data.max_response_length=9", "data.train_batch_size=4"]
    how += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "warmup.train_batch_size=4", "data.max_prompt_length=20"]
    warmup = flow == "warm-up"
    remarks = check(*how, "warmup.total_training_steps=1" if warmup else f"trainer.flow={flow}").remarks
    limits = "data.max_prompt_length = 20 or data.max_response_length = 9 tokens"
    train = f"data.train_files: 1 of 20 rows left out: 1 over {limits}"
    assert remarks == ((f"warm-up: {train}",) if warmup else (train, train.replace("train_files", "val_files")))


OPTIM = "actor_rollout_ref.actor.optim"
ACTOR = "actor_rollout_ref.actor"
FIELD = "actor_rollout_ref.actor.megatron.override_transformer_config"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{OPTIM}.lr=1e30"], f"{OPTIM}.lr: input should be less than or equal to 1 (got 1e+30)"),
        ([f"{OPTIM}.lr=.inf"], f"{OPTIM}.lr: input should be a finite number (got inf)"),
        ([f"{OPTIM}.min_lr=0.5"], "actor.optim.min_lr = 0.5 is more than actor.optim.lr = 0.001"),
        (["warmup.optim.min_lr=1"], "warmup.optim.min_lr = 1 is more than warmup.optim.lr = 1e-05"),
        (
            [f"{ACTOR}.clip_ratio_low=0.9", f"{ACTOR}.clip_ratio_high=0.0001"],
            "actor.clip_ratio_low = 0.9 and actor.clip_ratio_high = 0.0001 are more than a factor of 100 apart; they "
            "are distances from a ratio of 1, such as 0.2 and 0.28",
        ),
        (
            [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k1"],
            "actor.kl_loss_type=k1 regularises nothing: the expected gradient of a loss with k1 is zero on-policy; use "
            "k2, k3, or k1+, which has its value and the gradient of k2",
        ),
        (
            [
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.kl_coef=0",
            ],
            "algorithm.kl_ctrl.type=adaptive multiplies algorithm.kl_ctrl.kl_coef step by step, and 0 stays 0; begin "
            "with more, such as 0.001, or set type=fixed",
        ),
        (
            ["trainer.test_freq=1", "data.val_files=[]"],
            "trainer.test_freq = 1 validates on nothing: name held-out files in data.val_files, or set "
            "trainer.test_freq=-1",
        ),
        (
            ["actor_rollout_ref.rollout.stop_token_ids=[18]"],
            "rollout.stop_token_ids: 18 is no token: the model's vocab_size is 18",
        ),
        (["data.seed=9223372036854775808"], "data.seed: input should be less than or equal to 2147483647 (got 92"),
        (
            ["actor_rollout_ref.rollout.max_num_seqs=1e10"],
            "actor_rollout_ref.rollout.max_num_seqs: input should be less",
        ),
        (
            ["actor_rollout_ref.rollout.val_kwargs.n=4"],
            "rollout.val_kwargs.n = 4 greedy responses to a prompt are all the same; set "
            "rollout.val_kwargs.temperature, to 1 say",
        ),
        (["trainer.total_training_steps=1e18"], "trainer.total_training_steps: input should be less than or equal to"),
    ],
)
def test_nonsense_is_refused(check: Callable[..., Inputs], overrides: list[str], said: str) -> None:
    assert refusal(lambda: check(*overrides)).startswith(said)


PREFERENCE = "algorithm.preference"
UNREAD = [
    (
        ["trainer.resume_from_path=runs/x/checkpoints/global_step_4"],
        "trainer.resume_from_path is not read with trainer.resume_mode=auto; set trainer.resume_mode=resume_path, or "
        "leave the path out",
    ),
    (
        ["trainer.resume_mode=resume_path"],
        "trainer.resume_mode=resume_path goes on from no checkpoint: set trainer.res",
    ),
    (
        ["trainer.flow=preference", f"{PREFERENCE}.loss_mode=ipo", f"{PREFERENCE}.label_smoothing=0.1"],
        f"{PREFERENCE}.label_smoothing = 0.1 has no effect with {PREFERENCE}.loss_mode=ipo; leave it out",
    ),
    (
        ["trainer.flow=preference", f"{PREFERENCE}.loss_mode=orpo", f"{PREFERENCE}.sft_coef=0.1"],
        f"{PREFERENCE}.sft_coef = 0.1 has no effect with {PREFERENCE}.loss_mode=orpo; leave it out",
    ),
    (
        ["trainer.flow=preference", f"{PREFERENCE}.desirable_weight=2"],
        f"{PREFERENCE}.desirable_weight = 2.0 has no effect with {PREFERENCE}.loss_mode=dpo; leave it out",
    ),
    (
        ["trainer.flow=kto", f"{PREFERENCE}.loss_mode=simpo"],
        f"{PREFERENCE}.loss_mode = simpo has no effect with trainer.flow=kto; leave it out",
    ),
    (
        ["trainer.flow=reward_model", f"{PREFERENCE}.beta=0.2"],
        f"{PREFERENCE}.beta = 0.2 has no effect with trainer.flow=reward_model; leave it out",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), UNREAD)
def test_what_is_set_and_would_not_be_read_is_refused(
    check: Callable[..., Inputs], overrides: list[str], said: str
) -> None:
    assert refusal(lambda: check(*overrides)).startswith(said)


def test_what_is_switched_off_is_remarked_on(check: Callable[..., Inputs]) -> None:
    off = check(
        "checkpoint.save_contents=[model,optimizer,hf_model]", "trainer.save_freq=0", "warmup.train_files=[x.jsonl]"
    )
    assert off.remarks == (
        "remark: checkpoint.save_contents names hf_model, and trainer.save_freq=0 saves no checkpoints",
        "remark: warmup.train_files are not read: warmup.total_training_steps = 0, so there is no warm-up",
    )


def test_what_is_read_may_be_set(tmp_path: Path) -> None:
    path = str(write_run(tmp_path))
    (tmp_path / "own.py").write_text("def loss(preference): ...\n")
    for overrides in (
        ["trainer.flow=preference", f"{PREFERENCE}.loss_mode=simpo", f"{PREFERENCE}.gamma=1", f"{PREFERENCE}.beta=2"],
        ["trainer.flow=preference", f"{PREFERENCE}.loss_mode={tmp_path}/own.py:loss", f"{PREFERENCE}.gamma=1"],
        ["trainer.flow=kto", f"{PREFERENCE}.desirable_weight=2", f"{PREFERENCE}.label_smoothing=0"],
        ["trainer.flow=sft", "checkpoint.save_contents=[model,optimizer,hf_model]", "trainer.save_freq=-1"],
        [
            "trainer.flow=eval",
            "checkpoint.save_contents=[model,optimizer,hf_model]",
            "trainer.save_freq=0",
            "warmup.train_files=[x.jsonl]",
        ],
        ["actor_rollout_ref.rollout.val_kwargs={n: 4, temperature: 1}"],
    ):
        check_layouts(load_config(path, overrides))


def test_ratios_may_be_small_and_uneven(check: Callable[..., Inputs]) -> None:
    check(f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4")
    check(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k2")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("nope=1", ": Megatron-Core's TransformerConfig has no 'nope'"),
        ("recompute_granularty=full", "'recompute_granularty'; did you mean 'recompute_granularity'?"),
        ("num_layers=7", ".num_layers: the model and the layout decide it; leave it out"),
        ("attention_dropout=hello", ".attention_dropout: the model and the layout decide it; leave it out"),
        ("params_dtype=float16", ".params_dtype: the model and the layout decide it; leave it out"),
        ("num_moe_experts=4", ".num_moe_experts: the model and the layout decide it; leave it out"),
        (
            "expert_model_parallel_size=2",
            ".expert_model_parallel_size: the model and the layout decide it; leave it out",
        ),
        ("deterministic_mode=maybe", ".deterministic_mode: input should be a valid boolean (got 'maybe')"),
        (
            "recompute_granularity=nonsense",
            ".recompute_granularity: input should be 'full' or 'selective' (got 'nonsense')",
        ),
        (
            "recompute_granularity=full",
            " = {'recompute_granularity': 'full'}: Megatron-Core refuses it: Using recompute_",
        ),
    ],
)
def test_fields_of_megatron_that_cannot_be_set(check: Callable[..., Inputs], field: str, said: str) -> None:
    message = refusal(lambda: check(f"{FIELD}.{field}"))
    assert message.startswith("actor.megatron.override_transformer_config") and said in message


def test_grouped_experts_are_refused() -> None:
    """No layer reads the field: it would do nothing."""
    layout = TrainLayout(ranks=range(1))
    settings: dict[str, Any] = {"dtype": torch.float32, "sequence_parallel": False, "recompute": False}
    with pytest.raises(ValueError, match=r"moe_z_loss_coeff: set actor.megatron.moe_z_loss_coeff"):
        check_overrides({"moe_z_loss_coeff": 0.1}, WITH_EXPERTS, layout, **settings)
    with pytest.raises(ValueError, match=r"cp_comm_type: set actor.megatron.cp_comm_type"):
        check_overrides({"cp_comm_type": "p2p"}, WITH_EXPERTS, layout, **settings)
    with pytest.raises(ValueError, match="moe_grouped_gemm: the model and the layout decide it; leave it out"):
        check_overrides({"moe_grouped_gemm": True}, WITH_EXPERTS, layout, **settings)


def test_fields_of_latent_attention_are_decided() -> None:
    """Megatron-Core has them in a class of their own; other models' has none of them."""
    layout = TrainLayout(ranks=range(1))
    settings: dict[str, Any] = {"dtype": torch.float32, "sequence_parallel": False, "recompute": False}
    check_overrides({"persist_layer_norm": True}, LATENT, layout, **settings)
    for field in ("q_lora_rank", "rope_type", "mscale_all_dim", "cache_mla_latents", "qk_layernorm"):
        with pytest.raises(ValueError, match=f"{field}: the model and the layout decide it; leave it out"):
            check_overrides({field: 1}, LATENT, layout, **settings)
    with pytest.raises(ValueError, match="Megatron-Core's TransformerConfig has no 'mscale_all_dim'"):
        check_overrides({"mscale_all_dim": 1.0}, WITH_EXPERTS, layout, **settings)


def test_fields_of_megatron_that_can_be_set(check: Callable[..., Inputs]) -> None:
    fields = "{recompute_granularity: full, recompute_method: block, recompute_num_layers: 1, persist_layer_norm: true}"
    inputs = check(f"{FIELD}={fields}")
    world = SimpleNamespace(device=torch.device("cpu"))
    groups: Any = SimpleNamespace(layout=train_layout(inputs.config), world=world)
    overrides = inputs.config.actor_rollout_ref.actor.megatron.override_transformer_config
    config = transformer_config(inputs.arch, groups, dtype=torch.float32, overrides=overrides)
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == ("full", "block", 1)
    assert config.persist_layer_norm
