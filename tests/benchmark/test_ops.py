import statistics

import pytest
import torch

from hf_linattn.benchmark import memory, ops
from hf_linattn.benchmark.record import read_json
from hf_linattn.benchmark.sides import SIDES, why_not
from hf_linattn.ops import parallel_linear_attention

CPU = torch.device("cpu")
RUNNING = [name for name in SIDES if why_not(name, CPU, torch.float32, 8) is None]


def quiet(x, _):
    return x


def measure(**options):
    return ops.measure(**{"lengths": (16, 33), "heads": 2, "head_dim": 8, "rounds": 3, "progress": quiet, **options})


def test_every_side_in_every_round():
    result = measure(rounds=4)
    assert list(result["sides"]) == RUNNING
    assert {"torch", "bucketed", "softmax"} <= set(RUNNING)
    main = result["main"]
    for row in result["rows"]:
        for name in ops.PASSES:
            assert list(row[name]) == RUNNING
            for entry in row[name].values():
                assert len(entry["samples_ms"]) == 4
                assert entry["ms"] == statistics.median(entry["samples_ms"]) > 0
                pairs = zip(row[name][main]["samples_ms"], entry["samples_ms"], strict=True)
                assert entry["over_main"] == statistics.median(b / a for a, b in pairs)
                assert entry["peak_bytes"] >= 0  # tiny tensors fit in pages that are there


def test_shares_of_the_ceilings(monkeypatch):
    monkeypatch.setattr(ops, "WITH_CEILINGS", 16)
    monkeypatch.setattr(ops, "PRODUCT", 256)
    for row in measure(sides=["torch"])["rows"]:
        for name in ops.PASSES:
            best, entry = row[name]["ceilings"], row[name]["torch"]
            count = ops.counted_operations(row["length"], 1, 2, 8, 8, name != "forward")
            share = count / (entry["ms"] / 1e3) / best["product_operations_per_s"]
            assert share / 10 < entry["of_product_rate"] < share * 10
            assert entry["of_copy_bandwidth"] > 0


def test_operations_of_chunks_of_128():
    assert ops.counted_operations(1, 1, 1, 64, 64, backward=False) == 49_152
    assert ops.counted_operations(10, 3, 2, 64, 64, backward=True) == 49_152 * 60 * 3


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("name", [name for name in RUNNING if name != "softmax"])
def test_the_linear_sides_are_linear_attention(name, length):
    q, k, v = (torch.randn(2, length, 3, 8) for _ in range(3))
    expected = parallel_linear_attention(q, k, v, feature_map="elu1")[0]
    torch.testing.assert_close(SIDES[name].attend(q, k, v, "elu1"), expected, rtol=1e-4, atol=1e-5)


def test_softmax_attends_causally():
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    changed = v.clone()
    changed[:, :, -1] += 1
    outs = [SIDES["softmax"].attend(q, k, values, "elu1") for values in (v, changed)]
    assert torch.equal(outs[0][:, :, :-1], outs[1][:, :, :-1])
    assert not torch.allclose(outs[0][:, :, -1], outs[1][:, :, -1])


def test_backward_is_part_of_what_is_timed():
    seen = []

    def attend(q, k, v, feature_map):
        seen.append((q.requires_grad, torch.is_grad_enabled()))
        q.register_hook(lambda grad: seen.append("gradient")) if q.requires_grad else None
        return q * k * v

    side = SIDES["torch"]._replace(attend=attend)
    for backward in (False, True):
        ops._Job(1, 4, 1, 2, torch.float32, CPU, "elu1", backward, 0).call(side)()
    assert seen == [(False, False), (True, True), "gradient"]


def test_a_side_leaves_when_it_takes_too_long_or_too_much():
    result = measure(budget_s=0, sides=["torch", "softmax"])
    assert len(result["rows"]) == 2
    assert len(result["rows"][0]["forward"]["torch"]["samples_ms"]) == 3
    assert "forward" not in result["rows"][1]
    assert all("a run of 16 tokens took" in result["left"][name]["softmax"] for name in ops.PASSES)


def test_a_side_that_memory_cannot_hold(monkeypatch):
    monkeypatch.setattr(ops, "_memory", lambda device: 16 * 2 * 8 * 4 * 60)
    result = measure(lengths=(16, 64))
    assert "64 tokens may need" in result["left"]["forward"]["bucketed"]
    assert set(result["rows"][0]["forward"]) == set(RUNNING)
    assert "bucketed" not in result["rows"][1].get("forward", {})


@pytest.mark.parametrize("ratios, expected", [
    ([0.25, 4.0, 16.0], 2**0.5 * 1.0),
    ([2.0, 3.0, 4.0], 1.0),
    ([2.0, 0.5, 2.0], 2 * 2**0.5),
    ([0.5, 0.5, 0.9], None),
    ([0.25, 4.0, None], 2**0.5),
    ([None, None, None], None),
])  # fmt: skip
def test_crossover(ratios, expected):
    assert ops.crossover([1, 2, 4], ratios) == (None if expected is None else pytest.approx(expected))


def test_linear_fit():
    assert ops.linear_fit([1, 2, 3], [5, 7, 9]) == {"slope": 2, "start": 3, "r_squared": pytest.approx(1)}
    assert ops.linear_fit([1, 2, 3, 4], [1, 4, 9, 16])["r_squared"] < 0.99
    assert ops.linear_fit([1, 2], [1, 2]) is None


@pytest.mark.skipif(not memory.can_measure(CPU), reason="needs Linux' /proc/self/clear_refs")
def test_peak_bytes():
    size = 64 * 2**20
    kept = []

    def call():
        kept[:] = [torch.ones(size, dtype=torch.uint8)]
        torch.ones(size, dtype=torch.uint8).add_(1)

    kept.clear()
    measured = memory.peak_bytes(lambda: (kept.clear(), call()), CPU)
    assert 0.9 * size < measured < 2.1 * size


def test_a_side_that_cannot_run_here_is_named():
    with pytest.raises(ValueError, match="side 'triton' cannot run here: "):
        measure(sides=["torch", "triton"])


def test_command_line_writes_json(tmp_path):
    sizes = ["--lengths", "8", "16", "--heads", "1", "--head_dim", "4", "--rounds", "3", "--device", "cpu"]
    ops.main([*sizes, "--sides", "torch", "softmax", "--seed", "9", "--out", str(tmp_path / "ops.json")])
    result = read_json(tmp_path / "ops.json")
    assert result["kind"] == "ops"
    assert result["sizes"] == {"batch": 1, "heads": 1, "head_dim": 4}
    assert (result["record"]["seed"], result["dtype"], result["device"]) == (9, "float32", "cpu")
