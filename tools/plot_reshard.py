"""The figures of tools/bench_reshard.py as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from bench_reshard import Figures

COLORS = {
    "peer": "#4269d0",
    "collective": "#6cc5b0",
    "copy engine": "#97bbf5",
    "gather": "#efb118",
    "refit": "#ff725c",
}


def draw(figures: Figures, out_png: str) -> None:
    """A panel per pair of layouts: a bar of milliseconds for each way, its extra memory beside it, the bound a line."""
    bars = [len(reshard.ways) for reshard in figures.reshards]
    figure = Figure(figsize=(9, 0.9 + 0.7 * len(bars) + 0.3 * sum(bars)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(bars), 1, squeeze=False, height_ratios=bars)[:, 0]
    for axes, reshard in zip(panels, figures.reshards, strict=True):
        names = list(reshard.ways)
        times = [reshard.ways[name].milliseconds for name in names]
        axes.barh(names, times, color=[COLORS[name] for name in names])
        for i, name in enumerate(names):
            way = reshard.ways[name]
            memory = "" if figures.device == "cpu" else f", + {way.extra_device_mib:,.0f} MiB"
            axes.text(times[i], i, f" {times[i]:.3g} ms{memory}", va="center", fontsize=8)
        if reshard.bound_milliseconds:
            axes.axvline(reshard.bound_milliseconds, color="#333333", linewidth=1, linestyle="--")
        axes.set_xlim(0, 1.35 * max(times))
        axes.invert_yaxis()
        axes.set_title(f"{reshard.train} → {reshard.generation}", loc="left", fontsize=10)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
    figure.axes[-1].set_xlabel(
        "milliseconds, and extra memory of the device; dashed: what arrives, at the link's measured rate"
    )
    figure.suptitle(f"{figures.model} on {figures.ranks} x {figures.device}", fontweight="bold")
    figure.savefig(out_png)
