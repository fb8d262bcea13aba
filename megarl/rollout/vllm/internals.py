"""Keeps all uses of vLLM's internals in one place, for the versions that `megarl.rollout.vllm.checks` admits.

vLLM starts its workers itself unless `distributed_executor_backend="external_launcher"`, where each rank makes an
engine and the engines of a tensor-parallel group work in step. It then builds its groups in the world that is already
initialised, as [replicas, 1, 1, 1, tp] in rank order (`initialize_model_parallel`: "ExternalDP x DP x PP x PCP x TP"),
which is this program's `GenerationLayout`. Its data-parallel size stays 1: replicas must not wait for each other, and
with more it would spread the experts of a MoE model over them.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from megarl.parallel.world import World
from megarl.rollout.engine import Share

_ENVIRONMENT = {
    # the engine runs in this process, not in one of its own
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_CPU_ENVIRONMENT = {
    # otherwise every rank binds its threads to cores of its own, of which there may be too few
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def prepare(world: World) -> None:
    """Import vLLM and make it fit for living in a rank of this program; call it before building an engine."""
    on_cpu = world.device.type == "cpu"
    for name, value in {**_ENVIRONMENT, **(_CPU_ENVIRONMENT if on_cpu else {})}.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM sets its level itself
    _place_ranks(world)
    _keep_log_probs_plain()
    _spare_the_world()
    if on_cpu:
        _keep_cpu_weights()
    else:
        _leave_out_ranks()


def _place_ranks(world: World) -> None:
    """Give vLLM this world's ranks, not RANK and LOCAL_RANK, and a name for shared memory that no other job has."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    job = world.all_gather(os.getpid())[0]
    rank, local_rank = world.rank, world.device.index or 0  # not `world`, which the class would keep alive

    def distributed_args(self: Any) -> tuple[str, int, int]:
        # The first is not connected to, the world being there already: its end names the CPU ranks' shared memory.
        return f"tcp://megarl:{job}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args


def _keep_log_probs_plain() -> None:
    """Make a request's `logprobs` a list of the sampled tokens' log-probabilities.

    vLLM would fetch tokens, log-probabilities and ranks as three arrays, cut lists out of them for every token and put
    them together again with texts: a millisecond per step at 256 sequences, more than a third of a small model's step.
    Here only log-probabilities leave the GPU, a step's become Python's numbers at once, and a token's is one of them.
    """
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    def fetch(self: LogprobsTensors) -> LogprobsTensors:
        return self._replace(logprobs=self.logprobs.to("cpu", non_blocking=True))

    def sampled_only(self: LogprobsTensors) -> LogprobsLists:
        assert self.cu_num_generated_tokens is None, "nothing is decoded speculatively"
        return LogprobsLists(None, self.logprobs[:, 0].tolist(), None)

    def append(self: LogprobsProcessor, output: EngineCoreOutput) -> None:
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    LogprobsTensors.to_cpu_nonblocking = fetch
    LogprobsTensors.tolists = sampled_only
    LogprobsLists.slice_request = lambda self, request, tokens: self.logprobs[request] if tokens else None
    LogprobsProcessor.update_from_output = append


def _leave_out_ranks() -> None:
    """Keep vLLM's newer runner from finding the sampled token's rank: a kernel over all logits in each step."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs, compute_topk_logprobs

    def sampled_only(logits: torch.Tensor, num_logprobs: int, sampled: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if num_logprobs > 0:  # as vLLM's warming up asks for
            return compute_topk_logprobs(logits, num_logprobs, sampled, *args, **kwargs)
        token_ids = sampled.unsqueeze(-1)
        return LogprobsTensors(token_ids, compute_token_logprobs(logits, token_ids), selected_token_ranks=None)

    sampler.compute_topk_logprobs = sampled_only


def _spare_the_world() -> None:
    """Keep an engine that shuts down from destroying all process groups of the process, not only vLLM's."""
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = leave


def _keep_cpu_weights() -> None:
    """Keep vLLM from repacking linear weights on CPUs, which leaves empty parameters, of no use to a reshard."""
    import vllm.model_executor.layers.utils as utils

    def plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear


def parameters_of(llm: Any) -> dict[str, torch.Tensor]:
    """Return this rank's weights by name, as vLLM uses them; tied embeddings once."""
    return llm.apply_model(lambda model: {name: p.data for name, p in model.named_parameters()})[0]


@contextmanager
def sharing(share: Share, device: torch.device) -> Iterator[None]:
    """Give an `LLM` that is built meanwhile with load_format="dummy" the weights of `share`, and meaningless others.

    It must have them from the start: it captures its CUDA graphs as it is built, and they keep the addresses. The name
    "dummy" stays, because vLLM looks into the model's files for any it does not know.
    """
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    class AdoptingLoader(BaseModelLoader):
        """Puts shared weights in place of parameters, and vLLM's dummy weights into the others."""

        def download_model(self, model_config: Any) -> None:
            del model_config

        def load_weights(self, model: Any, model_config: Any) -> None:
            del model_config
            parameters = dict(model.named_parameters())
            shared = share({name: p.shape for name, p in parameters.items()})
            for name, p in parameters.items():
                if name in shared:
                    assert shared[name].dtype == p.dtype and shared[name].shape == p.shape
                    p.data = shared[name]
                    continue
                if p.device.type != device.type:
                    p.data = torch.empty_like(p.data, device=device)
                initialize_single_dummy_weight(p)

    dummy = loaders["dummy"]
    loaders["dummy"] = AdoptingLoader
    try:
        with _matrices_begin_on_the_host():
            yield
    finally:
        loaders["dummy"] = dummy


def kv_cache_at_most(nbytes: int) -> AbstractContextManager[None]:
    """Limit the KV cache of an `LLM` that is built meanwhile on a GPU to `nbytes`, or less where it finds less.

    vLLM would take all memory, to keep what it has computed for requests to come. Here no request outlives the weights,
    and to give back and take again tens of GiB in every step costs time.
    """
    from vllm.v1.worker.gpu_worker import Worker

    available = Worker.determine_available_memory
    return _replaced(Worker, "determine_available_memory", lambda self: min(available(self), nbytes))


@contextmanager
def _matrices_begin_on_the_host() -> Iterator[None]:
    """Make on the host those parameters that another tensor will replace: they must never take the GPU's memory.

    Nothing is written to them there, so they take no memory there either.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def on_the_host(create_weights: Callable[..., None]) -> Callable[..., None]:
        def create(*args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):
                create_weights(*args, **kwargs)

        return create

    kinds: tuple[Any, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    with ExitStack() as replaced:
        for kind in kinds:
            replaced.enter_context(_replaced(kind, "create_weights", on_the_host(kind.create_weights)))
        yield


@contextmanager
def decoding(llm: Any) -> Iterator[None]:
    """Leave out what vLLM does for every token and is of no use here: the CPU that it takes paces small models."""
    with _blocks_as_they_fill(llm), _collecting(llm):
        yield


def add_request(
    llm: Any,
    request_id: str,
    prompt: Sequence[int],
    begun: Sequence[int],
    params: Any,
    stop_at: Callable[[Sequence[int]], str | None] | None,
) -> None:
    """Hand over a request, of which `llm.llm_engine.step` returns only the end.

    Args:
        begun: token ids of the response so far.
        stop_at: given the token ids of a response so far, a string that ends it, or None. vLLM's own stop strings need
            a Hugging Face tokenizer, which it would have to load.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    params.output_kind = RequestOutputKind.FINAL_ONLY
    tokens = {"prompt_token_ids": [*prompt, *begun]}
    if stop_at is None:
        llm.llm_engine.add_request(request_id, tokens, params)
        return
    check = _stop_check(stop_at, begun)
    with _replaced(IncrementalDetokenizer, "from_new_request", lambda tokenizer, request: check):
        llm.llm_engine.add_request(request_id, tokens, params)


def interrupt(llm: Any) -> dict[str, tuple[list[int], list[float]]]:
    """End all requests; returns tokens and log-probabilities that were drawn for them, by the requests' ids."""
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    states = list(engine.output_processor.request_states.values())
    engine.abort_request([state.external_req_id for state in states])
    while core.batch_queue:  # steps that the GPU works on already, for requests that are gone
        engine.step()
    return {state.external_req_id: (state.detokenizer.token_ids, state.logprobs_processor.logprobs) for state in states}


def _blocks_as_they_fill(llm: Any) -> AbstractContextManager[None]:
    """Look for blocks of the KV cache only at a token that begins or fills one: any other changes nothing there."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    (layers,) = manager.coordinator.single_type_managers  # one kind of block: see VLLMEngine
    block = layers.block_size

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        computed = request.num_computed_tokens
        if num_new_tokens == 1 and computed >= request.num_prompt_tokens and 0 < computed % block < block - 1:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, *args, **kwargs)

    return _replaced(manager, "allocate_slots", allocate_slots)


def _collecting(llm: Any) -> AbstractContextManager[None]:
    """Collect only tokens and log-probabilities until a request ends, without statistics, texts and outputs."""
    processor = llm.llm_engine.output_processor
    process = processor.process_outputs

    def process_outputs(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        others = []
        for output in outputs:
            request = processor.request_states.get(output.request_id)
            if output.finish_reason is not None or request is None or hasattr(request.detokenizer, "stop_at"):
                others.append(output)
            else:
                request.detokenizer.token_ids += output.new_token_ids
                request.logprobs_processor.logprobs.append(output.new_logprobs)
        return process(others, *args, **kwargs)

    return _replaced(processor, "process_outputs", process_outputs)


def _stop_check(stop_at: Callable[[Sequence[int]], str | None], begun: Sequence[int]) -> Any:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    class StopCheck(IncrementalDetokenizer):
        """Ends a response at its stop strings, without making text of it."""

        def __init__(self) -> None:
            super().__init__()
            self.stop_at, self._response = stop_at, list(begun)

        def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
            del stop_terminated
            for token in new_token_ids:
                self.token_ids.append(token)
                self._response.append(token)
                if stop := self.stop_at(self._response):
                    return stop
            return None

    return StopCheck()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute meanwhile; what `owner` inherits, or has from its class, it inherits again afterwards."""
    previous = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if previous is None:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)


def shut_down(llm: Any) -> None:
    """End the engine and give its memory back."""
    llm.llm_engine.engine_core.shutdown()


def leave() -> None:
    """Destroy vLLM's groups; the world and everybody else's groups stay."""
    from vllm.distributed import parallel_state

    if torch.distributed.is_initialized():  # otherwise they went with it
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep this process's random number generators and thread settings, which vLLM seeds, draws from and replaces."""
    on_gpu, set_num_threads = torch.cuda.is_available(), torch.set_num_threads
    python, numpy, default_dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_num_threads
            torch.set_default_dtype(default_dtype)
