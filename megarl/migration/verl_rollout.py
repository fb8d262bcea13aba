"""verl's keys of generation, tools and agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.migration.entry import Entry, Made, Settings, carried, met, met_by, part_of, refused, renamed, ruled
from megarl.migration.verl import R
from megarl.migration.verl_policy import ONE_BUDGET, REMOVED

BY_RESHARD = "the engine's weights are always written by the reshard, which goes tensor by tensor"
IN_PROCESS = "the engine is in the ranks' own processes, and responses are scored while others are decoded"
TOOLS = (
    "tools are an environment: environment.name=path/to/file.py:class, or an agent: "
    "environment.agent=path/to/file.py:function"
)
VALIDATION = f"{R}.val_kwargs"
MILLION = 2**20


def _engine(value: Any, settings: Settings) -> Made:
    if value in ("vllm", None):
        return Made(kind="carried", values={f"{R}.name": "vllm"})
    if value in ("sglang", "trtllm", "hf", "sglang_async", "vllm_async"):
        why = f"{value} is not an engine here; vllm and native are"
        return Made(kind="translated", values={f"{R}.name": "vllm"}, why=why)
    return Made(kind="refused", why="an engine of your own is rollout.name=path/to/file.py:class")


def _replica(settings: Settings) -> dict[str, Any]:
    """Ranks of a replica: those that hold one copy of the weights, where experts are spread over more."""
    tp = settings.number(f"{R}.tensor_model_parallel_size")
    spread = settings.number(f"{R}.expert_parallel_size")
    return {f"{R}.tensor_model_parallel_size": max(tp, spread)}


def _tensor_parallel(value: Any, settings: Settings) -> Made:
    made = _replica(settings)
    same = value in made.values()
    return Made(kind="carried" if same else "translated", values=made, why="" if same else "with the experts' ranks")


def _experts(value: Any, settings: Settings) -> Mapping[str, Any]:
    return _replica(settings) if isinstance(value, int) and value > 1 else {}


def _greedy(value: Any, settings: Settings) -> Mapping[str, Any]:
    """verl's own temperature of validation is 0, and so is that of MegaRL."""
    return {} if value else {f"{VALIDATION}.temperature": 0.0}


def _temperature(value: Any, settings: Settings) -> Made | Mapping[str, Any]:
    if settings.of(f"{VALIDATION}.do_sample"):
        return Made(kind="carried", values={f"{VALIDATION}.temperature": value})
    if value:
        why = "verl ignores it without val_kwargs.do_sample, and so does this"
        return Made(kind="translated", values={f"{VALIDATION}.temperature": 0.0}, why=why)
    return {f"{VALIDATION}.temperature": 0.0}


def _samples(value: Any, settings: Settings) -> Made:
    if value and value > 1 and not settings.of(f"{VALIDATION}.do_sample"):
        why = "greedy responses to a prompt are all the same (val_kwargs.do_sample is not set): one is drawn"
        return Made(kind="translated", values={f"{VALIDATION}.n": 1}, why=why)
    return Made(kind="carried", values={f"{VALIDATION}.n": value} if value else {})


def _top_k(key: str) -> Entry:
    def rule(value: Any, settings: Settings) -> Made:
        return Made(kind="carried", values={key: value or -1})

    return ruled(key, "carried", key, "-1 keeps the whole vocabulary, as 0 does", rule)


def _engine_settings() -> list[Entry]:
    graphs = "graphs are captured of batches up to rollout.max_num_seqs"
    kwargs = f"{R}.engine_kwargs"
    return [
        ruled(f"{R}.name", "carried", f"{R}.name", "sglang, trtllm and hf become vllm", _engine),
        *carried(f"{R}.n", f"{R}.temperature", f"{R}.top_p", f"{R}.gpu_memory_utilization", f"{R}.enforce_eager"),
        *carried(f"{R}.free_cache_engine", f"{R}.max_num_batched_tokens", f"{R}.max_num_seqs"),
        _top_k(f"{R}.top_k"),
        ruled(f"{R}.tensor_model_parallel_size", "carried", f"{R}.tensor_model_parallel_size", "", _tensor_parallel),
        ruled(
            f"{R}.expert_parallel_size",
            "translated",
            f"{R}.tensor_model_parallel_size",
            "experts are spread over the replica's ranks, which become as many",
            _experts,
        ),
        met(f"{R}.enable_expert_parallel", "each expert's matrices are split over the replica's ranks"),
        renamed(f"{R}.max_batch_size", f"{R}.max_num_seqs", "responses that are decoded together"),
        met(
            f"{R}.data_parallel_size",
            "there are as many replicas as the ranks make: world size / tensor_model_parallel_size",
        ),
        met_by(
            f"{R}.pipeline_model_parallel_size", (1,), "replicas have no pipeline", "replicas have no pipeline; use TP"
        ),
        met(f"{R}.mode", IN_PROCESS),
        met(
            f"{R}.enable_chunked_prefill",
            "vLLM on GPUs divides prompts within max_num_batched_tokens; the native engine computes a prompt whole",
        ),
        met(f"{R}.enable_prefix_caching", "prompts that share a beginning share its cache"),
        met(f"{R}.max_model_len", "always data.max_prompt_length + data.max_response_length"),
        met(f"{R}.prompt_length", "data.max_prompt_length"),
        met(f"{R}.response_length", "data.max_response_length"),
        met(f"{R}.load_format", BY_RESHARD),
        met(f"{R}.layered_summon", BY_RESHARD),
        met_by(
            f"{R}.dtype",
            ("bfloat16",),
            "the weights' own, model.dtype",
            "the engine has the weights' type: model.dtype",
        ),
        met(f"{R}.calculate_log_probs", "the engine's log-probabilities are always kept"),
        met(f"{R}.multi_stage_wake_up", "the KV cache always comes after the weights"),
        met(f"{R}.skip_tokenizer_init", "the engine takes and gives token ids"),
        met(f"{R}.disable_log_stats", "the run has its own metrics"),
        met(f"{R}.do_sample", "temperature says it"),
        met_by(f"{R}.ignore_eos", (False,), "a response ends at the end token", "a response ends at the end token"),
        met(f"{R}.cudagraph_capture_sizes", graphs),
        met(f"{R}.engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes", graphs),
        refused(
            f"{R}.engine_kwargs.vllm.compilation_config.cudagraph_mode", "rollout.enforce_eager=true is without graphs"
        ),
        met(f"{kwargs}.vllm.disable_mm_preprocessor_cache", "there are no images, and no cache of them"),
        met(f"{kwargs}.vllm.disable_log_stats", "the run has its own metrics"),
        met(f"{kwargs}.vllm.swap_space", "the KV cache is on the GPU"),
        refused(f"{kwargs}.sglang.*", "there is no SGLang; the engine chooses its attention kernels"),
        refused(f"{kwargs}.trtllm.*", "there is no TensorRT-LLM; see rollout.max_num_seqs and max_num_batched_tokens"),
        refused(f"{kwargs}.*", "the engine is set up by the keys of rollout"),
        renamed(
            f"{R}.checkpoint_engine.update_weights_bucket_megabytes",
            "actor_rollout_ref.reshard.bucket_bytes",
            "bytes in flight in the move of the weights",
            lambda value: int(value * MILLION),
        ),
        renamed(
            f"{R}.update_weights_bucket_megabytes",
            "actor_rollout_ref.reshard.bucket_bytes",
            "bytes in flight in the move of the weights",
            lambda value: int(value * MILLION),
        ),
        met(f"{R}.checkpoint_engine.*", BY_RESHARD),
        met(f"{R}.log_prob_micro_batch_size", ONE_BUDGET),
        met(f"{R}.log_prob_micro_batch_size_per_gpu", ONE_BUDGET),
        met(f"{R}.log_prob_max_token_len_per_gpu", ONE_BUDGET),
        met(f"{R}.log_prob_use_dynamic_bsz", ONE_BUDGET),
        refused(f"{R}.enable_rollout_routing_replay", REMOVED),
        refused(f"{R}.quantization", "the engine's weights are the actor's, bit for bit"),
        refused(f"{R}.prometheus.*", "the engine has no server of its own; trainer.logger says where the metrics go"),
        met(f"{R}.trace.token2text", "sample rollouts are written as text: trainer.log_rollouts"),
        refused(f"{R}.trace.backend", "sample rollouts are written to the run folder: trainer.log_rollouts"),
        part_of(f"{R}.trace.*", [f"{R}.trace.backend"], "sample rollouts are written to the run folder"),
        refused(f"{R}.profiler.*", "profiles are of the whole run: profiler.tool, profiler.steps and profiler.ranks"),
    ]


def _turns() -> list[Entry]:
    turns, answers = "environment.max_turns", "responses of the policy in an episode"
    return [
        refused(f"{R}.multi_turn.enable", TOOLS),
        renamed(f"{R}.multi_turn.max_turns", turns, answers),
        renamed(f"{R}.multi_turn.max_assistant_turns", turns, answers),
        renamed(
            f"{R}.multi_turn.max_user_turns",
            turns,
            "the policy answers once more than it is spoken to",
            lambda n: n + 1,
        ),
        renamed(
            f"{R}.multi_turn.max_tool_response_length",
            "environment.max_observation_length",
            "verl counts characters, here tokens: some four characters each",
            lambda n: max(1, n // 4),
        ),
        refused(f"{R}.multi_turn.tool_config_path", TOOLS),
        refused(f"{R}.multi_turn.interaction_config_path", TOOLS),
        refused(f"{R}.multi_turn.format", TOOLS),
        refused(f"{R}.multi_turn.*", TOOLS),
        renamed(f"{R}.agent.num_workers", "environment.workers", "of each replica"),
        refused(f"{R}.agent.*", TOOLS),
        refused("data.need_tools_kwargs", TOOLS),
    ]


def _validation() -> list[Entry]:
    own, why = f"{VALIDATION}.temperature", "greedy unless val_kwargs.do_sample is true"
    return [
        ruled(f"{VALIDATION}.n", "carried", f"{VALIDATION}.n", "1 where responses are greedy", _samples),
        ruled(own, "carried", own, why, _temperature),
        ruled(f"{VALIDATION}.do_sample", "translated", own, why, _greedy),
        *carried(f"{VALIDATION}.top_p"),
        _top_k(f"{VALIDATION}.top_k"),
    ]


ENTRIES: tuple[Entry, ...] = (
    *_engine_settings(),
    *_turns(),
    *_validation(),
    renamed(
        "actor_rollout_ref.nccl_timeout",
        "trainer.timeout_minutes",
        "seconds become minutes: a rank that waits longer for the others ends the run",
        lambda value: round(value / 60, 2),
    ),
    met_by(
        "actor_rollout_ref.hybrid_engine", (True,), "the ranks always train and generate", "there is no other engine"
    ),
)
