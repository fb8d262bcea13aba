"""Parts of a layer that are computed again in backward: the same numbers, and of them nothing is kept."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ranks import Ranks
from selection import quick
from tiny_run import write_run
from training_cases import ARCH, NORMS_BEHIND, SOME_WITH_EXPERTS, WITH_EXPERTS, Case, actor_in, fixed_batch, train

from megarl.config import load_config
from megarl.models.architecture import Architecture
from megarl.models.parts.swiglu import SwiGLU
from megarl.trainer.admission.checks import check_run


def _model(*modules: str) -> dict[str, Any]:
    return {"model": {"dtype": "float32", "recompute_modules": list(modules)}}


LOSSES = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
CASES: list[tuple[dict[str, Any], tuple[str, ...], Architecture]] = [
    (dict(tp=2, sequence_parallel=True), ("mlp",), ARCH),
    (dict(dp=2, ep=2), ("moe",), WITH_EXPERTS),
    (dict(pp=2, dp=2, chunks=2), ("mlp", "moe"), SOME_WITH_EXPERTS),
    (dict(cp=2), ("mlp",), NORMS_BEHIND),
    (dict(tp=2, ep=2, etp=1, sequence_parallel=True), ("moe",), SOME_WITH_EXPERTS),
]


@pytest.mark.parametrize(("layout", "modules", "arch"), quick(CASES, 0), ids=str)
def test_the_same_bits(ranks: Ranks, layout: dict[str, Any], modules: tuple[str, ...], arch: Architecture) -> None:
    losses = {"actor": {"megatron": LOSSES | {"sequence_parallel": "sequence_parallel" in layout}}} if arch.moe else {}
    for mode in ("policy", "supervised"):
        kept, again = (
            ranks.run(case.world, train, case, 3, mode, arch)
            for case in (Case(**layout, config=_model(*some) | losses) for some in ((), modules))
        )
        assert again == kept


class _Saved:
    """A tensor that is kept for the backward pass; `most` are the bytes of all of them at once."""

    kept: ClassVar[Counter[int]] = Counter()
    bytes: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def __init__(self, x: torch.Tensor) -> None:
        self.tensor, storage = x, x.untyped_storage()
        self._place, self._nbytes = storage.data_ptr(), storage.nbytes()
        if not _Saved.kept[self._place]:
            _Saved.bytes += self._nbytes
        _Saved.kept[self._place] += 1
        _Saved.most = max(_Saved.most, _Saved.bytes)

    def __del__(self) -> None:
        _Saved.kept[self._place] -= 1
        if not _Saved.kept[self._place]:
            _Saved.bytes -= self._nbytes


def _most_kept(*modules: str) -> float:
    """Bytes per token that an update keeps at its peak."""
    from megarl.algorithms.cross_entropy import cross_entropy

    with actor_in(Case(config=_model(*modules))) as actor:
        batch = fixed_batch()
        plan = actor.plan(batch)
        _Saved.most = _Saved.bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(_Saved, lambda saved: saved.tensor):
            actor.update(batch, plan.mini_batches[0], cross_entropy)
        assert len(plan.micro_batches) == 1
    return _Saved.most / int(batch.lengths.sum())


def _with_and_without() -> tuple[float, float]:
    return _most_kept(), _most_kept("mlp")


def test_of_an_mlp_nothing_is_kept_but_in_the_layer_at_work(ranks: Ranks) -> None:
    ((everything, without),) = ranks.run(1, _with_and_without)
    mlp = ARCH.layer(0).mlp
    assert isinstance(mlp, SwiGLU)
    fused, in_parts = (4 * number * mlp.ffn_hidden_size for number in (3, 4))  # torch's keep the activated gate, too
    assert (ARCH.num_layers - 1.5) * fused < everything - without < (ARCH.num_layers + 0.5) * in_parts


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"recompute_modules": ["moe"]},
            "model.recompute_modules: no layer of the model has experts; leave moe out",
        ),
        (
            {"recompute_modules": ["mlp"], "enable_gradient_checkpointing": True},
            "model.recompute_modules: model.enable_gradient_checkpointing recomputes all of a layer; leave either out",
        ),
    ],
    ids=["experts", "all"],
)
def test_what_there_is_not_is_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    model = {f"actor_rollout_ref__model__{name}": value for name, value in keys.items()}
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        check_run(load_config(str(write_run(tmp_path, **model))))
