"""Defines the sections of the policy: model, training layout, loss, generation engine, reference and reshard."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import KlLoss, LossAggMode, ModelFiles, NonEmpty, Section, Size, Whole


class ModelConfig(ModelFiles):
    """Describes the policy's architecture and weights."""

    random_init: bool = Field(False, description="start from random weights instead of those in path")
    family: str = Field(
        "",
        description="path/to/file.py:function that describes a model whose architecture is unknown: its config.json, a "
        "dictionary, to an Architecture",
    )
    checkpoint: str = Field(
        "",
        description="checkpoint folder whose actor weights to start from: MegaRL's (global_step_N) or Megatron-LM's "
        "(iter_N, or the folder with its newest one)",
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="data type of weights and activations")
    enable_gradient_checkpointing: bool = Field(False, description="recompute every layer's activations in backward")
    recompute_modules: list[Literal["mlp", "moe"]] = Field(
        [],
        description="parts of a layer whose activations are recomputed in backward, the others being kept: mlp, the "
        "MLP that every token goes through; moe, experts with their router",
    )
    enable_activation_offload: bool = Field(
        False,
        description="what enable_gradient_checkpointing keeps, each layer's input, waits in host memory until the "
        "backward pass",
    )
    use_remove_padding: bool = Field(True, description="pack sequences instead of padding them")
    use_prefix_grouper: bool = Field(
        False,
        description="the prompt that several sequences of a micro-batch begin with is computed once for all; with "
        "use_dynamic_bsz they are put together where no rank gets more to do by it",
    )

    @property
    def recomputed(self) -> bool | list[Literal["mlp", "moe"]]:
        """Say what of a layer is computed again in backward: all but its input, or some parts."""
        return self.enable_gradient_checkpointing or self.recompute_modules


class OptimConfig(Section):
    """Sets AdamW, through Megatron-Core's optimizer, and its schedule."""

    lr: float = Field(1e-6, gt=0, le=1, description="peak learning rate")
    lr_warmup_steps: Whole = Field(0, ge=0, description="optimizer steps of linear warm-up")
    lr_warmup_steps_ratio: float = Field(
        0.0, ge=0, le=1, description="share of all optimizer steps in the warm-up, if lr_warmup_steps is 0"
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape of the learning rate after the warm-up"
    )
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay, as in AdamW; not for biases and norms")
    clip_grad: float = Field(
        1.0, ge=0, description="maximum L2 norm of the gradient of all parameters; 0 turns clipping off"
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of gradients")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of the mean of squared gradients")
    adam_eps: float = Field(1e-8, gt=0, description="term added to the denominator of an update")

    def warmup_of(self, total_steps: int) -> int:
        """Return the number of warm-up steps among `total_steps` optimizer steps."""
        return self.lr_warmup_steps or int(self.lr_warmup_steps_ratio * total_steps)


class FastOptimConfig(OptimConfig):
    """Sets AdamW and its schedule, with a higher default learning rate than the actor's."""

    lr: float = Field(1e-5, gt=0, le=1, description="peak learning rate")


class LayoutConfig(Section):
    """Sets how ranks share a model and its sequences; its defaults are the layout of one rank."""

    tensor_model_parallel_size: Size = Field(1, ge=1, description="ranks that share each layer")
    pipeline_model_parallel_size: Size = Field(1, ge=1, description="pipeline stages")
    virtual_pipeline_model_parallel_size: Size | None = Field(
        None, ge=2, description="model chunks per stage; 2 or more uses the interleaved schedule"
    )
    num_layers_in_first_pipeline_stage: Size | None = Field(
        None, ge=1, description="layers of the first stage; default: stages differ by a layer at most"
    )
    num_layers_in_last_pipeline_stage: Size | None = Field(
        None, ge=1, description="layers of the last stage; stages whose layers are not set have equally many"
    )
    account_for_embedding_in_pipeline_split: bool = Field(
        False, description="count the embedding as a layer: the first stage has one layer fewer than those between"
    )
    account_for_loss_in_pipeline_split: bool = Field(
        False, description="count the output layer and the loss as a layer: the last stage has one layer fewer"
    )
    pipeline_model_parallel_layout: str = Field(
        "",
        description="what each stage holds, in the place of the four keys above: Et*3|(tt|)*29L is the embedding (E) "
        "and 3 layers (t), 29 stages of 2 layers, and the loss (L); twice as many stages as "
        "pipeline_model_parallel_size are 2 chunks for each",
    )
    context_parallel_size: Size = Field(
        1,
        ge=1,
        description="ranks that share each sequence, a part of its tokens on each; see cp_comm_type for attention",
    )
    cp_comm_type: Literal["a2a", "all_gather"] = Field(
        "a2a",
        description="what context-parallel ranks do around attention: a2a exchanges heads for tokens, so that each "
        "attends with some heads; all_gather brings the keys and values of all tokens to each, whatever the heads",
    )
    expert_model_parallel_size: Size = Field(
        1, ge=1, description="ranks over which the experts of a layer are dealt out; data-parallel ranks are among them"
    )
    expert_tensor_parallel_size: Size | None = Field(
        None, ge=1, description="ranks that share each expert; default tensor_model_parallel_size"
    )
    sequence_parallel: bool = Field(False, description="split norms and residuals along the sequence within TP")


class MegatronConfig(LayoutConfig):
    """Sets the training layout, in Megatron-Core's names."""

    moe_aux_loss_coeff: float = Field(
        0.0, ge=0, description="weight of a loss that spreads a micro-batch's tokens over the experts, for each layer"
    )
    moe_z_loss_coeff: float = Field(0.0, ge=0, description="weight of a loss that keeps the routers' logits small")
    use_distributed_optimizer: bool = Field(True, description="shard optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = Field(False, description="reduce gradients during the backward pass")
    overlap_param_gather: bool = Field(
        False,
        description="gather other ranks' updated parameters during the next forward pass; needs "
        "use_distributed_optimizer and overlap_grad_reduce",
    )
    param_offload: bool = Field(
        False,
        description="move the weights off the GPU while responses are generated: bfloat16 weights are dropped and "
        "rebuilt from the optimizer's fp32 weights, others wait in pinned host memory",
    )
    grad_offload: bool = Field(False, description="free the gradients' memory between two updates; costs no time")
    optimizer_offload: bool = Field(
        False, description="keep the optimizer's state in pinned host memory while responses are generated"
    )
    transformer_engine: Literal["auto", "none"] = Field(
        "auto", description="auto uses Transformer Engine's layers on GPUs if it is installed"
    )
    override_transformer_config: dict[str, Any] = Field(
        default_factory=dict, description="further fields of Megatron-Core's TransformerConfig"
    )


class PolicyLossConfig(Section):
    """Sets the form of the policy update."""

    loss_mode: NonEmpty = Field(
        "vanilla", description="a name of `megarl algorithms` (vanilla is PPO's loss), or path/to/file.py:function"
    )
    tau_pos: float = Field(1.0, gt=0, description="SAPO: temperature of the soft gate for advantages above 0")
    tau_neg: float = Field(1.05, gt=0, description="SAPO: the same for the other advantages")
    clip_cov_ratio: float = Field(0.0002, gt=0, le=1, description="clip_cov: share of tokens without gradient")
    clip_cov_lb: float = Field(1.0, description="clip_cov: lower end of the covariances of these tokens")
    clip_cov_ub: float = Field(5.0, description="clip_cov: upper end of these covariances")
    kl_cov_ratio: float = Field(0.0002, gt=0, le=1, description="kl_cov: share of tokens with a KL penalty")
    ppo_kl_coef: float = Field(0.1, ge=0, description="kl_cov: weight of the KL penalty")


class BatchingConfig(Section):
    """Sets the size of micro-batches."""

    ppo_micro_batch_size_per_gpu: Size = Field(8, ge=1, description="sequences per micro-batch without use_dynamic_bsz")
    use_dynamic_bsz: bool = Field(True, description="fill each micro-batch up to a number of tokens")
    ppo_max_token_len_per_gpu: Whole = Field(
        16_384, ge=1, description="tokens per micro-batch and context-parallel rank with use_dynamic_bsz"
    )

    def most_tokens(self, megatron: MegatronConfig) -> int:
        """Count the tokens that a micro-batch may have with use_dynamic_bsz, over all its context-parallel ranks."""
        return self.ppo_max_token_len_per_gpu * megatron.context_parallel_size

    def least_tokens(self, tokens: int, megatron: MegatronConfig) -> int:
        """Give the least `ppo_max_token_len_per_gpu` with which a micro-batch may have so many tokens."""
        return math.ceil(tokens / megatron.context_parallel_size)

    def limit(self, megatron: MegatronConfig) -> str:
        """Write the numbers whose product is `most_tokens`."""
        ranks = megatron.context_parallel_size
        times = f" x context_parallel_size = {ranks}" if ranks > 1 else ""
        return f"{self.ppo_max_token_len_per_gpu}{times}"


class ActorConfig(BatchingConfig):
    """Sets how the policy is updated."""

    optim: OptimConfig = OptimConfig()
    ppo_mini_batch_size: Size = Field(64, ge=1, description="prompts per optimizer step (each with its n samples)")
    ppo_epochs: Size = Field(1, ge=1, description="passes over each batch of rollouts")
    clip_ratio: float = Field(0.2, gt=0, description="PPO clip range of both sides")
    clip_ratio_low: float | None = Field(
        None, gt=0, lt=1, description="clip range of the lower side; default clip_ratio"
    )
    clip_ratio_high: float | None = Field(
        None, gt=0, description="clip range of the upper side (DAPO: clip-higher); default clip_ratio"
    )
    clip_ratio_c: float | None = Field(
        None, gt=1, description="bound of the dual clip for negative advantages; default: off"
    )
    loss_agg_mode: LossAggMode = Field("token-mean", description="aggregation of token losses into one number")
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add the KL to the reference model to the loss")
    kl_loss_coef: float = Field(0.001, ge=0, description="weight of the KL in the loss")
    kl_loss_type: KlLoss = Field(
        "k3",
        description="per-token estimator of that KL; k1+ and k3+ have the value of k1 and k3 and the gradient of k2",
    )
    fused_old_log_probs: bool = Field(
        True,
        description="with one optimizer step per batch, take the old log-probabilities from the update's own forward "
        "pass if nothing needs them earlier, which saves a pass",
    )
    megatron: MegatronConfig = MegatronConfig()

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class ValKwargsConfig(Section):
    """Sets how responses are sampled for validation."""

    n: Size = Field(1, ge=1, description="samples per prompt; accuracy is the mean over them")
    k: list[Annotated[Size, Field(ge=1)]] = Field(
        default_factory=list,
        description="the k of pass@k and maj@k, up to n; default powers of two up to n, and n",
    )
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    top_k: Whole = Field(-1, ge=-1, description="-1 keeps the whole vocabulary")


class CarryOverConfig(Section):
    """Carries unfinished responses of a full batch over to the next step, which continues them with its weights."""

    enable: bool = Field(
        False, description="start more prompts than a step trains on, and carry the rest over to the next step"
    )
    groups: Size | None = Field(
        None,
        ge=2,
        description="prompts whose responses are generated at the same time: more than data.train_batch_size, at most "
        "twice as many, which is the default",
    )
    max_staleness: Whole = Field(
        4, ge=1, description="maximum of steps over which a response is generated; generation waits for older ones"
    )


class RolloutConfig(Section):
    """Sets how responses are generated: engine, layout and sampling."""

    name: str = Field("native", description="generation engine: native, vllm, or path/to/file.py:class")
    n: Size = Field(8, ge=1, description="samples per prompt")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probabilities are taken at it, too")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    top_k: Whole = Field(-1, ge=-1, description="-1 keeps the whole vocabulary")
    stop_token_ids: list[Whole] = Field(
        default_factory=list, description="further stop tokens besides the tokenizer's end"
    )
    stop: list[NonEmpty] = Field(
        default_factory=list, description="strings that end a response, which keeps the token that completes the string"
    )
    tensor_model_parallel_size: Size = Field(1, ge=1, description="ranks that share one generation replica")
    enable_expert_parallel: bool = Field(
        False, description="each rank of a replica has whole experts, in place of a share of every expert"
    )
    max_num_seqs: Size = Field(256, ge=1, description="sequences decoded together in one replica")
    max_num_batched_tokens: Whole = Field(
        8192, ge=1, description="tokens per forward pass of one replica (native: prompt tokens only)"
    )
    gpu_memory_utilization: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of a GPU's memory, or of a CPU rank's part of the machine's memory, for the engine's own "
        "weights, activations and KV cache; the cache is no larger than max_num_seqs sequences can fill",
    )
    max_logp_gap: float | None = Field(
        None,
        gt=0,
        description="nats: the run stops if the log-probabilities of engine and training layout differ by more than "
        "this on average; default 0.01 in float32, 0.2 in bfloat16; not checked with top_p or top_k",
    )
    enforce_eager: bool = Field(
        False, description="no CUDA graphs, which is slower (vllm: no compilation either, and starts a minute sooner)"
    )
    free_cache_engine: bool = Field(
        True, description="free the engine's weights and KV cache after each generation phase"
    )
    enable_rollout_routing_replay: bool = Field(
        False,
        description="mixtures of experts: record the experts that each token goes to, and send it to the same ones in "
        "the actor's passes, old log-probabilities and updates (R3)",
    )
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    carry_over: CarryOverConfig = CarryOverConfig()


class RefMegatronConfig(Section):
    """Places the weights of the reference model, which has the actor's layout."""

    param_offload: bool = Field(
        False, description="keep the reference's weights in pinned host memory except while they are used"
    )


class RefConfig(Section):
    """Describes the reference model: the frozen policy against which the KL is measured."""

    megatron: RefMegatronConfig = RefMegatronConfig()


class ReshardConfig(Section):
    """Sets the reshard: the copy of the actor's weights into the generation layout."""

    transport: Literal["auto", "collective"] = Field(
        "auto",
        description="auto: GPUs of one host read each other's memory, other ranks exchange buckets; collective: all "
        "ranks exchange buckets",
    )
    bucket_bytes: int = Field(
        256 * 2**20, ge=1024, le=2**40, description="bytes that a rank has in flight in one round of bucket exchange"
    )
    verify: bool = Field(False, description="check every tensor's checksum after each reshard")


class ActorRolloutRefConfig(Section):
    """Holds the sections of the policy, its generation engine and its reference."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    reshard: ReshardConfig = ReshardConfig()
