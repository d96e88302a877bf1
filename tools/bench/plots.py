"""How plots look.

Rules of this module:

- It draws panels of bars or of lines; it knows no workload.
- A peer has the same colour in every plot. Times, sizes and money are on logarithmic scales: peers differ by orders.
- The same panels make the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.results import Spread

# Blues are ours; the others' are Okabe and Ito's, told apart by most eyes.
COLOURS = {
    "lsm-file": "#0b3d91",
    "lsm-file-nosync": "#5b9bd5",
    "lsm-s3": "#0b3d91",
    "lsm-delayed": "#9ec5ea",
    "memory": "#999999",
    "sqlite": "#e69f00",
    "postgres": "#009e73",
    "objectstorage-file": "#cc79a7",
    "objectstorage-s3": "#cc79a7",
    "tigris": "#d55e00",
    "s3": "#b8a900",
}


@dataclass(frozen=True)
class Bar:
    """One bar: a peer, its title, its value, and the value in words."""

    peer: str
    title: str
    value: Spread
    words: str


@dataclass(frozen=True)
class Line:
    """One line: a peer, its title, and its points."""

    peer: str
    title: str
    points: Sequence[tuple[float, Spread]]


@dataclass(frozen=True)
class Panel:
    """One small plot: its title, what the value is, its marks, and what is across (for lines)."""

    title: str
    unit: str
    marks: Sequence[Bar] | Sequence[Line]
    across: str = ""


def draw(groups: Sequence[Sequence[Panel]], path: Path) -> Path:
    """Draw the panels that have marks into one SVG file, each group from a new row on; returns its path."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = [panels for group in groups if (panels := [panel for panel in group if panel.marks])]
    columns = max(len(group) if len(group) <= 5 else 3 for group in shown)
    places: list[Panel | None] = []
    for group in shown:
        places += [*group, *[None] * (-len(group) % columns)]
    rows = len(places) // columns
    style = {"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    with pyplot.rc_context(style):
        size = (max(4.2 * columns, 8.4), 2.9 * rows + 0.4)
        figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for axes, panel in zip(grid.flat, places, strict=True):
            if panel is None:
                axes.set_visible(False)
                continue
            axes.set_title(panel.title, fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            (_bars if isinstance(panel.marks[0], Bar) else _lines)(axes, panel)
        _legend(figure, grid)
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
        pyplot.close(figure)
    return path


def _bars(axes: Any, panel: Panel) -> None:
    bars: list[Any] = list(reversed(panel.marks))
    values = [bar.value.median for bar in bars]
    below = [bar.value.median - bar.value.low for bar in bars]
    above = [bar.value.high - bar.value.median for bar in bars]
    axes.barh(
        [bar.title for bar in bars],
        values,
        xerr=[below, above],
        color=[COLOURS[bar.peer] for bar in bars],
        error_kw={"elinewidth": 1, "ecolor": "#444444"},
        height=0.7,
    )
    axes.set_xscale("log")
    # Room for the words on the right, whatever the range.
    lowest, highest = min(values) / 10, max(bar.value.high for bar in bars)
    axes.set_xlim(lowest, highest * (highest / lowest) ** 0.4)
    for position, bar in enumerate(bars):
        axes.annotate(bar.words, (bar.value.high, position), (4, 0), textcoords="offset points", va="center")
    axes.set_xlabel(panel.unit)
    _ticks(axes.xaxis, panel.unit)


def _lines(axes: Any, panel: Panel) -> None:
    lines: Sequence[Any] = panel.marks
    for line in lines:
        colour = COLOURS[line.peer]
        across = [point for point, _ in line.points]
        axes.plot(across, [spread.median for _, spread in line.points], "o-", color=colour, ms=3, label=line.title)
        low, high = [spread.low for _, spread in line.points], [spread.high for _, spread in line.points]
        axes.fill_between(across, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({point for line in lines for point, _ in line.points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.unit)
    _ticks(axes.yaxis, panel.unit)


def _ticks(axis: Any, unit: str) -> None:
    """Few ticks, in words a person reads; more of them where the range is less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    narrow = high / low < 100
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=6))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _time(value) if "seconds" in unit[:7] else f"{value:,g}"))


def _time(seconds: float) -> str:
    unit, factor = ("µs", 1e6) if seconds < 0.99e-3 else ("ms", 1e3) if seconds < 0.99 else ("s", 1.0)
    return f"{seconds * factor:,.3g} {unit}"


def _legend(figure: Any, grid: Any) -> None:
    """One legend for all lines; bars carry their names."""
    lines = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
