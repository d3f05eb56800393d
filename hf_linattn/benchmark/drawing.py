"""What the pictures share: a figure, its labels, lines with their names, and ticks.

Lines differ in dash and marker as well as in shade, and carry their names: a grey printout reads as well.
"""

import math
from pathlib import Path
from typing import Any

from .text import bytes_text

STYLES = (
    {"color": "#0b4f9c", "linestyle": "-", "marker": "o"},
    {"color": "#c46a00", "linestyle": "--", "marker": "s"},
    {"color": "#555555", "linestyle": ":", "marker": "^"},
)


def figure(panels: int = 1, rows: int = 1, width: float = 5.6, height: float = 4.0) -> tuple[Any, list[Any]]:
    """A figure and its panels, row by row; `panels` of `width` by `height` inches stand side by side."""
    # The object interface: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * panels + 0.8, height * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(fig)
    return fig, list(fig.subplots(rows, panels, squeeze=False).flat)


def label(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def lines(axes: Any, x: list[float], series: dict[str, list[float]]) -> None:
    """Lines on log axes, each with its name at its right end."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.minorticks_off()
    for (name, y), style in zip(series.items(), STYLES, strict=False):
        axes.plot(x, y, linewidth=1.8, markersize=5, **style)
        axes.annotate(
            name,
            (x[-1], y[-1]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=style["color"],
            fontsize=9,
        )
    axes.margins(x=0.04, y=0.12)


def round_ticks(axes: Any, values: list[float]) -> None:
    """1, 2 and 5 times powers of ten on the y axis; only the powers where that would be many, more where few."""
    low, high = min(values) / 1.6, max(values) * 1.6
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10**e for e in powers for m in (1, 2, 5) if low <= m * 10**e <= high]
    if len(ticks) > 8:
        ticks = [10**e for e in powers if low <= 10**e <= high]
    if len(ticks) < 4:
        ticks = [m * 10**e for e in powers for m in (1, 1.5, 2, 3, 4, 5, 7) if low <= m * 10**e <= high]
    axes.set_yticks(ticks, [f"{tick:,g}" if tick < 1e6 else f"{tick / 1e6:,g} million" for tick in ticks])
    axes.minorticks_off()


def byte_ticks(axes: Any, values: list[float], along: str = "y") -> None:
    """Powers of four along an axis, in binary units; of two or sixteen where that is few or many."""
    low, high = math.log2(min(values)), math.log2(max(values))
    step = 1 if high - low < 3 else 2 if high - low < 16 else 4
    exponents = range(step * math.floor(low / step), step * math.ceil(high / step) + 1, step)
    set_ticks = {"x": axes.set_xticks, "y": axes.set_yticks}[along]
    set_ticks([2**e for e in exponents], [bytes_text(2**e) for e in exponents])
    axes.minorticks_off()


def save(fig: Any, path: Path) -> Path:
    fig.savefig(path)
    return path
