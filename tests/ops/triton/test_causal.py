"""Out, final state and gradients of the kernels against the float64 oracle, under every option."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import DEVICE, check, problem, run, to_device
from reference import Problem, assert_close, gradients

from hf_linattn.ops import chunk_linear_attention, make_feature_map
from hf_linattn.ops.triton import launch, triton_linear_attention

FUSED = ("elu1", "relu", "squared_relu", "exp", "softmax")


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
def test_lengths(T):
    check(problem(B=1, T=T, Hq=1), chunk_size=None)


@pytest.mark.parametrize("name", FUSED)
def test_maps(name):
    check(problem(B=1, mask="holes", state=name), name)


def test_ready_features():
    made = problem(B=1, state="exp", mask="left")
    check(replace(made, q=made.q.exp(), k=made.k.exp()), None)


@pytest.mark.parametrize("name, state", [("identity", None), ("identity", "identity"), ("elu1", "elu1")])
def test_without_denominator(name, state):
    check(problem(B=1, normalize=False, state=state, mask="right"), name)


@pytest.mark.parametrize("mask", ["left", "right", "holes", "first"])
def test_masks(mask):
    check(problem(mask=mask, state="elu1" if mask != "first" else None))


def test_groups():
    check(problem(B=1, T=20, Hq=6, Hk=2, mask="holes"))


@pytest.mark.parametrize("D, E", [(8, 20), (20, 64), (64, 80), (80, 256), (256, 8)])
def test_widths(D, E):
    check(problem(B=1, T=18, Hq=1, D=D, E=E, state="elu1"))


def test_softmax_too_wide_for_one_tile():
    assert not launch.softmax_fits(256, 128)
    check(problem(B=1, T=8, Hq=1, D=256, E=128, mask="holes"), "softmax")


PACKED = [0, 3, 3, 20, 35]


@pytest.mark.parametrize("mask, state", [(None, None), ("holes", "elu1")])
def test_packed_documents(mask, state):
    check(problem(B=1, mask=mask, state=state, cu_seqlens=PACKED))


def test_packed_documents_without_states():
    made = problem(B=1, cu_seqlens=PACKED)
    out, state = triton_linear_attention(
        *(x.to(DEVICE) for x in (made.q, made.k, made.v)), feature_map="elu1", cu_seqlens=made.cu_seqlens, chunk_size=16
    )
    assert state is None
    assert_close(out.cpu(), made.solve("elu1")[0], 1e-5)


# ---- segments


def test_segments(segments):
    made = problem(B=1, T=150, mask="left", state="elu1")
    assert launch.plan(1, 150, 1, None, made.q.device).rows == 3
    check(made, chunk_size=32)


def test_segments_of_packed_documents(segments):
    bounds = [0, 5, 5, 100, 170]
    made = problem(B=1, T=170, Hq=1, mask="holes", state="elu1", cu_seqlens=bounds)
    plan = launch.plan(1, 170, 1, made.cu_seqlens, made.q.device)
    assert plan.bounds.tolist()[:5] == [[0, 5, 0], [5, 69, 2], [69, 100, 2], [100, 164, 3], [164, 170, 3]]
    assert all(start >= stop for start, stop, _ in plan.bounds.tolist()[5:])
    check(made, chunk_size=32)


def test_segments_without_denominator(segments):
    check(problem(B=1, T=70, Hq=1, normalize=False), "identity", chunk_size=32)


def test_plan_fills_the_multiprocessors(monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    cuda = torch.device("cuda")
    assert launch.plan(8, 4096, 8 * 32, None, cuda).rows == 8  # enough heads: one pass
    few = launch.plan(1, 8192, 8, None, cuda)
    assert few.segments == 8192 // launch.SEGMENT
    assert launch.plan(1, 100, 1, None, cuda).segments == 1  # too short to cut
    long = launch.plan(1, 10**6, 8, None, cuda)
    assert 33 <= long.segments <= 34
    assert long.segments * long.length >= 10**6 > (long.segments - 1) * long.length


# ---- what must not matter


@pytest.mark.parametrize(
    "name, dtype", [("elu1", torch.float32), ("elu1", torch.bfloat16), ("softmax", torch.float32),
                    ("hedgehog", torch.float32)],
)  # fmt: skip
def test_nothing_under_a_mask_matters(name, dtype):
    made = problem(T=17, mask="first", dtype=dtype)
    hidden = ~made.key_mask[:, :, None, None]
    feature_map = make_feature_map(name, 8, 2, 1).to(DEVICE)
    nan = float("nan")
    poisoned = replace(made, k=made.k.masked_fill(hidden, nan), v=made.v.masked_fill(hidden, nan))
    outputs, grads = run(made, feature_map)
    others, other_grads = run(poisoned, feature_map)
    for actual, expected in zip([*others, *other_grads], [*outputs, *grads], strict=True):
        assert torch.equal(actual, expected)
        assert actual.isfinite().all()
    assert not other_grads[1].masked_select(hidden).any()
    assert not other_grads[2].masked_select(hidden).any()
    assert not outputs[0][0].any()  # the first row has no real key


def test_mask_of_ones_is_no_mask_to_the_bit():
    made = problem(B=1, T=17)
    expected = run(made)
    for dtype in (torch.bool, torch.int64):
        actual = run(replace(made, key_mask=torch.ones(1, 17, dtype=dtype)))
        for a, e in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True):
            assert torch.equal(a, e)


def test_nan_in_a_real_row_stays():
    """A comparison that loses NaN would turn a broken model into a plausible one."""
    made = to_device(problem(B=1, T=17, Hq=1))
    for name in ("q", "k", "v"):
        x = getattr(made, name).clone()
        x[0, 3] = float("nan")
        for feature_map in ("elu1", "relu"):
            out, mu, _ = replace(made, **{name: x}).run(triton_linear_attention, feature_map)
            assert out[0, 3].isnan().any()
            assert mu.isnan().any() == (name != "q")


def test_zero_denominator_gives_zero_and_no_gradient():
    made = problem(B=1, T=20, Hq=1)
    made = replace(made, q=-made.q.abs(), k=made.k.abs())
    outputs, grads = run(made, "relu")
    assert not outputs[0].any()
    out = made.leaves()
    result, _ = triton_linear_attention(*(x.to(DEVICE) for x in (out.q, out.k, out.v)), feature_map="relu")
    for grad in torch.autograd.grad(result.sum(), [out.q, out.k, out.v]):
        assert not grad.any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_no_epsilon_in_the_denominator(scale):
    made = problem(B=1, T=20, Hq=1)
    made = replace(made, q=made.q.exp() * scale, k=made.k.exp() * scale)
    assert_close(run(made, None)[0][0], made.solve(None)[0], 1e-5)


def test_strides():
    made = problem(T=18, Hq=4, Hk=2, mask="holes", state="elu1")

    def transposed(x):  # [B,T,H,D] over memory laid out as [B,H,D,T]
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    views = replace(
        made, q=transposed(made.q), k=transposed(made.k), v=made.v[:, :1].expand_as(made.v),
        initial_state=tuple(s.transpose(1, -1).contiguous().transpose(1, -1) for s in made.initial_state),
    )  # fmt: skip
    check(views)


def test_expanded_gradient():
    """The gradient of a sum is one number with strides of 0."""
    made = problem(B=1, T=18)
    leaves, oracle = to_device(made).leaves(), made.leaves()
    out = leaves.run(triton_linear_attention, "elu1")[0]
    (expected,) = torch.autograd.grad(oracle.solve("elu1")[0].sum(), [oracle.v])
    (actual,) = torch.autograd.grad(out.sum(), [leaves.v])
    assert_close(actual.cpu(), expected, 1e-5)


def test_offsets_beyond_two_to_the_31():
    """Rows 2^28 elements apart: only the pages that hold them are touched."""
    apart, made = 2**28, problem(B=1, T=18, Hq=1, D=8, E=8, dtype=torch.bfloat16)
    buffer = torch.empty(17 * apart + 64, dtype=torch.bfloat16, device=DEVICE)
    views = []
    for i, x in enumerate((made.q, made.k, made.v)):
        view = buffer[8 * i :].as_strided(x.shape, (0, apart, 8, 1))
        views.append(view.copy_(x))
    out, _ = triton_linear_attention(*views, feature_map="elu1")
    expected, _ = triton_linear_attention(*(x.to(DEVICE) for x in (made.q, made.k, made.v)), feature_map="elu1")
    assert torch.equal(out, expected)


# ---- dtypes


def plain_attention(problem):
    """What one would write in PyTorch without further thought: products and sums in the input's dtype."""
    phi_q, phi_k = (torch.nn.functional.elu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1
                    for x in (problem.q, problem.k))  # fmt: skip
    scores = torch.einsum("bihf,bjhf->bhij", phi_q.to(problem.q.dtype), phi_k.to(problem.k.dtype)).tril()
    return torch.einsum("bhij,bjhe->bihe", scores / scores.sum(-1, keepdim=True), problem.v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_error_is_at_most_twice_the_plain_one(dtype):
    made = problem(B=1, T=150, Hq=1, D=16, E=16, dtype=dtype)

    def results(leaves, attention):
        out = attention(leaves)
        return [out, *gradients(out, leaves.tensors())]

    double = replace(made, q=made.q.double(), k=made.k.double(), v=made.v.double())
    ours = to_device(made).leaves()
    out = ours.run(triton_linear_attention, "elu1")[0]
    g = torch.Generator().manual_seed(0)
    cotangent = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out)
    actual = [out, *torch.autograd.grad(out, ours.tensors(), cotangent)]
    for what, exact, usual, mine in zip(
        ("out", "dq", "dk", "dv"), results(double.leaves(), plain_attention), results(made.leaves(), plain_attention),
        actual, strict=True,
    ):  # fmt: skip
        for norm in (lambda x: x.pow(2).mean().sqrt(), lambda x: x.abs().max()):
            allowed, error = 2 * norm(usual.double() - exact), norm(mine.cpu().double() - exact)
            assert error <= allowed, f"{what}: error {error:.3g}, twice that of plain PyTorch is {allowed:.3g}"


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_state_of_half_precision_input_is_float32(dtype, tolerance):
    made = problem(B=1, T=100, mask="holes", dtype=dtype)
    (out, mu, nu), _ = run(made, chunk_size=None)
    assert (out.dtype, mu.dtype, nu.dtype) == (dtype, torch.float32, torch.float32)
    expected = made.solve("elu1")
    assert_close(nu, expected[2], 1e-5)  # sums of float32 features
    assert_close(mu, expected[1], tolerance)  # products may be in the input's dtype


def test_sums_that_half_precision_cannot_hold():
    """nu passes 256, where bf16 stops counting, and 65504, where float16 ends."""
    for dtype in (torch.bfloat16, torch.float16):
        zero, one = torch.zeros(1, 300, 1, 8, dtype=dtype, device=DEVICE), torch.ones(1, 300, 1, 8, dtype=dtype)
        state = tuple(torch.full(shape, 66000.0, device=DEVICE) for shape in ((1, 1, 8, 8), (1, 1, 8)))
        made = Problem(zero, zero, one.to(DEVICE), None, state)
        out, mu, nu = made.run(triton_linear_attention, "elu1")
        assert nu.unique().tolist() == mu.unique().tolist() == [66300]
        assert (out - 1).abs().max() <= 2**-7


def test_values_of_another_dtype():
    made = problem(B=1)
    made = replace(made, v=made.v.bfloat16())
    (out, mu, nu), _ = run(made)
    expected = made.solve("elu1")
    assert out.dtype == torch.bfloat16
    assert_close(out, expected[0], 2**-8)
    assert_close((mu, nu), expected[1:], 1e-5)


# ---- maps that no kernel has


@pytest.mark.parametrize("name", ["hedgehog", "taylor2"])
def test_other_maps_are_applied_first(name):
    made = problem(B=1, T=20, D=4, mask="holes")
    outputs, grads = run(made, make_feature_map(name, 4, 2, 1).to(DEVICE))
    expected, expected_grads = run(made, make_feature_map(name, 4, 2, 1).to(DEVICE), form=chunk_linear_attention)
    assert_close(outputs, expected, 1e-5)
    assert_close(grads, expected_grads, 2e-5)


def test_gradients_reach_the_parameters_of_a_map():
    made = to_device(problem(B=1, T=20, mask="holes"))
    grads = []
    for form in (triton_linear_attention, chunk_linear_attention):
        feature_map = make_feature_map("t2r", 8, 2, 1)
        with torch.no_grad():
            for i, weight in enumerate(feature_map.parameters()):
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)))
        feature_map.to(DEVICE)
        out, _, _ = made.run(form, feature_map)
        grads.append(torch.autograd.grad(out.sum(), list(feature_map.parameters())))
    assert_close(*grads, 2e-5)


# ---- autograd


def test_only_the_gradients_asked_for():
    made = to_device(problem(B=1, T=18, state="elu1"))
    full = made.leaves()
    expected = torch.autograd.grad(full.run(triton_linear_attention, "elu1")[0].sum(), full.tensors())
    for i in range(5):
        one = replace(made)
        tensors = one.tensors()
        leaf = tensors[i].clone().requires_grad_()
        tensors[i] = leaf
        one = Problem(*tensors[:3], None, tuple(tensors[3:]))
        (grad,) = torch.autograd.grad(one.run(triton_linear_attention, "elu1")[0].sum(), [leaf])
        assert torch.equal(grad, expected[i])


def test_second_derivatives_are_refused():
    leaves = to_device(problem(B=1, T=16, Hq=1)).leaves()
    out = leaves.run(triton_linear_attention, "elu1")[0]
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), [leaves.q], create_graph=True)


def test_the_initial_state_is_never_modified():
    for T in (1, 18):
        made = to_device(problem(B=1, T=T, state="elu1"))
        before = [s.clone() for s in made.initial_state]
        made.run(triton_linear_attention, "elu1")
        assert all(torch.equal(a, b) for a, b in zip(made.initial_state, before))
