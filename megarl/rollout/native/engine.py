"""The built-in generation engine: plain PyTorch, on CPU and CUDA, tensor-parallel over the group it is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.rollout.native.attention import DecodeAttention, PrefillAttention
from megarl.rollout.native.kv_cache import KVCache
from megarl.rollout.native.model import Decoder, parameter_shapes
from megarl.rollout.native.sampler import sample
from megarl.rollout.native.scheduler import Admission, Running, Scheduler
from megarl.rollout.requests import check_requests
from megarl.rollout.stop_strings import Decode
from megarl.types import Completion, SamplingParams


class NativeEngine:
    """Implements `megarl.rollout.engine.Engine`. Starts with its weights allocated and all zero, without KV cache.

    Args:
        tp_group: the replica's ranks; None is one rank alone.
        dtype: of weights, activations and KV cache; float32 or bfloat16.
        max_num_seqs: sequences decoded together: slots of the KV cache.
        max_num_batched_tokens: prompt tokens (padding included) computed together; one prompt may be longer.
        max_model_len: prompt and response of a sequence at most, tokens: length of a slot.
        decode: token ids to text, for stop strings.

    Raises:
        ValueError: the architecture cannot be split over the group.
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
    ) -> None:
        self._tp = 1 if tp_group is None else tp_group.size()
        arch.check_generation(tp=self._tp)
        self._arch, self._dtype, self._device = arch, dtype, torch.device(device)
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._max_model_len, self._decode_text = max_model_len, decode
        self._parameters = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, shape in parameter_shapes(arch, self._tp).items()
        }
        self._decoder = Decoder(arch, self._parameters, tp_group=tp_group, max_model_len=max_model_len)
        self._cache: KVCache | None = None

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def wake(self, *, weights_only: bool = False) -> None:
        for p in self._parameters.values():
            # `resize_` moves the data even when the size stays the same.
            if p.untyped_storage().nbytes() != p.nbytes:
                p.untyped_storage().resize_(p.nbytes)
        if not weights_only and self._cache is None:
            self._cache = KVCache(
                self._arch,
                tp=self._tp,
                slots=self._max_num_seqs,
                length=self._max_model_len,
                dtype=self._dtype,
                device=self._device,
            )

    def sleep(self, *, release_weights: bool = False) -> None:
        self._cache = None
        if release_weights:
            # The storage goes, the tensors stay: whoever holds them from `parameters` can write to them after waking.
            for p in self._parameters.values():
                p.untyped_storage().resize_(0)

    def close(self) -> None:
        self.sleep(release_weights=True)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        assert self._cache is not None, "wake() before generate()"
        assert len(prompts) == len(seeds)
        check_requests(prompts, params, max_model_len=self._max_model_len, vocab_size=self._arch.vocab_size)
        scheduler = Scheduler(
            prompts,
            params,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            decode=self._decode_text,
        )
        while scheduler.busy:
            self._prefill(self._cache, scheduler.admit())
            drawn = self._decode(self._cache, scheduler.running, params, seeds)
            self._cache.copy_slots(scheduler.advance(drawn))
        return scheduler.completions

    def _prefill(self, cache: KVCache, admission: Admission) -> None:
        """Fill the slots of new requests."""
        longest = max((len(p) for p in admission.prompts), default=0)
        if longest > 0:
            rectangle = [[*p, *([0] * (longest - len(p)))] for p in admission.prompts]
            tokens = torch.tensor(rectangle, device=self._device)
            positions = torch.arange(longest, device=self._device).expand_as(tokens)
            attention = PrefillAttention(
                cache, first_slot=admission.first_slot, sequences=len(rectangle), length=longest
            )
            self._decoder.forward(tokens.flatten(), positions.flatten(), attention)
        cache.copy_slots(admission.copies)

    def _decode(
        self, cache: KVCache, running: Sequence[Running], params: SamplingParams, seeds: Sequence[int]
    ) -> list[tuple[int, float, float]]:
        """Draw the next (token, logp, model_logp) of every running sequence."""
        host = [(r.newest, r.position, seeds[r.request], len(r.token_ids)) for r in running]
        tokens, positions, row_seeds, drawn = torch.tensor(host, device=self._device).unbind(1)
        longest = max(r.position for r in running) + 1
        attention = DecodeAttention(cache, positions=positions, longest=longest, dtype=self._dtype)
        logits = self._decoder.logits(self._decoder.forward(tokens, positions, attention))
        out = sample(logits, params, seeds=row_seeds, positions=drawn)
        # The step's only wait for the device. float64 holds every token id.
        table = torch.stack((out.token_ids.double(), out.logp.double(), out.model_logp.double()), dim=1).tolist()
        return [(int(token), logp, model_logp) for token, logp, model_logp in table]
