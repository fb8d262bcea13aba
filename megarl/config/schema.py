"""Every configuration key, with its type, default and unit. Imports no torch.

Key names follow verl for the RL part and Megatron-Core for parallelism. All sections are frozen and keyword-only;
unknown keys are refused by `megarl.config.load`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KlPenalty = Literal["k1", "abs", "k2", "k3"]
KlLoss = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
NonEmpty = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(le=2**31 - 1)]
"""Steps, tokens, seeds: what is counted in int32 somewhere, or would not come to its end in a lifetime."""
Size = Annotated[int, Field(le=2**20)]
"""How many ranks, sequences or rows there are at once: each takes memory."""
Identity = Literal["model", "tokenizer", "data", "warmup", "seed", "batch", "algorithm", "reward", "roles", "flow"]
"""Parts of a run that a checkpoint records: one that goes on from it must have the same."""


class Section(BaseModel):
    """A frozen group of keys; a key that is not declared here is an error, and so are infinity and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# --------------------------------------------------------------------------------------------------------- data


class Data(Section):
    """Where prompts and examples come from and how they are batched."""

    format: Literal["auto", "prompts", "demonstrations", "preferences", "judged"] = Field(
        "auto",
        description="what a row is: a prompt to answer, a prompt or conversation with its answer, a chosen and a "
        "rejected answer, or an answer with a label; auto is what trainer.flow reads",
    )
    train_files: list[str] = Field(
        default_factory=list, description="jsonl or parquet files: paths, globs, or URIs such as s3://bucket/x.parquet"
    )
    val_files: list[str] = Field(default_factory=list, description="held-out files for validation, the same way")
    source: str = Field(
        "",
        description="path/to/file.py:function that returns training rows, or a class with __len__ and __getitem__, "
        "instead of train_files; asked once, and again when the file or its attribute `version` changes",
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=list,
        description="share of the training prompts drawn from each entry of train_files; default: as many as it has",
    )
    cache_dir: str = Field(
        "",
        description="where large, remote and generated rows are indexed once per node; default "
        "$XDG_CACHE_HOME/megarl/rows or ~/.cache/megarl/rows",
    )
    prompt_key: str = Field("prompt", description="column with the prompt: text, or a list of chat messages")
    answer_key: str = Field("answer", description="column with the reference answer")
    source_key: str = Field(
        "data_source", description="column that names where a row comes from, for metrics and rewards"
    )
    messages_key: str = Field(
        "", description="demonstrations: column with conversations, of which every turn of the assistant is learnt"
    )
    chosen_key: str = Field("chosen", description="preferences: column with the better answer")
    rejected_key: str = Field("rejected", description="preferences: column with the other answer")
    margin_key: str = Field("", description="preferences: column with how much better the chosen answer is, a number")
    label_key: str = Field("label", description="judged: column that says whether the answer is desirable")
    train_batch_size: Size = Field(64, ge=1, description="prompts, examples or pairs per step, over all ranks")
    gen_batch_size: Size | None = Field(
        None, ge=1, description="prompts per draw with algorithm.filter_groups; default train_batch_size"
    )
    max_prompt_length: Whole = Field(512, ge=1, description="tokens; longer prompts follow `truncation`")
    max_response_length: Whole = Field(512, ge=1, description="tokens generated at most")
    filter_overlong_prompts: bool = Field(
        False, description="drop prompts over max_prompt_length, and answers over max_response_length, instead"
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="what happens to a prompt over max_prompt_length: which part is cut, or an error"
    )
    filter: str = Field(
        "", description="path/to/file.py:function(row) -> whether a training prompt is used; default: all"
    )
    drop_duplicates: bool = Field(False, description="drop training prompts that an earlier row has too")
    shuffle: bool = Field(True, description="a new order of the training prompts every epoch")
    curriculum: str = Field(
        "",
        description="order of an epoch: a column with numbers to begin with the smallest of, or "
        "path/to/file.py:function(epoch, rows) -> positions of the rows in the order to draw them in",
    )
    seed: Whole = Field(1, ge=0, description="seeds data order, weight initialisation and sampling")

    @property
    def prompts_per_draw(self) -> int:
        """Prompts that responses are generated to at a time."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.max_prompt_length + self.max_response_length


# ---------------------------------------------------------------------------------------------------- algorithm


class KlCtrl(Section):
    """Controller of the KL coefficient when KL is subtracted from the reward (Ziegler et al. 2019, section 2.2)."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive steers the KL towards target_kl")
    kl_coef: float = Field(0.001, ge=0, description="coefficient, or its first value when adaptive")
    target_kl: float = Field(0.1, gt=0, description="nats per sequence, adaptive only")
    horizon: Whole = Field(10_000, ge=1, description="sequences over which the adaptive controller reacts")


class RolloutCorrection(Section):
    """Weights and rejection for the gap between the engine's distribution and the training layout's."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="truncated importance sampling by each token's ratio p_train / p_rollout, or its sequence's"
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="importance weights are cut off here")
    rollout_rs: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="reject tokens, or sequences by product or geometric mean, whose ratio is out of range"
    )
    rollout_rs_threshold: float = Field(2.0, ge=1, description="upper end of that range")
    rollout_rs_threshold_lower: float | None = Field(None, gt=0, le=1, description="lower end; default 1 / upper")
    rollout_token_veto_threshold: float | None = Field(
        None, gt=0, lt=1, description="reject every sequence with a token whose ratio is below this"
    )

    @property
    def corrects(self) -> bool:
        """Whether anything is corrected."""
        return (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold) != (None, None, None)

    @property
    def rs_lower(self) -> float:
        lower = self.rollout_rs_threshold_lower
        return 1 / self.rollout_rs_threshold if lower is None else lower


class FilterGroups(Section):
    """Dynamic sampling: prompts whose responses all score the same teach nothing, and others are drawn (DAPO)."""

    enable: bool = False
    metric: Literal["acc", "score", "seq_reward"] = Field(
        "acc", description="what must differ within a group: score >= 1, the score, or the score with its penalties"
    )
    max_num_gen_batches: Size = Field(
        10, ge=1, description="draws per step at most; then the batch is filled up with groups that were left out"
    )


class Preference(Section):
    """The loss on pairs of answers, or on answers with a label."""

    loss_mode: NonEmpty = Field("dpo", description="a name of `megarl algorithms`, or path/to/file.py:function")
    beta: float = Field(0.1, gt=0, description="weight of the log-ratio to the reference (ORPO: of the odds ratio)")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of pairs that are the wrong way round")
    length_normalization: bool = Field(False, description="log-probabilities of an answer are means over its tokens")
    gamma: float = Field(0.5, ge=0, description="SimPO: margin, as a share of beta")
    sft_coef: float = Field(0.0, ge=0, description="weight of the chosen answers' cross-entropy beside it")
    desirable_weight: float = Field(1.0, gt=0, description="KTO: weight of desirable answers")
    undesirable_weight: float = Field(1.0, gt=0, description="KTO: weight of the others")


class Algorithm(Section):
    """How rewards become advantages."""

    adv_estimator: NonEmpty = Field(
        "grpo",
        description="how advantages are estimated: a name of `megarl algorithms`, or path/to/file.py:function",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="GAE: decay per token of what values are corrected by")
    filter_groups: FilterGroups = FilterGroups()
    overlong_filtering: bool = Field(
        False, description="responses that were cut off at max_response_length are left out of the loss"
    )
    preference: Preference = Preference()
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="divide by the group's standard deviation (false: Dr. GRPO)"
    )
    use_kl_in_reward: bool = Field(False, description="subtract the KL to the reference model from the reward")
    kl_penalty: KlPenalty = Field("k1", description="per-token estimator of that KL")
    kl_ctrl: KlCtrl = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()


# ------------------------------------------------------------------------------------------------ actor, rollout


class Model(Section):
    """The policy's architecture and weights."""

    path: str = Field("", description="directory with a Hugging Face config.json, and weights in safetensors files")
    tokenizer_path: str = Field("", description="tokenizer directory or SentencePiece .model file; default: path")
    random_init: bool = Field(False, description="start from random weights instead of those in path")
    checkpoint: str = Field(
        "", description="MegaRL checkpoint folder (global_step_N) whose actor weights to start from"
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="type of weights and activations")
    enable_gradient_checkpointing: bool = Field(False, description="recompute every layer's activations in backward")
    use_remove_padding: bool = Field(True, description="pack sequences instead of padding them")


class Optim(Section):
    """AdamW, through Megatron-Core's optimizer, and its schedule."""

    lr: float = Field(1e-6, gt=0, le=1, description="peak learning rate")
    lr_warmup_steps: Whole = Field(0, ge=0, description="optimizer steps of linear warm-up")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate that the decay ends at")
    weight_decay: float = Field(0.01, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="L2 norm over all parameters; 0 turns clipping off")
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)


class Megatron(Section):
    """The training layout, in Megatron-Core's names."""

    tensor_model_parallel_size: Size = Field(1, ge=1, description="ranks that share one layer")
    pipeline_model_parallel_size: Size = Field(1, ge=1, description="pipeline stages")
    virtual_pipeline_model_parallel_size: Size | None = Field(
        None, ge=2, description="model chunks per stage; 2 or more uses the interleaved schedule"
    )
    sequence_parallel: bool = Field(False, description="split norms and residuals along the sequence within TP")
    use_distributed_optimizer: bool = Field(True, description="shard optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = Field(False, description="reduce gradients while the backward pass runs")
    overlap_param_gather: bool = Field(
        False,
        description="fetch the other ranks' updated parameters while the next forward pass runs; needs "
        "use_distributed_optimizer and overlap_grad_reduce",
    )
    param_offload: bool = Field(
        False,
        description="the weights leave the GPU while responses are generated: bfloat16 ones are dropped and rebuilt "
        "from the optimizer's fp32 weights, others wait in pinned host memory",
    )
    grad_offload: bool = Field(False, description="give the gradients' memory back between two updates; costs nothing")
    optimizer_offload: bool = Field(
        False, description="the optimizer's state waits in pinned host memory while responses are generated"
    )
    transformer_engine: Literal["auto", "none"] = Field(
        "auto", description="auto uses Transformer Engine's layers on GPUs when it is installed"
    )
    override_transformer_config: dict[str, Any] = Field(
        default_factory=dict, description="fields of Megatron-Core's TransformerConfig to set as they are"
    )


class PolicyLoss(Section):
    """The form of the policy update."""

    loss_mode: NonEmpty = Field(
        "vanilla", description="a name of `megarl algorithms`: vanilla is PPO's; or path/to/file.py:function"
    )
    tau_pos: float = Field(1.0, gt=0, description="SAPO: temperature of the soft gate for advantages above 0")
    tau_neg: float = Field(1.05, gt=0, description="SAPO: the same for the others")
    clip_cov_ratio: float = Field(0.0002, gt=0, le=1, description="clip_cov: share of tokens without gradient")
    clip_cov_lb: float = Field(1.0, description="clip_cov: they are drawn among those whose covariance is above this")
    clip_cov_ub: float = Field(5.0, description="clip_cov: and below this")
    kl_cov_ratio: float = Field(0.0002, gt=0, le=1, description="kl_cov: share of tokens with a KL penalty")
    ppo_kl_coef: float = Field(0.1, ge=0, description="kl_cov: weight of that penalty")


class Batching(Section):
    """How many tokens or sequences go through a model at once."""

    ppo_micro_batch_size_per_gpu: Size = Field(
        8, ge=1, description="sequences per forward pass; not with dynamic sizes"
    )
    use_dynamic_bsz: bool = Field(True, description="fill each micro-batch up to a number of tokens instead")
    ppo_max_token_len_per_gpu: Whole = Field(16_384, ge=1, description="tokens per micro-batch with use_dynamic_bsz")


class Actor(Batching):
    """The policy update."""

    optim: Optim = Optim()
    ppo_mini_batch_size: Size = Field(64, ge=1, description="prompts per optimizer step (each with its n samples)")
    ppo_epochs: Size = Field(1, ge=1, description="passes over each batch of rollouts")
    clip_ratio: float = Field(0.2, gt=0, description="PPO clip range, both sides unless set apart below")
    clip_ratio_low: float | None = Field(None, gt=0, lt=1, description="lower side; default clip_ratio")
    clip_ratio_high: float | None = Field(None, gt=0, description="upper side; default clip_ratio (DAPO: clip-higher)")
    clip_ratio_c: float | None = Field(None, gt=1, description="dual clip for negative advantages; off by default")
    loss_agg_mode: LossAggMode = Field("token-mean", description="how token losses become one number")
    policy_loss: PolicyLoss = PolicyLoss()
    entropy_coeff: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add the KL to the reference model to the loss")
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: KlLoss = Field(
        "k3", description="per-token estimator of that KL; k1+ and k3+ have their value and the gradient of k2"
    )
    fused_old_log_probs: bool = Field(
        True,
        description="with one optimizer step per batch, the log-probabilities before it are those of its own forward "
        "pass, where nothing needs them sooner: a pass less",
    )
    megatron: Megatron = Megatron()

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class ValKwargs(Section):
    """Sampling for validation."""

    n: Size = Field(1, ge=1, description="samples per prompt; accuracy is their mean")
    k: list[Annotated[Size, Field(ge=1)]] = Field(
        default_factory=list,
        description="numbers of samples, up to n, for pass@k and maj@k; default powers of two up to n, and n",
    )
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(-1, ge=-1, description="-1 keeps the whole vocabulary")


class CarryOver(Section):
    """Responses that are not finished when a batch is full go on under the next step's weights."""

    enable: bool = False
    groups: Size | None = Field(
        None,
        ge=2,
        description="prompts whose responses are under way at a time: more than data.train_batch_size, and at most "
        "twice as many, which is the default",
    )
    max_staleness: Whole = Field(
        4, ge=1, description="steps that a response takes at most: generation waits for one that would take more"
    )


class Rollout(Section):
    """Generation: engine, layout and sampling."""

    name: str = Field("native", description="generation engine: native, vllm, or path/to/file.py:class")
    n: Size = Field(8, ge=1, description="samples per prompt")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    top_k: Whole = Field(-1, ge=-1, description="-1 keeps the whole vocabulary")
    stop_token_ids: list[Whole] = Field(default_factory=list, description="stop tokens beside the tokenizer's own end")
    stop: list[NonEmpty] = Field(
        default_factory=list, description="strings that end a response; it keeps the token that completes one"
    )
    tensor_model_parallel_size: Size = Field(1, ge=1, description="ranks that share one generation replica")
    max_num_seqs: Size = Field(256, ge=1, description="sequences decoded together in one replica")
    max_num_batched_tokens: Whole = Field(
        8192, ge=1, description="tokens computed together in one replica (native: prompt tokens only)"
    )
    gpu_memory_utilization: float = Field(
        0.5,
        gt=0,
        le=1,
        description="part of a GPU's memory for the engine's own weights, activations and KV cache, "
        "which takes no more of it than max_num_seqs sequences can fill",
    )
    max_logp_gap: float | None = Field(
        None,
        gt=0,
        description="nats: the run stops when the engine's log-probabilities are further than this from the training "
        "layout's on average; default 0.01 in float32, 0.2 in bfloat16; not checked with top_p or top_k",
    )
    enforce_eager: bool = Field(
        False, description="no CUDA graphs (vllm: nor compilation, so it starts a minute sooner): generates more slowly"
    )
    free_cache_engine: bool = Field(
        True, description="give the engine's weights and KV cache back after each generation phase"
    )
    val_kwargs: ValKwargs = ValKwargs()
    carry_over: CarryOver = CarryOver()


class RefMegatron(Section):
    """The reference's memory; its layout is the actor's."""

    param_offload: bool = Field(
        False, description="the reference's weights are in pinned host memory except while they are used"
    )


class Ref(Section):
    """The frozen policy that the KL is measured against."""

    megatron: RefMegatron = RefMegatron()


class Reshard(Section):
    """The move of the actor's weights into the generation layout."""

    transport: Literal["auto", "collective"] = Field(
        "auto",
        description="auto: GPUs of one host read each other's memory, other ranks exchange buckets; collective: all do",
    )
    bucket_bytes: int = Field(
        256 * 2**20, ge=1024, le=2**40, description="bytes in flight per rank in one round of bucket exchange"
    )
    verify: bool = Field(False, description="check every tensor's checksum after each reshard")


class ActorRolloutRef(Section):
    """The policy, its generation engine and its reference."""

    model: Model = Model()
    actor: Actor = Actor()
    ref: Ref = Ref()
    rollout: Rollout = Rollout()
    reshard: Reshard = Reshard()


# ------------------------------------------------------------------------------------------------- other models


class OtherModel(Section):
    """The weights of a model beside the policy."""

    path: str = Field("", description="directory with a Hugging Face config.json and safetensors files")
    tokenizer_path: str = Field("", description="tokenizer directory or SentencePiece .model file; default: path")
    random_init: bool = Field(False, description="start from random weights instead of those in path")


class CriticOptim(Optim):
    """The same, with a default of its own."""

    lr: float = Field(1e-5, gt=0, le=1, description="peak learning rate")


class Critic(Batching):
    """The model that predicts returns, for an estimator that needs values. Of its Megatron keys those that are not set
    are the actor's."""

    model: OtherModel = Field(
        OtherModel(),
        description="path: a language model, or one with a single label; default: as the policy begins",
    )
    optim: CriticOptim = CriticOptim()
    ppo_mini_batch_size: Size | None = Field(None, ge=1, description="prompts per optimizer step; default the actor's")
    ppo_epochs: Size = Field(1, ge=1, description="passes over each batch of rollouts")
    cliprange_value: float | None = Field(0.5, gt=0, description="values move no further in a step; null: any distance")
    loss_agg_mode: LossAggMode = Field("token-mean", description="how token losses become one number")
    lam: float | None = Field(None, ge=0, le=1, description="decay of its returns; default algorithm.lam")
    megatron: Megatron = Megatron()


class RewardModel(Batching):
    """A model that scores responses, for reward.name=model. Of its Megatron keys those that are not set are the
    actor's."""

    model: OtherModel = Field(OtherModel(), description="path: a sequence classifier with one label")
    megatron: Megatron = Megatron()


class Teacher(Batching):
    """A frozen language model with the policy's vocabulary, for an estimator that needs one. Of its Megatron keys those
    that are not set are the actor's."""

    model: OtherModel = OtherModel()
    megatron: Megatron = Megatron()


# --------------------------------------------------------------------------------------------- reward, trainer


class OverlongBuffer(Section):
    """The soft penalty for long responses (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = False
    len: Whole = Field(0, ge=0, description="tokens before max_response_length over which the penalty grows")
    penalty_factor: float = Field(1.0, ge=0, description="penalty at max_response_length")


class RewardPart(Section):
    """A function with its weight in the score."""

    name: NonEmpty = Field(description="a registered verifier, or path/to/file.py:function")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="the score is the sum of weight x part")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    data_sources: list[str] = Field(
        default_factory=list, description="rows whose data.source_key is one of these; default all rows"
    )


class Reward(Section):
    """How a response is scored."""

    name: str = Field(
        "exact_match",
        description="a registered verifier, path/to/file.py:function, or model for the scores of `reward_model`",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    parts: dict[str, RewardPart] = Field(
        default_factory=dict,
        description="label -> a function with a weight: scores are sums of these, instead of reward.name",
    )
    overlong_buffer: OverlongBuffer = OverlongBuffer()
    on_error: Literal["fail", "drop", "retry"] = Field(
        "fail",
        description="when scoring a response fails, takes too long or gives no finite number: fail ends the run, drop "
        "leaves the response out of its group and of the loss and counts it in reward/failed, retry tries again up to "
        "reward.retries times, and then drops it",
    )
    retries: Size = Field(
        3, ge=1, le=100, description="further tries with on_error=retry, after 1 s, 2 s, 4 s and so on, 60 s at most"
    )
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds that one call of a function may take")
    workers: Size | None = Field(
        None, ge=1, description="processes per node that score, at least 1 per rank that does; default one per CPU core"
    )
    batch_size: Size | None = Field(
        None, ge=1, description="the function takes lists of up to so many responses and rows, and returns their scores"
    )
    concurrency: Size = Field(
        64, ge=1, description="calls of an async def that a worker has under way, such as requests to a judge"
    )


class Environment(Section):
    """What answers the policy, so that a response has several turns."""

    name: str = Field("", description="a registered environment, or path/to/file.py:class; empty: nobody answers")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments that an environment is made with")
    agent: str = Field(
        "",
        description="path/to/file.py:function instead: an `async def agent(base_url, row)` that asks an "
        "OpenAI-compatible endpoint for the policy's responses",
    )
    max_turns: Whole = Field(8, ge=1, description="responses of the policy in an episode")
    timeout: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="seconds that a step of an environment, or a whole episode of an agent, takes",
    )
    max_observation_length: Whole = Field(256, ge=1, description="tokens of an observation; a longer one is cut")
    role: Literal["user", "tool"] = Field("user", description="whose message an observation is, in a chat")
    workers: Size = Field(
        8,
        ge=1,
        description="of each replica: threads in which steps run, or processes of agents, each with many episodes; at "
        "most rollout.max_num_seqs episodes are under way",
    )

    @property
    def answers(self) -> bool:
        """Whether responses have several turns."""
        return bool(self.name or self.agent)


class WarmupOptim(Optim):
    """The same, with a default of its own."""

    lr: float = Field(1e-5, gt=0, le=1, description="peak learning rate")


class Warmup(Section):
    """A supervised phase before the RL steps: cross-entropy on `data.answer_key`, then a fresh optimizer."""

    train_files: list[str] = Field(default_factory=list, description="demonstrations; default data.train_files")
    total_training_steps: Whole = Field(0, ge=0, description="optimizer steps; 0 skips the phase")
    train_batch_size: Size = Field(256, ge=1, description="examples per step, over all ranks")
    optim: WarmupOptim = WarmupOptim()


class Trainer(Section):
    """The run itself."""

    flow: NonEmpty = Field("ppo", description="what the run does: a registered flow, or path/to/file.py:function")
    nnodes: Size = Field(1, ge=1)
    n_gpus_per_node: Size = Field(1, ge=1, description="ranks per node (CPU ranks where there is no GPU)")
    total_epochs: Whole = Field(
        1, ge=1, description="passes over the training prompts, unless total_training_steps is set"
    )
    total_training_steps: Whole | None = Field(None, ge=1, description="steps; overrides total_epochs")
    critic_warmup: Whole = Field(0, ge=0, description="first steps in which only the critic is trained")
    save_freq: Whole = Field(-1, ge=-1, description="steps between checkpoints; -1 saves only at the end, 0 never")
    max_ckpt_to_keep: Whole | None = Field(None, ge=1, description="older checkpoints are deleted; default keeps all")
    best_metric: str = Field(
        "",
        description="a metric of the validation, such as val/accuracy: the step with the best one is saved, whatever "
        "save_freq says, stays beside the max_ckpt_to_keep newest, and is named in checkpoints/best.json; default none",
    )
    best_mode: Literal["max", "min"] = Field("max", description="whether a high or a low best_metric is good")
    test_freq: Whole = Field(-1, ge=-1, description="steps between validations; -1 validates only at the end, 0 never")
    val_before_train: bool = Field(True, description="validate before the first step")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto", description="auto goes on from the run folder's latest checkpoint, if any"
    )
    resume_from_path: str = Field("", description="a global_step_N folder, for resume_mode=resume_path")
    resume_allow: list[Identity] = Field(
        default_factory=list, description="parts of a run that may differ from the checkpoint that it goes on from"
    )
    on_nonfinite: Literal["skip", "stop", "rollback"] = Field(
        "skip",
        description="a loss or gradient norm that is not finite: skip leaves the optimizer step out, and stops after 3 "
        "in a row; stop ends the run; rollback goes on from the last checkpoint, with the batches after the bad one",
    )
    timeout_minutes: float = Field(
        30.0, gt=0, le=100_000, description="a rank that waits longer for the others ends the run, and names them"
    )
    stop_timeout: float = Field(
        300.0, gt=0, le=86_400, description="seconds after SIGTERM, SIGINT or SIGUSR1 to end the step, save and leave"
    )
    agreement_freq: Whole = Field(
        10,
        ge=0,
        description="steps between two checks that all ranks computed the same advantages and that the engine holds "
        "the actor's weights, the first step included; 0 never",
    )
    logger: list[str] = Field(
        default=["console", "jsonl", "tensorboard"],
        description="where metrics go: console, jsonl, csv, tensorboard, or path/to/file.py:class",
    )
    project_name: str = "megarl"
    experiment_name: str = "run"
    default_local_dir: str = Field("", description="run folder; default runs/{project_name}/{experiment_name}")
    balance_batch: bool = Field(True, description="even out tokens over data-parallel ranks")
    log_rollouts: Size = Field(
        8,
        ge=0,
        description="sample rollouts written to the run folder at each step; unless 0, all of a validation are written",
    )

    @property
    def run_dir(self) -> str:
        return self.default_local_dir or f"runs/{self.project_name}/{self.experiment_name}"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node


class Checkpoint(Section):
    """What a checkpoint holds beside what resuming needs."""

    save_hf: bool = Field(
        False,
        description="the actor, or what a reward_model run trains, as a Hugging Face folder, global_step_N/huggingface",
    )
    verify: bool = Field(True, description="compare every file with the checkpoint's manifest before it is loaded")


class Config(Section):
    """The whole configuration of a run."""

    data: Data = Data()
    algorithm: Algorithm = Algorithm()
    actor_rollout_ref: ActorRolloutRef = ActorRolloutRef()
    critic: Critic = Critic()
    reward_model: RewardModel = RewardModel()
    teacher: Teacher = Teacher()
    reward: Reward = Reward()
    environment: Environment = Environment()
    warmup: Warmup = Warmup()
    trainer: Trainer = Trainer()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="before")
    @classmethod
    def _as_the_actor(cls, values: Any) -> Any:
        """Megatron keys of another model that are not set are the actor's."""
        if not isinstance(values, dict):
            return values
        actor = values.get("actor_rollout_ref") or {}
        own = (actor.get("actor") or {}).get("megatron") if isinstance(actor, dict) else None
        if not isinstance(own, dict):
            return values
        others = {}
        for name in ("critic", "reward_model", "teacher"):
            section = values.get(name, {})
            if isinstance(section, dict) and isinstance(section.get("megatron", {}), dict):
                others[name] = {**section, "megatron": {**own, **section.get("megatron", {})}}
        return {**values, **others}

    @property
    def critic_mini_batch_size(self) -> int:
        """Prompts per optimizer step of the critic."""
        return self.critic.ppo_mini_batch_size or self.actor_rollout_ref.actor.ppo_mini_batch_size

    @property
    def groups_under_way(self) -> int:
        """Prompts whose responses are generated at a time, with `rollout.carry_over`."""
        return self.actor_rollout_ref.rollout.carry_over.groups or 2 * self.data.train_batch_size

    @property
    def needs_reference(self) -> bool:
        """Whether keys ask for a reference; an algorithm may need one too."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
