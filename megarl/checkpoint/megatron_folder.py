"""Writes and reads a Megatron-Core `dist_checkpointing` folder in one process, parameter by parameter.

`dist_checkpointing.save` and `load` need a whole state dict. Their format is that of `torch.distributed.checkpoint`,
whose storage writer asks for one tensor at a time, and whose reader reads one at a time. Keys, shapes and offsets
come from the sharded state dict of a Megatron-Core model on the meta device.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType

from megarl.checkpoint.folder import write_state
from megarl.checkpoint.manifest import FORMAT, one_line
from megarl.checkpoint.plan_items import (
    chunk_index,
    object_bytes,
    object_item,
    stored_shape,
    tensor_item,
)
from megarl.checkpoint.sharded_files import Reads, write_common
from megarl.checkpoint.stored_names import as_stored, shape_problem
from megarl.checkpoint.stored_objects import CheckpointReader
from megarl.models.architecture import Architecture
from megarl.models.fill import local_view
from megarl.models.gpt import build_chunks, named_parameters, transformer_config
from megarl.models.placements import Placement
from megarl.models.weights import training_placements
from megarl.parallel.layout import TrainLayout
from megarl.parallel.train_groups import stand_in


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredParameter:
    """Describes a parameter of one rank, and its place in a checkpoint.

    Attributes:
        rank: number of the rank in the layout.
        meta: shape and type of the parameter.
        placements: boxes of logical tensors that it holds.
        sharded: Megatron-Core's description of it.
    """

    rank: int
    meta: Tensor
    placements: list[Placement]
    sharded: ShardedTensor | ShardedTensorFactory

    @property
    def trained(self) -> bool:
        """Say whether it is a weight; a buffer is float32 in a model of any type."""
        return isinstance(self.meta, torch.nn.Parameter)

    def chunks(self, data: Tensor) -> list[ShardedTensor]:
        """Cut `data` into views, each with its key and its place in the checkpoint; none if another rank stores it."""
        if isinstance(self.sharded, ShardedTensorFactory):
            parts = nested_values(replace(self.sharded, data=data).build())
        else:
            parts = [replace(self.sharded, data=data, dtype=data.dtype)]
        return [part for part in parts if is_main_replica(part.replica_id)]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Lists the parameters and objects that one rank of a layout stores in a checkpoint.

    Attributes:
        parameters: by placement name.
        empty_objects: keys of Megatron-Core's per-module extra states, which are empty but must be there.
    """

    parameters: dict[str, StoredParameter]
    empty_objects: list[str]


def describe(arch: Architecture, layout: TrainLayout, rank: int, dtype: torch.dtype, prefix: str = "") -> Stored:
    """Describe what a rank stores; takes no memory for its weights.

    Args:
        prefix: tells several models in a checkpoint apart.
    """
    meta = torch.device("meta")
    with stand_in(layout, rank, meta) as groups, meta:
        config = transformer_config(arch, groups, dtype=dtype, overrides={"use_cpu_initialization": True})
        chunks = build_chunks(arch, config, groups)
        sharded = [value for chunk in chunks for value in nested_values(chunk.sharded_state_dict(prefix))]
    placed: dict[str, list[Placement]] = {}
    for placement in training_placements(arch, layout, rank):
        placed.setdefault(placement.param, []).append(placement)
    by_data = {id(value.data): value for value in sharded}
    parameters = {
        name: StoredParameter(
            rank=rank, meta=parameter, placements=placed.get(name, []), sharded=by_data[id(parameter)]
        )
        for name, parameter in named_parameters(chunks).items()
    }
    objects = [value for value in sharded if isinstance(value, ShardedObject) and is_main_replica(value.replica_id)]
    assert all(value.data is None for value in objects)
    return Stored(parameters=parameters, empty_objects=[value.unique_key for value in objects])


# ------------------------------------------------------------------------------------------------------- writing

Fill = Callable[[StoredParameter, Tensor], None]
"""Writes a parameter's values into a tensor of its shape, which is zero."""


def write_megatron(folder: str, ranks: list[Stored], fill: Fill, *, max_file_bytes: int) -> None:
    """Write the checkpoint that these ranks would write, but for the manifest; one parameter in memory at a time.

    Args:
        folder: an existing, empty folder.
        max_file_bytes: a rank's parameters are spread over files of about this size.
    """
    planner = _SavePlanner(fill)
    plans = [plan for stored in ranks for plan in planner.plans(stored, max_file_bytes)]
    writer = FileSystemWriter(folder, thread_count=1)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan(plans)  # checks that the chunks cover every tensor exactly once
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    write_common(folder, {})
    writer.finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist"), folder)
    write_state(folder, {"step": 0, "weights_only": True, "format": FORMAT})


class _SavePlanner(DefaultSavePlanner):
    """Makes a tensor when the storage writer asks for it."""

    def __init__(self, fill: Fill) -> None:
        super().__init__(flatten_state_dict=False)
        self._fill = fill
        self._source: dict[MetadataIndex, StoredParameter] = {}
        self._current: tuple[StoredParameter, dict[MetadataIndex, Tensor]] | None = None

    def plans(self, stored: Stored, max_file_bytes: int) -> Iterator[SavePlan]:
        """Plan the files of a rank, one plan per file."""
        items = [object_item(key) for key in stored.empty_objects]
        size = 0
        for parameter in stored.parameters.values():
            chunks = parameter.chunks(parameter.meta)
            nbytes = parameter.meta.nbytes if chunks else 0
            if size and size + nbytes > max_file_bytes:
                yield SavePlan(items)
                items, size = [], 0
            for chunk in chunks:
                items.append(tensor_item(chunk))
                self._source[items[-1].index] = parameter
            size += nbytes
        yield SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return object_bytes(None)
        parameter = self._source[write_item.index]
        if self._current is None or self._current[0] is not parameter:
            self._current = None  # frees the last parameter before the next one is made
            data = torch.zeros_like(parameter.meta, device="cpu", requires_grad=False)
            self._fill(parameter, data)
            self._current = (
                parameter,
                {chunk_index(chunk): chunk.data.view(stored_shape(chunk)) for chunk in parameter.chunks(data)},
            )
        return self._current[1][write_item.index]


# ------------------------------------------------------------------------------------------------------- reading


class MegatronWeights:
    """Reads the weights of a checkpoint of any layout, one parameter of a one-rank model at a time."""

    def __init__(self, folder: str, arch: Architecture, prefix: str = "") -> None:
        """Open a checkpoint. Raises ValueError if the folder is none of this architecture.

        Args:
            prefix: as for `describe`.
        """
        if not os.path.isfile(os.path.join(folder, "metadata.json")):
            raise ValueError(f"'{folder}' is not a Megatron-Core distributed checkpoint: it has no metadata.json")
        self._folder = folder
        try:
            self._reader = CheckpointReader(folder)
        except ValueError as e:
            raise ValueError(f"'{folder}': {e}") from e
        self.parameters = describe(arch, TrainLayout(ranks=range(1)), 0, torch.float32, prefix).parameters
        self._by_tensor: dict[str, list[tuple[str, Placement]]] = {}
        for name, stored in self.parameters.items():
            for place in stored.placements:
                self._by_tensor.setdefault(place.tensor, []).append((name, place))
        self._kept: dict[str, Tensor] = {}
        chunks = [
            (stored, as_stored(chunk, self._reader.stored))
            for stored in self.parameters.values()
            for chunk in stored.chunks(stored.meta)
        ]
        self.dtype = self._check(chunks)
        used = {chunk.key for _, chunk in chunks}
        self._refuse_others((f"{prefix}decoder.", *([f"{prefix}output_layer."] if arch.tied else [])), used)

    def tensor(self, name: str) -> Tensor:
        """Read a whole logical tensor, in the checkpoint's type and with its logical shape."""
        (param, place), *others = self._by_tensor[name]
        if not others:
            return self._box(param, place)
        boxes = [(place.box, self._box(param, place)) for param, place in self._by_tensor[name]]  # of one expert each
        whole = torch.empty([max(box[axis][1] for box, _ in boxes) for axis in range(len(place.box))], dtype=self.dtype)
        for box, part in boxes:
            whole[tuple(slice(*i) for i in box)] = part
        return whole

    def _box(self, param: str, place: Placement) -> Tensor:
        if param not in self._kept:
            # the last two parameters only: q, k and v, or gate and up, are parts of one, and so are their biases
            self._kept = dict(list(self._kept.items())[-1:])
            self._kept[param] = self.parameter(param)
        return local_view(self._kept[param], place)

    def parameter(self, name: str) -> Tensor:
        """Read a parameter of the one-rank model, in the checkpoint's type."""
        stored = self.parameters[name]
        whole = torch.empty(stored.meta.shape, dtype=self.dtype if stored.trained else stored.meta.dtype)
        planner = Reads(self._reader)
        for chunk in stored.chunks(whole):
            planner.add(as_stored(chunk, self._reader.stored))
        try:
            self._reader.read_data(LoadPlan(planner.items), planner).wait()
        except Exception as e:  # whatever reading a damaged file raises
            raise ValueError(f"'{self._folder}': {name} cannot be read: {one_line(e)}") from e
        return whole

    def _check(self, chunks: list[tuple[StoredParameter, ShardedTensor]]) -> torch.dtype:
        dtypes = set()
        for parameter, chunk in chunks:
            stored = self._reader.stored.get(chunk.key)
            if (problem := shape_problem(chunk, stored)) is not None:
                raise ValueError(f"'{self._folder}': {problem}")
            assert isinstance(stored, TensorStorageMetadata)
            if parameter.trained:
                dtypes.add(stored.properties.dtype)
        if len(dtypes) > 1:
            raise ValueError(f"'{self._folder}' mixes weights of several types: {', '.join(sorted(map(str, dtypes)))}")
        return dtypes.pop()

    def _refuse_others(self, beginnings: tuple[str, ...], used: Container[str]) -> None:
        """Refuse weights that the model has not, such as biases: without them it would compute something else."""
        for key, stored in self._reader.stored.items():
            if isinstance(stored, TensorStorageMetadata) and key.startswith(beginnings) and key not in used:
                raise ValueError(
                    f"'{self._folder}' has {key}, which this model has not: it is no checkpoint of this model"
                )
