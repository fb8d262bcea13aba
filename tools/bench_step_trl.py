#!/usr/bin/env python3
"""A whole GRPO step beside one of TRL's GRPOTrainer, on one GPU or the CPU.

    python tools/bench_step_trl.py CONFIG [key=value ...] [--rounds 3] [--vllm] [--json FILE]

First `bench_step.py` runs in a process of its own, then TRL in another: the same shape of the model with random
weights, the same number of random prompts and responses of the same lengths, the same micro-batches, no reference, and
scores that cost nothing. TRL generates with transformers, or with vLLM in its own process (--vllm). It needs
`pip install trl==1.16.0`, which the project does not install.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_step import SETTINGS, WARM_UP
from benchmark import command_line

from megarl.config import Config, ConfigError, load_run_config

TOOLS = Path(__file__).parent


def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help=f"measured steps, after {WARM_UP} that warm up")
    parser.add_argument("--vllm", action="store_true", help="TRL generates with vLLM")
    parser.add_argument("--only-trl", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_run_config(args.config, [*args.overrides, *SETTINGS])
        if config.trainer.world_size != 1:
            raise ValueError("TRL's step is compared on one rank: trainer.nnodes=1 trainer.n_gpus_per_node=1")
    except (ConfigError, ValueError) as e:
        print(f"bench_step_trl: error: {e}", file=sys.stderr)
        return 2
    if args.only_trl:
        Path(args.only_trl).write_text(json.dumps(trl_steps(config, WARM_UP + args.rounds, vllm=args.vllm)))
        return 0
    same = [args.config, *args.overrides, "--rounds", str(args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        ours, peer = os.path.join(folder, "ours"), os.path.join(folder, "peer")
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
        subprocess.run([sys.executable, *launch, TOOLS / "bench_step.py", *same, "--json", ours], check=True)
        more = ["--vllm"] if args.vllm else []
        subprocess.run([sys.executable, __file__, *same, *more, "--only-trl", peer], check=True)
        mine = json.loads(Path(ours).read_text())["phases"]["step"]["seconds"]
        theirs = statistics.median(json.loads(Path(peer).read_text())[WARM_UP:])
    tokens = sequences(config) * length(config)
    print(f"{sequences(config)} sequences of {length(config)} tokens, {config.actor_rollout_ref.model.path}")
    for name, seconds in (("MegaRL", mine), ("TRL", theirs)):
        print(f"{name:8}{seconds:10.2f} s{tokens / seconds:12,.0f} tokens/s")
    print(f"{'':8}{theirs / mine:10.2f} times")
    if args.json:
        Path(args.json).write_text(json.dumps({"seconds": mine, "trl_seconds": theirs, "tokens": tokens}))
    return 0


def sequences(config: Config) -> int:
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def length(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def trl_steps(config: Config, steps: int, *, vllm: bool) -> list[float]:
    """Seconds of TRL's steps: generate, score, and update with as many sequences per micro-batch as ours."""
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    data, ours = config.data, config.actor_rollout_ref
    on_gpu = torch.cuda.is_available()
    model_config = AutoConfig.from_pretrained(ours.model.path)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    most = max(1, min(ours.actor.ppo_max_token_len_per_gpu // length(config), sequences(config)))
    micro = max(count for count in range(1, most + 1) if sequences(config) % count == 0)
    rng = random.Random(0)
    prompts = [
        " ".join(str(rng.randrange(model_config.vocab_size - 2)) for _ in range(data.max_prompt_length))
        for _ in range(data.train_batch_size)
    ]
    ends = list[float]()

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        if vllm:
            model.to(torch.bfloat16).save_pretrained(folder)
            numbers_as_words(model_config.vocab_size).save_pretrained(folder)
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=sequences(config) // micro,
            num_generations=ours.rollout.n,
            max_completion_length=data.max_response_length,
            generation_kwargs={"ignore_eos": True} if vllm else {"min_new_tokens": data.max_response_length},
            beta=0.0,
            learning_rate=1e-6,
            bf16=on_gpu,
            gradient_checkpointing=False,
            use_cpu=not on_gpu,
            use_vllm=vllm,
            vllm_mode="colocate",
            max_steps=steps,
            num_train_epochs=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=folder if vllm else model,
            reward_funcs=lambda completions, **kwargs: [rng.random() for _ in completions],
            args=arguments,
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
            processing_class=numbers_as_words(model_config.vocab_size),
            callbacks=[Clock()],
        )
        trainer.train()
    return [end - begin for begin, end in pairwise(ends)]


def numbers_as_words(vocab_size: int) -> Any:
    """A tokenizer of transformers' whose words are the numbers of tokens, but for the last two."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = "<pad>", "<end>"
    numbers = {str(i): i for i in range(vocab_size - 2)}
    words = Tokenizer(models.WordLevel(numbers | {pad: vocab_size - 2, end: vocab_size - 1}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=pad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
