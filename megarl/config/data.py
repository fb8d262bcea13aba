"""What is trained on: files, columns, sizes and order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import Section, Size, Whole


class Data(Section):
    """Where prompts and examples come from and how they are batched."""

    format: Literal["auto", "prompts", "demonstrations", "preferences", "judged"] = Field(
        "auto",
        description="what a row is: a prompt to answer, a prompt or conversation with its answer, a chosen and a "
        "rejected answer, or an answer with a label; auto is what trainer.flow reads",
    )
    train_files: list[str] = Field(
        default_factory=list,
        description="files of rows, .jsonl, .json, .csv, .parquet or .arrow, or folders of them: paths, globs, or URIs "
        "such as s3://bucket/x.parquet",
    )
    val_files: list[str] = Field(default_factory=list, description="held-out files for validation, the same way")
    source: str = Field(
        "",
        description="path/to/file.py:function that returns training rows, or a class with __len__ and __getitem__, "
        "instead of train_files; asked once, and again when the file or its attribute `version` changes",
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=list,
        description="share of the training prompts drawn from each entry of train_files; default: as many as it has",
    )
    cache_dir: str = Field(
        "",
        description="where large, remote and generated rows are indexed once per node; default "
        "$XDG_CACHE_HOME/megarl/rows or ~/.cache/megarl/rows",
    )
    prompt_key: str = Field("prompt", description="column with the prompt: text, or a list of chat messages")
    answer_key: str = Field(
        "answer", description="column with the reference answer, or its place in one: reward_model.ground_truth"
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="what the policy's chat template is told beside the messages, such as enable_thinking: false",
    )
    read_special_tokens: bool = Field(
        False,
        description="special tokens that texts of the data spell, such as <|im_end|>, become these tokens, as in "
        "prompts that were put into a chat template before; default: they stay text",
    )
    tools_key: str = Field(
        "tools",
        description="column with the tools that a row offers, which go into the chat template: a list of JSON schemas "
        "of functions, or one as JSON text; empty: the template is told of none",
    )
    source_key: str = Field(
        "data_source", description="column that names where a row comes from, for metrics and rewards"
    )
    messages_key: str = Field(
        "", description="demonstrations: column with conversations, of which every turn of the assistant is learnt"
    )
    chosen_key: str = Field("chosen", description="preferences: column with the better answer")
    rejected_key: str = Field("rejected", description="preferences: column with the other answer")
    margin_key: str = Field("", description="preferences: column with how much better the chosen answer is, a number")
    label_key: str = Field("label", description="judged: column that says whether the answer is desirable")
    train_batch_size: Size = Field(64, ge=1, description="prompts, examples or pairs per step, over all ranks")
    gen_batch_size: Size | None = Field(
        None, ge=1, description="prompts per draw with algorithm.filter_groups; default train_batch_size"
    )
    max_prompt_length: Whole = Field(512, ge=1, description="tokens; longer prompts follow `truncation`")
    max_response_length: Whole = Field(512, ge=1, description="tokens generated at most")
    filter_overlong_prompts: bool = Field(
        False, description="drop prompts over max_prompt_length, and answers over max_response_length, instead"
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="what happens to a prompt over max_prompt_length: which part is cut, or an error"
    )
    filter: str = Field(
        "", description="path/to/file.py:function(row) -> whether a training prompt is used; default: all"
    )
    drop_duplicates: bool = Field(False, description="drop training prompts that an earlier row has too")
    shuffle: bool = Field(True, description="a new order of the training prompts every epoch")
    curriculum: str = Field(
        "",
        description="order of an epoch: a column with numbers to begin with the smallest of, or "
        "path/to/file.py:function(epoch, rows) -> positions of the rows in the order to draw them in",
    )
    seed: Whole = Field(1, ge=0, description="seeds data order, weight initialisation and sampling")

    @property
    def prompts_per_draw(self) -> int:
        """Prompts that responses are generated to at a time."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.max_prompt_length + self.max_response_length
