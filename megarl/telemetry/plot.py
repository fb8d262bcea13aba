"""The learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from megarl.telemetry.colors import OTHER, PHASE_COLORS
from megarl.telemetry.sinks.jsonl import read_row

Row = Mapping[str, Any]

_ACCURACY, _REWARD, _WARMUP, _INK, _GRID = "#4269d0", "#ef9118", "#777777", "#333333", "#e4e4e4"
_WARMUP_WIDTH = 0.22  # of the RL steps' width


def plot_learning_curve(metrics_file: str, out_png: str) -> bool:
    """Draw held-out accuracy and training reward over RL steps and, below, the seconds of each phase of a step.

    A run without rewards has its losses in their place, and accuracies on a scale of their own. Rows of a supervised
    warm-up are drawn as a shaded band left of the RL steps, with their loss.

    Args:
        metrics_file: a run's `metrics.jsonl`.
        out_png: where the picture goes.

    Returns:
        False, and no picture, if there are no rows of RL steps.
    """
    rows = [row for line in Path(metrics_file).read_bytes().splitlines() if (row := read_row(line)) is not None]
    warmup = [row for row in rows if "warmup/step" in row]
    steps = [row for row in rows if "warmup/step" not in row]
    if not steps:
        return False
    figure = Figure(figsize=(10.5, 6.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    scores, times = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reinforced = any("reward/mean" in row for row in steps)
    (_draw_scores if reinforced else _draw_losses)(scores, steps)
    _draw_times(times, [row for row in steps if row["step"] > 0])
    left, right = steps[0]["step"], max(steps[-1]["step"], steps[0]["step"] + 1)
    if warmup:
        left = _draw_warmup(scores, times, warmup, left, right)
    for panel in (scores, times):
        _dress(panel)
    times.set_xlim(left, right + 0.5)
    times.set_xlabel("RL step" if reinforced else "step", color=_INK)
    times.xaxis.set_major_locator(MaxNLocator(integer=True))
    times.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x >= 0 else ""))
    headline = _headline(steps) if reinforced else _loss_headline(steps)
    figure.suptitle(headline, color=_INK, fontsize=14, fontweight="bold")
    figure.savefig(out_png)
    return True


def _series(rows: Sequence[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have the metric; null (not finite) is a gap in the line."""
    points = [(row["step"], np.nan if row[key] is None else row[key]) for row in rows if key in row]
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return x, y


def _moving_average(y: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over about `width` steps, over fewer at the ends; a gap stays a gap."""
    half = width // 2
    windows = [y[max(0, i - half) : i + half + 1] for i in range(len(y))]
    return np.array([np.nan if np.isnan(y[i]) else np.nanmean(window) for i, window in enumerate(windows)])


def _draw_scores(axes: Axes, steps: Sequence[Row]) -> None:
    x, y = _series(steps, "reward/mean")
    axes.plot(x, y, color=_REWARD, linewidth=1, alpha=0.35)
    axes.plot(x, _moving_average(y, 1 + len(y) // 16), color=_REWARD, linewidth=2, label="training reward")
    x, y = _series(steps, "val/accuracy")
    line: dict[str, Any] = {"color": _ACCURACY, "linewidth": 2, "marker": "o", "markersize": 5, "zorder": 3}
    axes.plot(x, y, label="held-out accuracy", clip_on=False, **line)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0), max(high, 1.02))
    axes.set_ylabel("accuracy, reward", color=_INK)


def _draw_losses(axes: Axes, steps: Sequence[Row]) -> None:
    """Losses by their names in the rows, training ones smoothed; accuracies beside them, dashed."""
    names = list(dict.fromkeys(name for row in steps for name in row if name.endswith(("/loss", "/accuracy"))))
    accuracies = [name for name in names if name.endswith("/accuracy")]
    beside = axes.twinx() if accuracies else axes
    for i, name in enumerate(names):
        x, y = _series(steps, name)
        panel, style = (beside, "--") if name in accuracies else (axes, "-")
        line: dict[str, Any] = {"color": f"C{i}", "linewidth": 2, "linestyle": style, "label": name.replace("/", " ")}
        if name.startswith("val/"):
            line |= {"marker": "o", "markersize": 4, "zorder": 3}
        else:
            panel.plot(x, y, color=f"C{i}", linewidth=1, alpha=0.3)
            y = _moving_average(y, 1 + len(y) // 16)
        panel.plot(x, y, **line)
    axes.set_ylabel("loss", color=_INK)
    if accuracies:
        beside.set_ylim(0, 1.02)
        for side in ("top", "left", "right", "bottom"):
            beside.spines[side].set_visible(False)
        beside.tick_params(axis="y", colors=_INK, length=0, pad=-26)  # inside: the legend is on the right
        beside.yaxis.set_major_formatter(PercentFormatter(1.0))
        for drawn in beside.get_lines():  # one legend for both scales
            if drawn.get_linestyle() == "--":
                axes.plot([], [], color=drawn.get_color(), linestyle="--", linewidth=2, label=drawn.get_label())


def _draw_times(axes: Axes, steps: Sequence[Row]) -> None:
    """Stacked seconds; in the legend their medians over the steps that have the phase. A few very slow steps (the
    first one, say) may leave the picture so that the rest stays readable; the slowest has its seconds beside it.
    """
    axes.set_ylabel("seconds per step", color=_INK)
    seconds = _phase_seconds(steps)
    if not seconds:
        return
    x = np.array([row["step"] for row in steps], dtype=float)
    heights = np.array(list(seconds.values()))
    axes.stackplot(
        np.append(x - 0.5, x[-1] + 0.5),
        np.append(heights, heights[:, -1:], axis=1),
        step="post",
        colors=[PHASE_COLORS.get(phase, f"C{i}") for i, phase in enumerate(seconds)],
        labels=[f"{phase} {_seconds(float(np.median(s[s > 0])))}" for phase, s in seconds.items()],
        linewidth=0,
    )
    total = heights.sum(axis=0)
    limit, slowest = 1.6 * np.quantile(total, 0.8), int(total.argmax())
    if total[slowest] > 1.5 * limit:
        axes.set_ylim(0, limit)
        text = f"{_seconds(total[slowest])} "
        axes.text(x[slowest] - 0.5, 0.98 * limit, text, color=_INK, fontsize=8, ha="right", va="top")


def _seconds(value: float) -> str:
    """Two digits below 10 s, whole seconds above."""
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def _phase_seconds(steps: Sequence[Row]) -> dict[str, np.ndarray]:
    """Seconds of each phase at each step, 0 where a step lacks it; "other" is what no timer has seen of a step.

    Phases that take less than a thousandth of the time are left out: nobody could see them.
    """
    names = {key for row in steps for key in row if key.startswith("timing/")}
    columns = {
        name.removeprefix("timing/").removesuffix("_s"): np.array([row.get(name) or 0.0 for row in steps])
        for name in sorted(names)
    }
    whole = columns.pop("step", None)
    if whole is not None:
        columns[OTHER] = np.maximum(whole - sum(columns.values()), 0.0)
    order = [*PHASE_COLORS, *(columns.keys() - PHASE_COLORS.keys())]
    visible = 1e-3 * sum(seconds.sum() for seconds in columns.values())
    return {phase: columns[phase] for phase in order if phase in columns and columns[phase].sum() > visible}


def _draw_warmup(scores: Axes, times: Axes, warmup: Sequence[Row], first: float, last: float) -> float:
    """Shade the band of the warm-up and draw its loss in it, on a scale of its own; returns the band's left edge."""
    left = first - _WARMUP_WIDTH * (last - first)
    for panel in (scores, times):
        panel.axvspan(left, first, color="#f3f3f3", zorder=0, linewidth=0)
        panel.axvline(first, color="#bbbbbb", linewidth=1, zorder=1)
    loss = np.array([row["warmup/loss"] for row in warmup], dtype=float)
    x = np.linspace(left, first, len(loss) + 1)[1:]
    own_scale = scores.twinx()
    own_scale.plot(x, loss, color=_WARMUP, linewidth=1.5)
    own_scale.set_ylim(bottom=0, top=1.4 * np.nanmax(loss))
    own_scale.axis("off")
    text = f"supervised warm-up\n{len(loss)} steps\nloss {loss[0]:.2f} → {loss[-1]:.2f}"
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


def _loss_headline(steps: Sequence[Row]) -> str:
    for what in ("val/accuracy", "val/loss"):
        _, y = _series(steps, what)
        if len(y) > 1:
            shown = "{:.1%}" if what == "val/accuracy" else "{:.3f}"
            name = what.replace("val/", "Held-out ")
            return f"{name} {shown.format(y[0])} → {shown.format(y[-1])} over {steps[-1]['step']} steps"
    return f"Training loss over {steps[-1]['step']} steps"


def _dress(axes: Axes) -> None:
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True, handlelength=1.2, frameon=False, fontsize=9
        )
