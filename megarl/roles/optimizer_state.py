"""The optimizer's state in model space: per parameter, in the parameter's own shape, hence loadable in any layout.

MegaRL's own, because Megatron-Core's formats for the distributed optimizer cannot load torch's AdamW (its `step` is
in no format) and, for parameters whose size is not a multiple of 64, drop elements at the ends of buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megarl.checkpoint.agreement import first_of
from megarl.parallel.megatron_internals import copy_main_params_to_model_params, model_param_range
from megarl.parallel.world import World
from megarl.roles.writers import parameters_in

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """This rank's part of one parameter's optimizer state.

    Attributes:
        main: the fp32 tensor that the inner optimizer steps.
        adam: that inner optimizer.
        start, stop: which elements of the flattened model parameter it is.
    """

    main: Tensor
    adam: Any
    start: int
    stop: int

    def tensors(self) -> dict[str, Tensor]:
        """The fp32 weights and Adam's moments, made if the optimizer has not stepped yet."""
        state = self.adam.state[self.main]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(self.main, dtype=torch.float32)
        if isinstance(self.adam, torch.optim.Adam):  # with any state it expects all of it
            state.setdefault("step", torch.tensor(0.0))
        return {"main": self.main, **{name: state[name] for name in MOMENTS}}


def sharded_optimizer_state(
    optimizer: Any, weights: dict[str, Any], data_parallel: dist.ProcessGroup | None, *, loading: bool
) -> dict[str, Any]:
    """The state as Megatron-Core's sharded state dict, shaped like the weights.

    To save it, each parameter's state lies on the host of the rank that writes it, and nowhere else; where one rank
    has all of it, the optimizer's own tensors are given. To load, it is on the host: a GPU has room for its own part.

    Args:
        optimizer: Megatron-Core's optimizer, distributed or not.
        weights: sharded state dict of the model.
        data_parallel: the ranks over which the optimizer splits its state, if it does; all of them call.
        loading: leave the tensors empty, to be read into.

    Returns:
        {"step": ..., "state": {index of the weight: {name: sharded tensor of the weight's shape}}}
    """
    state: dict[int, dict[str, Any]] = {}
    for index, weight in enumerate(parameters_in(weights)):
        slot = _slot(optimizer, weight.data)
        state[index] = {}
        for name in ("main", *MOMENTS):
            if loading:
                # zeros, not empty: nothing is read into rows by which only this layout pads the vocabulary
                whole = torch.zeros(weight.data.shape, dtype=torch.float32)
            else:
                whole = _gather(name, slot, weight, data_parallel)
            key = f"optimizer.{name}.{weight.key}"
            state[index][name] = replace(weight, key=key, data=whole, **_fp32(weight))
    return {"step": _step(optimizer), "state": state}


def refuse_nonfinite(optimizer: Any, weights: dict[str, Any], world: World) -> None:
    """Raises ValueError on every rank alike, naming the first parameter whose weight or state is not finite anywhere.

    Each rank looks at what it steps: one reduction per tensor, and the device is waited for once.

    Args:
        weights: sharded state dict of the model.
    """
    names, extremes = [], []
    for weight in parameters_in(weights):
        slot = _slot(optimizer, weight.data)
        for name, tensor in {"weight": weight.data, **(slot.tensors() if slot is not None else {})}.items():
            if tensor.numel():
                names.append(f"{weight.key} ({name})")
                extremes.append(torch.stack(tensor.detach().aminmax()).float())
    finite = torch.stack(extremes).isfinite().all(1).tolist() if extremes else []
    mine = next((name for name, fine in zip(names, finite, strict=True) if not fine), None)
    if (found := first_of(world, mine)) is not None:
        raise ValueError(f"{found} is not finite: nothing is saved, and earlier checkpoints stay as they are")


def load_optimizer_state(optimizer: Any, weights: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Take over what was read through `sharded_optimizer_state`."""
    with torch.no_grad():
        for index, weight in enumerate(parameters_in(weights)):
            slot = _slot(optimizer, weight.data)
            if slot is not None:
                for name, tensor in slot.tensors().items():
                    whole = loaded["state"][index][name].flatten()
                    tensor.copy_(whole[slot.start : slot.stop].view_as(tensor))
    for adam in _inner(optimizer):
        for group in adam.param_groups:
            if isinstance(adam, torch.optim.Adam):
                for main in group["params"]:
                    adam.state[main]["step"] = torch.tensor(float(loaded["step"]))
            else:  # Transformer Engine's and apex's FusedAdam, which has none before its first step
                group["step"] = loaded["step"]


def master_weights(optimizer: Any) -> Iterator[Tensor]:
    """The fp32 weights that this rank steps; where the model is fp32 they are views of the model's."""
    for adam in _inner(optimizer):
        for group in adam.param_groups:
            yield from group["params"]


def moments(optimizer: Any) -> Iterator[Tensor]:
    """Adam's moments on this rank; none before the first step."""
    for adam in _inner(optimizer):
        for state in adam.state.values():
            yield from (state[name] for name in MOMENTS if name in state)


def clip(optimizer: Any, grad_norm: float) -> None:
    """Scale the gradients down to the norm of the optimizer's `clip_grad`, as Megatron-Core's own step does."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.config.clip_grad > 0 and (parameters := part.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)


def copy_masters_to_weights(optimizer: Any) -> None:
    """Round the fp32 weights into the model's, as a step does; with the distributed optimizer this rank's part only."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        copy_main_params_to_model_params(part)


def _gather(name: str, slot: Slot | None, weight: Any, data_parallel: dist.ProcessGroup | None) -> Tensor:
    """Put the parts of all data-parallel ranks together; they do not overlap, so adding them rounds nothing.

    Returns:
        the whole on the rank that will write it; its shape alone on the others.
    """
    nothing = torch.zeros(()).expand(weight.data.shape)
    *model_parallel, replica = weight.replica_id
    if any(model_parallel):  # ranks of another model-parallel index write it
        return nothing
    if data_parallel is None or data_parallel.size() == 1:
        assert slot is not None
        return slot.tensors()[name].detach().view(weight.data.shape) if replica == 0 else nothing
    writer = (data_parallel.rank() - replica) % data_parallel.size()
    whole = torch.zeros_like(weight.data, dtype=torch.float32)
    if slot is not None:
        whole.view(-1)[slot.start : slot.stop] = slot.tensors()[name].detach().flatten()
    dist.reduce(whole, group=data_parallel, group_dst=writer)
    return whole.cpu() if replica == 0 else nothing


def _slot(optimizer: Any, parameter: Tensor) -> Slot | None:
    """Where this rank keeps its part of a parameter's state; None if it has no part."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "model_param_group_index_map"):  # the distributed optimizer
            if parameter in part.model_param_group_index_map:
                group, order = part.model_param_group_index_map[parameter]
                start, stop = model_param_range(part, parameter)
                main = part.optimizer.param_groups[group]["params"][order]
                return Slot(main=main, adam=part.optimizer, start=start, stop=stop)
        else:
            main = getattr(parameter, "main_param", parameter)
            return Slot(main=main, adam=part.optimizer, start=0, stop=parameter.numel())
    return None


def _fp32(weight: Any) -> dict[str, Any]:
    """A sharded tensor names its dtype, a factory takes that of its data."""
    return {"dtype": torch.float32} if hasattr(weight, "dtype") else {}


def _inner(optimizer: Any) -> list[Any]:
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def _step(optimizer: Any) -> int:
    """Optimizer steps taken so far, the same for all parameters."""
    for adam in _inner(optimizer):
        for group in adam.param_groups:
            if "step" in group:
                return int(group["step"])
            for main in group["params"]:
                if "step" in adam.state[main]:
                    return int(adam.state[main]["step"])
    return 0
