"""Sides climb the lengths until they are too slow, too large, or fail; the others go on."""

import statistics

import pytest
import torch

from hf_linattn.benchmark import climb as module
from hf_linattn.benchmark.climb import Clock, Settings, climb, drop, new_pass

CPU = torch.device("cpu")


@pytest.fixture
def cost(monkeypatch):
    """Clock and memory that the calls themselves set: {side: length -> (seconds, bytes)}."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "peak_bytes", lambda call, device: call() or call.bytes)
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000.0)

    def build(costs):
        def prepare(length, names):
            def make(name):
                def call():
                    now[0] += costs[name](length)[0]

                call.bytes = costs[name](length)[1]
                return call

            return {name: lambda name=name: make(name) for name in names}

        return prepare

    return build


def settings(lengths=(1, 2, 4, 8, 16, 32), **changes):
    return Settings(CPU, torch.float32, lengths, rounds=3, budget_s=1.0, say=lambda _: None, **changes)


def measured_at(measured, name):
    return [row["length"] for row in measured["rows"] if name in row["sides"]]


def test_a_side_that_would_be_slow_is_not_tried(cost):
    prepare = cost({"a": lambda n: (0.1, 10), "b": lambda n: (0.02 * n**2, 10)})
    measured, saved = new_pass(), []
    climb(measured, ["a", "b"], prepare, settings(save=lambda: saved.append(len(measured["rows"]))), title="t")
    assert measured_at(measured, "a") == [1, 2, 4, 8, 16, 32]
    assert measured_at(measured, "b") == [1, 2, 4]
    reason = "would take about 1.3 s, the budget of a call is 1 s"
    assert measured["dropped"] == {"b": {"length": 8, "reason": reason}}
    assert saved == [1, 2, 3, 4, 5, 6]
    assert measured["crossover"] == {"b": {"measured": 4, "interpolated": pytest.approx(5**0.5)}}
    row = measured["rows"][2]
    assert row["over_first"] == {"b": pytest.approx(3.2)}
    assert row["sides"]["b"]["ms"] == pytest.approx(320) == statistics.median(row["sides"]["b"]["samples_ms"])
    assert row["sides"]["b"]["quartiles_ms"] == pytest.approx([320, 320])


def test_a_side_that_will_not_fit_is_not_tried(cost):
    """It quadruples: 320 bytes at 8 tokens, so that 1,280 are foreseen at 16, where twice 320 would fit."""
    tried = []

    def large(n):
        tried.append(n)
        return 0.1, 5 * n**2

    measured = new_pass()
    climb(measured, ["a", "b"], cost({"a": lambda n: (0.1, 10 * n), "b": large}), settings(), title="t")
    assert max(tried) == 8
    assert measured["dropped"]["b"]["length"] == 16
    assert measured["dropped"]["b"]["reason"].startswith("would take about")
    assert measured_at(measured, "a") == [1, 2, 4, 8, 16, 32]


def test_inputs_take_memory_too(cost):
    measured = new_pass()
    held = {"held_bytes": lambda n, names: 20 * n * len(names)}
    climb(measured, ["a"], cost({"a": lambda n: (0.1, 10 * n)}), settings(), title="t", **held)
    assert measured["dropped"]["a"]["length"] == 32  # 320 and 640 held, of 900


def test_a_side_that_fails_costs_only_itself(cost):
    def failing(n):
        if n >= 4:
            raise torch.OutOfMemoryError("out of\nmemory")
        return 0.1, 10

    measured = new_pass()
    climb(measured, ["a", "b"], cost({"a": lambda n: (0.1, 10), "b": failing}), settings(), title="t")
    assert measured["dropped"] == {"b": {"length": 4, "reason": "OutOfMemoryError: out of memory"}}
    assert measured_at(measured, "a") == [1, 2, 4, 8, 16, 32]
    assert measured_at(measured, "b") == [1, 2]


def test_parts_share_the_time_that_is_left(cost):
    clock = Clock(minutes=2.0)
    clock.share(parts=4)
    assert clock.part_left == pytest.approx(30)
    climb(new_pass(), ["a"], cost({"a": lambda n: (10, 10)}), settings([1], clock=clock), title="t")  # 10 s, 5 times
    clock.share(parts=2)
    assert clock.part_left == pytest.approx((120 - 50) / 2)


def test_when_time_is_over_the_rest_is_not_measured(cost):
    clock = Clock(minutes=1.0)
    clock.share(parts=2)
    measured = new_pass()
    climb(measured, ["a"], cost({"a": lambda n: (0.9, 10)}), settings(range(1, 40), clock=clock), title="t")
    assert measured["dropped"]["a"]["reason"] == "the time for this part of the run was over"
    assert measured["dropped"]["a"]["length"] == len(measured["rows"]) + 1
    assert clock.part_left == pytest.approx(0, abs=5 * 0.9)


def test_what_is_dropped_beforehand_stays_so(cost):
    measured = new_pass()
    drop(measured, ["b"], 4, "why")
    costs = {"a": lambda n: (0.1, 10), "b": lambda n: (0.1, 10)}
    climb(measured, ["a", "b"], cost(costs), settings(), title="t")
    assert measured_at(measured, "b") == [1, 2]
    assert measured["dropped"]["b"] == {"length": 4, "reason": "why"}


def test_what_runs_beside_takes_turns(cost):
    seen = []
    measured = new_pass()
    climb(
        measured, ["a"], cost({"a": lambda n: (0.1, 10)}), settings([4]), title="t",
        beside=lambda length: {"c": lambda: None} if length == 4 else {},
        finish=lambda row, samples: seen.append((row["length"], {name: len(s) for name, s in samples.items()})),
    )  # fmt: skip
    assert seen == [(4, {"a": 3, "c": 3})]
    assert list(measured["rows"][0]["sides"]) == ["a"]


def test_what_runs_beside_comes_right_after_the_first_side_and_lasts_as_long(cost, monkeypatch):
    seen = {}
    real = module.interleave

    def watched(sides, *given):
        seen.update(order=list(sides), lasting=given[-1])
        return real(sides, *given)

    monkeypatch.setattr(module, "interleave", watched)
    costs = {"a": lambda n: (0.1, 10), "b": lambda n: (0.1, 10)}
    climb(new_pass(), ["a", "b"], cost(costs), settings([4]), title="t", beside=lambda length: {"c": lambda: None})
    assert seen == {"order": ["a", "c", "b"], "lasting": {"c": pytest.approx(100)}}
