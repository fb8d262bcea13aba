"""What tools/bench_reshard.py finds out, as a table and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from reshard_links import Links

COLORS = {
    "peer": "#4269d0",
    "collective": "#6cc5b0",
    "copy engine": "#97bbf5",
    "gather": "#efb118",
    "refit": "#ff725c",
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one way to reshard did.

    Attributes:
        milliseconds: median.
        of_bound: the bound, as a part of that.
        first_milliseconds: of the first time, everything that is built for it included.
        extra_allocated_mib, extra_device_mib: extra memory by the allocator's and by the device's account; 0 on CPUs.
        exact: whether the engine's parameters have the training parameters' bits; None: it has parameters of its own.
    """

    milliseconds: float
    of_bound: float | None
    first_milliseconds: float
    extra_allocated_mib: float
    extra_device_mib: float
    exact: bool | None


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """A pair of layouts. Bytes are those of the rank with most.

    Attributes:
        shared_bytes: of the engine's parameters that are the actor's own, which no way moves.
        pulled_bytes: the part of `received_bytes` that the peer transport pulls.
        notes: of ways that could not be taken, why.
        sweep: milliseconds of the peer transport by "words of a tile x warps".
    """

    train: str
    generation: str
    shared_bytes: int
    local_bytes: int
    sent_bytes: int
    received_bytes: int
    pulled_bytes: int
    bound_milliseconds: float | None
    ways: dict[str, Way]
    notes: dict[str, str]
    sweep: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the run showed."""

    model: str
    engine: str
    ranks: int
    device: str
    links: Links
    reshards: list[Reshard] = field(default_factory=list)


def print_table(figures: Figures) -> None:
    rates = [f"{name} {rate / 1e9:.1f} GB/s" for name, rate in asdict(figures.links).items() if rate]
    print(f"{figures.model}, {figures.engine} engine, {figures.ranks} x {figures.device}; {', '.join(rates)}")
    for reshard in figures.reshards:
        bound = reshard.bound_milliseconds
        print(
            f"\n{reshard.train} -> {reshard.generation}: {reshard.received_bytes / 1e9:.3f} GB arrive "
            f"({reshard.pulled_bytes / 1e9:.3f} pulled), {reshard.sent_bytes / 1e9:.3f} leave, "
            f"{reshard.local_bytes / 1e9:.3f} copied in place, {reshard.shared_bytes / 1e9:.3f} shared"
            + (f"; bound {bound:.3f} ms" if bound else "")
        )
        print(f"{'':14}{'ms':>10}{'of bound':>10}{'first ms':>10}{'MiB torch':>11}{'MiB device':>11}  exact")
        for name, w in reshard.ways.items():
            share = f"{w.of_bound:.1%}" if w.of_bound else ""
            print(
                f"{name:14}{w.milliseconds:>10.3f}{share:>10}{w.first_milliseconds:>10.0f}"
                f"{w.extra_allocated_mib:>11.1f}{w.extra_device_mib:>11.1f}  {'' if w.exact is None else w.exact}"
            )
        for name, note in reshard.notes.items():
            print(f"{name:14}{note}")
        for size, ms in sorted(reshard.sweep.items(), key=lambda item: item[1]):
            print(f"tiles of {size:>10} warps{ms:>10.3f} ms")


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
