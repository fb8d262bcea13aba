#!/usr/bin/env python3
"""Training speed and memory in the trainer's actor, with random weights and tokens.

    torchrun --nproc_per_node N tools/bench_train.py CONFIG [key=value ...] [--json FILE]
        [--lengths 64x1024] [--rounds 10] [--profile FILE]  forward + backward, against plain Megatron-Core
        [--without-plain]                                   the same alone: of long sequences, and of parts of them
        --packing [--sequences 256] [--longest 4096]        packed and balanced micro-batches against padded ones
        --log-probs 32768                                   memory of that many log-probabilities, and their gradients

Only the model's shape, the layout, micro-batch sizes and kernels are taken from the configuration
(`configs/bench_train.yaml`). The rounds of what is compared alternate, so that the clocks are the same for all.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from benchmark import command_line, finish, random_weights, run_of, start, synthetic_inputs
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from rounds import Rounds

from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.cross_entropy import cross_entropy
from megarl.algorithms.losses.vanilla import PolicyClip
from megarl.config import Config, ConfigError, load_run_config
from megarl.data.packing import MicroBatches, pack_by_count, pack_by_tokens
from megarl.estimate.job import active_parameter_count
from megarl.estimate.prediction import flops_of_sequences
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.gpt import build_chunks
from megarl.models.heads import Passed
from megarl.models.logprobs import token_log_probs, token_loss, vocab_shard
from megarl.models.microbatch import MicroBatch, SequenceShard, make_micro_batch
from megarl.parallel.train_groups import TrainGroups, train_groups
from megarl.parallel.world import World
from megarl.roles.passes import Passes
from megarl.roles.trained import Actor
from megarl.trainer.layouts import train_layout
from megarl.types import Batch, batch_of

PEAK_FLOPS = 989e12
"""bf16 of an H100 or H200, dense."""
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One thing that was timed.

    Attributes:
        seconds: median over the rounds.
        tokens_per_second: per rank.
        mfu: model FLOPs (6 per parameter and token, and causal attention; a third of it without a backward pass) per
            second and rank, over 989 TFLOP/s; 0 for the optimizer.
        peak_gib: of allocated GPU memory, weights and buffers of everything that is compared included; 0 on CPUs.
    """

    seconds: float
    tokens_per_second: float
    mfu: float
    peak_gib: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run showed."""

    what: str
    kernels: str
    ranks: int
    tokens: int
    phases: dict[str, Phase]
    extra: dict[str, float] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--lengths", default="64x1024", help="sequences x tokens for each data-parallel rank")
    parser.add_argument("--rounds", type=int, default=10, help=f"measured rounds, after {WARM_UP} that warm up")
    parser.add_argument("--profile", help="file for a table of one step's kernels")
    parser.add_argument("--without-plain", action="store_true", help="not plain Megatron-Core, which makes all logits")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--sequences", type=int, default=256, help="with --packing")
    parser.add_argument("--longest", type=int, default=4096, help="tokens, with --packing")
    parser.add_argument("--log-probs", type=int, metavar="TOKENS")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_run_config(args.config, args.overrides)
        arch = read_architecture(config.actor_rollout_ref.model.path)
    except (ConfigError, ValueError) as e:
        print(f"bench_train: error: {e}", file=sys.stderr)
        return 2
    groups = train_groups(start(), train_layout(config))
    if args.log_probs:
        figures = measure_log_probs(arch, groups, args.log_probs)
    elif args.packing:
        lengths = long_tailed(args.sequences, args.longest)
        figures = measure_packing(build(config, arch, groups), config, lengths, args.rounds)
    else:
        count, length = (int(n) for n in args.lengths.split("x"))
        lengths = [length] * (count * groups.layout.dp)
        actor, plain = build(config, arch, groups), not args.without_plain
        figures = measure_training(actor, config, lengths, args.rounds, args.profile, plain=plain)
    finish(figures, print_table, args.json)
    return 0


def build(config: Config, arch: Architecture, groups: TrainGroups) -> Actor:
    weights, ours = random_weights(arch, groups.world.device), config.actor_rollout_ref
    actor = Actor(
        arch,
        groups,
        model=ours.model,
        megatron=ours.actor.megatron,
        batching=ours.actor,
        optim=ours.actor.optim,
        total_steps=1000,
        initial=lambda policy: policy.load(weights),
    )
    return run_of(synthetic_inputs(config, arch), groups.world).add("actor", actor)


def random_batch(lengths: Sequence[int], vocab_size: int) -> Batch:
    """Sequences of these lengths, of which only the first token is a prompt."""
    rng = random.Random(0)
    texts = [rng.choices(range(vocab_size), k=n) for n in lengths]
    batch = batch_of([t[:1] for t in texts], [t[1:] for t in texts], list(range(len(texts))))
    generator = torch.Generator().manual_seed(0)
    return batch.with_(advantages=torch.randn(len(batch.tokens), generator=generator) * batch.response_mask)


def long_tailed(count: int, longest: int) -> list[int]:
    """Lengths as reasoning models produce them: log-normal, the median a tenth of the longest."""
    rng = random.Random(0)
    drawn = (round(rng.lognormvariate(math.log(longest / 10), 1)) for _ in range(count - 1))
    return [longest, *(min(max(2, n), longest) for n in drawn)]


# ----------------------------------------------------------------------------------------------------- training


def measure_training(
    actor: Actor, config: Config, lengths: Sequence[int], rounds: int, profile: str | None, *, plain: bool
) -> Figures:
    """Forward and backward with the policy loss, the optimizer and log-probabilities; and `plain` Megatron-Core."""
    groups, arch = actor.groups, actor.arch
    batch = random_batch(lengths, arch.vocab_size)
    limit = max(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, max(lengths))
    plan = pack_by_tokens(lengths, [range(len(lengths))], dp=groups.layout.dp, max_tokens=limit)
    micro_batches = plan[groups.layout.coords(groups.world.rank).dp][0]
    passes = Passes(layout=groups.layout, micro_batches=micro_batches)
    batch = batch.with_(old_logp=actor.log_probs(batch, passes))
    weights = token_weights(batch, range(len(batch)), "token-mean", max(lengths))
    loss = PolicyClip(clip_low=0.2, clip_high=0.28)

    def step() -> list[Passed]:
        return actor.accumulate_gradients(batch, passes, weights, loss)

    losses = [out for one in step() for out in one.losses]
    deviation = max((float(out.metrics["ratio_max_deviation"].value) for out in losses), default=0.0)
    jobs: dict[str, Callable[[], object]] = {
        "forward + backward": step,
        "optimizer": lambda: actor.optimizer.step(loss=0.0),
    }
    if plain and groups.layout.pp == 1:
        peer = PlainMegatron(actor, batch, micro_batches)
        jobs |= {f"plain Megatron-Core, {name}": partial(peer.step, name) for name in peer.cross_entropies}
    clock = Rounds(groups.world)
    seen = clock.medians(jobs, rounds, warm_up=WARM_UP)
    log_probs = {"log-probs": lambda: actor.log_probs(batch, passes)}
    seen |= clock.medians(log_probs, rounds, warm_up=WARM_UP)  # as in a run, not in turn with training
    if profile and groups.world.rank == 0:
        write_profile(step, profile)
    tokens = len(batch.tokens)
    flops = model_flops(arch, lengths)
    share = {"optimizer": 0.0, "log-probs": 1 / 3}
    phases = {name: phase(groups.world, *taken, tokens, flops * share.get(name, 1.0)) for name, taken in seen.items()}
    best = min((p.seconds for name, p in phases.items() if name.startswith("plain")), default=None)
    extra = {"of_plain_megatron": best / phases["forward + backward"].seconds} if best else {}
    extra["first_ratio_max_deviation"] = deviation
    what = f"{len(lengths)} sequences of {max(lengths)} tokens in {len(micro_batches)} micro-batches per rank"
    return Figures(
        what=what, kernels=actor.kernels, ranks=groups.layout.size, tokens=tokens, phases=phases, extra=extra
    )


class PlainMegatron:
    """Megatron-Core's own GPTModel with the actor's layers, weights, DDP settings and micro-batches.

    Its output layer makes all logits, and its own vocabulary-parallel cross-entropy takes the loss: plain, compiled
    or Transformer Engine's. No policy loss.
    """

    def __init__(self, actor: Actor, batch: Batch, micro_batches: MicroBatches) -> None:
        groups, arch = actor.groups, actor.arch
        self.config = copy.copy(actor.transformer_config)
        self.config.finalize_model_grads_func = None  # Megatron-Core copies all of the configuration for experts
        (chunk,) = build_chunks(arch, self.config, groups, actor.layers, model_class=GPTModel)
        chunk.load_state_dict(actor.chunks[0].state_dict())
        ddp_config = actor.ddp[0].ddp_config
        self.model = DistributedDataParallel(self.config, ddp_config, chunk, pg_collection=groups.pgs)
        self.config.no_sync_func = self.model.no_sync if ddp_config.overlap_grad_reduce else None
        self.config.finalize_model_grads_func = actor.transformer_config.finalize_model_grads_func
        self.groups, self.tokens = groups, len(batch.tokens)
        form: Any = dict(packed=actor.packed, shard=SequenceShard(tp=groups.layout.tp), device=groups.world.device)
        self.inputs = [make_micro_batch(batch, sequences, **form) for sequences in micro_batches]
        on_gpu = groups.world.device.type == "cuda"
        self.cross_entropies = ["unfused", *["native"] * on_gpu, *["te"] * (on_gpu and (not actor.layers.rotates))]

    def step(self, cross_entropy: str) -> None:
        """Forward and backward; `cross_entropy` is one of `cross_entropies`."""
        self.config.cross_entropy_loss_fusion = cross_entropy != "unfused"
        self.config.cross_entropy_fusion_impl = "te" if cross_entropy == "te" else "native"
        self.model.zero_grad_buffer()
        get_forward_backward_func(1, None)(
            forward_step_func=self._forward_step,
            data_iterator=iter(self.inputs),
            model=self.model,
            num_microbatches=len(self.inputs),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=P2PCommunicator(self.groups.pgs.pp, self.config),
            pg_collection=self.groups.pgs,
        )

    def _forward_step(self, inputs: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro = next(inputs)
        labels = micro.tokens.roll(-1, 1)
        losses = model(micro.tokens, micro.position_ids, None, labels=labels, packed_seq_params=micro.packed)

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            return losses.sum() / self.tokens, torch.zeros((), dtype=torch.int, device=losses.device), None

        return losses, mean


def model_flops(arch: Architecture, lengths: Sequence[int]) -> float:
    """Forward and backward: 6 per parameter and token, and causal attention (PaLM, arXiv 2204.02311, appendix B)."""
    parameters = active_parameter_count(arch)
    return 3 * flops_of_sequences(arch, parameters, sum(lengths), sum(n * n for n in lengths))


def write_profile(step: Callable[[], object], path: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    with open(path, "w", encoding="utf-8") as f:
        f.write(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))


# ------------------------------------------------------------------------------------------------------ packing


def measure_packing(actor: Actor, config: Config, lengths: Sequence[int], rounds: int) -> Figures:
    """The same mini-batch packed and balanced, and in padded rows in its own order, within the same token budget."""
    groups = actor.groups
    batch = random_batch(lengths, actor.arch.vocab_size)
    weights = token_weights(batch, range(len(batch)), "token-mean", max(lengths))
    dp, mine = groups.layout.dp, groups.layout.coords(groups.world.rank).dp
    budget = max(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, max(lengths))
    whole = [range(len(batch))]
    packed = pack_by_tokens(lengths, whole, dp=dp, max_tokens=budget)
    rows = pack_by_count(lengths, whole, dp=dp, micro_batch_size=budget // max(lengths), balance=False)
    losses: dict[str, float] = {}

    def job(name: str, micro_batches: MicroBatches, remove_padding: bool) -> Callable[[], object]:
        def step() -> None:
            actor.packed = remove_padding
            passes = Passes(layout=groups.layout, micro_batches=micro_batches)
            outputs = actor.accumulate_gradients(batch, passes, weights, cross_entropy)
            losses[name] = sum(float(out.loss) for one in outputs for out in one.losses)

        return step

    jobs = {"packed": job("packed", packed[mine][0], True), "padded": job("padded", rows[mine][0], False)}
    seen = Rounds(groups.world).medians(jobs, rounds, warm_up=WARM_UP)
    mean = {name: sum(groups.world.all_gather(loss)) / groups.layout.tp for name, loss in losses.items()}
    flops = model_flops(actor.arch, lengths)
    phases = {name: phase(groups.world, *taken, sum(lengths), flops) for name, taken in seen.items()}
    return Figures(
        what=f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens",
        kernels=actor.kernels,
        ranks=groups.layout.size,
        tokens=sum(lengths),
        phases=phases,
        extra={
            "times_padded": phases["padded"].seconds / phases["packed"].seconds,
            "loss_packed": mean["packed"],
            "loss_padded": mean["padded"],
        },
    )


# ---------------------------------------------------------------------------------------------------- log-probs


def measure_log_probs(arch: Architecture, groups: TrainGroups, tokens: int) -> Figures:
    """Peak memory beyond inputs and weight, and beyond the gradient of the hidden states, which autograd returns.

    The weight's gradient in the weight's precision is returned, too, but it does not exist yet at the peak.
    """
    device = groups.world.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    padded = arch.padded_vocab_size(groups.layout.tp)
    shard = vocab_shard(arch.vocab_size, padded, groups.pgs.tp)
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(tokens, arch.hidden_size, generator=generator, device=device).to(dtype)
    weight = (torch.randn(padded // groups.layout.tp, arch.hidden_size, generator=generator, device=device)).to(dtype)
    buffered = weight.clone().requires_grad_()
    buffered.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # as Megatron-Core's DDP keeps it
    labels = torch.randint(arch.vocab_size, (tokens,), generator=generator, device=device)
    head = hidden.requires_grad_(), weight.requires_grad_(), labels, shard

    def forward() -> None:
        with torch.no_grad():
            token_log_probs(*head, temperature=1.0)

    def any_loss() -> None:
        token_log_probs(*head, temperature=1.0)[0].mean().backward()

    def mean(logp: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
        del entropy, part
        return logp.sum() / tokens

    jobs = {
        "forward": forward,
        "forward + backward": lambda: token_loss(*head, mean, temperature=1.0).backward(),
        "the same, into a gradient buffer": lambda: token_loss(
            hidden, buffered, labels, shard, mean, temperature=1.0
        ).backward(),
        "forward + backward, any loss": any_loss,
    }
    flops = 6.0 * arch.vocab_size * arch.hidden_size * tokens
    rounds = Rounds(groups.world)
    phases = {}
    for name, job in jobs.items():
        for _ in range(WARM_UP):
            hidden.grad = weight.grad = buffered.grad = None
            held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            seconds, peak = rounds.once(job)
        extra = peak - (held + (0 if name == "forward" else hidden.nbytes)) / 2**30 if peak else 0.0
        phases[name] = phase(groups.world, seconds, extra, tokens, flops / 3 if name == "forward" else flops)
    return Figures(
        what=f"log-probabilities of {tokens} tokens at a vocabulary of {arch.vocab_size}, GiB beyond what is given",
        kernels=str(dtype),
        ranks=groups.layout.size,
        tokens=tokens,
        phases=phases,
    )


# ------------------------------------------------------------------------------------------------------ figures


def phase(world: World, seconds: float, peak_gib: float, tokens: int, flops: float) -> Phase:
    per_rank = 1 / seconds / world.size
    return Phase(
        seconds=seconds,
        tokens_per_second=tokens * per_rank,
        mfu=flops * per_rank / PEAK_FLOPS,
        peak_gib=peak_gib,
    )


def print_table(figures: Figures) -> None:
    print(f"{figures.what}, {figures.ranks} ranks; {figures.kernels}")
    print(f"{'':40}{'ms':>10}{'tokens/s/rank':>16}{'MFU':>8}{'GiB':>8}")
    for name, p in figures.phases.items():
        print(f"{name:40}{p.seconds * 1e3:>10.1f}{p.tokens_per_second:>16,.0f}{p.mfu:>8.1%}{p.peak_gib:>8.2f}")
    for name, value in figures.extra.items():
        print(f"{name:40}{value:>18.7f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
