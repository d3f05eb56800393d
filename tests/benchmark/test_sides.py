"""Every side computes what it is compared for: against its definition in float64, gradients included."""

import sys
import types

import pytest
import torch
from reference import assert_close, random_problem

from hf_linattn.benchmark import attention, sides
from hf_linattn.benchmark.ceilings import ceilings, operations, traffic
from hf_linattn.benchmark.climb import Settings
from hf_linattn.ops import backends

CPU = torch.device("cpu")


def test_the_best_here_comes_first_and_the_others_say_why():
    found, absent = sides.sides_here(CPU, torch.float32, 16)
    compiled = backends.kernels("native").missing() is None
    assert list(found) == ["native"] * compiled + ["torch", "bucketed", "softmax"]
    assert absent["flash-linear-attention"] == "needs a GPU"
    assert "GPU" in absent["linear, Triton kernels"]
    assert len(found) + len(absent) == len(sides.SIDES)
    half, absent = sides.sides_here(CPU, torch.float16, 16)
    assert next(iter(half)) == "torch"
    assert "float16 has no kernel" in absent["linear, C kernels"]


@pytest.mark.parametrize("name", ["native", "torch"])
def test_the_package_runs_the_backend_of_the_name(name, monkeypatch):
    asked = []
    monkeypatch.setattr(sides, "linear_attention", lambda *x, **options: asked.append(options) or x)
    sides.SIDES[name].run(1, 2, 3)
    assert asked == [{"feature_map": "elu1", "backend": name}]


def test_softmax_attends_causally():
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    changed = v.clone()
    changed[:, :, -1] += 1
    before, after = (sides.softmax(q, k, values) for values in (v, changed))
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])
    assert not torch.allclose(before[:, :, -1], after[:, :, -1])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_bucketed_is_linear_attention(length):
    made = random_problem(2, length, 2, 2, 8, 8)
    out = sides.bucketed(*(x.transpose(1, 2) for x in (made.q, made.k, made.v))).transpose(1, 2)
    assert_close(out, made.solve("elu1")[0], 1e-12)


def test_errors_are_those_of_each_side():
    found, _ = sides.sides_here(CPU, torch.float32, 16)
    wrong = found | {"bucketed": found["bucketed"]._replace(run=lambda q, k, v: sides.bucketed(q, k, v * 1.5))}
    settings = Settings(CPU, torch.float32, [])
    errors = attention.errors(wrong, settings, batch=1, heads=2, head_dim=16)
    for side in found.keys() - {"bucketed"}:
        assert list(errors[side]) == ["out", "dq", "dk", "dv"]
        assert all(0 < error < 2e-6 for error in errors[side].values())
    assert all(error == pytest.approx(0.5, rel=1e-3) for error in errors["bucketed"].values())


def test_a_side_that_fails_is_reported():
    def broken(q, k, v):
        raise RuntimeError("no such\nkernel")

    side = sides.Side("x", broken)
    errors = attention.errors({"x": side}, Settings(CPU, torch.float32, []), batch=1, heads=1, head_dim=4)
    assert errors == {"x": {"failed": "RuntimeError: no such kernel"}}


@pytest.mark.parametrize("name", ["forward", "backward", "forward+backward"])
def test_a_pass_is_timed_as_it_is_named(name):
    seen = []

    def run(q, k, v):
        seen.append(("run", torch.is_grad_enabled() and q.requires_grad))
        out = q * k * v
        if out.requires_grad:
            out.register_hook(lambda grad: seen.append("gradient"))
        return out

    call = sides.attention_call(run, [torch.randn(1, 4, 1, 2) for _ in range(4)], name)
    before, seen[:] = list(seen), []
    call()
    call()
    assert before == ([("run", True)] if name == "backward" else [])
    assert (
        seen
        == {
            "forward": [("run", False)] * 2,
            "backward": ["gradient"] * 2,
            "forward+backward": [("run", True), "gradient"] * 2,
        }[name]
    )


@pytest.mark.parametrize(
    "parameters, options",
    [("scale, normalize", {}), ("scale, normalize, head_first=True", {"head_first": False}), ("scale", None)],
)
def test_flash_linear_attention_of_several_releases(monkeypatch, parameters, options):
    """Its signature decides; the feature map comes first, and no scale."""
    names: dict = {"seen": []}
    listed = ", ".join(part.split("=")[0] for part in parameters.split(", "))
    exec(f"def chunk_linear_attn(q, k, v, {parameters}):\n    seen.append(({listed}))\n    return q + k, None", names)
    module = types.ModuleType("fla.ops.linear_attn")
    module.chunk_linear_attn = names["chunk_linear_attn"]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", module)
    reason = sides.why_not("fla", torch.device("cuda"), torch.float32, 64)
    if options is None:
        assert reason == "its chunk_linear_attn does not take scale and normalize"
        return
    assert reason is None
    x = torch.tensor([[-1.0, 2.0]])
    assert torch.equal(sides.flash_linear_attention(x, x, x), 2 * (torch.nn.functional.elu(x) + 1))
    assert names["seen"] == [(1.0, True, *options.values())]


def test_flash_linear_attention_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    reason = sides.why_not("fla", torch.device("cuda"), torch.float32, 64)
    assert reason.startswith("cannot be imported: ")


def test_operations_and_bytes():
    assert operations("forward", 1, 1, 64, 64) == 49_152
    assert operations("forward+backward", 10, 2, 64, 64) == 3 * 20 * 49_152
    assert operations("backward", 1, 1, 128, 32) == 2 * (2 * 128 * 128 + 2 * 128 * 32 + 4 * 128 * 32)
    assert traffic("forward", 5, 2, 64, 64, 4) == 10 * 4 * 64 * 4
    assert traffic("backward", 1, 1, 64, 32, 2) == 2 * (2 * 64 + 2 * 32 + 2 * 64 + 32)  # q k v dout dq dk dv


def test_ceilings_do_what_they_count():
    found, product = ceilings(CPU, torch.bfloat16, small=True)
    assert product == "matmul float32"
    assert set(found) == {"copy", "matmul float32"}
    assert found["matmul float32"].run().shape == (64, 64)
    assert found["matmul float32"].amount == 2 * 64**3
    assert found["copy"].run().sum() == 0
    assert found["copy"].amount == 2 * found["copy"].run().nbytes
