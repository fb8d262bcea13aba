"""Implements the built-in generation engine: PyTorch on CPU and CUDA, tensor-parallel over a group.

With Triton on a GPU, decoding runs Triton kernels inside CUDA graphs. Everything else is plain torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.sizes import BLOCK_SIZE
from megarl.models.weights import buffers
from megarl.parallel.experts import TensorSplit
from megarl.parallel.upload import upload
from megarl.rollout.engine import Engine, Request, Share, share_nothing
from megarl.rollout.expert_record import empty_record
from megarl.rollout.native import kernels
from megarl.rollout.native.blocks import SCRATCH_BLOCK
from megarl.rollout.native.cache_size import cache_blocks
from megarl.rollout.native.graphs import DecodeGraphs
from megarl.rollout.native.in_flight import InFlight
from megarl.rollout.native.kv_cache import KVCache
from megarl.rollout.native.model import Decoder, parameter_shapes
from megarl.rollout.native.parts.part import Attention
from megarl.rollout.native.passes import PassesByLayer
from megarl.rollout.native.sampler import Sample, sample
from megarl.rollout.native.scheduler import Admission, Running, Scheduler
from megarl.rollout.native.slots import ON_DEVICE, POSITION, Rows
from megarl.rollout.requests import check_requests
from megarl.rollout.stop_strings import Decode
from megarl.types import Completion, SamplingParams


class NativeEngine(Engine):
    """Implements `megarl.rollout.engine.Engine`. Starts with its own weights allocated and all zero, without KV cache.

    Args:
        tp_group: the replica's ranks; None: a single rank.
        enable_expert_parallel: each of them has whole experts, in place of a share of every expert.
        dtype: of weights, activations and KV cache; float32 or bfloat16.
        max_num_seqs: sequences decoded together.
        max_num_batched_tokens: prompt tokens computed together; a longer prompt is computed in parts, where attention
            can (`Architecture.prompt_keys`).
        max_model_len: prompt and response of a sequence at most, tokens.
        gpu_memory_utilization: part of the GPU's memory for own weights, activations and KV cache together; for a CPU
            rank, of its share of the machine's memory. The cache takes no more than `max_num_seqs` sequences of
            `max_model_len` fill, nor than is free on waking.
        decode: token ids to text, for stop strings.
        enforce_eager: decode without CUDA graphs. CPU ranks, and GPUs without Triton, always do.
        share: gives the weights that the engine shares with training.
        records_routing: experts of requests that ask for them (`SamplingParams.routed_experts`) are recorded.

    Raises:
        ValueError: the architecture cannot be split over the group; on waking: the memory does not hold the cache of
            one sequence.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        tp_group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device | str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        decode: Decode,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        enable_expert_parallel: bool = False,
        share: Share = share_nothing,
        records_routing: bool = False,
    ) -> None:
        tp = 1 if tp_group is None else tp_group.size()
        self._split = split = TensorSplit.of_replica(tp, enable_expert_parallel=enable_expert_parallel)
        arch.check_generation(split)
        self._arch, self._tp_group, self._dtype, self._device = arch, tp_group, dtype, torch.device(device)
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._max_model_len, self._gpu_memory_utilization = max_model_len, gpu_memory_utilization
        self._decode_text = decode
        self._unrouted = empty_record(arch) if records_routing else None
        shapes = parameter_shapes(arch, split)
        shared = share(shapes)
        dtypes = dict.fromkeys(shapes, dtype) | dict.fromkeys(buffers(arch), torch.float32)
        assert all(p.dtype == dtypes[name] and p.shape == shapes[name] for name, p in shared.items())
        self._own = {
            name: torch.zeros(shape, dtype=dtypes[name], device=device)
            for name, shape in shapes.items()
            if name not in shared
        }
        self._parameters = {name: shared[name] if name in shared else self._own[name] for name in shapes}
        self._decoder = Decoder(arch, self._parameters, tp_group=tp_group, split=split)
        self._passes = PassesByLayer(arch, max_model_len=max_model_len, dtype=dtype, device=self._device)
        self._cache: KVCache | None = None
        self._scheduler: Scheduler | None = None
        self._newest = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)  # drawn for each slot
        self._in_flight: InFlight | None = None
        self._graphs: DecodeGraphs | None = None
        if kernels.on(self._device) and not enforce_eager:
            filling = torch.tensor([[0, 0, max_num_seqs, SCRATCH_BLOCK, 0, 0]])
            self._graphs = DecodeGraphs(self._logits, rows=max_num_seqs, filling=filling, device=self._device)

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def wake(self, *, weights_only: bool = False) -> None:
        for p in self._own.values():
            # `resize_` moves the data even when the size stays the same.
            if p.untyped_storage().nbytes() != p.nbytes:
                p.untyped_storage().resize_(p.nbytes)
        if not weights_only and self._cache is None:
            self._cache = KVCache(
                self._arch,
                tp=self._split.tp,
                blocks=cache_blocks(
                    self._arch,
                    self._split,
                    tp_group=self._tp_group,
                    dtype=self._dtype,
                    device=self._device,
                    max_num_seqs=self._max_num_seqs,
                    max_num_batched_tokens=self._max_num_batched_tokens,
                    max_model_len=self._max_model_len,
                    weight_bytes=sum(p.nbytes for p in self._own.values()),
                    gpu_memory_utilization=self._gpu_memory_utilization,
                    records_routing=self._unrouted is not None,
                ),
                max_num_seqs=self._max_num_seqs,
                max_model_len=self._max_model_len,
                dtype=self._dtype,
                device=self._device,
                routed=self._unrouted,
            )
        if not weights_only:
            assert self._cache is not None and not self.busy
            # anew even where the cache stays: its keys and values belong to other weights
            self._scheduler = Scheduler(
                max_num_seqs=self._max_num_seqs,
                max_num_batched_tokens=self._max_num_batched_tokens,
                blocks=self._cache.blocks,
                decode=self._decode_text,
                recurrent=self._arch.recurrent,
                leaving=self._record_routing,
            )

    def sleep(self, *, release_weights: bool = False) -> None:
        if self._graphs is not None:
            self._graphs.forget()
        self._cache = self._scheduler = self._in_flight = None
        if release_weights:
            # The storage goes, the tensors stay: callers of `parameters` can write to them after waking.
            for p in self._own.values():
                p.untyped_storage().resize_(0)

    def close(self) -> None:
        self.sleep(release_weights=True)

    @property
    def busy(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    def submit(self, requests: Sequence[Request]) -> None:
        assert self._scheduler is not None, "wake() before submit()"
        check_requests(requests, max_model_len=self._max_model_len, vocab_size=self._arch.vocab_size)
        self._scheduler.submit(requests)

    @torch.inference_mode()
    def step(self) -> Mapping[int, Completion]:
        assert self._scheduler is not None, "wake() before step()"
        drawn = self._in_flight or self._decode_next(self._scheduler)
        assert drawn is not None, "submit() before step()"
        # while the host looks at what was drawn, the device draws what follows
        self._in_flight = self._decode_next(self._scheduler)
        finished = self._scheduler.advance(drawn.rows, *drawn.wait())
        if not self._scheduler.running:
            self._in_flight = None
        return finished

    def under_way(self) -> Mapping[int, Sequence[int]]:
        return {} if self._scheduler is None else self._scheduler.under_way()

    def interrupt(self) -> Mapping[int, Completion]:
        self._in_flight = None
        return {} if self._scheduler is None else self._scheduler.interrupt()

    def forget(self, keys: Iterable[int]) -> None:
        if self._scheduler is not None:
            self._scheduler.forget(keys)

    def _prefill(self, cache: KVCache, admission: Admission) -> None:
        """Fill the blocks of the requests that enter."""
        cache.enter(admission.entered)
        computed = [(r.slot, r.cached) for r in admission.computed if r.position]
        if len(computed) == 1 and self._arch.prompt_keys(self._split.tp) is not None:
            ((slot, sequence),) = computed
            for start in range(0, len(sequence), self._max_num_batched_tokens):
                self._fill(cache, [(slot, sequence[start : start + self._max_num_batched_tokens])], start)
        elif computed:
            self._fill(cache, computed)
        cache.copy(admission.copies, admission.state_copies)
        rows = [
            (token, position, r.slot, r.blocks[position // BLOCK_SIZE], 0, 0)
            for r in admission.extended
            for position, token in enumerate(r.cached[r.block_tokens :], start=r.block_tokens)
        ]
        # Compute them as decode steps do the newest tokens, several rows of a sequence at a time: the keys of all rows
        # are in the cache before a row attends, up to its own position.
        for start in range(0, len(rows), self._max_num_seqs):
            part = torch.tensor(rows[start : start + self._max_num_seqs])
            self._hidden(upload(part, self._device), longest=int(part[:, POSITION].max()) + 1)

    def _fill(self, cache: KVCache, sequences: Sequence[tuple[int, Sequence[int]]], start: int = 0) -> None:
        """Compute sequences, each given by its slot and tokens; of one, those before `start` are in the cache."""
        slots, texts = zip(*sequences, strict=True)
        lengths = [len(text) for text in texts]
        attention = self._passes.prefill(cache, slots=slots, lengths=lengths, start=start)
        tokens = upload(torch.tensor([token for text in texts for token in text]), self._device)
        routed = self._forward(tokens, attention)[1]
        if routed is not None:
            slot_of_token = upload(torch.tensor(slots).repeat_interleave(torch.tensor(lengths)), self._device)
            positions = upload(torch.cat([start + torch.arange(n) for n in lengths]), self._device)
            cache.write_routed(slot_of_token, positions, routed)

    def _decode_next(self, scheduler: Scheduler) -> InFlight | None:
        """Let requests enter, and begin a decode step of all that go on; None: none does."""
        assert self._cache is not None
        self._prefill(self._cache, scheduler.admit())
        rows = scheduler.next_rows()
        if not len(rows):
            return None
        table = torch.from_numpy(rows.table)
        if self._graphs is None:
            on_device = upload(table, self._device)
            logits = self._logits(on_device, longest=int(table[:, POSITION].max()) + 1)
        else:
            on_device, logits = self._graphs(table)
        _, _, slots, _, seeds, counts = on_device.unbind(1)
        drawn = self._sample(scheduler.kinds, rows, logits, seeds=seeds, positions=counts)
        self._newest[slots] = drawn.token_ids
        return InFlight(rows, drawn)

    def _sample(self, kinds: Sequence[SamplingParams], rows: Rows, logits: Tensor, **places: Tensor) -> Sample:
        """Call `sample` for each kind of rows that are drawn alike."""
        if (rows.kinds == rows.kinds[0]).all():
            return sample(logits, kinds[rows.kinds[0]], **places)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        logp = torch.empty(len(rows), device=self._device)
        of_row = torch.from_numpy(rows.kinds)
        for kind in of_row.unique():
            which = upload((of_row == kind).nonzero().flatten(), self._device)
            out = sample(logits[which], kinds[kind], **{name: x[which] for name, x in places.items()})
            token_ids[which], logp[which] = out.token_ids, out.logp
        return Sample(token_ids=token_ids, logp=logp)

    def _logits(self, rows: Tensor, longest: int | None = None) -> Tensor:
        """Compute the logits of a decode step: int64 [B, COLUMNS] -> [B, vocab_size].

        Args:
            longest: tokens of the longest sequence, where the caller knows; otherwise `max_model_len`.
        """
        return self._decoder.logits(self._hidden(rows, longest))

    def _hidden(self, rows: Tensor, longest: int | None) -> Tensor:
        """Compute the last hidden state of a decode step, [B, hidden], and fill the cache."""
        cache = self._cache
        assert cache is not None
        given, positions, slots, blocks, *_ = rows.unbind(1)
        tokens = torch.where(given == ON_DEVICE, self._newest[slots], given)
        cache.grow(slots, positions, blocks)
        attention = self._passes.decode(
            cache, slots=slots, positions=positions, blocks=blocks, longest=longest or self._max_model_len
        )
        hidden, routed = self._forward(tokens, attention)
        if routed is not None:
            cache.write_routed(slots, positions, routed)
        return hidden

    def _forward(self, tokens: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
        """Compute the last hidden states, [T, hidden], and the tokens' experts, if they are recorded.

        Returns: the latter int16 [T, layers with experts, experts per token].
        """
        if self._unrouted is None:
            return self._decoder.forward(tokens, attention), None
        routed: list[Tensor] = []
        hidden = self._decoder.forward(tokens, attention, routed)
        return hidden, torch.stack(routed, dim=1)

    def _record_routing(self, r: Running) -> None:
        """Record the experts of a request's tokens that were fed to the model; not again those from before it waited.

        A response that was interrupted keeps the experts by which its tokens were drawn, whatever its keys are computed
        with when it goes on.
        """
        if self._unrouted is None or not r.request.params.routed_experts:
            return
        assert self._cache is not None
        so_far = self._unrouted if r.routed is None else r.routed
        if len(so_far) < r.position:
            so_far = so_far.followed_by(self._cache.read_routed(r.blocks, len(so_far), r.position))
        r.routed = so_far
