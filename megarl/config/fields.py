"""Defines the types of configuration values, and the base class of all sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from megarl.hub import folder_of

KlPenalty = Literal["k1", "abs", "k2", "k3"]
KlLoss = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
NonEmpty = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(le=2**31 - 1)]
"""A number of steps or tokens, or a seed: it fits into int32, in which some of them are counted."""
Size = Annotated[int, Field(le=2**20)]
"""A number of ranks, sequences or rows that are held at the same time; each takes memory."""
Identity = Literal["model", "tokenizer", "data", "warmup", "seed", "batch", "algorithm", "reward", "roles", "flow"]
"""Parts of a run that a checkpoint records. A run that resumes from it must have the same."""


class Section(BaseModel):
    """Holds a frozen group of keys. An undeclared key is an error, and so are infinity and NaN.

    A single text is accepted for a list of texts: `data.train_files=train.jsonl`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _list_one_text(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        single = {
            name: [value]
            for name, value in values.items()
            if value and isinstance(value, str) and name in cls.model_fields and _lists_texts(cls.model_fields[name])
        }
        return {**values, **single}


class ModelFiles(Section):
    """Names the files of a model. A Hub's model, once it is in the cache, has its commit in its name."""

    path: str = Field(
        "",
        description="directory with a Hugging Face config.json, and weights in safetensors files; or a model of the "
        "Hub, such as Qwen/Qwen2.5-0.5B, with @ and a branch, tag or commit",
    )
    tokenizer_path: str = Field(
        "", description="tokenizer directory, SentencePiece .model file, or model of the Hub; default: path"
    )

    @property
    def folder(self) -> str:
        """Return the directory that `path` stands for."""
        return folder_of(self.path)

    @property
    def tokenizer(self) -> str:
        """Return the directory or file with the tokenizer."""
        return folder_of(self.tokenizer_path or self.path)


def _lists_texts(field: FieldInfo) -> bool:
    if get_origin(field.annotation) is not list:
        return False
    (item,) = get_args(field.annotation)
    item = get_args(item)[0] if get_origin(item) is Annotated else item
    return item is str or get_origin(item) is Literal
