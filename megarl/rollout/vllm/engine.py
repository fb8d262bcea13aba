"""Puts vLLM behind the engine protocol: one `vllm.LLM` per rank, the ranks of a replica working in step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.host import cpu_rank_memory
from megarl.models.architecture import Architecture
from megarl.models.sizes import kv_bytes_per_token, most_blocks
from megarl.parallel.generation_groups import GenerationGroups
from megarl.rollout.engine import Engine, Request, Share
from megarl.rollout.requests import check_requests
from megarl.rollout.stop_strings import Decode, StopStrings
from megarl.rollout.vllm import internals
from megarl.rollout.vllm.checks import BLOCK_SIZE
from megarl.types import Completion, FinishReason


class VLLMEngine(Engine):
    """Implements `megarl.rollout.engine.Engine`. Starts awake, with meaningless weights. All ranks build it together.

    Prompts that share a beginning share its KV cache until the next `wake`, as long as vLLM keeps it; so do the turns
    of one response, and `Request.keep` asks for nothing more. CUDA graphs are captured once and stay valid, since the
    weights are written in place or shared for good.

    Args:
        path: the model's folder, whose config.json vLLM builds it from.
        enable_expert_parallel: the ranks of a replica have whole experts, the first rank the first of them.
        dtype: of weights, activations and KV cache.
        max_num_seqs: sequences decoded together.
        max_num_batched_tokens: tokens computed in one step, prompts and responses; of no use beyond the model's
            positions. CPU ranks compute a prompt in one step, however long.
        max_model_len: prompt and response of a sequence at most, tokens.
        gpu_memory_utilization: part of the GPU's memory for own weights, activations and KV cache together, of which no
            more is taken than `max_num_seqs` sequences can fill. CPU ranks take that much, or this part of their share
            of the machine's memory.
        enforce_eager: without compiled kernels and CUDA graphs; CPU ranks always are.
        sleeps: whether `sleep` gives memory back; without it, it does nothing. CPU ranks have no sleep.
        decode: token ids to text, for stop strings.
        share: gives the weights that are not to be the engine's own; vLLM's sleep leaves them alone.

    Attributes:
        llm: vLLM's own engine.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        path: str,
        groups: GenerationGroups,
        enable_expert_parallel: bool,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        sleeps: bool,
        decode: Decode,
        share: Share,
    ) -> None:
        tp, on_cpu = groups.layout.tp, groups.world.device.type == "cpu"
        self._arch, self._max_model_len, self._decode = arch, max_model_len, decode
        self._sleeps = sleeps and not on_cpu
        self._asleep: set[str] = set()
        self._requests: dict[int, Request] = {}
        self._decoding = ExitStack()
        blocks = most_blocks(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=BLOCK_SIZE)
        kv_cache_bytes = blocks * BLOCK_SIZE * kv_bytes_per_token(arch, tp=tp, itemsize=dtype.itemsize)
        if on_cpu:
            kv_cache_bytes = min(kv_cache_bytes, int(gpu_memory_utilization * cpu_rank_memory()))
        with internals.undisturbed():
            internals.prepare(groups.world)
            from vllm import LLM

            with internals.sharing(share, groups.world.device), internals.kv_cache_at_most(kv_cache_bytes):
                self.llm = LLM(
                    model=path,
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    dtype=str(dtype).removeprefix("torch."),
                    load_format="dummy",
                    seed=0,
                    tensor_parallel_size=tp,
                    enable_expert_parallel=enable_expert_parallel,
                    distributed_executor_backend="external_launcher",
                    # between two chunks of a prompt vLLM rewinds the request's generator, which a CPU's cannot do
                    enable_chunked_prefill=not on_cpu,
                    gpu_memory_utilization=gpu_memory_utilization,
                    kv_cache_memory_bytes=kv_cache_bytes if on_cpu else None,
                    enforce_eager=enforce_eager or on_cpu,
                    enable_sleep_mode=self._sleeps,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",
                    # one kind of block, in which layers with windows keep all tokens, too: as the cache is measured
                    disable_hybrid_kv_cache_manager=True,
                    # other kernels rearrange the experts' weights, so that they no longer are where the reshard writes
                    **({"moe_backend": "triton"} if arch.moe else {}),
                    **_limits(arch, max_num_seqs, max_num_batched_tokens, max_model_len, on_cpu=on_cpu),
                )
            self._parameters = internals.parameters_of(self.llm)

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def wake(self, *, weights_only: bool = False) -> None:
        tags_awake = {"weights"} if weights_only else {"weights", "kv_cache"}
        tags = sorted(self._asleep & tags_awake)
        if tags:
            torch.cuda.empty_cache()  # what torch keeps in reserve, vLLM's allocator could not take
            self.llm.wake_up(tags)
            self._asleep -= tags_awake
        if not weights_only and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which belongs to other weights")

    def sleep(self, *, release_weights: bool = False) -> None:
        """Without `release_weights` vLLM moves the weights to the host's memory, and back when it wakes."""
        if self._sleeps and not self._asleep:
            self.llm.sleep(level=2 if release_weights else 1)
            self._asleep = {"weights", "kv_cache"}

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        assert not self._asleep, "wake() before submit()"
        check_requests(requests, max_model_len=self._max_model_len, vocab_size=self._arch.vocab_size)
        if not self._requests:
            self._decoding.enter_context(internals.decoding(self.llm))
        with internals.undisturbed():
            for request in requests:
                assert request.key not in self._requests
                stop_at = None
                if request.params.stop:
                    stop_at = partial(StopStrings(request.params.stop, self._decode).found, since=request.turn_start)
                internals.add_request(
                    self.llm, str(request.key), request.prompt, request.response.ids, _sampling(request), stop_at
                )
                self._requests[request.key] = request

    def step(self) -> Mapping[int, Completion]:
        with internals.undisturbed():
            outputs = self.llm.llm_engine.step()
        completions = {}
        for output in outputs:
            drawn, request = output.outputs[0], self._requests.pop(int(output.request_id))
            reason: FinishReason = "stop" if drawn.finish_reason == "stop" else "length"
            response = request.response.drawn(drawn.token_ids, drawn.logprobs)
            completions[request.key] = Completion(response=response, finish_reason=reason)
        if not self._requests:
            self._decoding.close()
        return completions

    def interrupt(self) -> Mapping[int, Completion]:
        if not self._requests:
            return {}
        with internals.undisturbed():
            drawn = internals.interrupt(self.llm)
        self._decoding.close()
        everyone, self._requests = self._requests, {}
        responses = {key: request.response.drawn(*drawn[str(key)]) for key, request in everyone.items()}
        return {key: Completion(response=response, finish_reason=None) for key, response in responses.items()}

    def forget(self, keys: Iterable[int]) -> None:
        """vLLM forgets by itself what it has not used for longest."""

    def close(self) -> None:
        self._parameters = {}
        internals.shut_down(self.llm)
        del self.llm


def _limits(
    arch: Architecture, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, *, on_cpu: bool
) -> dict[str, Any]:
    """Set the most that vLLM computes at once, and the sizes of its CUDA graphs."""
    limits: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    # vLLM's first pass puts a token at each of so many positions, and reads past a shorter rotary table
    tokens = min(max_num_batched_tokens, arch.max_position_embeddings)
    limits["max_num_batched_tokens"] = max(tokens, max_num_seqs, max_model_len if on_cpu else 0)
    if max_num_seqs > 512:  # by itself vLLM captures no graph of more sequences, and decodes them without
        sizes = {1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs, 32), max_num_seqs}
        limits["compilation_config"] = {"cudagraph_capture_sizes": sorted(sizes)}
    return limits


def _sampling(request: Request) -> Any:
    """Return vLLM's parameters of one request, with a seed of its own: every rank of a replica draws it alike."""
    import vllm

    params, begun = request.params, len(request.response)
    return vllm.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=_seed_at(request.seed, begun) if begun else request.seed,
        max_tokens=params.max_tokens - begun,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
    )


def _seed_at(seed: int, place: int) -> int:
    """Compute a seed for the rest of a response: vLLM's generators cannot be wound forward."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest(), "big") >> 1
