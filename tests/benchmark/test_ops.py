import statistics

import torch

from hf_linattn.benchmark import ops
from hf_linattn.benchmark.record import read_json


def test_ratio_is_the_median_over_pairs_of_turns():
    result = ops.measure(lengths=(16, 33), heads=2, head_dim=8, rounds=5, progress=lambda x, _: x)
    assert [row["length"] for row in result["rows"]] == [16, 33]
    for row in result["rows"]:
        for name in ops.PASSES:
            samples = row[name]["samples_ms"]
            assert [len(side) for side in samples.values()] == [5, 5]
            assert min(map(min, samples.values())) > 0
            ratios = [b / a for a, b in zip(samples["linear"], samples["softmax"], strict=True)]
            assert row[name]["softmax_over_linear"] == statistics.median(ratios)
            assert row[name]["linear_ms"] == statistics.median(samples["linear"])


def test_a_spent_budget_leaves_three_rounds():
    result = ops.measure(lengths=(16,), heads=1, head_dim=8, rounds=50, budget_s=0, progress=lambda x, _: x)
    assert len(result["rows"][0]["forward"]["samples_ms"]["linear"]) == 3


def test_backward_is_part_of_what_is_timed():
    seen = []

    def attention(q, k, v, feature_map):
        seen.append((q.requires_grad, torch.is_grad_enabled()))
        q.register_hook(lambda grad: seen.append("gradient")) if q.requires_grad else None
        return q * k * v

    tensors = [torch.randn(1, 4, 1, 2) for _ in range(4)]
    assert ops.timed(attention, tensors, "elu1", backward=False) > 0
    assert ops.timed(attention, tensors, "elu1", backward=True) > 0
    assert seen == [(False, False), (True, True), "gradient"]


def test_both_sides_attend_causally():
    q, k, v = (torch.randn(1, 6, 2, 4) for _ in range(3))
    changed = v.clone()
    changed[:, -1] += 1
    for attention, heads_first in ((ops.linear, False), (ops.softmax, True)):
        outs = []
        for values in (v, changed):
            inputs = [x.transpose(1, 2) if heads_first else x for x in (q, k, values)]
            out = attention(*inputs, "elu1")
            outs.append(out.transpose(1, 2) if heads_first else out)
        assert torch.equal(outs[0][:, :-1], outs[1][:, :-1])
        assert not torch.allclose(outs[0][:, -1], outs[1][:, -1])


def test_command_line_writes_json(tmp_path):
    sizes = ["--lengths", "8", "16", "--heads", "1", "--head_dim", "4", "--rounds", "3", "--device", "cpu"]
    ops.main([*sizes, "--seed", "9", "--out", str(tmp_path / "ops.json")])
    result = read_json(tmp_path / "ops.json")
    assert result["kind"] == "ops"
    assert result["sizes"] == {"batch": 1, "heads": 1, "head_dim": 4}
    assert (result["record"]["seed"], result["dtype"], result["device"]) == (9, "float32", "cpu")
