"""Lets users' functions change a batch, and checks what they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from megarl.own_code import OwnCodeError, form_of, torch_as_before
from megarl.types import Batch
from megarl.types.batch import SequenceTable, TokenShard

_OWN_COLUMNS = ("sequence_columns", "token_columns")


def changed_by(change: Callable[[Batch], Any], batch: Batch, name: str, *, compare: bool = False) -> Batch:
    """Let a user's function change a batch, all of whose tokens every rank gives it; every rank calls this.

    Args:
        name: of the function, in messages.
        compare: whether the ranks compare what it returned, before each keeps its own tokens of that.

    Raises:
        OwnCodeError: it returned no batch of the same sequences, or another batch than on the first rank.
    """

    def checked(whole: Batch) -> Batch:
        with torch_as_before():
            returned = change(whole)
        result = checked_batch(returned, whole, name)
        if compare and batch.owners is not None:
            ranks = batch.owners.ranks
            checksums = torch.zeros(ranks.size, dtype=torch.int64)
            checksums[ranks.rank] = _checksum(result)
            ranks.sum_(checksums, f"what {name} returned on each rank")
            others = (checksums != checksums[0]).nonzero().flatten().tolist()
            if others:
                raise OwnCodeError(
                    f"{name} returned other values on rank {others[0]} than on rank 0: they must be the same on every "
                    f"rank; seed what it draws at random with the step, say",
                    everywhere=True,
                )
        return result

    return batch.changed_as_a_whole(checked)


def checked_batch(returned: Any, before: Batch, name: str) -> Batch:
    """Return the batch that a user's function made of another one, with numbers of the types that a batch has.

    Raises:
        OwnCodeError: it is no batch of the same sequences, or a column has gone or is none.
    """
    rule = f"{name} must return the batch that it is given, with columns changed or added"
    if not isinstance(returned, Batch):
        raise OwnCodeError(f"{rule}; it returned {form_of(returned)}")
    if not torch.equal(returned.cu_seqlens, before.cu_seqlens):
        raise OwnCodeError(f"{rule}; it returned {len(returned)} other sequences for {len(before)}")
    earlier, columns = _filled(before), _filled(returned)
    if missing := sorted(earlier.keys() - columns.keys()):
        raise OwnCodeError(f"{rule}; it returned one without {', '.join(missing)}")
    of_sequences = {f.name for f in fields(SequenceTable)} | returned.sequence_columns.keys()
    for label, column in columns.items():
        length = len(before) if label in of_sequences else len(before.tokens)
        shape = earlier[label].shape if label in earlier else (length,)
        if not isinstance(column, Tensor) or column.shape != shape:
            raise OwnCodeError(f"{rule}; its {label} must be a tensor {list(shape)}, not {form_of(column)}")
    converted = {label: _as_in_a_batch(column, earlier.get(label)) for label, column in columns.items()}
    tables = {table: {label: converted.pop(label) for label in getattr(returned, table)} for table in _OWN_COLUMNS}
    changes = {label: column for label, column in converted.items() if column is not columns[label]}
    return returned.with_(**changes, **tables)


def _as_in_a_batch(column: Tensor, before: Tensor | None) -> Tensor:
    """Put a column on the host, without a gradient, in the type that it had; new ones in float32 if they are not
    whole numbers."""
    dtype = before.dtype if before is not None else torch.float32 if column.is_floating_point() else column.dtype
    return (column.detach() if column.requires_grad else column).to("cpu", dtype)


def _filled(batch: Batch) -> dict[str, Any]:
    """List the filled columns of a batch by name, those of a user's own among them."""
    names = [f.name for table in (SequenceTable, TokenShard) for f in fields(table)]
    columns = {name: getattr(batch, name) for name in names if name not in ("cu_seqlens", *_OWN_COLUMNS)}
    return {k: x for k, x in {**columns, **batch.sequence_columns, **batch.token_columns}.items() if x is not None}


def _checksum(batch: Batch) -> int:
    total = 0
    for name, column in sorted(_filled(batch).items()):
        total = crc32(column.contiguous().view(torch.uint8).numpy(), crc32(name.encode(), total))
    return total
