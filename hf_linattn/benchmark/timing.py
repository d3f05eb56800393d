"""Time of functions that take turns, and what follows from several lengths."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

CALL_S = 2e-3  # a sample lasts at least this long, by repeating the call: shorter ones measure the clock
MOST_CALLS = 64
LEAST_ROUNDS = 3
LONG_MS = 1e3  # a call of this length has warmed up when it ends


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def milliseconds(call: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Milliseconds of one call, as the mean over `calls` of them in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def interleave(
    sides: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    budget_s: float = math.inf,
    calls: int | None = None,
    known: Mapping[str, float] | None = None,
    lasting: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each side in each round; the sides take turns, so that whatever slows the machine slows all.

    Args:
        sides: what to time, by name, in the order of their turns.
        device: where they run.
        rounds: rounds that count, after one that warms up.
        budget_s: stop early after so many seconds, but not before three rounds (or `rounds`, if fewer).
        calls: calls that a sample averages; by default enough that it is long enough to time.
        known: milliseconds of an earlier call of a side; one that was long is not warmed up again.
        lasting: milliseconds that a sample of a side lasts at least, by repeating the call.
    """
    deadline = time.perf_counter() + budget_s
    repeats = {}
    for name, side in sides.items():
        if (known or {}).get(name, 0) > LONG_MS:
            repeats[name] = calls or 1
            continue
        once = milliseconds(side, device, calls or 1)
        if calls is None and once < 100:  # the first call may have compiled something
            once = milliseconds(side, device)
        enough = max(CALL_S * 1e3, (lasting or {}).get(name, 0))
        repeats[name] = calls or max(1, min(MOST_CALLS, math.ceil(enough / max(once, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        for name, side in sides.items():
            samples[name].append(milliseconds(side, device, repeats[name]))
    return samples


def spread(samples: Sequence[float]) -> list[float]:
    """Lower and upper quartile."""
    if len(samples) == 1:
        return [samples[0]] * 2
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return [low, high]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> dict[str, float | None] | None:
    """Where the ratio (the other's time over ours) rises above 1 for good; `None` if it does not by the last length.

    `measured`: the shortest measured length from which it is and stays above 1. `interpolated`: where a straight line
    on logarithmic axes, from the length before, passes 1; `None` if the ratio is above 1 from the first length on.
    """
    first = len(ratios)
    while first > 0 and ratios[first - 1] > 1:
        first -= 1
    if first == len(ratios):
        return None
    if first == 0:
        return {"measured": lengths[0], "interpolated": None}
    below, above = math.log(ratios[first - 1]), math.log(ratios[first])
    part = -below / (above - below)
    return {"measured": lengths[first], "interpolated": lengths[first - 1] ** (1 - part) * lengths[first] ** part}


def linear_fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float] | None:
    """Least squares y = slope x + start, and the share of the variance that it explains; `None` for under 3 points."""
    if len(x) < 3:
        return None
    slope, start = statistics.linear_regression(x, y)
    left = sum((b - slope * a - start) ** 2 for a, b in zip(x, y))
    all_of_it = sum((b - statistics.fmean(y)) ** 2 for b in y)
    return {"slope": slope, "start": start, "r_squared": 1 - left / all_of_it if all_of_it else 1.0}
