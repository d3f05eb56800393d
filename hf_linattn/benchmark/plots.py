"""Pictures from result files, and from nothing else.

    python -m hf_linattn.benchmark.plots runs/demo/results.json --out figures

Lines differ in dash and marker as well as in shade, and carry their names: a grey printout reads as well.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .record import read_json
from .tables import bytes_text

STYLES = (
    {"color": "#0b4f9c", "linestyle": "-", "marker": "o"},
    {"color": "#c46a00", "linestyle": "--", "marker": "s"},
    {"color": "#555555", "linestyle": ":", "marker": "^"},
    {"color": "#8a1c5c", "linestyle": "-.", "marker": "D"},
    {"color": "#2e7d4f", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
)


def figure(panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its panels, side by side."""
    # The object interface: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(5.6 * panels + 0.8, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(fig)
    return fig, list(fig.subplots(1, panels, squeeze=False)[0])


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


def curves(axes: Any, series: dict[str, list[tuple[float, float]]]) -> None:
    """Lines of different lengths on log axes, named in a legend: their ends may lie close together."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for (name, points), style in zip(series.items(), STYLES, strict=False):
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.6, markersize=4.5, **style)
    lengths = sorted({x for points in series.values() for x, _ in points})
    shown = lengths[:: max(1, math.ceil(len(lengths) / 7))]
    axes.set_xticks(shown, [length_text(x) for x in shown])
    axes.legend(fontsize=8, frameon=False)
    axes.margins(x=0.04, y=0.08)


def mark(axes: Any, x: float, text: str) -> None:
    """A thin vertical line with a note at its foot."""
    axes.axvline(x, color="#333333", linewidth=0.9, linestyle=(0, (1, 2)))
    axes.annotate(text, (x, 0.02), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
                  fontsize=8, color="#333333", va="bottom")  # fmt: skip


def length_text(length: float) -> str:
    """1,024 as 1k, 1,048,576 as 1M."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if length >= size:
            return f"{length / size:g}{unit}"
    return f"{length:g}"


def round_ticks(axes: Any, values: list[float]) -> None:
    """1, 2 and 5 times powers of ten on the y axis; only the powers where that would be many."""
    low, high = min(values) / 1.6, max(values) * 1.6
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10**e for e in powers for m in (1, 2, 5) if low <= m * 10**e <= high]
    if len(ticks) > 8:
        ticks = [10**e for e in powers if low <= 10**e <= high]
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.minorticks_off()


def byte_ticks(axes: Any, values: list[float]) -> None:
    """Powers of four on the y axis, in binary units."""
    exponents = range(math.floor(math.log(min(values), 4)), math.ceil(math.log(max(values), 4)) + 1)
    axes.set_yticks([4**e for e in exponents], [bytes_text(4**e) for e in exponents])
    axes.minorticks_off()


def plot_compare(result: dict[str, Any], folder: Path) -> list[Path]:
    """compare.png: cache and time per token against the context."""
    contexts = [row["context"] for row in result["rows"]]
    where = f"({result['device']}, {result['dtype']})"
    fig, panels = figure(2)
    for axes, (measure, title, unit, ticks) in zip(
        panels,
        (
            ("cache_bytes", f"Cache while generating {where}", "", byte_ticks),
            ("ms_per_token", f"Time per generated token {where}", "milliseconds", round_ticks),
        ),
        strict=True,
    ):
        label(axes, title, "context (tokens)", unit)
        sides = {"linear attention": "model", "Llama": "llama"}
        series = {name: [row[side][measure] for row in result["rows"]] for name, side in sides.items()}
        lines(axes, contexts, series)
        ticks(axes, [y for ys in series.values() for y in ys])
    return [save(fig, folder / "compare.png")]


def plot_ops(result: dict[str, Any], folder: Path) -> list[Path]:
    """ops.png: time against the length, forward and forward with backward, with the crossing of softmax attention.
    memory.png: peak memory of the two."""
    written = []
    for name, quantity, unit, ticks in (
        ("ops.png", "ms", "milliseconds", round_ticks),
        ("memory.png", "peak_bytes", "peak memory", byte_ticks),
    ):
        fig, panels = figure(2)
        for axes, pass_name in zip(panels, ("forward", "forward+backward"), strict=True):
            label(axes, f"{pass_name} ({result['device']}, {result['dtype']})", "length (tokens)", unit)
            entries = [(row["length"], row.get(pass_name, {})) for row in result["rows"]]
            series = {
                title: [(length, entry[side][quantity]) for length, entry in entries if quantity in entry.get(side, {})]
                for side, title in result["sides"].items()
            }
            curves(axes, {title: points for title, points in series.items() if points})
            values = [y for points in series.values() for _, y in points]
            if values:
                ticks(axes, values)
            crossing = result["crossover"].get(pass_name, {}).get("softmax")
            if quantity == "ms" and crossing is not None:
                mark(axes, crossing, f"softmax slower\nfrom {crossing:,.0f}")
        written.append(save(fig, folder / name))
    return written


def plot_train(result: dict[str, Any], folder: Path) -> list[Path]:
    """training.png: held-out bits per byte over steps, with the baselines as level lines."""
    fig, (axes,) = figure()
    label(axes, "Held-out text", "optimizer steps", "bits per byte")
    steps, values = zip(*result["evaluations"], strict=True)
    axes.plot(steps, values, linewidth=1.8, markersize=5, **STYLES[0])
    axes.annotate(
        f"model {values[-1]:.2f}", (steps[-1], values[-1]), xytext=(7, 0), textcoords="offset points", va="center",
        color=STYLES[0]["color"], fontsize=9,
    )  # fmt: skip
    levels = {name: baseline["bits_per_byte"] for name, baseline in (result["baselines"] or {}).items()}
    for (name, level), style in zip(levels.items(), STYLES[1:], strict=False):
        axes.axhline(level, linewidth=1.2, color=style["color"], linestyle=style["linestyle"])
        highest = level == max(levels.values())  # one name above its line, the other below: they may be close
        axes.annotate(
            f"{name} {level:.2f}", (steps[0], level), xytext=(0, 4 if highest else -4), textcoords="offset points",
            va="bottom" if highest else "top", color=style["color"], fontsize=9,
        )  # fmt: skip
    axes.set_yscale("log")
    round_ticks(axes, [*values, *levels.values()])
    return [save(fig, folder / "training.png")]


def save(fig: Any, path: Path) -> Path:
    fig.savefig(path)
    return path


PLOTS: dict[str, Callable[[dict[str, Any], Path], list[Path]]] = {
    "compare": plot_compare,
    "ops": plot_ops,
    "train": plot_train,
}


def plot(result: dict[str, Any], folder: str | Path) -> list[Path]:
    """Draws a result, or each result in a file of several (`kind: demo`); returns the files written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if result["kind"] in PLOTS:
        return PLOTS[result["kind"]](result, folder)
    parts = [value for value in result.values() if isinstance(value, dict) and value.get("kind") in PLOTS]
    if not parts:
        raise ValueError(f"no picture for kind {result['kind']!r}; known: {', '.join(PLOTS)}")
    return [path for part in parts for path in plot(part, folder)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="JSON files")
    parser.add_argument("--out", default="figures", help="folder for the PNG files")
    arguments = parser.parse_args(argv)
    for path in arguments.results:
        for written in plot(read_json(path), arguments.out):
            print(written)


if __name__ == "__main__":
    main()
