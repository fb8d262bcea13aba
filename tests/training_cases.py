"""Training jobs that run inside the pool's ranks: an actor in some layout on a fixed batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from architectures import alike, changed
from tiny_engines import text_of

from megarl.algorithms.loss import LossInput, LossOutput
from megarl.models.architecture import Architecture, Layer
from megarl.models.parts.experts import Experts, MixtureOfExperts
from megarl.models.parts.gated_delta import GatedDelta
from megarl.models.parts.latent import Latent
from megarl.models.parts.rotary import Yarn
from megarl.models.parts.stacked_experts import StackedExperts
from megarl.models.parts.swiglu import SwiGLU
from megarl.parallel.context import ALL_GATHER, ALL_TO_ALL
from megarl.parallel.layout import TrainLayout
from megarl.parallel.pipeline_split import PipelineSplit
from megarl.parallel.world import World
from megarl.roles.passes import MiniBatch
from megarl.types import Batch, batch_of

ARCH = alike(
    family="qwen3",
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,  # divisible by no tensor-parallel size
    max_position_embeddings=64,
    qkv_bias=True,
    qk_norm=True,
    output="tied",
    init_std=0.1,
)
WITH_EXPERTS = changed(ARCH, moe=MixtureOfExperts(num_experts=6, experts_per_token=2, norm_topk_prob=True))
WIDE = changed(ARCH, hidden_size=512, ffn_hidden_size=256, head_dim=64)
WIDE_WITH_EXPERTS = changed(WIDE, moe=MixtureOfExperts(num_experts=32, experts_per_token=8, norm_topk_prob=True))
SIGMOID = MixtureOfExperts(
    num_experts=8,
    experts_per_token=4,
    norm_topk_prob=True,
    score_function="sigmoid",
    correction_bias=True,
    num_groups=4,
    groups_per_token=2,
    scaling_factor=2.5,
)
_ATTENTION = replace(ARCH.attention, partial_rotary_factor=0.5)
_EXPERTS = Layer(attention=_ATTENTION, mlp=Experts(ffn_hidden_size=16, shared_ffn_hidden_size=32, moe=SIGMOID))
SOME_WITH_EXPERTS = replace(
    ARCH, family="glm4_moe", layers=((replace(ARCH.layer(0), attention=_ATTENTION), 1), (_EXPERTS, 3))
)
"""A dense layer, then three with experts, as GLM's."""
_SEES_ALL = replace(ARCH.attention, qkv_bias=False, zero_centered_norms=True, softmax_scale=0.3, rope_theta=1e6)
_MLP = SwiGLU(ffn_hidden_size=48, activation="gelu_tanh")
_SEES = {window: replace(_SEES_ALL, sliding_window=window) for window in (3, None)}
WINDOWS = replace(
    ARCH,
    family="gemma3_text",
    layers=tuple(
        (Layer(attention=_SEES[window], mlp=_MLP, output_norms=True), count)
        for window, count in ((3, 2), (None, 1), (3, 1))
    ),
    zero_centered_norms=True,
    embedding_scale=32**0.5,
)
"""Two layers with a window, one that sees everything, and another with a window, as Gemma's."""
NORMS_BEHIND = replace(
    ARCH,
    family="olmo2",
    layers=(
        (
            replace(
                ARCH.layer(0).with_attention(qkv_bias=False, norm_over_heads=True),
                input_norms=False,
                output_norms=True,
            ),
            4,
        ),
    ),
)
"""Norms behind attention and MLP alone, and over all heads of the queries and keys, as OLMo 2's."""
_BIASED = replace(ARCH.attention, qk_norm=False, output_bias=True, sinks=True)
_STACKED = StackedExperts(
    ffn_hidden_size=16,
    moe=MixtureOfExperts(num_experts=6, experts_per_token=2, norm_topk_prob=True, logit_bias=True, gate="router"),
    limit=0.3,
)
SINKS = replace(
    ARCH,
    family="gpt_oss",
    layers=tuple(
        (Layer(attention=replace(_BIASED, sliding_window=window), mlp=_STACKED), 1) for window in (3, None, 3, None)
    ),
)
"""Sinks and biases, a window in every second layer, and experts in all, as gpt-oss'."""
_LATENT = Latent(
    num_attention_heads=4,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    rope_scaling=Yarn(factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.2),
)
LATENT = replace(
    SOME_WITH_EXPERTS,
    family="deepseek_v3",
    layers=tuple((replace(layer, attention=_LATENT), count) for layer, count in SOME_WITH_EXPERTS.layers),
)
"""Latent attention in the same layers, as DeepSeek-V3's."""
_LINEAR = GatedDelta(num_key_heads=4, num_value_heads=8, key_head_dim=6, value_head_dim=4, conv_kernel=4, joined=True)
_GATED = replace(ARCH.attention, qkv_bias=False, zero_centered_norms=True, output_gate=True, partial_rotary_factor=0.5)
_SHARED = Experts(
    ffn_hidden_size=16,
    shared_ffn_hidden_size=32,
    shared_gate=True,
    shared_name="shared_expert",
    moe=MixtureOfExperts(num_experts=8, experts_per_token=2, norm_topk_prob=True),
)
LINEAR = replace(
    ARCH,
    family="qwen3_next",
    layers=tuple(
        (Layer(attention=attention, mlp=_SHARED), count)
        for attention, count in ((_LINEAR, 2), (_GATED, 1), (_LINEAR, 1))
    ),
    zero_centered_norms=True,
    output="lm",
    norm_eps=1e-2,  # a first token's output, its value times query and key, is so near 0 that a norm shows its rounding
)
"""Gated delta nets, a layer of gated attention among them, with experts and a gated one for all, as Qwen3-Next's."""
LINEAR_APART = replace(
    LINEAR,
    family="qwen3_5_moe_text",
    layers=tuple(
        (replace(layer, attention=replace(_LINEAR, joined=False)) if layer.attention is _LINEAR else layer, count)
        for layer, count in LINEAR.layers
    ),
)
"""The same with queries, keys and values of all heads in a matrix of the files, as Qwen3.5's."""
NORMS_AND_EXPERTS = changed(
    ARCH,
    family="minimax_m2",
    qkv_bias=False,
    norm_over_heads=True,
    partial_rotary_factor=0.5,
    moe=replace(SIGMOID, num_groups=1, groups_per_token=1, scaling_factor=1.0),
)
"""Norms over all heads of the queries and keys, before experts, as MiniMax-M2's."""
SEQUENCES = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training layout, whose stages a `pipeline_model_parallel_layout` may name, and how micro-batches are made.

    With `gathers` context-parallel ranks gather keys, else they exchange heads.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1
    gen_tp: int = 1
    cp: int = 1
    gathers: bool = False
    ep: int = 1
    etp: int | None = None
    split: str = ""
    sequence_parallel: bool = False
    packed: bool = True
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def name(self) -> str:
        tags = [
            f"cp{self.cp}{'g' * self.gathers}" * (self.cp > 1),
            f"x{self.chunks}" * (self.chunks > 1),
            self.split,
            "sp" * self.sequence_parallel,
            "padded" * (not self.packed),
        ]
        experts = f"ep{self.ep}" + (f"x{self.etp}" if self.etp else "") if self.ep > 1 or self.etp else ""
        return "-".join([f"{self.tp}{self.pp}{self.dp}", *filter(None, [experts, *tags])])


def fixed_batch() -> Batch:
    """16 sequences of 4 prompts with lengths all over the place, scores and a made-up old policy."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(ARCH.vocab_size, (length,), generator=generator).tolist()

    prompts = [draw(2, 9) for _ in range(4)]
    batch = batch_of(
        [prompts[i // 4] for i in range(SEQUENCES)],
        [draw(1, 12) for _ in range(SEQUENCES)],
        [i // 4 for i in range(SEQUENCES)],
    )
    return batch.with_(rewards=torch.rand(SEQUENCES, generator=generator))


def same_again(arch: Architecture, dtype: str) -> tuple[bool, float]:
    """Whether log-probs are the same bits twice, and how far the first ratio of a training pass is from 1."""
    from megarl.algorithms.aggregation import token_weights
    from megarl.algorithms.losses.vanilla import PolicyClip

    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(arch.vocab_size, (8, 256), generator=generator).tolist()
    batch = batch_of([text[:1] for text in texts], [text[1:] for text in texts], list(range(8)))
    with actor_in(Case(), arch, dtype) as actor:
        passes = actor.plan(batch).mini_batches[0]
        first, second = (actor.log_probs(batch, passes) for _ in range(2))
        batch = batch.with_(old_logp=first, advantages=torch.ones(len(batch.tokens)))
        weights = token_weights(batch, range(8), "token-mean", 256)
        (out,) = actor.accumulate_gradients(batch, passes, weights, PolicyClip(clip_low=0.2, clip_high=0.2))
        deviation = max(float(loss.metrics["ratio_max_deviation"].value) for loss in out.losses)
        return torch.equal(first, second), deviation


def with_targets() -> Batch:
    """The fixed batch with a number per token to train values towards, as its advantages."""
    batch = fixed_batch()
    generator = torch.Generator().manual_seed(5)
    return batch.with_(advantages=torch.randn(len(batch.tokens), generator=generator))


class Squares:
    """Squared distance from a field of the batch."""

    def __init__(self, field: str) -> None:
        self.columns = (field,)

    def __call__(self, x: LossInput) -> LossOutput:
        return LossOutput(loss=x.weights.dot((x.output - x.columns[self.columns[0]]).square()))


_MADE_AS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@contextmanager
def actor_in(
    case: Case,
    arch: Architecture = ARCH,
    dtype: str = "float32",
    *,
    role: str | type = "Actor",
    total_steps: int = 4,
    **optim: Any,
) -> Iterator[Any]:
    """An actor with the same random weights in every layout, inside an initialised world.

    Args:
        role: another role that is trained, or a class of one.
        optim: keys of its optimizer.
    """
    from megarl.parallel.train_groups import leave_groups, train_groups
    from megarl.parallel.world import World

    world = World()
    groups = train_groups(world, layout_of(case))
    try:
        yield _model_in(groups, case, arch, dtype, role=role, total_steps=total_steps, **optim)
    finally:
        leave_groups(world)


def beside(
    actor: Any, case: Case, arch: Architecture = ARCH, dtype: str = "float32", *, role: str = "Critic", **optim: Any
) -> Any:
    """Another model that is trained, over the ranks of the actor, in a layout of its own."""
    from megarl.parallel.train_groups import train_groups

    groups = train_groups(actor.groups.world, layout_of(case))
    return _model_in(groups, case, arch, dtype, role=role, total_steps=4, **optim)


def layout_of(case: Case) -> TrainLayout:
    ranks = range(dist.get_world_size())
    split = PipelineSplit(pipeline_model_parallel_layout=case.split)
    sizes = dict(tp=case.tp, pp=case.pp, cp=case.cp, chunks=case.chunks, ep=case.ep, etp=case.etp)
    return TrainLayout(ranks=ranks, split=split, context=ALL_GATHER if case.gathers else ALL_TO_ALL, **sizes)


def _model_in(
    groups: Any, case: Case, arch: Architecture, dtype: str, *, role: str | type, total_steps: int, **optim: Any
) -> Any:
    import megarl
    from megarl.config.policy import ActorRolloutRefConfig, OptimConfig

    config = ActorRolloutRefConfig.model_validate(
        {
            "model": {"dtype": dtype, "use_remove_padding": case.packed},
            "actor": {"megatron": {"sequence_parallel": case.sequence_parallel}},
            **case.config,
        }
    )
    model = (getattr(megarl, role) if isinstance(role, str) else role)(
        arch,
        groups,
        model=config.model,
        megatron=config.actor.megatron,
        batching=config.actor,
        optim=OptimConfig(**optim),
        total_steps=total_steps,
        initial=lambda model: model.load(_weights(model.arch)),
    )
    if case.pp > 1 and case.chunks == 1 and groups.layout.coords(groups.world.rank).pp == case.pp - 1:
        # as on GPUs; other stages send what is freed, which gloo has not read yet
        model.transformer_config.deallocate_pipeline_outputs = True
    _MADE_AS[model] = case, config
    return model


def _weights(arch: Architecture) -> Any:
    """Random initial weights; biases of routers, and with them those of gpt-oss, which would be 0, are random, too."""
    from megarl.models.fill import random_source

    source = random_source(arch, 1)

    def box(tensor: Any, part: Any) -> Any:
        zero = tensor.kind == "buffer" or (tensor.kind == "bias" and arch.family == "gpt_oss")
        return source(replace(tensor, kind="matrix") if zero else tensor, part)

    return box


def reference_of(actor: Any) -> Any:
    """A copy of the actor as it is."""
    from megarl.roles.frozen import Reference

    _, config = _MADE_AS[actor]
    offload = config.ref.megatron.param_offload
    return Reference(actor, model=config.model, megatron=config.actor.megatron, param_offload=offload)


def hybrid_of(actor: Any, max_model_len: int, reference: Any = None) -> Any:
    """A hybrid engine around the actor; the text of token 7 is "<7>"."""
    from megarl.hybrid.generation import Generation
    from megarl.hybrid.residency import Residency
    from megarl.parallel.experts import TensorSplit
    from megarl.parallel.generation_groups import generation_groups
    from megarl.parallel.layout import GenerationLayout, closest_stride
    from megarl.telemetry.timers import PhaseTimers

    (case, config), residency, train = _MADE_AS[actor], Residency(), actor.groups.layout
    split = TensorSplit.of_replica(case.gen_tp, enable_expert_parallel=config.rollout.enable_expert_parallel)
    stride = closest_stride(train, case.gen_tp)
    layout = GenerationLayout(ranks=train.ranks, tp=case.gen_tp, stride=stride, ep=split.ep)
    residency.add(actor.kind, actor.memory)
    if reference is not None:
        residency.add(reference.kind, reference.memory)
    generation = Generation(
        actor,
        generation_groups(actor.groups.world, layout),
        rollout=config.rollout,
        reshard=config.reshard,
        model_path=config.model.path,
        residency=residency,
        timers=PhaseTimers(actor.groups.world.device),
        max_model_len=max_model_len,
        decode=text_of,
    )
    generation.residency = residency  # for tests that enter phases
    return generation


def mini_batch_of(actor: Any, size: int = 2) -> MiniBatch:
    """All sequences; this data-parallel rank's are passed in order, `size` at a time."""
    layout = actor.groups.layout
    mine = list(range(SEQUENCES))[layout.coords(actor.groups.world.rank).dp :: layout.dp]
    micro_batches = [mine[i : i + size] for i in range(0, len(mine), size)]
    return MiniBatch(layout=layout, sequences=range(SEQUENCES), micro_batches=micro_batches)


def update(actor: Any, batch: Batch, loss: Any = None, size: int = 2) -> dict[str, float]:
    """One update on the whole batch, `size` sequences at a time; cross-entropy unless there is a loss."""
    from megarl.algorithms.cross_entropy import cross_entropy

    metrics = actor.update(batch, mini_batch_of(actor, size), loss or cross_entropy)
    return {name: float(metric.value) for name, metric in metrics.items()}


def policy_loss(*, entropy_coeff: float = 0.0, kl_coef: float = 0.0, **clip: Any) -> Any:
    """PPO's loss with entropy and the KL to a reference."""
    from megarl.algorithms.loss import Sum
    from megarl.algorithms.losses.vanilla import PolicyClip
    from megarl.algorithms.regularizers import Entropy, KlToReference

    surrogate = PolicyClip(**{"clip_low": 0.2, "clip_high": 0.28, **clip})
    return Sum(surrogate, Entropy(coeff=entropy_coeff), KlToReference(coef=kl_coef, kind="k3"))


def train(case: Case, steps: int, loss: str, arch: Architecture = ARCH) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; `loss` is "supervised" or "policy" (clipped, with entropy and reference)."""
    from megarl.algorithms.advantages import compute_advantages
    from megarl.config.algorithm import AlgorithmConfig

    size = 2 if case.pp * case.dp > 2 or case.world == 1 else 4  # larger ones leave a pipeline no steady state
    with actor_in(case, arch, lr=3e-3, total_steps=steps) as actor:
        batch, function = fixed_batch().with_(temperature=0.9), None
        if loss == "policy":
            old = actor.log_probs(batch, mini_batch_of(actor, size))
            batch = batch.with_(old_logp=old, ref_logp=old * 1.1)
            batch = compute_advantages(batch, AlgorithmConfig(), 0.0)
            function = policy_loss(entropy_coeff=0.01, kl_coef=0.1)
        updates = [update(actor, batch, function, size) for _ in range(steps)]
        return [(metrics["loss"], metrics["grad_norm"]) for metrics in updates]


def save_checkpoint(*state: Any, world: World, **more: Any) -> str:
    """The folder of a checkpoint that is written at once; for arguments see `take_snapshot`."""
    from megarl.checkpoint.store import Save, take_snapshot

    snapshot = take_snapshot(*state, world=world, **more)
    return Save(snapshot, world).finish().folder
