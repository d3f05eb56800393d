"""One measurement over growing lengths; a side that gets too slow or too large is dropped, with the reason."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .memory import free_bytes, peak_bytes
from .timing import crossover, interleave, linear_fit, median_ratio, milliseconds, spread

MARGIN = 0.9  # of the free memory: the rest is for what is not foreseen
LONGEST_BESIDE_MS = 2000.0

Call = Callable[[], Any]


@dataclass
class Clock:
    """The time that a whole run may take, in minutes, and the share of it that the current part has."""

    minutes: float = math.inf
    started: float = field(default_factory=lambda: time.perf_counter())
    part_ends: float = math.inf

    @property
    def left(self) -> float:
        """Seconds until the run must end."""
        return self.started + 60 * self.minutes - time.perf_counter()

    def share(self, parts: int) -> None:
        """Give the next part its share of what is left, with `parts` to come, itself included."""
        self.part_ends = time.perf_counter() + max(0.0, self.left) / parts

    @property
    def part_left(self) -> float:
        return self.part_ends - time.perf_counter()


@dataclass
class Settings:
    """How every level measures.

    Fields:
        device, dtype: where, and of what input.
        lengths: tokens, growing.
        rounds: turns of each side that count, at each length.
        budget_s: a side whose call is foreseen to take longer is dropped from a length on.
        seed: of all inputs and weights.
        sides: of the attention function, by name; None takes all that run here.
        small: sizes that only try the code.
        clock: the time that all of it may take.
        say: takes a line of progress.
        save: is called after every length.
    """

    device: torch.device
    dtype: torch.dtype
    lengths: Sequence[int]
    rounds: int = 5
    budget_s: float = 10.0
    seed: int = 0
    sides: Sequence[str] | None = None
    small: bool = False
    clock: Clock = field(default_factory=Clock)
    say: Callable[[str], Any] = print
    save: Callable[[], Any] = lambda: None


def new_pass() -> dict[str, Any]:
    return {"rows": [], "dropped": {}, "crossover": {}, "memory_fit": {}}


def drop(measured: dict[str, Any], names: Iterable[str], length: int, reason: str) -> None:
    """Record that sides are not measured from `length` on; what was recorded first stays."""
    for name in names:
        measured["dropped"].setdefault(name, {"length": length, "reason": reason})


def running(measured: dict[str, Any], names: Iterable[str], length: int) -> list[str]:
    dropped = measured["dropped"]
    return [name for name in names if name not in dropped or length < dropped[name]["length"]]


def climb(
    measured: dict[str, Any],
    names: Sequence[str],
    prepare: Callable[[int, list[str]], Mapping[str, Callable[[], Call]]],
    settings: Settings,
    *,
    title: str,
    lengths: Sequence[int] | None = None,
    held_bytes: Callable[[int, list[str]], int] = lambda length, names: 0,
    beside: Callable[[int], Mapping[str, Call]] = lambda length: {},
    calls: int | None = None,
    finish: Callable[[dict[str, Any], dict[str, list[float]]], None] = lambda row, samples: None,
) -> None:
    """Measure all sides at every length; fills `measured`, which `new_pass` made.

    Args:
        measured: `rows`, one a length; `dropped`, from which length on a side is not measured, and why; `crossover`,
            for every other side where the first becomes faster for good; `memory_fit`, a straight line through the
            peak bytes of every side over the lengths.
        names: sides in the order of their turns; the first is the one that the others are held against.
        prepare: (length, sides) -> for each side a function that makes the call to be timed. Its preparations are not.
        settings: see there.
        title: what is measured, for the line of progress.
        lengths: instead of those of the settings.
        held_bytes: (length, sides) -> bytes that the prepared inputs take.
        beside: length -> more calls that take turns with the sides, as ceilings.
        calls: calls that a sample averages; by default as many as it takes.
        finish: (row, samples) -> None, adds what follows from the samples of one length.
    """
    for length in settings.lengths if lengths is None else lengths:
        drop_what_is_slow(measured, running(measured, names, length), length, settings.budget_s)
        names_left = running(measured, names, length)
        if not names_left:
            break
        if settings.clock.part_left <= 0:
            drop(measured, names_left, length, "the time for this part of the run was over")
            break
        drop_what_does_not_fit(measured, names_left, length, held_bytes, settings.device)
        settings.say(f"{title}, {length:,} tokens: {', '.join(running(measured, names, length))}")
        row = measure_row(measured, names, length, prepare, settings, beside(length), calls, finish)
        if row is not None:
            measured["rows"].append(row)
            measured["crossover"] = crossovers(measured["rows"], names)
            measured["memory_fit"] = {name: linear_fit(*peaks(measured["rows"], name)) for name in names}
        settings.save()


def measure_row(measured, names, length, prepare, settings, beside, calls, finish) -> dict[str, Any] | None:
    """One length: peak memory in the first call, which also finds out who fails, then the rounds."""
    device, turns, memory, first = settings.device, {}, {}, {}
    try:
        makers = prepare(length, running(measured, names, length))
    except (RuntimeError, MemoryError) as error:
        drop(measured, running(measured, names, length), length, f"the inputs: {one_line(error)}")
        return None
    for name, maker in makers.items():
        try:
            turns[name] = maker()
            first[name] = milliseconds(turns[name], device)  # may compile and tune, which takes memory of its own
            memory[name] = peak_bytes(turns[name], device)
        except Exception as error:  # another code's fault must not cost the rest of the run
            turns.pop(name, None)
            drop(measured, [name], length, one_line(error))
    if not turns:
        return None
    # What runs beside takes its turn right after the first side, and lasts about as long: a busy machine changes by the
    # second, and is to change both alike.
    (base, its_call), *others = turns.items()
    lasting = dict.fromkeys(beside, min(first[base], LONGEST_BESIDE_MS))
    turns_taken = {base: its_call, **beside, **dict(others)}
    budget = min(1.5 * settings.budget_s, max(0.0, settings.clock.part_left))
    samples = interleave(turns_taken, device, settings.rounds, budget, calls, first, lasting)
    row: dict[str, Any] = {"length": length, "sides": {}}
    for name in turns:
        row["sides"][name] = {
            "ms": statistics.median(samples[name]),
            "quartiles_ms": spread(samples[name]),
            "peak_bytes": memory[name],
            "samples_ms": samples[name],
        }
    if base == names[0]:
        row["over_first"] = {name: median_ratio(samples[name], samples[base]) for name in turns if name != base}
    finish(row, samples)
    return row


def drop_what_is_slow(measured: dict[str, Any], names: Sequence[str], length: int, budget_s: float) -> None:
    """Drop the sides whose call is foreseen to take longer than the budget."""
    for name in names:
        seconds = foreseen(*times(measured["rows"], name), length, least=0) / 1e3
        if seconds > budget_s:
            drop(measured, [name], length, f"would take about {seconds:.2g} s, the budget of a call is {budget_s:g} s")


def drop_what_does_not_fit(measured, names, length, held_bytes, device) -> None:
    """Drop, the largest first, the sides whose peak is foreseen to exceed the free memory."""
    needs = {name: foreseen(*peaks(measured["rows"], name), length) for name in names}
    free = MARGIN * free_bytes(device)
    for name in sorted(needs, key=needs.get, reverse=True):
        need = needs[name] + held_bytes(length, running(measured, names, length))
        if need > free:
            reason = f"would take about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
            drop(measured, [name], length, reason)


def foreseen(lengths: Sequence[int], values: Sequence[float], length: int, least: float = 1.0) -> float:
    """The value at `length` if it goes on growing as between the last two lengths: at least with the power `least` of
    the length, and at most with its square (a small peak in whole pages may seem to grow by any factor)."""
    if not values:
        return 0.0
    power = least
    if len(values) > 1:
        power = math.log(values[-1] / values[-2]) / math.log(lengths[-1] / lengths[-2])
    return values[-1] * (length / lengths[-1]) ** min(2.0, max(least, power))


def peaks(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Lengths, and the peak bytes of a side at each, where there are any."""
    return _values(rows, name, "peak_bytes")


def times(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Lengths, and the milliseconds of a side at each."""
    return _values(rows, name, "ms")


def _values(rows: list[dict[str, Any]], name: str, what: str) -> tuple[list[int], list[float]]:
    found = [(row["length"], row["sides"].get(name, {}).get(what)) for row in rows]
    return [length for length, value in found if value], [value for _, value in found if value]


def crossovers(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """For every other side, where the first becomes faster than it for good."""
    found = {}
    for name in names[1:]:
        both = [(row["length"], row["over_first"][name]) for row in rows if name in row.get("over_first", {})]
        if both:
            found[name] = crossover(*zip(*both, strict=True))
    return found


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
