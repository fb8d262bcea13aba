"""Checks the rows: there are enough, and every response to them can be scored."""

from __future__ import annotations

from megarl.config.data import DataConfig
from megarl.data.example_set import ExampleSet
from megarl.data.prompts import PromptSet
from megarl.flow_kinds import flow_kind, generates, trains
from megarl.rewards.parts import refusal_of, scorers_of
from megarl.trainer.inputs import Inputs


def check_rows(inputs: Inputs) -> None:
    """Check that there are enough rows, and that responses to each can be scored: not when it is drawn, hours later."""
    data, warmup = inputs.config.data, inputs.config.warmup
    if trains(inputs.config):
        _at_most("data.train_batch_size", data.train_batch_size, inputs.train_rows, "data.train_files")
        _at_most("data.gen_batch_size", data.prompts_per_draw, inputs.train_rows, "data.train_files")
    if not generates(inputs.config):
        _check_examples(inputs)
    elif warmup.total_training_steps:
        _at_most("warmup.train_batch_size", warmup.train_batch_size, len(inputs.demonstrations), "warmup.train_files")
    if inputs.rewards:
        _check_scoring(inputs)


def _check_scoring(inputs: Inputs) -> None:
    """Check that every row has a part that scores it, and the columns that its parts need."""
    scorers, sources = scorers_of(inputs.rewards), set[str]()
    for prompts in (inputs.train_prompts, inputs.val_prompts):
        if isinstance(prompts, PromptSet) and prompts.checked_for == scorers:  # as they were read
            sources |= prompts.sources
            continue
        for prompt in prompts:
            sources.add(prompt.data_source)
            if wrong := refusal_of(prompt.row, prompt.data_source, scorers):
                raise ValueError(f"{prompt.source}: {wrong}")
    for part in inputs.rewards if trains(inputs.config) else ():  # held-out rows may be of fewer sources
        for source in part.data_sources:
            if source not in sources:
                known = ", ".join([*sorted(sources)[:8], *["..."] * (len(sources) > 8)])
                raise ValueError(
                    f"reward.parts.{part.label}.data_sources: no row has the data source {source!r}; there are {known}"
                )


def _check_examples(inputs: Inputs) -> None:
    """Check that every pair fits into a micro-batch, and that batches are as large as the flow needs."""
    config, actor = inputs.config, inputs.config.actor_rollout_ref.actor
    sets = [rows for rows in (inputs.train_examples, inputs.val_examples) if isinstance(rows, ExampleSet)]
    tokens, together, whose = max((_most_tokens(rows, config.data) for rows in sets), key=lambda most: most[0])
    if actor.use_dynamic_bsz and tokens > actor.most_tokens(actor.megatron):
        raise ValueError(
            f"{whose} {tokens} tokens, more than actor.ppo_max_token_len_per_gpu = {actor.limit(actor.megatron)}, and "
            "its two answers are compared within one micro-batch; raise the key"
        )
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu < together:
        raise ValueError("actor.ppo_micro_batch_size_per_gpu = 1 holds no pair; set it to 2 or more")
    if flow_kind(config).compares_prompts and 1 in (config.data.train_batch_size, len(inputs.val_examples)):
        raise ValueError(
            f"{config.trainer.flow} compares each answer with those to other prompts: data.train_batch_size, and the "
            "rows of data.val_files, must be 2 or more"
        )


def _most_tokens(rows: ExampleSet, data: DataConfig) -> tuple[int, int, str]:
    """Return how many tokens an example has at most, how many sequences it has, and words that say whose they are."""
    if rows.drawn:
        count, both = rows.sequences, "2 x (data.max_prompt_length + data.max_response_length) ="
        return count * data.max_sequence_length, count, f"a pair, tokenised when it is drawn, may have {both}"
    longest = rows.longest
    return longest.tokens, len(longest.sequences), f"{longest.source}: the pair has"


def _at_most(key: str, size: int, there_are: int, files: str) -> None:
    if size > there_are:
        raise ValueError(f"{key} = {size} is more than the {there_are} rows of {files}")
