"""Exports are read as they were trained, by transformers, peft, lm-eval and vLLM."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from huggingface_cases import write_folder
from ranks import Ranks
from test_generate_command import answered
from test_vllm_engine import needs_vllm
from tiny_families import CONFIGS
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from megarl.checkpoint.exported_files import export_model_files
from megarl.checkpoint.verify import compare_answers, megatron_model
from megarl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_place
from megarl.data.tokenizer_sentencepiece_export import _model_proto
from megarl.models.families import read_architecture
from tools.convert import main
from tools.prepare_reasoning_gym import train_tokenizer

CORPUS = [
    *("the quick brown fox jumps over the lazy dog", "  two  blanks  ", "Grüße aus Köln ①", "3 + 5 = 8\n"),
    *("a line\nand another\n\n", "def f(x):\n    return x + 1\n", "< / > [ ] # = 0 1 2 3 4 5 6 7 8 9"),
]
TEXTS = [
    "3 + 5 = ",
    "",
    " ",
    "  a  ",
    "a</s>b",
    "<unk>",
    "<pad> </s >",
    "🙂a🙂🙂",
    "x\n\n\ty",
    "Grüße e\u0301 ﬁ ①",
    "▁▁a ▁",
]


def sentencepiece_model(**options: Any) -> Callable[[Path], None]:
    """Writes a `tokenizer.model` of at most 61 tokens into a folder."""

    def write(folder: Path) -> None:
        model = io.BytesIO()
        ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": 3}
        settings = {"vocab_size": 61, "hard_vocab_limit": False, "character_coverage": 0.98, **ids, **options}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=model, minloglevel=2, num_threads=1, **settings
        )
        (folder / "tokenizer.model").write_bytes(model.getvalue())

    return write


def as_the_quickstart(folder: Path) -> None:
    train_tokenizer(folder / "tokenizer.model", ["1 + 2 + 3 =", "456789 0", "- 6"], vocab_size=32)


def byte_level(folder: Path) -> None:
    """A tokenizer.json of bytes with the tokens of a chat and a template, which puts a token before every text."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=ALPHABET))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|im_end|>")
    begin = ("<|begin|>", fast.bos_token_id)
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    fast.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}assistant:"
    fast.save_pretrained(folder)


ALPHABET = pre_tokenizers.ByteLevel.alphabet()
KINDS: dict[str, Callable[[Path], None]] = {
    "quickstart": as_the_quickstart,
    "unigram": sentencepiece_model(model_type="unigram", byte_fallback=False),
    "bpe": sentencepiece_model(model_type="bpe", vocab_size=330, byte_fallback=True),
    "char": sentencepiece_model(model_type="char", add_dummy_prefix=False),
    "byte_level": byte_level,
}


def model_folder(folder: Path, family: str, kind: str, **config: Any) -> Path:
    """A tiny model with as many tokens as its tokenizer may need, and the tokenizer."""
    write_folder(folder, family, vocab_size=400, **config)
    KINDS[kind](folder)
    return folder


def assert_read_alike(ours: Tokenizer, folder: Path, texts: list[str]) -> None:
    """Ids, texts and special tokens, in transformers' own words."""
    theirs = AutoTokenizer.from_pretrained(tokenizer_place(str(folder)))
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text


@pytest.mark.parametrize("kind", ["quickstart", "unigram", "bpe", "char"])
def test_sentencepiece_is_read_alike(tmp_path: Path, kind: str) -> None:
    """Spelt control symbols included; and `config.json` names the tokens, where the family would have its own."""
    source, target = model_folder(tmp_path / "source", "llama", kind), tmp_path / "target"
    target.mkdir()
    assert export_model_files(str(source), str(source), str(target), dtype="float32") == []
    ours = load_tokenizer(str(source))
    assert_read_alike(ours, target, TEXTS)
    for config in (
        json.loads((target / "config.json").read_text()),
        GenerationConfig.from_pretrained(target).to_dict(),
    ):
        found = [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")]
        assert found == [ours.bos_id, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_every_option_of_sentencepiece(tmp_path: Path, model_type: str, rule: str) -> None:
    rng = random.Random(0)
    alphabet = "abe\n 12+=<>/s🙂ä▁"
    texts = [*TEXTS, *("".join(rng.choices(alphabet, k=rng.randint(1, 12))) for _ in range(300))]
    for case in range(16):
        dummy, blanks, fallback, user = (bool(case >> bit & 1) for bit in range(4))
        source, target = tmp_path / f"source{case}", tmp_path / f"target{case}"
        target.mkdir()
        write_folder(source, "qwen2")
        sentencepiece_model(
            model_type=model_type,
            vocab_size=400,
            normalization_rule_name=rule,
            add_dummy_prefix=dummy,
            remove_extra_whitespaces=blanks,
            byte_fallback=fallback and model_type != "char",
            user_defined_symbols=["<sep>", "🙂"] if user else [],
        )(source)
        export_model_files(str(source), str(source), str(target), dtype="float32")
        assert_read_alike(load_tokenizer(str(source)), target, [*texts, "<sep>a<sep> b"])


def greedy(folder: Path, prompt: str, length: int) -> tuple[list[int], str]:
    """The answer of transformers by the folder alone: token ids, the end token among them, and text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_place(str(folder)))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=length, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return answer.tolist(), tokenizer.decode(answer, skip_special_tokens=True)


def exported(folder: Path, family: str, kind: str, **config: Any) -> tuple[Path, Path]:
    """A checkpoint of a tiny model and what `megarl convert` makes of it."""
    source = model_folder(folder / "source", family, kind, **config)
    assert main(["hf-to-megatron", str(source), str(folder / "checkpoint")]) == 0
    assert main(["megatron-to-hf", str(folder / "checkpoint"), str(folder / "exported")]) == 0
    return folder / "checkpoint", folder / "exported"


FAMILY_AND_KIND = [
    (family, list(KINDS)[i % len(KINDS)] if one else kind)
    for i, family in enumerate(CONFIGS)
    for kind, one in ([(kind, False) for kind in KINDS] if family in ("llama", "mistral", "qwen2") else [("", True)])
]
"""Every kind for families whose own tokenizers are of several, and one elsewhere."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), FAMILY_AND_KIND)
def test_transformers_answers_as_megarl_generate(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, kind: str
) -> None:
    checkpoint, folder = exported(tmp_path, family, kind)
    said = capsys.readouterr().out
    assert "compared: 4 greedy answers are the same in transformers" in said
    assert ("add_special_tokens=false" in said) == (kind == "byte_level")
    (tmp_path / "prompts.txt").write_text("3 + 5 =\n the  quick fox\n")
    asked = [str(checkpoint), "--prompts", str(tmp_path / "prompts.txt"), "--raw", "--max-tokens", "9"]
    out, _ = ranks.run(1, answered, asked, ["actor_rollout_ref.model.dtype=float32"])[0]
    for line in out.splitlines():
        row = json.loads(line)
        ids, text = greedy(folder, row["prompt"], 9)
        assert len(ids) == row["tokens"]
        if "\ufffd" not in text:  # of a run of bytes that is no text transformers loses the letters, too
            assert text == row["response"]
    if kind != "byte_level":
        assert_read_alike(load_tokenizer(str(tmp_path / "source")), folder, TEXTS)


def test_other_weights_are_said(tmp_path: Path) -> None:
    """Both answers are named."""
    folders = [write_folder(tmp_path / name, "qwen2", seed=seed) for name, seed in (("one", 1), ("other", 2))]
    assert main(["hf-to-megatron", str(folders[1]), str(tmp_path / "checkpoint")]) == 0
    arch = read_architecture(str(folders[0]))
    with pytest.raises(ValueError, match=r"transformers answers 'x' with the ids \[.*\], the checkpoint with \[.*\]$"):
        compare_answers(str(folders[0]), str(tmp_path / "checkpoint"), arch, {"x": [3, 4]}, [])


def test_a_tokenizer_that_transformers_reads_as_the_familys_is_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the quickstart's: beside a config.json of qwen2 every tokenizer is Qwen2's. Both lists of ids are named."""
    checkpoint, folder = exported(tmp_path, "qwen2", "quickstart")
    said = capsys.readouterr().out
    assert "transformers reads 'a' as [], training as [2]; it is in tokenizer/: give that folder to Auto" in said
    with pytest.raises((KeyError, ValueError)):
        AutoTokenizer.from_pretrained(folder)
    assert_read_alike(load_tokenizer(str(checkpoint)), folder, TEXTS)
    assert main(["hf-to-megatron", str(folder), str(tmp_path / "again")]) == 0
    assert load_tokenizer(str(tmp_path / "again")).encode("1 + 2") == load_tokenizer(str(folder)).encode("1 + 2")


def test_a_protobuf_that_is_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries pin one; nothing else of a run needs it."""
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    monkeypatch.delattr("sentencepiece.sentencepiece_model_pb2", raising=False)
    with pytest.raises(
        ValueError, match=r"^the SentencePiece model cannot be read with the protobuf that is installed"
    ):
        _model_proto()


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of whole words, which no tokenizer.json has."""
    source = write_folder(tmp_path / "source", "llama", vocab_size=400)
    sentencepiece_model(model_type="word")(source)
    assert main(["hf-to-megatron", str(source), str(tmp_path / "checkpoint")]) == 0
    capsys.readouterr()
    assert main(["megatron-to-hf", str(tmp_path / "checkpoint"), str(tmp_path / "exported")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "SentencePiece model splits text into whole words, as no tokenizer.json does" in said
    assert not list(tmp_path.glob("*exported*"))


@pytest.mark.slow
def test_peft_trains_on_an_export(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="launch/requirements-exports.txt is not installed")
    _, folder = exported(tmp_path, "llama", "quickstart")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    batch = AutoTokenizer.from_pretrained(folder)("1 + 2 + 3 = 6", return_tensors="pt")
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[1] < losses[0]


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: ["5", "6", "7 8"]
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
def test_lm_eval_scores_as_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice's log-probability, and the share of right ones, from a task in a local file."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval", reason="launch/requirements-exports.txt is not installed")
    from lm_eval.tasks import TaskManager

    checkpoint, folder = exported(tmp_path, "qwen3", "quickstart")
    rows: list[dict[str, Any]] = [
        {"prompt": f"{a} + {b} =", "label": (a + b) % 3} for a in range(1, 5) for b in range(1, 5)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=["sums"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    tokenizer, right = load_tokenizer(str(tmp_path / "source")), []
    with torch.no_grad(), megatron_model(str(checkpoint), read_architecture(str(checkpoint))) as log_probs:
        for row, sample in zip(rows, sorted(result["samples"]["sums"], key=lambda x: x["doc_id"]), strict=True):
            scores = []
            for choice in (" 5", " 6", " 7 8"):
                ids, begin = tokenizer.encode(row["prompt"] + choice), len(tokenizer.encode(row["prompt"]))
                of_ids = log_probs(torch.tensor(ids[:-1])).gather(1, torch.tensor(ids[1:])[:, None])
                scores.append(float(of_ids[begin - 1 :].sum()))
            theirs = [float(answer[0][0]) for answer in sample["resps"]]
            assert theirs == pytest.approx(scores, abs=1e-4)
            right.append(scores.index(max(scores)) == row["label"])
    assert result["results"]["sums"]["acc,none"] == pytest.approx(sum(right) / len(right))


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, kv_cache_memory_bytes=2**26, enforce_eager=True)
    for made in llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=9)):
        print("made", json.dumps([made.prompt_token_ids, list(made.outputs[0].token_ids)]))
"""


@needs_vllm
@pytest.mark.parametrize("kind", ["quickstart", "bpe"])
def test_vllm_answers_as_transformers(tmp_path: Path, kind: str) -> None:
    """Its attention on CPUs has no heads below 32."""
    size = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    checkpoint, folder = exported(tmp_path, "llama", kind, **size)
    prompts, ours = ["3 + 5 =", " 1  + 2"], load_tokenizer(str(checkpoint))
    done = subprocess.run(
        [sys.executable, "-c", VLLM, str(folder), json.dumps(prompts)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("made ")]
    assert [ids for ids, _ in made] == [ours.encode(prompt) for prompt in prompts]
    assert [answer for _, answer in made] == [greedy(folder, prompt, 9)[0] for prompt in prompts]
