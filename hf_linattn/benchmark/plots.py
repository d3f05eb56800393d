"""Pictures from result files, and from nothing else.

python -m hf_linattn.benchmark.plots runs/demo/results.json --out figures
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .drawing import STYLES, byte_ticks, figure, label, lines, round_ticks, save
from .record import read_json
from .studies import plot_bytes, plot_recall
from .tables import RIVALS, TITLES, settings_text, tokens_per_second

# A side of a level looks the same in every picture.
LOOKS = {
    "native": STYLES[0],
    "model": STYLES[0],
    "softmax": STYLES[1],
    "llama": STYLES[1],
    "bucketed": STYLES[2],
    "torch": {"color": "#8a1c5c", "linestyle": "-.", "marker": "D"},
    "triton": {"color": "#000000", "linestyle": "-", "marker": "v"},
    "fla": {"color": "#2e7d4f", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "x"},
}


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


def plot_level(result: dict[str, Any], folder: Path) -> list[Path]:
    """benchmark_*.png: for every pass speed and memory against the length, where they cross marked."""
    passes = {name: measured for name, measured in result.get("passes", {}).items() if measured["rows"]}
    if not passes:
        return []
    fig, panels = figure(max(2, len(passes)), rows=min(2, len(passes)), width=4.8)
    fig.suptitle(f"{TITLES[result['kind']]} ({settings_text(result)})", fontsize=11)
    lengths = sorted({row["length"] for measured in passes.values() for row in measured["rows"]})
    for i, (name, measured) in enumerate(passes.items()):
        at = "context" if name == "decode" else "length"
        speed, memory = panels[i], panels[len(passes) + i]
        label(speed, f"{name}: speed", f"{at} (tokens)", "tokens per second")
        values = side_lines(
            speed, result, measured, lengths,
            lambda row, side, name=name: tokens_per_second(result["sizes"], name, row["length"], side["ms"]),
        )  # fmt: skip
        round_ticks(speed, values)
        mark_crossover(speed, measured)
        what = "cache or state" if name == "decode" else "peak memory of a call"
        label(memory, f"{name}: {what}", f"{at} (tokens)", "")
        key = "held_bytes" if name == "decode" else "peak_bytes"
        if values := side_lines(memory, result, measured, lengths, lambda row, side, key=key: side[key]):
            byte_ticks(memory, values)
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return [save(fig, folder / f"{result['kind'].replace(' ', '_')}.png")]


def side_lines(
    axes: Any, result: dict[str, Any], measured: dict[str, Any], lengths: list[int], value: Callable
) -> list[float]:
    """A line for every measured side, named for the legend; returns all values."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = -(-len(lengths) // 7)
    axes.set_xticks(lengths[::every], [length_text(length) for length in lengths[::every]])
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    drawn = []
    for side, about in result["sides"].items():
        points = [(row["length"], value(row, row["sides"][side])) for row in measured["rows"] if side in row["sides"]]
        points = [(x, y) for x, y in points if y]  # a device may not tell its memory
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, linewidth=1.8, markersize=5, label=about["label"], **LOOKS[side])
            drawn += y
    axes.margins(y=0.12)
    return drawn


def mark_crossover(axes: Any, measured: dict[str, Any]) -> None:
    """An upright line where the first side becomes faster than softmax attention for good."""
    for side in RIVALS:
        place = measured["crossover"].get(side)
        if place and place["interpolated"]:
            axes.axvline(place["interpolated"], color="#777777", linewidth=1.0, linestyle=(0, (1, 2)))
            axes.annotate(
                f"faster from {place['interpolated']:,.0f} tokens", (place["interpolated"], 0.02), xytext=(4, 0),
                xycoords=("data", "axes fraction"), textcoords="offset points", va="bottom", fontsize=8,
            )  # fmt: skip


def length_text(length: int) -> str:
    """128, 2k, 1M: binary thousands where they are whole."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if length % size == 0:
            return f"{length // size}{unit}"
    return f"{length:,}"


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


PLOTS: dict[str, Callable[[dict[str, Any], Path], list[Path]]] = {
    "benchmark decode": plot_level,
    "benchmark model": plot_level,
    "benchmark op": plot_level,
    "bytes study": plot_bytes,
    "compare": plot_compare,
    "recall study": plot_recall,
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
