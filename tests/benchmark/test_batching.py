import statistics

import pytest
from helpers import make_model

from hf_linattn.benchmark import batching
from hf_linattn.benchmark.record import read_json


def test_jobs_follow_the_seed_and_the_ranges():
    jobs = batching.draw_jobs(200, (3, 5), (2, 4), 29, seed=1)
    assert jobs == batching.draw_jobs(200, (3, 5), (2, 4), 29, seed=1)
    assert jobs != batching.draw_jobs(200, (3, 5), (2, 4), 29, seed=2)
    assert {len(job.prompt) for job in jobs} == {3, 4, 5}
    assert {job.new_tokens for job in jobs} == {2, 3, 4}
    assert {token for job in jobs for token in job.prompt} == set(range(29))


@pytest.mark.parametrize("name", ["conv", "hybrid"])
def test_all_sides_say_the_same(name):
    model = make_model(name, eos_token_id=3).double()
    sizes = {"requests": 7, "prompt": (1, 20), "new_tokens": (1, 9), "slots": 3, "prefill_chunk": 16, "rounds": 2}
    result = batching.measure(model, **sizes, progress=lambda x, _: x)
    assert result["same_text_as_one_by_one"] == {"static": 1, "continuous": 1}
    assert model.generation_config.eos_token_id == 3
    samples = result["samples_s"]
    assert [len(samples[side]) for side in batching.SIDES] == [2, 2, 2]
    total = result["sizes"]["generated"]
    for side in batching.SIDES:
        assert result["tokens_per_second"][side] == statistics.median(total / s for s in samples[side])
    for side in ("one_by_one", "static"):
        ratios = [a / b for a, b in zip(samples[side], samples["continuous"], strict=True)]
        assert result["continuous_over"][side] == statistics.median(ratios)


def test_turns_are_interleaved(monkeypatch):
    turns = []
    for side in batching.SIDES:
        monkeypatch.setattr(
            batching, side, lambda model, jobs, *_, side=side: turns.append(side) or [[0] * j.new_tokens for j in jobs]
        )
    batching.measure(make_model("linear"), requests=2, rounds=2, progress=lambda x, _: x)
    assert turns == list(batching.SIDES) * 3


def test_a_side_that_stops_early_is_not_a_measurement(monkeypatch):
    monkeypatch.setattr(batching, "static", lambda model, jobs, *_: [[0] for _ in jobs])
    sizes = {"requests": 2, "prompt": (2, 3), "new_tokens": (2, 3), "rounds": 1}
    with pytest.raises(RuntimeError, match="static did not generate as many tokens"):
        batching.measure(make_model("linear"), **sizes, progress=lambda x, _: x)


def test_command_line_writes_json(tmp_path):
    make_model("linear").save_pretrained(tmp_path / "model")
    sizes = ["--requests", "3", "--prompt", "2", "5", "--new_tokens", "1", "4", "--slots", "2", "--rounds", "1"]
    out = tmp_path / "batching.json"
    batching.main(["--model", str(tmp_path / "model"), *sizes, "--seed", "9", "--device", "cpu", "--out", str(out)])
    result = read_json(out)
    assert result["kind"] == "batching"
    assert (result["record"]["seed"], result["dtype"], result["device"]) == (9, "float32", "cpu")
    assert result["sizes"]["slots"] == 2
    assert min(result["tokens_per_second"].values()) > 0
