"""Tables and pictures of the studies: which feature map, and what around it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .drawing import STYLES, byte_ticks, figure, label, save
from .text import bytes_text, table

Row = dict[str, Any]

MIX_NAMES = {
    (False, False): "alone",
    (True, False): "with convolution",
    (False, True): "with a full layer",
    (True, True): "with both",
}


def hardest(result: dict[str, Any]) -> str:
    """The number of pairs that is hardest to recall."""
    return str(result["scale"]["pairs"][-1])


def recall_of(result: dict[str, Any]) -> Callable[[Row], list[float]]:
    """Accuracy of each seed, in percent, at the hardest setting."""
    return lambda row: [100 * run["accuracy"][hardest(result)] for run in row["runs"]]


def bits_of(field: str = "bits_per_byte") -> Callable[[Row], list[float]]:
    return lambda row: [run[field] for run in row["runs"]]


def spread(values: list[float], digits: int) -> str:
    """The mean over seeds and their standard deviation; where a seed has no finite result, how many have."""
    if missing := sum(value is None for value in values):
        return f"{len(values) - missing} of {len(values)} finite"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def mixes(result: dict[str, Any]) -> list[tuple[bool, bool]]:
    return [tuple(mix) for mix in result["scale"]["mixes"]]


def by_map(result: dict[str, Any]) -> dict[str, dict[tuple[bool, bool], Row]]:
    """Rows without a change, by feature map and mix."""
    found: dict[str, dict[tuple[bool, bool], Row]] = {}
    for row in result["rows"]:
        if row["feature_map"] is not None and not row["change"]:
            found.setdefault(row["feature_map"], {})[row["conv"], row["full"]] = row
    return found


def softmax_row(result: dict[str, Any]) -> Row:
    return next(row for row in result["rows"] if row["feature_map"] is None and not row["change"])


def limits(result: dict[str, Any]) -> str:
    """What the study cannot say, from its own sizes."""
    scale, runs = result["scale"], [run for row in result["rows"] for run in row["runs"]]
    parameters = sorted(run["parameters"] for run in runs)
    length = scale.get("length") or scale["block_size"]
    rates = ", ".join(f"{rate:g}" for rate in scale["learning_rates"])
    return (
        f"What this cannot say: how models of more than {parameters[-1]:,} parameters ({scale['layers']} layers of "
        f"{scale['hidden_size']}, heads of {scale['hidden_size'] // scale['heads']}), sequences of more than "
        f"{length:,} tokens, or more than {scale['steps']:,} steps of {scale['batch_size']} sequences compare: who "
        f"learns slowly counts as who cannot. Learning rates {rates}; {len(scale['seeds'])} seeds, ± is their standard "
        f"deviation. {result['trained']} models, which took {result['seconds'] / 60:.0f} minutes one after another.\n"
    )


def study_tables(
    result: dict[str, Any],
    measure: Callable[[Row], list[float]],
    digits: int,
    what: str,
    verdict: str,
    more: tuple[tuple[str, Callable[[Row], list[float]]], ...] = (),
) -> str:
    """A row a map, a column a mix, and what it comes to; then, where some were measured, less room and single changes;
    then the limits."""
    columns = mixes(result)
    reference = softmax_row(result)
    rows = [[f"**{reference['name']}**", spread(measure(reference), digits), *[""] * (len(columns) - 1)]]
    rows[0] += [spread(extra(reference), digits) for _, extra in more]
    rows[0].append(bytes_text(reference["runs"][0]["cache_bytes"]))
    for name, cells in by_map(result).items():
        line = [name, *(spread(measure(cells[mix]), digits) if mix in cells else "" for mix in columns)]
        shown = cells.get((True, False)) or next(iter(cells.values()))
        line += [spread(extra(shown), digits) for _, extra in more]
        rows.append([*line, bytes_text(shown["runs"][0]["cache_bytes"])])
    header = [what, *(MIX_NAMES[mix] for mix in columns), *(name for name, _ in more), "cache"]
    parts = [table(header, rows), verdict, narrow_table(result, measure, digits)]
    return "\n".join(part for part in [*parts, changes_table(result, measure, digits), limits(result)] if part)


CHANGE_NAMES = {"rope": "RoPE too", "qk_norm": "qk norm", "rmsnorm": "rmsnorm for the denominator"}


def by_change(result: dict[str, Any]) -> dict[str | None, dict[str, Row]]:
    """Rows with a convolution (and softmax attention), by feature map and change; "" is the one without."""
    found: dict[str | None, dict[str, Row]] = {}
    for row in result["rows"]:
        if row["feature_map"] is None or (row["conv"] and not row["full"]):
            found.setdefault(row["feature_map"], {})[row["change"]] = row
    return found


def changes_table(result: dict[str, Any], measure: Callable[[Row], list[float]], digits: int) -> str:
    """Single changes of maps with a convolution, beside the same map without the change."""
    maps = {name: cells for name, cells in by_change(result).items() if any(c in CHANGE_NAMES for c in cells)}
    if not maps:
        return ""
    rows = [
        [str(name), *(spread(measure(cells[c]), digits) if c in cells else "" for c in ("", *CHANGE_NAMES))]
        for name, cells in maps.items()
    ]
    return table(["with convolution", "as above", *CHANGE_NAMES.values()], rows)


def narrow_table(result: dict[str, Any], measure: Callable[[Row], list[float]], digits: int) -> str:
    """Less room for the state: fewer and smaller heads, each with the bytes that are kept of a sequence."""
    maps = by_change(result)
    names = [
        name for name in dict.fromkeys(c for cells in maps.values() for c in cells) if name and name not in CHANGE_NAMES
    ]
    if not names:
        return ""
    rows = []
    for name, cells in maps.items():
        if not any(narrow in cells for narrow in names):
            continue
        line = [str(name)]
        for size in ("", *names):
            if size not in cells:
                line += ["", ""]
                continue
            line += [spread(measure(cells[size]), digits), bytes_text(cells[size]["runs"][0]["cache_bytes"])]
        rows.append(line)
    heads = f"{result['scale']['heads']} heads of {result['scale']['hidden_size'] // result['scale']['heads']}"
    header = ["with convolution", *(text for name in (heads, *names) for text in (name, "cache"))]
    return table(header, rows)


def means_with_convolution(
    result: dict[str, Any], measure: Callable[[Row], list[float]], changes: tuple[str, ...] = ("",)
) -> list[tuple[float, Row]]:
    """(mean over seeds, row) of the linear models with a convolution, where every seed has a finite result."""
    maps = {name: cells for name, cells in by_change(result).items() if name is not None}
    rows = [row for cells in maps.values() for change, row in cells.items() if change in changes]
    return [(statistics.fmean(measure(row)), row) for row in rows if None not in measure(row)]


def recall_verdict(result: dict[str, Any], points: float = 2) -> str:
    """Which maps come near the best seed of softmax attention, some of which may not have learned yet; and the least
    state in which one does."""
    reference = max(recall_of(result)(softmax_row(result)))
    narrow = {row["change"] for row in result["rows"]} - CHANGE_NAMES.keys()
    near = [
        row for mean, row in means_with_convolution(result, recall_of(result), (*narrow,)) if mean >= reference - points
    ]
    wide = [row["feature_map"] for row in near if not row["change"]]
    if not wide:
        return f"With a convolution, no map comes within {points:g} points of softmax attention's best seed.\n"
    least = min(near, key=lambda row: row["runs"][0]["cache_bytes"])
    size = f" with {least['change']}" * bool(least["change"])
    return (
        f"With a convolution, {len(wide)} of {len(by_map(result))} maps come within {points:g} points of softmax "
        f"attention's best seed: {', '.join(wide)}. The least that one keeps of a sequence for it is "
        f"{bytes_text(least['runs'][0]['cache_bytes'])} ({least['feature_map']}{size}); softmax attention keeps "
        f"{bytes_text(softmax_row(result)['runs'][0]['cache_bytes'])}.\n"
    )


def bytes_verdict(result: dict[str, Any], percent: float = 3) -> str:
    """Which maps come near softmax attention, and how near the best does."""
    reference = statistics.fmean(bits_of()(softmax_row(result)))
    means = sorted(
        ((mean, row["feature_map"]) for mean, row in means_with_convolution(result, bits_of())),
        key=lambda pair: pair[0],
    )
    near = [name for mean, name in means if mean <= reference * (1 + percent / 100)]
    if not means:
        return ""
    (best, name), distance = means[0], 100 * (means[0][0] / reference - 1)
    which = f": {', '.join(near)}" if near else ""
    return (
        f"With a convolution, {len(near)} of {len(by_map(result))} maps are at most {percent:g}% worse than softmax "
        f"attention{which}. The best is {name} with {best:.3f} bits, {abs(distance):.1f}% "
        f"{'less' if distance < 0 else 'more'} than softmax attention.\n"
    )


def recall_tables(result: dict[str, Any]) -> str:
    """Accuracy in percent at the hardest setting."""
    scale = result["scale"]
    what = f"recall of {hardest(result)} pairs in {scale['length']} tokens, %"
    return study_tables(result, recall_of(result), 1, what, recall_verdict(result))


def bytes_tables(result: dict[str, Any]) -> str:
    """Bits per byte of held-out text; with a convolution also of repeated strings and of the rest."""
    more = (("repeated", bits_of("bits_of_repeated")), ("the rest", bits_of("bits_of_others")))
    return study_tables(result, bits_of(), 3, "bits per byte", bytes_verdict(result), more)


def plot_recall(result: dict[str, Any], folder: Path) -> list[Path]:
    """recall.png: every map in every mix, beside softmax attention; and accuracy against the size of the cache."""
    fig, (left, right) = figure(2, height=0.34 * len(by_map(result)) + 1.6)
    dots(left, result, recall_of(result))
    label(left, f"Recall of {hardest(result)} pairs, % (mean and range of seeds)", "", "")
    ends = {}
    for name, cells in by_change(result).items():
        if name is None:
            continue
        sizes = [row for change, row in cells.items() if change not in CHANGE_NAMES]
        sizes.sort(key=lambda row: row["runs"][0]["cache_bytes"])
        x = [row["runs"][0]["cache_bytes"] for row in sizes]
        y = [statistics.fmean(recall_of(result)(row)) for row in sizes]
        right.plot(x, y, **{**MIX_STYLES[True, False], "linestyle": "-", "linewidth": 0.6, "markersize": 4})
        ends[name] = (x[0], y[0])
    seeds = recall_of(result)(softmax_row(result))
    right.plot([softmax_row(result)["runs"][0]["cache_bytes"]] * len(seeds), seeds, **SOFTMAX_STYLE, markersize=4)
    right.annotate(
        "softmax attention,\neach seed", (softmax_row(result)["runs"][0]["cache_bytes"], min(seeds)), xytext=(6, 0),
        textcoords="offset points", va="center", fontsize=7, color=SOFTMAX_STYLE["color"],
    )  # fmt: skip
    for name, ((x, y), place) in zip(ends, zip(ends.values(), apart([y for _, y in ends.values()], 3.2))):
        right.annotate(
            name, (x, y), xytext=(x * 0.8, place), ha="right", va="center", fontsize=7,
            color=MIX_STYLES[True, False]["color"],
        )  # fmt: skip
    right.set_xscale("log", base=2)
    label(right, "With convolution and less room, %", "bytes kept of a sequence", "")
    right.margins(x=0.3)
    byte_ticks(right, [run["cache_bytes"] for row in result["rows"] for run in row["runs"]], along="x")
    return [save(fig, folder / "recall.png")]


def plot_bytes(result: dict[str, Any], folder: Path) -> list[Path]:
    """bytes.png: every map, beside softmax attention; and the loss by context of a few."""
    fig, (left, right) = figure(2, height=0.34 * len(by_map(result)) + 1.6)
    dots(left, result, bits_of())
    label(left, "Held-out bits per byte (mean and range of seeds)", "", "")
    convolved = [row for cells in by_map(result).values() if (row := cells.get((True, False)))]
    convolved = [row for row in convolved if None not in bits_of()(row)]
    convolved.sort(key=lambda row: statistics.fmean(bits_of()(row)))
    chosen = [softmax_row(result), convolved[0], convolved[-1]] if convolved else [softmax_row(result)]
    for row, style in zip(chosen, (STYLES[1], STYLES[0], STYLES[2])):
        lists = [run["by_context"] for run in row["runs"]]
        x = [each["from"] for each in lists[0]]
        y = [statistics.fmean(each["bits_per_token"] for each in at) for at in zip(*lists)]
        right.plot(x, y, label=row["name"], linewidth=1.8, markersize=4, **style)
    right.axvline(result["scale"]["block_size"], color="#999999", linewidth=0.8)
    right.annotate(
        "trained length", (result["scale"]["block_size"], 1), xycoords=("data", "axes fraction"), xytext=(-4, -4),
        textcoords="offset points", ha="right", va="top", fontsize=8, color="#555555",
    )  # fmt: skip
    right.set_xscale("log", base=2)
    label(right, "Softmax, best and worst with convolution", "bytes of context", "bits per byte")
    right.legend(fontsize=8, frameon=False)
    return [save(fig, folder / "bytes.png")]


SOFTMAX_STYLE = {"color": "#c46a00", "linestyle": "none", "marker": "s"}
MIX_STYLES = {
    (False, False): {"color": "#777777", "linestyle": "none", "marker": "x"},
    (True, False): {"color": "#0b4f9c", "linestyle": "none", "marker": "o"},
    (False, True): {"color": "#8a1c5c", "linestyle": "none", "marker": "^", "fillstyle": "none"},
    (True, True): {"color": "#2e7d4f", "linestyle": "none", "marker": "D", "fillstyle": "none"},
}


def apart(places: list[float], gap: float) -> list[float]:
    """The places, in their order, pushed from each other until neighbours are `gap` apart, or nearly."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for _ in range(200):
        for low, high in zip(order, order[1:]):
            push = max(0.0, gap - (moved[high] - moved[low])) / 2
            moved[low], moved[high] = moved[low] - push, moved[high] + push
    return moved


def dots(axes: Any, result: dict[str, Any], measure: Callable[[Row], list[float]]) -> None:
    """A line a map, a mark a mix, the range of seeds as a bar; softmax attention is a line a seed, top to bottom."""
    maps = by_map(result)
    columns = mixes(result)
    for column, mix in enumerate(columns):
        style, shown = MIX_STYLES[mix], True
        for place, cells in enumerate(maps.values()):
            if mix not in cells:
                continue
            values = [value for value in measure(cells[mix]) if value is not None]
            if not values:
                continue
            y = place + 0.14 * (column - (len(columns) - 1) / 2)
            axes.plot([min(values), max(values)], [y, y], color=style["color"], linewidth=1)
            axes.plot(statistics.fmean(values), y, label=MIX_NAMES[mix] if shown else None, markersize=4.5, **style)
            shown = False
    for number, value in enumerate(measure(softmax_row(result))):
        name = f"{softmax_row(result)['name']}, each seed"
        axes.axvline(value, color="#c46a00", linestyle="--", linewidth=1, label=name if number == 0 else None)
    axes.set_yticks(range(len(maps)), list(maps))
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
