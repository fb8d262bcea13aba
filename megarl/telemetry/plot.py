"""The learning curve of a run as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

Row = Mapping[str, Any]

_PHASES = {  # in the order of a step, drawn from the bottom up
    "generate": "#4269d0",
    "reshard": "#ff725c",
    "reward": "#efb118",
    "log_probs": "#6cc5b0",
    "update": "#3ca951",
}
_OTHER_PHASES = ("#a463f2", "#9c6b4e", "#97bbf5", "#9498a0")
_ACCURACY, _REWARD, _WARMUP, _INK, _GRID = "#4269d0", "#ef9118", "#777777", "#333333", "#e4e4e4"
_WARMUP_WIDTH = 0.22  # of the RL steps' width
_SMOOTHED = 9  # steps in the moving average of the training reward


def plot_learning_curve(metrics_file: str, out_png: str) -> None:
    """Draw held-out accuracy and training reward over RL steps and, below, the seconds of each phase of a step.

    Rows of a supervised warm-up are drawn as a shaded band left of the RL steps, with their loss.

    Args:
        metrics_file: a run's `metrics.jsonl`.
        out_png: where the picture goes.

    Raises:
        ValueError: the file has no rows of RL steps.
    """
    rows = [json.loads(line) for line in Path(metrics_file).read_text(encoding="utf-8").splitlines()]
    warmup = [row for row in rows if "warmup/step" in row]
    steps = [row for row in rows if "warmup/step" not in row]
    if not steps:
        raise ValueError(f"'{metrics_file}' has no rows of RL steps to draw")
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    scores, times = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_scores(scores, steps)
    _draw_times(times, steps)
    left, right = steps[0]["step"], max(steps[-1]["step"], steps[0]["step"] + 1)
    if warmup:
        left = _draw_warmup(scores, times, warmup, left, right)
    for axes in (scores, times):
        _dress(axes)
    times.set_xlim(left, right + 0.01 * (right - left))
    times.set_xlabel("RL step", color=_INK)
    times.xaxis.set_major_locator(MaxNLocator(integer=True))
    times.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x >= 0 else ""))
    figure.suptitle(_headline(steps), color=_INK, fontsize=14, fontweight="bold")
    figure.savefig(out_png)


def _series(rows: Sequence[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have the metric; null (not finite) is a gap in the line."""
    points = [(row["step"], np.nan if row[key] is None else row[key]) for row in rows if key in row]
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return x, y


def _moving_average(y: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` steps, over fewer at the ends."""
    half = width // 2
    return np.array([np.nanmean([np.nan_to_num(y[i]), *y[max(0, i - half) : i + half + 1]]) for i in range(len(y))])


def _draw_scores(axes: Axes, steps: Sequence[Row]) -> None:
    x, y = _series(steps, "reward/mean")
    axes.plot(x, y, color=_REWARD, linewidth=1, alpha=0.35)
    axes.plot(x, _moving_average(y, _SMOOTHED), color=_REWARD, linewidth=2, label="training reward (mean, smoothed)")
    x, y = _series(steps, "val/accuracy")
    axes.plot(x, y, color=_ACCURACY, linewidth=2, marker="o", markersize=5, zorder=3, label="held-out accuracy")
    axes.set_ylabel("accuracy, reward", color=_INK)


def _draw_times(axes: Axes, steps: Sequence[Row]) -> None:
    """Stacked bars; one slow step (the first one, say) may leave the picture so that the others stay readable."""
    timed = [row for row in steps if any(key.startswith("timing/") for key in row)]
    seen = {key.removeprefix("timing/").removesuffix("_s") for row in timed for key in row if key.startswith("timing/")}
    phases = [phase for phase in _PHASES if phase in seen] + sorted(seen - _PHASES.keys())
    other = iter(_OTHER_PHASES * len(seen))
    x = np.array([row["step"] for row in timed], dtype=float)
    total = np.zeros(len(timed))
    for phase in phases:
        seconds = np.array([row.get(f"timing/{phase}_s") or 0.0 for row in timed])
        color = _PHASES.get(phase) or next(other)
        label = f"{phase} {seconds.mean():.3g} s"
        axes.bar(x, seconds, bottom=total, width=1.0, color=color, label=label, linewidth=0)
        total += seconds
    if timed and total.max() > 2 * np.quantile(total, 0.95):
        axes.set_ylim(0, 1.3 * np.quantile(total, 0.95))
    axes.set_ylabel("seconds per step", color=_INK)


def _draw_warmup(scores: Axes, times: Axes, warmup: Sequence[Row], first: float, last: float) -> float:
    """Shade the band of the warm-up and draw its loss in it, on a scale of its own; returns the band's left edge."""
    left = first - _WARMUP_WIDTH * (last - first)
    for axes in (scores, times):
        axes.axvspan(left, first, color="#f3f3f3", zorder=0, linewidth=0)
        axes.axvline(first, color="#bbbbbb", linewidth=1, zorder=1)
    loss = np.array([row["warmup/loss"] for row in warmup], dtype=float)
    x = np.linspace(left, first, len(loss) + 1)[1:]
    own_scale = scores.twinx()
    own_scale.plot(x, loss, color=_WARMUP, linewidth=1.5)
    own_scale.set_ylim(bottom=0, top=1.35 * np.nanmax(loss))
    own_scale.axis("off")
    text = f"supervised warm-up\n{len(loss)} steps, loss {loss[0]:.2f} → {loss[-1]:.2f}"
    middle = (left + first) / 2
    scores.text(
        middle, 0.97, text, transform=scores.get_xaxis_transform(), ha="center", va="top", color=_WARMUP, fontsize=8.5
    )
    return left


def _headline(steps: Sequence[Row]) -> str:
    _, accuracy = _series(steps, "val/accuracy")
    if len(accuracy) < 2:
        return f"Training reward over {steps[-1]['step']} RL steps"
    return f"Held-out accuracy {accuracy[0]:.1%} → {accuracy[-1]:.1%} over {steps[-1]['step']} RL steps"


def _dress(axes: Axes) -> None:
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, fontsize=9, borderaxespad=0.2)
