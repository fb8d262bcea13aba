"""Draws the pictures of docs/concepts: `python docs/drawings/draw.py` writes them beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from svg import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, Drawing  # noqa: E402

from megarl.phases import Item, Phase  # noqa: E402
from megarl.role_kinds import ACTOR  # noqa: E402


def step() -> Drawing:
    """The phases of a step in time, in the layout that each of them uses."""
    d = Drawing(820, 300)
    d.text(10, 62, "training layout", anchor="start", bold=True)
    d.text(10, 80, "tensor × pipeline × data", anchor="start", size=12, faint=True)
    d.text(10, 202, "generation layout", anchor="start", bold=True)
    d.text(10, 220, "tensor × replicas", anchor="start", size=12, faint=True)
    d.box(170, 165, 210, 70, GREEN)
    d.text(275, 195, "generate")
    d.text(275, 215, "responses, log-probabilities", size=12, faint=True)
    d.box(170, 248, 210, 34, ORANGE)
    d.text(275, 270, "score, while others decode", size=13)
    lane = [("log_probs", "of the policy", 105), ("ref, values", "if needed", 105), ("update", "advantages, loss", 115)]
    x = 400.0
    for name, below, width in lane:
        d.box(x, 30, width, 70, BLUE)
        d.text(x + width / 2, 60, name)
        d.text(x + width / 2, 80, below, size=12, faint=True)
        x += width + 12
    d.arrow([(385, 200), (450, 200), (450, 106)])
    d.text(460, 160, "tokens go once to the ranks that", anchor="start", size=12)
    d.text(460, 176, "train on them, scores to all", anchor="start", size=12)
    d.box(170, 30, 100, 70, VIOLET)
    d.text(220, 60, "weights")
    d.text(220, 80, "of the policy", size=12, faint=True)
    d.arrow([(220, 105), (220, 160)], RED)
    d.text(230, 138, "reshard, bit for bit", anchor="start", size=13)
    d.arrow([(690, 25), (690, 12), (220, 12), (220, 25)])
    d.line(170, 292, 750, 292)
    d.text(810, 296, "time", anchor="end", size=12, faint=True)
    d.arrow([(740, 292), (765, 292)])
    return d


def layouts() -> Drawing:
    """Four ranks in both layouts."""
    d = Drawing(820, 330)
    d.text(200, 24, "training: TP2 × PP2", bold=True)
    d.text(620, 24, "generation: TP2 × 2 replicas", bold=True)
    for stage in range(2):
        y = 48 + 130 * stage
        d.box(20, y, 360, 110, dashed=True)
        d.text(34, y + 20, f"stage {stage}: layers {1 + 16 * stage} to {16 + 16 * stage}", anchor="start", size=13)
        for half in range(2):
            d.box(36 + 170 * half, y + 32, 160, 64, BLUE)
            d.text(116 + 170 * half, y + 60, f"rank {2 * stage + half}", bold=True)
            d.text(116 + 170 * half, y + 80, f"half {'ab'[half]} of 16 layers", size=12, faint=True)
    for replica in range(2):
        y = 48 + 130 * replica
        d.box(440, y, 360, 110, dashed=True)
        d.text(454, y + 20, f"replica {replica}: layers 1 to 32", anchor="start", size=13)
        for half in range(2):
            d.box(456 + 170 * half, y + 32, 160, 64, GREEN)
            d.text(536 + 170 * half, y + 60, f"rank {2 * replica + half}", bold=True)
            d.text(536 + 170 * half, y + 80, f"half {'ab'[half]} of 32 layers", size=12, faint=True)
    d.arrow([(386, 170), (434, 170)], RED)
    d.text(410, 325, "the same four processes; no second copy of the job", size=13, faint=True)
    return d


def reshard() -> Drawing:
    """Where each rank's engine gets a weight of layer 20 from."""
    d = Drawing(820, 300)
    d.text(20, 24, "one weight of layer 20, which is on stage 1", anchor="start", bold=True)
    d.text(20, 80, "training", anchor="start")
    d.text(20, 210, "engine", anchor="start")
    for rank in range(4):
        x = 120 + 175 * rank
        half = "ab"[rank % 2]
        if rank < 2:
            d.box(x, 50, 150, 50, GREY, dashed=True)
            d.text(x + 75, 80, "stage 0: not here", size=12, faint=True)
        else:
            d.box(x, 50, 150, 50, BLUE)
            d.text(x + 75, 80, f"half {half}")
        d.box(x, 180, 150, 50, GREEN)
        d.text(x + 75, 210, f"half {half}")
        d.text(x + 75, 256, f"rank {rank}", bold=True)
    for rank in (2, 3):
        x = 195 + 175 * rank
        d.arrow([(x, 102), (x, 176)], GREEN, dashed=True)
        d.arrow([(x - 40, 102), (x - 40 - 350 + 40, 176)], RED)
    d.arrow([(120, 284), (160, 284)], RED)
    d.text(168, 289, "read out of the other GPU's memory", anchor="start", size=12)
    d.arrow([(450, 284), (490, 284)], GREEN, dashed=True)
    d.text(498, 289, "the same memory: nothing is copied", anchor="start", size=12)
    return d


def memory() -> Drawing:
    """What is on the GPU in each phase when everything that may leave does, by `megarl.phases`."""
    d = Drawing(820, 360)
    sizes = {Item.WEIGHTS: ("weights", 50.0, BLUE), Item.GRADIENTS: ("gradients", 70.0, VIOLET)}
    sizes[Item.OPTIMIZER] = ("optimizer state", 90.0, ORANGE)
    beside = {
        Phase.RESHARD: [("engine's weights", 40.0, GREEN)],
        Phase.GENERATE: [("engine's weights", 40.0, GREEN), ("KV cache", 130.0, RED)],
        Phase.LOG_PROBS: [("activations", 40.0, GREY)],
        Phase.UPDATE: [("activations", 60.0, GREY)],
    }
    for i, (phase, others) in enumerate(beside.items()):
        x, y = 90 + 180 * i, 300.0
        held = [size for item, size in sizes.items() if phase not in ACTOR.without(item)]
        for name, height, colour in [*held, *others]:
            y -= height
            d.box(x, y, 150, height, colour)
            d.text(x + 75, y + height / 2 + 5, name, size=13)
        d.text(x + 75, 324, phase.value, bold=True)
    d.line(80, 20, 800, 20, dashed=True)
    d.text(74, 25, "GPU", anchor="end", size=12)
    d.line(80, 300, 800, 300)
    d.text(440, 350, "heights are for the eye; megarl plan gives the bytes", size=12, faint=True)
    return d


DRAWINGS = {"step": step, "layouts": layouts, "reshard": reshard, "memory": memory}


def main() -> None:
    """Write every drawing."""
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
