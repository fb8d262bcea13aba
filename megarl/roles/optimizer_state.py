"""Saves the optimizer's state in model space: per parameter, in the parameter's shape, hence loadable in any layout.

The format is MegaRL's own, because Megatron-Core's formats for the distributed optimizer cannot load torch's AdamW (its
`step` is in no format) and, for parameters whose size is not a multiple of 64, drop elements at the ends of buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megarl.checkpoint.rank_failures import first_of
from megarl.parallel.megatron_internals import copy_main_params_to_model_params, model_param_range
from megarl.parallel.world import World
from megarl.roles.writers import parameters_in

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Holds the part of one parameter's optimizer state that is on this rank.

    Attributes:
        main: fp32 tensor that the inner optimizer steps.
        adam: the inner optimizer.
        start, stop: elements of the flattened model parameter.
    """

    main: Tensor
    adam: Any
    start: int
    stop: int

    def tensors(self) -> dict[str, Tensor]:
        """Return the fp32 weights and Adam's moments, which are made if the optimizer has not stepped yet."""
        state = self.adam.state[self.main]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(self.main, dtype=torch.float32)
        if isinstance(self.adam, torch.optim.Adam):  # with any state it expects all of it
            state.setdefault("step", torch.tensor(0.0))
        return {"main": self.main, **{name: state[name] for name in MOMENTS}}


class Slots:
    """Finds this rank's part of each parameter's state in the optimizer that steps the parameter.

    Args:
        optimizer: Megatron-Core's optimizer: distributed or not, or several chained ones, each of its own parameters.
    """

    def __init__(self, optimizer: Any) -> None:
        self._distributed: dict[Tensor, Any] = {}  # by model parameter: the optimizer that splits its state over ranks
        self._whole: dict[Tensor, Any] = {}  # by fp32 tensor: the inner optimizer that steps it
        for part in _parts(optimizer):
            if hasattr(part, "model_param_group_index_map"):
                self._distributed |= {p: part for buffer in part.buffers for p in buffer.param_index_map}
            else:
                self._whole |= dict.fromkeys(master_weights(part), part.optimizer)

    def of(self, parameter: Tensor) -> Slot | None:
        """Find the slot of a model parameter; None if it is not trained, or other data-parallel ranks have all of its
        state."""
        if not parameter.requires_grad:
            return None
        if (part := self._distributed.get(parameter)) is not None:
            if parameter not in part.model_param_group_index_map:
                return None
            group, order = part.model_param_group_index_map[parameter]
            start, stop = model_param_range(part, parameter)
            return Slot(
                main=part.optimizer.param_groups[group]["params"][order], adam=part.optimizer, start=start, stop=stop
            )
        main = getattr(parameter, "main_param", parameter)
        assert main in self._whole, "no optimizer steps a parameter that is trained: it has no state to save or to load"
        return Slot(main=main, adam=self._whole[main], start=0, stop=parameter.numel())

    def splits(self, parameter: Tensor) -> bool:
        """Tell whether data-parallel ranks split the parameter's state."""
        return parameter in self._distributed


def sharded_optimizer_state(optimizer: Any, weights: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """Describe the state as Megatron-Core's sharded state dict, shaped like the weights, with this rank's part of it.

    The tensors are views of the optimizer's own, which are saved as they are and read into.

    Args:
        optimizer: Megatron-Core's optimizer, distributed or not.
        weights: sharded state dict of the model, spread over replicas to save it.
        loading: set the tensors to 0: nothing is read into rows by which only this layout pads the vocabulary.

    Returns:
        {"step": ..., "state": {index of the weight: {name: {number: sharded tensor, a box of the weight's shape}}}}
    """
    state: dict[int, dict[str, Any]] = {}
    slots = Slots(optimizer)
    for index, weight in enumerate(parameters_in(weights)):
        slot = slots.of(weight.data)
        if slot is None:
            continue
        *model_parallel, replica = weight.replica_id
        described = replace(
            weight,
            data=torch.empty(weight.data.shape, dtype=torch.float32, device="meta"),
            # ranks that split the state are no replicas of one another in it
            replica_id=(*model_parallel, 0 if slots.splits(weight.data) else replica),
            **({"dtype": torch.float32} if hasattr(weight, "dtype") else {}),
        )
        state[index] = {}
        for name, tensor in slot.tensors().items():
            tensor = tensor.detach()
            if loading:
                tensor.zero_()
            boxes = _boxes(described, f"optimizer.{name}.{weight.key}", tensor.view(-1), slot.start)
            state[index][name] = dict(enumerate(boxes))
    return {"step": _step(optimizer), "state": state}


def refuse_nonfinite(optimizer: Any, weights: dict[str, Any], world: World) -> None:
    """Refuse weights or state that are not finite. Raises ValueError on every rank, naming the first such parameter.

    Each rank looks at the part that it steps, with a few kernels for all tensors of a type; it waits for the device
    once.

    Args:
        weights: sharded state dict of the model.
    """
    tensors: dict[torch.dtype, dict[str, Tensor]] = {}
    slots = Slots(optimizer)
    for weight in parameters_in(weights):
        slot = slots.of(weight.data)
        for name, tensor in {"weight": weight.data, **(slot.tensors() if slot is not None else {})}.items():
            if tensor.numel():
                tensors.setdefault(tensor.dtype, {})[f"{weight.key} ({name})"] = tensor.detach()
    largest = [norm for of_type in tensors.values() for norm in torch._foreach_norm([*of_type.values()], math.inf)]
    finite = torch.stack([norm.float() for norm in largest]).isfinite().tolist() if largest else []
    names = [name for of_type in tensors.values() for name in of_type]
    first_here = next((name for name, fine in zip(names, finite, strict=True) if not fine), None)
    if (place := first_of(world, first_here)) is not None:
        raise ValueError(f"{place} is not finite: nothing is saved, and earlier checkpoints stay as they are")


def load_step(optimizer: Any, step: int) -> None:
    """Take over the number of steps; the tensors have been read through `sharded_optimizer_state`."""
    for part in _parts(optimizer):
        adam = part.optimizer
        for group in adam.param_groups:
            if isinstance(adam, torch.optim.Adam):
                for main in group["params"]:
                    adam.state[main]["step"] = torch.tensor(float(step))
            else:  # Transformer Engine's and apex's FusedAdam, which has none before its first step
                group["step"] = step


def master_weights(optimizer: Any) -> Iterator[Tensor]:
    """Yield the fp32 weights that this rank steps; where the model is fp32 they are views of the model's weights."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]


def moments(optimizer: Any) -> Iterator[Tensor]:
    """Yield Adam's moments on this rank; none before the first step."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            yield from (state[name] for name in MOMENTS if name in state)


def clip(optimizer: Any, grad_norm: float) -> None:
    """Scale the gradients down to the norm of the optimizer's `clip_grad`, as Megatron-Core's own step does."""
    for part in _parts(optimizer):
        if part.config.clip_grad > 0 and (parameters := part.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)


def copy_masters_to_weights(optimizer: Any) -> None:
    """Round the fp32 weights into the model's, as a step does; with the distributed optimizer this rank's part only."""
    for part in _parts(optimizer):
        copy_main_params_to_model_params(part)


def _boxes(weight: Any, key: str, flat: Tensor, start: int) -> Iterator[ShardedTensor]:
    """Cut elements of a flattened weight into boxes of the tensors that a checkpoint has of it.

    Args:
        weight: fp32 sharded tensor of the weight without data, or factory of several, each a block of it.
        key: for the boxes; a factory's tensors add to it.
        flat: the elements from `start` on, each box a view of them.
    """
    named = replace(weight, key=key)
    for part in nested_values(named.build()) if isinstance(weight, ShardedTensorFactory) else (named,):
        assert part.data.is_contiguous(), f"{part.key} is no block of its parameter"
        first = part.data.storage_offset()
        begin, end = max(start, first), min(start + flat.numel(), first + part.data.numel())
        at = begin - start
        for offsets, sizes in row_major_boxes(part.local_shape, begin - first, end - first):
            count = math.prod(sizes)
            prepended = part.global_offset[: part.prepend_axis_num]
            within = zip(part.global_offset[part.prepend_axis_num :], offsets, strict=True)
            yield replace(
                part,
                data=flat[at : at + count].view(sizes),
                local_shape=sizes,
                global_offset=(*prepended, *(whole + offset for whole, offset in within)),
                axis_fragmentations=None,  # the boxes have several shapes
            )
            at += count


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes along the axes of a tensor."""


def row_major_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes, in order, that together are elements `start` to `stop` of a tensor in row-major order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # of the whole rows
    if first > last:  # all in one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for offsets, sizes in row_major_boxes(shape[1:], start - before, stop - before):
        yield (row, *offsets), (1, *sizes)


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _step(optimizer: Any) -> int:
    """Count the optimizer steps so far, the same for all parameters."""
    for part in _parts(optimizer):
        adam = part.optimizer
        for group in adam.param_groups:
            if "step" in group:
                return int(group["step"])
            for main in group["params"]:
                if "step" in adam.state[main]:
                    return int(adam.state[main]["step"])
    return 0
