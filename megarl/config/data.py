"""Defines the section of data: files, columns, sizes and order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import Section, Size, Whole


class DataConfig(Section):
    """Names the files of prompts and examples and their columns, and sets the batches."""

    format: Literal["auto", "prompts", "demonstrations", "preferences", "judged"] = Field(
        "auto",
        description="content of a row: a prompt to answer, a prompt or conversation with its answer, a chosen and a "
        "rejected answer, or an answer with a label; auto is the format that trainer.flow reads",
    )
    train_files: list[str] = Field(
        default_factory=list,
        description="files of rows, .jsonl, .json, .csv, .parquet or .arrow, or folders of them: paths, globs, or URIs "
        "such as s3://bucket/x.parquet",
    )
    val_files: list[str] = Field(default_factory=list, description="held-out files for validation, in the same form")
    source: str = Field(
        "",
        description="path/to/file.py:function that returns training rows, or a class with __len__ and __getitem__, "
        "instead of train_files; called once, and again when the file or its attribute `version` changes",
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=list,
        description="share of the training prompts drawn from each entry of train_files; default: proportional to its "
        "number of prompts",
    )
    cache_dir: str = Field(
        "",
        description="folder for indexes of large, remote and generated rows, made once per node; default "
        "$XDG_CACHE_HOME/megarl/rows or ~/.cache/megarl/rows",
    )
    prompt_key: str = Field("prompt", description="column with the prompt: text, or a list of chat messages")
    answer_key: str = Field(
        "answer",
        description="column with the reference answer, or its place within a column: reward_model.ground_truth",
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="further arguments of the policy's chat template, such as enable_thinking: false",
    )
    read_special_tokens: bool = Field(
        False,
        description="encode special tokens in the data's texts, such as <|im_end|>, as these tokens, for prompts that "
        "were put into a chat template before; default: as text",
    )
    tools_key: str = Field(
        "tools",
        description="column with a row's tools for the chat template: a list of JSON schemas of functions, or one as "
        "JSON text; empty: no tools",
    )
    source_key: str = Field(
        "data_source", description="column with the name of a row's data source, for metrics and rewards"
    )
    messages_key: str = Field(
        "", description="demonstrations: column with conversations; every turn of the assistant is learnt"
    )
    chosen_key: str = Field("chosen", description="preferences: column with the better answer")
    rejected_key: str = Field("rejected", description="preferences: column with the other answer")
    margin_key: str = Field("", description="preferences: column with how much better the chosen answer is, a number")
    label_key: str = Field("label", description="judged: column with the label, whether the answer is desirable")
    train_batch_size: Size = Field(64, ge=1, description="prompts, examples or pairs per step, over all ranks")
    gen_batch_size: Size | None = Field(
        None, ge=1, description="prompts per draw with algorithm.filter_groups; default train_batch_size"
    )
    max_prompt_length: Whole = Field(512, ge=1, description="tokens; longer prompts follow `truncation`")
    max_response_length: Whole = Field(512, ge=1, description="maximum number of generated tokens")
    filter_overlong_prompts: bool = Field(
        False,
        description="drop rows with prompts over max_prompt_length or answers over max_response_length; training rows "
        "with answers of more than 64 MiB are tokenised when they are drawn then, and passed over where too long",
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="treatment of a prompt over max_prompt_length: the part that is cut, or an error"
    )
    filter: str = Field(
        "", description="path/to/file.py:function(row) -> whether a training prompt is used; default: all"
    )
    drop_duplicates: bool = Field(False, description="drop training prompts that repeat an earlier row's")
    shuffle: bool = Field(True, description="shuffle the training prompts anew every epoch")
    curriculum: str = Field(
        "",
        description="order of an epoch: a column with numbers, whose smallest come first, or "
        "path/to/file.py:function(epoch, rows) -> positions of the rows in the order of the epoch",
    )
    seed: Whole = Field(1, ge=0, description="seed of data order, weight initialisation and sampling")

    @property
    def prompts_per_draw(self) -> int:
        """Count the prompts of one draw, whose responses are generated together."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Return the maximum number of tokens of a prompt and its response together."""
        return self.max_prompt_length + self.max_response_length
