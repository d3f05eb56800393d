import math
import statistics

import pytest
import torch

from hf_linattn.benchmark import timing
from hf_linattn.benchmark.timing import crossover, interleave, linear_fit, median_ratio, spread

CPU = torch.device("cpu")


def test_sides_take_turns_and_the_first_turns_do_not_count():
    turns = []
    sides = {name: lambda name=name: turns.append(name) for name in "ab"}
    samples = interleave(sides, CPU, rounds=4, calls=2)
    assert turns == ["a", "a", "b", "b"] * 5
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4}


def test_a_spent_budget_leaves_three_rounds():
    assert len(interleave({"a": lambda: None}, CPU, rounds=50, budget_s=0)["a"]) == timing.LEAST_ROUNDS


def test_short_calls_are_repeated_within_a_sample(monkeypatch):
    """A clock that advances only in the call: 0.3 ms, so that 2 ms take seven."""
    now, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call():
        calls.append(1)
        now[0] += 3e-4

    samples = interleave({"a": call}, CPU, rounds=2)["a"]
    assert samples == pytest.approx([0.3, 0.3])
    assert len(calls) == 2 + 2 * 7


def test_a_sample_lasts_as_long_as_it_is_told(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call():
        calls.append(1)
        now[0] += 0.01

    interleave({"a": call}, CPU, rounds=2, lasting={"a": 95.0})
    assert len(calls) == 2 + 2 * 10


def test_a_call_that_is_known_to_be_long_is_not_warmed_up():
    turns = []
    sides = {name: lambda name=name: turns.append(name) for name in "ab"}
    interleave(sides, CPU, rounds=2, calls=1, known={"a": 2e3, "b": 1.0})
    assert turns == ["b", *"abab"]


def test_statistics():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
    assert spread([7.0]) == [7.0, 7.0]
    assert median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0  # not the ratio of the medians, 4
    assert statistics.median([2.0, 9.0, 8.0]) / statistics.median([1.0, 3.0, 2.0]) == 4.0


@pytest.mark.parametrize(
    "ratios, measured, interpolated",
    [
        ([0.5, 2.0, 4.0], 256, 128 * math.sqrt(2)),  # halfway on log axes
        ([0.25, 2.0, 4.0], 256, 128 * 2 ** (2 / 3)),
        ([2.0, 0.5, 4.0], 512, 256 * 2 ** (1 / 3)),  # what it was before it stays so does not count
        ([1.5, 2.0, 4.0], 128, None),
    ],
)
def test_crossover(ratios, measured, interpolated):
    found = crossover([128, 256, 512], ratios)
    assert found["measured"] == measured
    assert found["interpolated"] == (interpolated if interpolated is None else pytest.approx(interpolated))


def test_no_crossover():
    assert crossover([128, 256], [2.0, 0.9]) is None
    assert crossover([128, 256], [0.9, 1.0]) is None


def test_linear_fit():
    assert linear_fit([1, 2, 3], [5, 7, 9]) == {"slope": 2, "start": 3, "r_squared": pytest.approx(1)}
    assert linear_fit([1, 2, 3, 4], [1, 4, 9, 16])["r_squared"] < 0.99
    assert linear_fit([1, 2, 3], [4, 4, 4]) == {"slope": 0, "start": 4, "r_squared": 1}
    assert linear_fit([1, 2], [1, 2]) is None
