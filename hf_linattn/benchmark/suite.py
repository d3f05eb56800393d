"""`hf-linattn benchmark`: measure every level, write JSON after each length, then draw what the JSON says.

The file holds a record of the machine and one entry a level, each a kind that `tables` and `plots` know. What was not
measured is listed with its reason under `skipped`, or under `dropped` where lengths were the reason.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .attention import attention_level, shapes_level
from .climb import Clock, Settings, one_line
from .decoding import decode_level
from .kernels import kernels_level
from .models import model_level
from .plots import PLOTS, plot
from .record import read_json, record, write_json
from .sides import SIDES, why_not
from .tables import TABLES, render

LEVELS: dict[str, Callable[[dict[str, Any], Settings], None]] = {
    "op": attention_level,
    "decode": decode_level,
    "model": model_level,
}
# On a GPU the function level also says that the kernels are right, and how they do at published shapes.
GPU_PARTS: dict[str, Callable[[dict[str, Any], Settings], None]] = {"kernels": kernels_level, "shapes": shapes_level}
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = tuple(2**i for i in range(7, 21))
QUICK_LENGTHS = (32, 64)
GPU_MINUTES = 8.0
BUDGET_S, GPU_BUDGET_S = 5.0, 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, ...; by default a GPU if there is one")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), metavar="LEVEL", help=f"of {', '.join(LEVELS)}")
    parser.add_argument(
        "--lengths", type=int, nargs="+", help=f"tokens (default: the powers of 2 from {LENGTHS[0]} to {LENGTHS[-1]:,})"
    )
    parser.add_argument(
        "--sides", nargs="+", metavar="SIDE", help=f"of the attention function, among {', '.join(SIDES)} (default: all)"
    )
    parser.add_argument("--dtype", help="of inputs and weights (default: float32 on the CPU, bfloat16 on a GPU)")
    parser.add_argument("--rounds", type=int, help="turns of each side that count (default: 5)")
    parser.add_argument(
        "--budget_s", type=float,
        help="seconds; a side is measured up to the length where a call is foreseen to take longer "
        f"(default: {BUDGET_S:g}, {GPU_BUDGET_S:g} on a GPU)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help=f"for all of it (default: no end; {GPU_MINUTES:g} on a GPU)")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="try the code in seconds; the figures mean nothing")
    parser.set_defaults(run=run)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the options stand for; a ValueError of one line if they make no sense."""
    device = device_of(arguments.device)
    on_gpu, quick = device.type != "cpu", arguments.quick
    dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {list(DTYPES)}")
    for name, choices in (("levels", LEVELS), ("sides", SIDES)):
        for value in getattr(arguments, name) or ():
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown; choose among {list(choices)}")
    for side in arguments.sides or ():
        if reason := why_not(side, device, getattr(torch, dtype), 64):
            raise ValueError(f"sides={side!r} cannot run here: {reason}")
    lengths = sorted(set(arguments.lengths or (QUICK_LENGTHS if quick else LENGTHS)))
    if lengths[0] < 1:
        raise ValueError(f"lengths={lengths[0]} is not a number of tokens; choose 1 or more")
    numbers = {
        "rounds": (arguments.rounds, 2 if quick else 5),
        "budget_s": (arguments.budget_s, GPU_BUDGET_S if on_gpu else BUDGET_S),
        "minutes": (arguments.minutes, GPU_MINUTES if on_gpu else math.inf),
    }
    chosen = {name: default if given is None else given for name, (given, default) in numbers.items()}
    for name, value in chosen.items():
        if not value > 0:
            raise ValueError(f"{name}={value} is not positive; choose more than 0")
    return Settings(
        device, getattr(torch, dtype), lengths, chosen["rounds"], chosen["budget_s"], arguments.seed, arguments.sides,
        quick, Clock(chosen["minutes"]), say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip


def device_of(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown; choose 'cpu' or 'cuda'") from None
    try:
        torch.empty(1, device=device)
    except Exception:
        raise ValueError(f"device={name!r}: torch finds no such device here; choose 'cpu'") from None
    return device


def parts_of(levels: Sequence[str], device: torch.device) -> dict[str, Callable[[dict[str, Any], Settings], None]]:
    """What to measure, the most important first."""
    parts = {name: level for name, level in LEVELS.items() if name in levels}
    return (GPU_PARTS if device.type == "cuda" and "op" in levels else {}) | parts


def measure(
    settings: Settings, parts: dict[str, Callable[[dict[str, Any], Settings], None]], path: Path
) -> dict[str, Any]:
    """Measure all parts; what is measured stands in the file at `path` at any time, an interrupt included."""
    result: dict[str, Any] = {
        "kind": "benchmark",
        "record": record(settings.seed),
        "complete": False,
        "quick": settings.small,
        "skipped": {},
    }
    settings.save = lambda: write_json(path, result)
    settings.save()
    try:
        for i, (name, part) in enumerate(parts.items()):
            settings.clock.share(len(parts) - i)
            if settings.clock.left <= 0:
                result["skipped"][name] = f"the {settings.clock.minutes:g} minutes of the run were over"
                continue
            level: dict[str, Any] = {}
            result[name] = level
            try:
                part(level, settings)
            except Exception as error:  # the parts that follow are worth having
                result["skipped"][name] = f"failed: {one_line(error)}"
                settings.say(f"{name} failed: {one_line(error)}")
            settings.save()
        result["complete"] = not result["skipped"]
    except KeyboardInterrupt:
        result["skipped"]["the rest"] = "interrupted"
    settings.save()
    return result


def run(arguments: argparse.Namespace) -> None:
    """The command: measure, print the tables, say where the files are."""
    settings = settings_of(arguments)
    path = arguments.out / "benchmark.json"
    measure(settings, parts_of(arguments.levels, settings.device), path)
    report(read_json(path), path)


def report(result: dict[str, Any], path: Path) -> None:
    """Print and draw what the file says; end as the measurement did."""
    if result["quick"]:
        print("A quick run only tries the code: its figures say nothing about speed.\n")
    tables = [render(part) for part in result.values() if isinstance(part, dict) and part.get("kind") in TABLES]
    print("\n".join(tables))
    for part, reason in result["skipped"].items():
        print(f"{part}: {reason}")
    print(f"JSON: {path}")
    if find_spec("matplotlib") is None:
        print("no figures: they need matplotlib (pip install 'hf-linattn[plot]')")
    else:
        parts = [part for part in result.values() if isinstance(part, dict) and part.get("kind") in PLOTS]
        for figure in (each for part in parts for each in plot(part, path.parent / "figures")):
            print(f"figure: {figure}")
    if "interrupted" in result["skipped"].values():
        sys.exit(130)
    failed = [part for part, reason in result["skipped"].items() if reason.startswith("failed")]
    if failed:
        raise ValueError(f"{failed[0]} {result['skipped'][failed[0]]}")
