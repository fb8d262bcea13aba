"""Compares a model's folder with `transformers`: tensors, log-probabilities, gradients and greedy answers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.config.policy import RolloutConfig
from megarl.models.architecture import Architecture
from megarl.models.tensors import Box
from megarl.models.weights import logical_tensors
from megarl.parallel.one_rank import one_rank
from megarl.parity.reference import Reference, reference_of
from megarl.parity.result import Result, verdict
from megarl.parity.sequences import Sequences, sequences_for
from megarl.rollout.kinds import engine_kind

if TYPE_CHECKING:
    from megarl.parity.trained import TrainedHere

LOGP, OUTPUT, GRADIENT, TIE = 1e-4, 1e-4, 1e-3, 1e-3
"""Differences that float32 may make: of log-probabilities, nats; of outputs and gradients, relative; between the
log-probabilities of two tokens that may change places."""
ROUNDING = 4.0
"""bfloat16 may move a number as far as it moves transformers', times this."""
_SMALL = 1e-6
"""A gradient counts as 0 below this part of the whole gradient's norm."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Holds what transformers computed: in float32 and, if that is another type, in the type that is compared."""

    exact: Reference
    rounded: Reference | None

    @property
    def answers(self) -> list[list[int]]:
        return (self.rounded or self.exact).answers


def compare_numbers(folder: str, arch: Architecture, *, dtype: str) -> Iterator[Result]:
    """Compare numbers and answers; yields each result as soon as it is known.

    Args:
        folder: has exactly the tensors of the architecture.
        dtype: of MegaRL's weights; transformers computes in float32, and in that type, too.

    Raises:
        ValueError: transformers cannot read the folder.
    """
    sequences = sequences_for(arch)
    with ExitStack() as stack:
        gradients = stack.enter_context(TemporaryDirectory(prefix="megarl-check-"))
        world = stack.enter_context(one_rank())
        from megarl.parity.trained import TrainedHere  # imports Megatron-Core, which must find a world of CPU ranks

        def known(dtype: str) -> Reference:
            target = os.path.join(gradients, dtype)
            return reference_of(folder, sequences, target, dtype=DTYPES[dtype], device=world.device)

        theirs = _Known(exact=known("float32"), rounded=None if dtype == "float32" else known(dtype))
        ours = TrainedHere(folder, arch, world, dtype=dtype)
        logp, outputs = ours.log_probs(sequences)
        yield _log_probs(logp, outputs, theirs)
        yield _gradients(ours.gradients(sequences), arch, theirs)
        for engine in ("native", "vllm"):
            if why := _not_here(engine, arch, folder, on_gpu=world.device.type == "cuda"):
                yield Result(name=engine, compared="", state="-", finding=why)
            else:
                yield _answers(engine, ours, sequences, theirs)


def _log_probs(logp: Tensor, outputs: Mapping[str, Tensor], theirs: _Known) -> Result:
    """Compare log-probabilities and, where they differ, what comes out of each layer.

    In bfloat16 the mean difference counts: a token may go to another expert by rounding.
    """
    differences = (logp - theirs.exact.logp).abs()
    worst, allowed, which = float(differences.max()), LOGP, "at most"
    if theirs.rounded:
        moved = float((theirs.rounded.logp - theirs.exact.logp).abs().mean())
        worst, allowed, which = float(differences.mean()), LOGP + ROUNDING * moved, "on average"
    details = [] if worst <= allowed else [f"allowed are {allowed:.1e} nats", *_first_output(outputs, theirs)]
    return verdict("log-probs", f"{len(logp)} tokens", f"{worst:.1e} nats {which}", details)


def _first_output(outputs: Mapping[str, Tensor], theirs: _Known) -> list[str]:
    """Name the first place in the forward pass whose output differs."""
    for place, wanted in theirs.exact.outputs.items():
        allowed = OUTPUT + ROUNDING * (_relative(theirs.rounded.outputs[place], wanted) if theirs.rounded else 0)
        if place in outputs and (distance := _relative(outputs[place], wanted)) > allowed:
            return [f"first in {place}: what comes out differs by {distance:.1e} of its norm"]
    return ["only behind the last layer: in the last norm or the output layer"]


def _relative(x: Tensor, wanted: Tensor) -> float:
    return float((x - wanted).norm() / wanted.norm().clamp_min(1e-30)) if x.shape == wanted.shape else float("inf")


def _gradients(parts: Iterator[tuple[str, Box, Tensor]], arch: Architecture, theirs: _Known) -> Result:
    """Compare the gradient of each weight; those that differ are named from the output on, as backward reaches them.

    In bfloat16 that of all weights together counts.
    """
    tensors = logical_tensors(arch)
    exact = HuggingFaceWeights(theirs.exact.gradients, arch)
    rounded = HuggingFaceWeights(theirs.rounded.gradients, arch) if theirs.rounded else None
    squares: dict[str, tuple[float, float]] = {}
    moved = 0.0
    for name, box, gradient in parts:
        wanted = exact.box(tensors[name], box).float()
        apart, norm = squares.get(name, (0.0, 0.0))
        squares[name] = apart + _square(gradient.float().cpu() - wanted), norm + _square(wanted)
        moved += _square(rounded.box(tensors[name], box).float() - wanted) if rounded else 0.0
    whole = sum(norm for _, norm in squares.values()) ** 0.5
    distances = {name: apart**0.5 / max(norm**0.5, _SMALL * whole) for name, (apart, norm) in squares.items()}
    worst = max(distances, key=lambda name: distances[name])
    lines = [f"{name}: differs by {x:.1e} of its norm" for name, x in distances.items() if not x <= GRADIENT]
    finding = f"{distances[worst]:.1e} of a norm at most, {worst}"
    if rounded:
        apart, allowed = (sum(apart for apart, _ in squares.values()) ** 0.5 / whole, ROUNDING * moved**0.5 / whole)
        finding = f"{apart:.1e} of the norm of all, of which {GRADIENT + allowed:.1e} is allowed"
        lines = lines if not apart <= GRADIENT + allowed else []
    lines += [f"{name}: no gradient" for name in _trained(arch) - squares.keys()]
    return verdict("gradients", f"{len(squares)} tensors", finding, lines[::-1])


def _trained(arch: Architecture) -> set[str]:
    return {name for name, tensor in logical_tensors(arch).items() if tensor.kind != "buffer"}


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _not_here(engine: str, arch: Architecture, folder: str, *, on_gpu: bool) -> str:
    """Say why an engine cannot take the model here; empty: it can."""
    kind, rollout = engine_kind(engine), RolloutConfig(name=engine)
    try:
        kind.check(rollout, arch, trains=False)
        kind.check_here(rollout, arch, folder, on_gpu=on_gpu)
    except (ValueError, ImportError) as e:
        return " ".join(str(e).split())
    return ""


def _answers(engine: str, ours: TrainedHere, sequences: Sequences, theirs: _Known) -> Result:
    """Compare an engine's greedy answers with transformers', and their log-probabilities with the training model's.

    In bfloat16 rounding chooses between tokens, so that only the log-probabilities count.
    """
    prompts = sequences.prompts
    completions = ours.answers(engine, prompts)
    answers = [list(completion.response.ids) for completion in completions]
    allowed = LOGP
    if theirs.rounded:
        allowed += ROUNDING * float((theirs.rounded.logp - theirs.exact.logp).abs().max())
    worst, details = 0.0, list[str]()
    trained = ours.log_probs_of(prompts, answers)
    for number, (completion, logp) in enumerate(zip(completions, trained, strict=True)):
        difference = float((torch.tensor(completion.response.logp) - logp).abs().max())
        worst = max(worst, difference)
        if not difference <= allowed:
            details.append(f"answer {number}: log-probabilities differ from the training model's by {difference:.1e}")
    for number, (prompt, answer, wanted) in enumerate(zip(prompts, answers, theirs.answers, strict=True)):
        if answer != wanted and not theirs.rounded and _apart(ours, prompt, answer, wanted) > TIE:
            details.append(f"answer {number}: {answer}, transformers' {wanted}")
    compared = f"{len(answers)} answers"
    return verdict(engine, compared, f"{worst:.1e} nats at most from the training model", details)


def _apart(ours: TrainedHere, prompt: list[int], answer: list[int], wanted: list[int]) -> float:
    """Compute how much less probable the second answer's token is where the answers part."""
    at = next(i for i, pair in enumerate(zip(answer, wanted, strict=True)) if pair[0] != pair[1])
    here, there = ours.log_probs_of([prompt, prompt], [answer[: at + 1], wanted[: at + 1]])
    return abs(float(here[-1] - there[-1]))
