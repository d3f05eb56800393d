"""The attention function as the length grows: time, memory, and how near it comes to what the machine can do.

    python -m hf_linattn.benchmark.ops --out ops.json

All sides (see `sides.py`) run in one process and take turns, so that whatever slows the machine slows all; in each
round a large matrix product and a copy take their turn too. Ratios are medians over rounds. A side leaves at the length
where its last run took longer than `budget_s`, or would not fit in memory; the file says so.

The operations counted are those of chunks of 128 tokens, whatever a side does: 4 (128 F + F E) per token and head at
F = E, half of the products above the diagonal included; twice as many for a backward pass.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from ..ops import backends
from .compare import synchronize
from .memory import can_measure, peak_bytes
from .record import memory_gib, record, write_json
from .sides import SIDES, Side, why_not

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
PASSES = ("forward", "forward+backward")
CHUNK = 128  # of the operations counted
PRODUCT = 2048  # rows and columns of the matrix product that is the machine's ceiling
WITH_CEILINGS = 1024  # the shortest length whose rounds include the ceilings
COPIED = 2**26  # bytes


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def counted_operations(length: int, batch: int, heads: int, features: int, values: int, backward: bool) -> int:
    """Floating-point operations of chunks of 128 tokens: two products within a chunk and two with the state."""
    forward = batch * length * heads * (2 * CHUNK * (features + values) + 4 * features * values)
    return 3 * forward if backward else forward


def crossover(lengths: Sequence[int], ratios: Sequence[float | None]) -> float | None:
    """The length from which the other side stays slower (ratio above 1), interpolated on log axes; `None` if never.
    A side that has left counts as slower from there on."""
    points = [(length, ratio) for length, ratio in zip(lengths, ratios) if ratio is not None]
    slower = [i for i, (_, ratio) in enumerate(points) if ratio <= 1]
    if not points or slower and slower[-1] == len(points) - 1:
        return None
    if not slower:
        return float(points[0][0])
    (a, low), (b, high) = points[slower[-1]], points[slower[-1] + 1]
    share = -math.log(low) / (math.log(high) - math.log(low))
    return math.exp(math.log(a) + share * (math.log(b) - math.log(a)))


def spread(samples: Sequence[float]) -> float:
    """Interquartile range."""
    if len(samples) < 2:
        return 0.0
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]


def linear_fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float] | None:
    """Least squares y = slope x + start, and the share of the variance that it explains; `None` for under 3 points."""
    if len(x) < 3:
        return None
    slope, start = statistics.linear_regression(x, y)
    return {"slope": slope, "start": start, "r_squared": statistics.correlation(x, y) ** 2}


class _Ceilings:
    """A large matrix product and a large copy: what the machine does at its best."""

    def __init__(self, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.a = torch.randn(PRODUCT, PRODUCT, generator=generator).to(device)
        self.product = torch.empty_like(self.a)
        self.source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
        self.target = torch.zeros_like(self.source)

    def turn(self) -> dict[str, float]:
        """Operations and bytes (read and written) a second."""
        product = timed(lambda: torch.mm(self.a, self.a, out=self.product), self.device)
        copy = timed(lambda: self.target.copy_(self.source), self.device)
        return {"operations": 2 * PRODUCT**3 / (product / 1e3), "bytes": 2 * COPIED / (copy / 1e3)}


def measure(
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    feature_map: str = "elu1",
    sides: Sequence[str] | None = None,
    passes: Sequence[str] = PASSES,
    rounds: int = 15,
    budget_s: float = 4.0,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[..., Any] = tqdm,
) -> dict[str, Any]:
    """Measures all sides at each length; the result is what the JSON file holds.

    Args:
        lengths: sequence lengths, in tokens.
        batch, heads, head_dim: the other sizes; F = E = head_dim.
        feature_map: the name of a parameter-free map with F = D.
        sides: names in `SIDES`; `None` takes all that can run here.
        rounds: turns of each side at each length and pass, after one that warms up. Fewer, though at least three,
            where they would take longer than eight times `budget_s`.
        budget_s: seconds; a side whose run took longer has had its last length.
        seed: seed of the inputs.
    """
    place = torch.device(device)
    reasons = {name: why_not(name, place, dtype, head_dim) for name in (sides or SIDES)}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    if sides and absent:
        name, reason = next(iter(absent.items()))
        raise ValueError(f"side {name!r} cannot run here: {reason}")
    present = [name for name, reason in reasons.items() if reason is None]
    probe = torch.empty(1, 2, 1, head_dim, device=place, dtype=dtype)
    main_side = backends.choose(probe, probe, probe, feature_map=feature_map).backend
    main_side = main_side if main_side in present else present[0]
    ceilings = _Ceilings(place)
    left: dict[str, dict[str, str]] = {name: {} for name in passes}
    rows: list[dict[str, Any]] = []
    for length in progress(lengths, "time at each length"):
        row: dict[str, Any] = {"length": length}
        for name in passes:
            job = _Job(batch, length, heads, head_dim, dtype, place, feature_map, name != "forward", seed)
            for side in present:
                if side not in left[name] and job.bytes_needed(SIDES[side]) > 0.8 * _memory(place):
                    left[name][side] = f"{length:,} tokens may need {job.bytes_needed(SIDES[side]) / 2**30:.0f} GiB"
            staying = [side for side in present if side not in left[name]]
            if not staying:
                continue
            turns = _turns(job, staying, rounds, budget_s, ceilings if length >= WITH_CEILINGS else None)
            row[name] = _summary(job, staying, main_side, turns)
            for side in staying:
                if max(turns[side]) > 1e3 * budget_s:
                    left[name][side] = f"a run of {length:,} tokens took {max(turns[side]) / 1e3:.1f} s"
        rows.append(row)
    if can_measure(place):
        for row in progress(rows, "memory at each length"):
            for name in passes:
                job = _Job(batch, row["length"], heads, head_dim, dtype, place, feature_map, name != "forward", seed)
                for side in row.get(name, {}).keys() & set(present):
                    row[name][side]["peak_bytes"] = peak_bytes(job.call(SIDES[side]), place)
    return {
        "kind": "ops",
        "record": record(seed),
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "sizes": {"batch": batch, "heads": heads, "head_dim": head_dim},
        "feature_map": feature_map,
        "main": main_side,
        "sides": {name: SIDES[name].title for name in present},
        "absent": absent,
        "left": left,
        "crossover": {
            name: {
                side: crossover(lengths, [row.get(name, {}).get(side, {}).get("over_main") for row in rows])
                for side in present
                if side != main_side
            }
            for name in passes
        },
        "memory_over_length": {
            name: {side: linear_fit(*_peaks(rows, name, side)) for side in present} for name in passes
        },
        "rows": rows,
    }


def _peaks(rows: list[dict[str, Any]], name: str, side: str) -> tuple[list[int], list[int]]:
    """Lengths, and the peak bytes at each, where they were measured."""
    found = [(row["length"], row[name][side].get("peak_bytes")) for row in rows if side in row.get(name, {})]
    found = [(length, peak) for length, peak in found if peak is not None]
    return [length for length, _ in found], [peak for _, peak in found]


class _Job:
    """One length and pass: the tensors, made once for each layout, and the call of a side on them."""

    def __init__(self, batch, length, heads, head_dim, dtype, device, feature_map, backward, seed):
        self.shape = (batch, length, heads, head_dim)
        self.dtype, self.device, self.feature_map, self.backward, self.seed = dtype, device, feature_map, backward, seed
        self.q_bytes = math.prod(self.shape) * dtype.itemsize

    def bytes_needed(self, side: Side) -> int:
        return self.q_bytes * (4 + side.copies * (2 if self.backward else 1))

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of out."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(self.shape, generator=generator).to(self.device, self.dtype) for _ in range(4)]

    @functools.cached_property
    def tensors_by_head(self) -> list[torch.Tensor]:
        return [x.transpose(1, 2).contiguous() for x in self.tensors]

    def call(self, side: Side) -> Callable[[], None]:
        """What is measured: forward, with the gradients of q, k and v if `backward`."""
        *inputs, grad = self.tensors_by_head if side.heads_first else self.tensors
        inputs = [x.detach().requires_grad_(self.backward) for x in inputs]

        def run() -> None:
            with torch.set_grad_enabled(self.backward):
                out = side.attend(*inputs, self.feature_map)
            if self.backward:
                torch.autograd.grad(out, inputs, grad)

        return run


def _turns(job: _Job, sides: list[str], rounds: int, budget_s: float, ceilings: _Ceilings | None):
    """Milliseconds of each side, and the ceilings, round by round; the first round is not counted."""
    calls = {side: job.call(SIDES[side]) for side in sides}
    turns: dict[str, list[float]] = {name: [] for name in (*sides, "operations", "bytes")}
    deadline = time.perf_counter() + 8 * budget_s
    for turn in range(rounds + 1):
        taken = {} if ceilings is None else ceilings.turn()
        taken |= {side: timed(call, job.device) for side, call in calls.items()}
        if turn > 0:
            for name, value in taken.items():
                turns[name].append(value)
        if turn >= 3 and time.perf_counter() > deadline:
            break
    return turns


def _summary(job: _Job, sides: list[str], main_side: str, turns: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, spread and ratios of one length and pass."""
    batch, length, heads, head_dim = job.shape
    operations = counted_operations(length, batch, heads, head_dim, head_dim, job.backward)
    moved = job.q_bytes * (12 if job.backward else 4)  # q, k, v, out; and once more each with their gradients
    found: dict[str, Any] = {}
    for side in sides:
        samples = turns[side]
        entry = {"ms": statistics.median(samples), "spread_ms": spread(samples), "samples_ms": samples}
        if main_side in turns:
            entry["over_main"] = statistics.median(b / a for a, b in zip(turns[main_side], samples))
        for name, amount, best in (
            ("of_product_rate", operations, turns["operations"]),
            ("of_copy_bandwidth", moved, turns["bytes"]),
        ):
            if best:
                entry[name] = statistics.median(amount / (ms / 1e3) / top for ms, top in zip(samples, best))
        found[side] = entry
    if turns["operations"]:
        found["ceilings"] = {
            "product_operations_per_s": statistics.median(turns["operations"]),
            "copy_bytes_per_s": statistics.median(turns["bytes"]),
        }
    return found


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return (memory_gib() or math.inf) * 2**30


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--feature_map", default="elu1")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="default: all that can run here")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--budget_s", type=float, default=4.0, help="a side whose run took longer has had its last length"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", default="ops.json")
    arguments = vars(parser.parse_args(argv))
    out, dtype = arguments.pop("out"), getattr(torch, arguments.pop("dtype"))
    write_json(out, measure(**arguments, dtype=dtype))


if __name__ == "__main__":
    main()
