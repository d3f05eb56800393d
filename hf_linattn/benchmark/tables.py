"""Markdown tables from result files, and from nothing else.

python -m hf_linattn.benchmark.tables runs/demo/results.json [--out table.md]
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .record import read_json


def table(header: list[str], rows: list[list[str]], align: str = "---:") -> str:
    """A Markdown table; all columns but the first are numbers and stand to the right, or as `align` says."""
    lines = [header, ["---", *[align] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.4g} GiB"


def milliseconds_text(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def ratio_text(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def compare_table(result: dict[str, Any]) -> str:
    """Cache and time per token of the model and the Llama at each context length."""
    rows = [
        [
            f"{row['context']:,}",
            bytes_text(row["model"]["cache_bytes"]),
            bytes_text(row["llama"]["cache_bytes"]),
            ratio_text(row["llama_over_model"]["cache_bytes"]),
            milliseconds_text(row["model"]["ms_per_token"]),
            milliseconds_text(row["llama"]["ms_per_token"]),
            ratio_text(row["llama_over_model"]["ms_per_token"]),
        ]
        for row in result["rows"]
    ]
    header = ["context (tokens)", "cache", "Llama's cache", "ratio", "ms/token", "Llama's ms/token", "ratio"]
    return table(header, rows)


def ops_table(result: dict[str, Any]) -> str:
    """For each pass: the time of the main side, how much longer the others take, its share of the machine's rate, and
    peak memory; and from which length each of the others is slower."""
    main, titles = result["main"], result["sides"]
    others = [side for side in titles if side != main]
    q_bytes = math.prod(result["sizes"].values()) * {"float32": 4, "bfloat16": 2, "float16": 2}[result["dtype"]]
    parts = []
    for name, crossings in result["crossover"].items():
        header = [f"{name}, length", f"{titles[main]}, ms", *(titles[side] for side in others)]
        header += ["of the product rate", "memory, times q"]
        rows = []
        for row in result["rows"]:
            entries = row.get(name, {})
            if main not in entries:
                continue
            cells = [f"{row['length']:,}", milliseconds_text(entries[main]["ms"])]
            cells += [ratio_text(entries[side]["over_main"]) if side in entries else "" for side in others]
            share, peak = entries[main].get("of_product_rate"), entries[main].get("peak_bytes")
            cells.append("" if share is None else f"{share:.2f}")
            cells.append("" if peak is None else f"{peak / (row['length'] * q_bytes):.1f}")
            rows.append(cells)
        parts.append(table(header, rows))
        slower = [
            f"{titles[side]} from {length:,.0f} tokens" for side, length in crossings.items() if length is not None
        ]
        parts.append(f"Slower than {titles[main]}: {'; '.join(slower) or 'none'}.\n")
    return "\n".join(parts)


def train_table(result: dict[str, Any]) -> str:
    """Held-out bits per byte before and after training, beside the baselines."""
    rows = [["the model, untrained", f"{result['bits_per_byte']['before']:.3f}"]]
    rows += [[each["what"], f"{each['bits_per_byte']:.3f}"] for each in (result["baselines"] or {}).values()]
    rows += [[f"the model, after {result['tokens_seen']:,} tokens", f"{result['bits_per_byte']['after']:.3f}"]]
    return table(["held-out text", "bits per byte"], rows)


def generation_table(result: dict[str, Any]) -> str:
    """What a generated token costs, beside what is promised; parts that were not measured are left out."""
    bounds, rows = result["bounds"], []

    def add(what: str, key: str, value: str, limit: Callable[[float], str], word: str = "at most") -> None:
        rows.append([what, value, f"{word} {limit(bounds[key])}"])

    if positions := result.get("positions"):
        place = f"a token after {positions['far']:,} tokens over one after {positions['near']:,}"
        for case, row in positions["cases"].items():
            cost = f"{ratio_text(row['ratio'])} ({milliseconds_text(row['far_us'] / 1e3)} ms)"
            add(f"time of {place}, {case}", case, cost, ratio_text)
        prefill = positions["prefill"]
        what = f"time of reading the last tenth of {prefill['length']:,} tokens over the first"
        add(what, "prefill", ratio_text(prefill["ratio"]), ratio_text)
    if loop := result.get("loop"):
        cost = f"{ratio_text(loop['ratio'])} ({loop['ours_us']:.0f} us against {loop['stock_us']:.0f} us)"
        add("time of the loop beyond the model, over that of transformers' loop", "loop", cost, ratio_text)
    if memory := result.get("memory"):
        what = f"resident memory from token {memory['near']:,} to {memory['length']:,}, ids aside"
        add(what, "memory", signed_bytes_text(memory["growth_without_ids_bytes"]), bytes_text)
    if lookup := result.get("prompt lookup"):
        what = f"speed of prompt lookup over greedy search, median of {len(lookup['texts'])} repetitive texts"
        each = ", ".join(ratio_text(text["ratio"]) for text in lookup["texts"].values())
        add(what, "prompt lookup", f"{ratio_text(lookup['ratio'])} ({each})", ratio_text, "at least")
    return table(["what", "measured", "promised"], rows)


def signed_bytes_text(size: float) -> str:
    return f"-{bytes_text(-size)}" if size < 0 else bytes_text(size)


def batching_table(result: dict[str, Any]) -> str:
    """Tokens a second of the three ways to serve many requests, and how much faster the continuous batch is."""
    speeds, over, sizes = result["tokens_per_second"], result["continuous_over"], result["sizes"]
    names = {"one_by_one": "one by one", "static": f"static batches of {sizes['slots']}"}
    rows = [[names[key], f"{speeds[key]:,.0f}", ratio_text(over[key])] for key in names]
    rows.append([f"continuous batch, {sizes['slots']} rows", f"{speeds['continuous']:,.0f}", ""])
    return table([f"{sizes['requests']} requests", "tokens/s", "continuous is faster by"], rows)


def modes_table(result: dict[str, Any]) -> str:
    """A line of the modes that are exact everywhere, and a table of the others; those of the same cells share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in result["rows"]:
        cells = tuple(row[column] for column in ("linear", "linear_padded", "hybrid", "hybrid_padded"))
        groups.setdefault(cells, []).append(row["mode"])
    everywhere = groups.pop(("exact",) * 4, [])
    header = ["mode", "linear", "linear, padded", "hybrid", "hybrid, padded"]
    rest = table(header, [["; ".join(modes), *cells] for cells, modes in groups.items()], align="---")
    return f"Exact in all four columns: {'; '.join(everywhere)}.\n\n{rest}"


PLAN_COSTS = {
    "cache_bytes": "cache",
    "decode_bytes": "bytes a decoding step moves",
    "decode_flops": "operations of a decoding step",
    "prefill_flops": "operations of reading the context",
    "training_flops": "operations of forward and backward",
    "attention_bytes": "peak of one attention, forward and backward",
}


def operations_text(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 999.5:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:,.4g} P"


def plan_table(result: dict[str, Any]) -> str:
    """What a model and its twin are, a row per cost and context, and from which context linear attention wins."""
    sides = ("linear", "softmax")
    models = [
        f"- {side} ({'given' if side == result['given'] else 'twin'}): "
        f"{', '.join(f'{count} {kind}' for kind, count in result['layers'][side].items())} layers, "
        f"{result['parameters'][side]:,} parameters"
        for side in sides
    ]
    rows = []
    for cost, label in PLAN_COSTS.items():
        text = bytes_text if cost.endswith("bytes") else operations_text
        for row in result["rows"]:
            linear, softmax = (row[side][cost] for side in sides)
            rows.append([label, f"{row['context']:,}", text(linear), text(softmax), ratio_text(softmax / linear)])
    wins = [
        f"- {PLAN_COSTS[cost]}: {'never' if start is None else f'from {start:,} tokens on'}"
        for cost, start in result["crossovers"].items()
    ]
    head = (
        f"Feature map {result['feature_map']}, {result['dtype']}, batch {result['batch_size']}; counted, not measured."
    )
    costs = table(["cost", "context", *sides, "softmax / linear"], rows)
    return "\n".join([head, "", *models, "", costs, "Linear attention is lower in", "", *wins, ""])


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "batching": batching_table,
    "compare": compare_table,
    "generation": generation_table,
    "modes": modes_table,
    "ops": ops_table,
    "plan": plan_table,
    "train": train_table,
}


def render(result: dict[str, Any]) -> str:
    """The table of a result; of a file of several results (`kind: demo`), all their tables."""
    if result["kind"] in TABLES:
        return TABLES[result["kind"]](result)
    parts = [value for value in result.values() if isinstance(value, dict) and value.get("kind") in TABLES]
    if not parts:
        raise ValueError(f"no table for kind {result['kind']!r}; known: {', '.join(TABLES)}")
    return "\n".join(map(render, parts))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="JSON files")
    parser.add_argument("--out", help="file to write; by default the tables are printed")
    arguments = parser.parse_args(argv)
    text = "\n".join(render(read_json(path)) for path in arguments.results)
    if arguments.out:
        Path(arguments.out).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
