"""Markdown tables from result files, and from nothing else.

python -m hf_linattn.benchmark.tables runs/demo/results.json [--out table.md]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .record import read_json
from .studies import bytes_tables, recall_tables
from .text import (
    blank,
    bytes_text,
    error_text,
    microseconds_text,
    milliseconds_text,
    operations_text,
    percent_text,
    ratio_text,
    signed_bytes_text,
    table,
)


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


TITLES = {
    "benchmark op": "Attention function",
    "benchmark decode": "Attention function",
    "benchmark model": "Model",
}
RIVALS = ("softmax", "llama")
NOT_CHOSEN = "not chosen"  # why a side is absent, where nothing need be said
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def level_table(result: dict[str, Any]) -> str:
    """A level of `hf-linattn benchmark`: for every pass a table, where it crosses over, and who was dropped."""
    parts = [error_table(result)] if result.get("errors") else []
    passes = {name: measured for name, measured in result.get("passes", {}).items() if measured["rows"]}
    for name, measured in passes.items():
        parts.append(f"{TITLES[result['kind']]}, {name} ({settings_text(result)}):\n")
        parts.append(pass_table(result, name, measured))
    lines = [line for name, measured in passes.items() for line in remarks(result, name, measured)]
    absent = {label: reason for label, reason in result.get("absent", {}).items() if reason != NOT_CHOSEN}
    lines += [f"{label} was not measured: {reason}." for label, reason in absent.items()]
    return "\n".join([*parts, "".join(f"- {line}\n" for line in lines)])


def settings_text(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    if "hidden_size" in sizes:
        what = f"batch {sizes['batch']}, {sizes['num_hidden_layers']} layers of {sizes['hidden_size']}"
    else:
        what = f"batch {sizes['batch']}, {sizes['heads']} heads of {sizes['head_dim']}"
    return f"{result['device']}, {result['dtype']}, {what}"


def tokens_per_second(sizes: dict[str, int], name: str, length: int, milliseconds: float) -> float:
    """Tokens of a call over its time; a decoding step is one token a row."""
    return sizes["batch"] * (1 if name == "decode" else length) / milliseconds * 1e3


def pass_table(result: dict[str, Any], name: str, measured: dict[str, Any]) -> str:
    """The first side's time and how much longer the others take, the part of the machine's best that it reaches, and
    memory. Of models, tokens a second of both."""
    labels = {side: about["label"] for side, about in result["sides"].items()}
    first, *others = labels
    valued = list(labels) if result["kind"] == "benchmark model" else [first]
    remembered = [side for side in labels if side in (first, *RIVALS)]
    memory, held = ("held_bytes", "cache") if name == "decode" else ("peak_bytes", "peak memory")
    parts = (
        ("of_matmul", "of_copy") if any("of_matmul" in row["sides"].get(first, {}) for row in measured["rows"]) else ()
    )
    rows = []
    for row in measured["rows"]:
        sides, over = row["sides"], row.get("over_first", {})
        cells = [f"{row['length']:,}"]
        for side in valued:
            value = sides.get(side, {}).get("ms")
            if len(valued) > 1 and value is not None:
                cells.append(f"{tokens_per_second(result['sizes'], name, row['length'], value):,.0f}")
            else:
                cells.append(blank(value, milliseconds_text))
        cells += [blank(over.get(side), ratio_text) for side in others]
        cells += [blank(sides.get(first, {}).get(part), percent_text) for part in parts]
        cells += [blank(sides.get(side, {}).get(memory), bytes_text) for side in remembered]
        rows.append(cells)
    unit = "tokens/s" if len(valued) > 1 else "ms"
    header = ["context" if name == "decode" else "length", *(f"{labels[side]}, {unit}" for side in valued)]
    header += [f"{labels[side]}, times longer" for side in others]
    header += ["of the product rate", "of the copy bandwidth"] if parts else []
    return table([*header, *(f"{labels[side]}, {held}" for side in remembered)], rows)


def remarks(result: dict[str, Any], name: str, measured: dict[str, Any]) -> list[str]:
    """From where on the first side is faster, how its memory grows, and which sides stop before the last length."""
    labels = {side: about["label"] for side, about in result["sides"].items()}
    first, lines = next(iter(labels)), []
    for side, place in measured["crossover"].items():
        last = max(row["length"] for row in measured["rows"] if side in row.get("over_first", {}))
        if place is None:
            lines.append(f"{name}: {labels[side]} is faster at {last:,} tokens, the longest of both.")
        else:
            start = place["measured"] if place["interpolated"] is None else round(place["interpolated"])
            lines.append(f"{name}: {labels[side]} is slower from {start:,} to {last:,} tokens, the longest of both.")
    fit = measured["memory_fit"].get(first)
    if fit and name != "decode":
        what = f"{name}: peak memory of {labels[first]}: {bytes_text(fit['slope'])} a token"
        sizes = result["sizes"]
        if "head_dim" in sizes:
            of_q = sizes["batch"] * sizes["heads"] * sizes["head_dim"] * ITEM_BYTES[result["dtype"]]
            what += f", {fit['slope'] / of_q:.1f} times that of q"
        lines.append(f"{what} (R^2 = {fit['r_squared']:.7f}).")
    for side, end in measured["dropped"].items():
        lines.append(f"{name}: {labels[side]} was not measured from {end['length']:,} tokens on: {end['reason']}.")
    return lines


def error_table(result: dict[str, Any]) -> str:
    """Largest error of each side against its definition in float64, over the largest entry."""
    names = ("out", "dq", "dk", "dv")
    rows = [
        [about["label"], *(blank(result["errors"].get(side, {}).get(name), error_text) for name in names)]
        for side, about in result["sides"].items()
    ]
    return table([f"error against float64 ({result['dtype']})", *names], rows)


def shapes_table(result: dict[str, Any]) -> str:
    """Milliseconds of every side at each fixed shape and pass, and the part of the ceilings that the first reaches."""
    labels = {side: about["label"] for side, about in result.get("sides", {}).items()}
    first, rows = next(iter(labels), None), []
    for shape in result["shapes"]:
        sizes = shape["sizes"]
        where = f"B{sizes['batch']} T{sizes['length']} H{sizes['heads']} D{sizes['head_dim']}"
        for name, measured in shape["passes"].items():
            for row in measured["rows"]:
                sides, over = row["sides"], row.get("over_first", {})
                own = sides.get(first, {})
                cells = [f"{where}, {name}", *(blank(sides.get(s, {}).get("ms"), microseconds_text) for s in labels)]
                cells += [blank(over.get(side), ratio_text) for side in ("softmax", "fla")]
                cells.append(blank(own.get("held_bytes" if name == "decode" else "peak_bytes"), bytes_text))
                cells += [blank(own.get(part), percent_text) for part in ("of_matmul", "of_copy")]
                rows.append(cells)
    header = [
        f"shape ({result.get('device', '')}, {result.get('dtype', '')})",
        *(f"{label}, ms" for label in labels.values()),
    ]
    header += ["softmax, times longer", "flash-linear-attention, times longer", "memory of the first"]
    return table([*header, "of the product rate", "of the copy bandwidth"], rows)


def kernels_table(result: dict[str, Any]) -> str:
    """Errors of the kernels against float64 under each option, and whether they are within their bounds."""
    names = ("out", "mu", "nu", "dq", "dk", "dv", "decode")
    rows = []
    for row in result["rows"]:
        found = row.get("errors", {})
        verdict = "yes" if row["within"] else row.get("failed", "no")
        rows.append([row["case"], *(blank(found.get(name), error_text) for name in names), verdict])
    return table([f"kernels ({result['device']})", *names, "within bounds"], rows)


def throughput_table(result: dict[str, Any]) -> str:
    """Tokens a second of pretrain.py and of bare steps, and the median ratio of pairs of steps."""
    names = {"pretrain": "pretrain.py", "bare": "forward, backward and AdamW alone"}
    rows = [[names[key], f"{value:,.0f}"] for key, value in result["tokens_per_second"].items()]
    rows.append(["pretrain.py, part of the bare speed", percent_text(result["pretrain_over_bare"])])
    return table([f"steps of {result['tokens_per_step']:,} tokens ({result['device']})", "tokens/s"], rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "batching": batching_table,
    "benchmark decode": level_table,
    "benchmark kernels": kernels_table,
    "benchmark model": level_table,
    "benchmark op": level_table,
    "benchmark shapes": shapes_table,
    "bytes study": bytes_tables,
    "compare": compare_table,
    "generation": generation_table,
    "modes": modes_table,
    "plan": plan_table,
    "recall study": recall_tables,
    "throughput": throughput_table,
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
