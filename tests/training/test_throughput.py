import statistics

import pytest
import torch

import throughput
from config import ConfigError
from hf_linattn.benchmark.record import read_json
from recipes import TINY

from .conftest import fresh_accelerate


def measure(arguments) -> None:
    fresh_accelerate()
    throughput.main(arguments)


def test_both_loops_take_the_same_steps_in_turns(arguments, tmp_path, capsys):
    measure(arguments(max_steps=throughput.SETTLING + 6, model_config={"model_type": "linattn", **TINY}))
    result = read_json(tmp_path / "run" / "throughput.json")
    ours, bare = (result["samples_s"][name] for name in ("pretrain", "bare"))
    assert min(*ours, *bare) > 0
    assert len(ours) == len(bare) == 5  # nobody asks for what follows the last
    assert result["tokens_per_step"] == 2 * 48
    assert result["tokens_per_second"]["pretrain"] == 96 / statistics.median(ours)
    assert result["pretrain_over_bare"] == statistics.median(b / a for a, b in zip(ours, bare))
    assert "of it (median over pairs of steps)" in capsys.readouterr().out


def test_turns_tell_the_loops_apart(monkeypatch):
    """A clock that only the loops move: a bare step takes 2, ours 3, and fetching a batch 1."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def move(by):
        clock[0] += by

    def batches():
        while True:
            move(1)
            yield {}

    class Bare:
        def step(self, batch):
            move(2)

    turns = throughput.Turns(batches(), Bare(), torch.device("cpu"))
    for _ in range(4):
        next(turns)
        move(3)
    assert (turns.bare, turns.ours) == ([2.0] * 4, [4.0] * 3)


@pytest.mark.parametrize("changes", [{"max_steps": 5}, {"max_steps": 50, "gradient_accumulation_steps": 2}])
def test_what_it_needs(arguments, changes):
    with pytest.raises(ConfigError, match="needs model_config, more than 10 max_steps"):
        measure(arguments(**changes))
