"""Predicts how busy the stages of a pipeline are. Torch-free."""

from __future__ import annotations

from megarl.estimate.job import active_parameters
from megarl.estimate.model import ModelJob


def stage_flops(model: ModelJob, tokens: float) -> list[float]:
    """Count the FLOPs of a sequence's forward pass in each stage: those of its layers, and of the output in the last.

    The embedding only looks up.
    """
    arch, layout, active = model.arch, model.layout, active_parameters(model.arch)
    layers: list[float] = []
    for first, (layer, count) in zip(arch.firsts, arch.layers, strict=True):
        layers += [2 * active[first] * tokens + layer.attention.flops(tokens, tokens**2)] * count
    chunks = [sum(layers[number] for number in chunk) for chunk in layout.all_layers(arch.num_layers)]
    stages = [sum(chunks[stage :: layout.pp]) for stage in range(layout.pp)]
    stages[-1] += 2 * active[None] * tokens
    return stages


def imbalance(model: ModelJob, tokens: float) -> float:
    """Predict the part of a pass in which a stage waits for the slowest, however many micro-batches there are."""
    flops = stage_flops(model, tokens)
    return 1 - sum(flops) / (len(flops) * max(flops))


def bubble(model: ModelJob, tokens: float, sequences: int, mini_batches: int = 1) -> float:
    """Predict the part of a pipelined pass in which a stage waits.

    A pass of m micro-batches takes m times as long as the slowest stage, and once what the others take, divided by the
    chunks of a stage. Where all stages are equal, (pp - 1) / (chunks m + pp - 1) of that is waiting (arXiv 2104.04473,
    section 2.2).

    Args:
        tokens: of a sequence, on average.
        sequences: of a mini-batch, over all ranks.
        mini_batches: that go through the pipeline without a pause.
    """
    flops, micro_batches = stage_flops(model, tokens), mini_batches * model.micro_batches(sequences, tokens)
    slowest, all_stages = max(flops), sum(flops)
    whole = micro_batches * slowest + (all_stages - slowest) / model.layout.chunks
    return 1 - micro_batches * all_stages / len(flops) / whole
