"""The non-causal form in kernels: self- and cross-attention against the float64 oracle, under every option."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import DEVICE, check, problem, run, to_device
from reference import Problem, assert_close

from hf_linattn.ops import chunk_linear_attention, make_feature_map
from hf_linattn.ops.triton import launch, triton_linear_attention


def cross(T=18, S=35, **options):
    return problem(T=T, S=S, causal=False, **options)


@pytest.mark.parametrize("T, S", [(1, 1), (1, 33), (33, 1), (16, 17), (65, 64), (64, 130)])
def test_lengths(T, S):
    check(cross(T, S, B=1, Hq=1), chunk_size=None)


@pytest.mark.parametrize("name", ["elu1", "relu", "squared_relu", "exp", "softmax"])
def test_maps(name):
    check(cross(B=1, mask="holes", state=name), name)


@pytest.mark.parametrize("name, state", [("identity", None), ("identity", "identity"), ("elu1", "elu1")])
def test_without_denominator(name, state):
    check(cross(B=1, normalize=False, state=state, mask="right"), name)


@pytest.mark.parametrize("mask", ["left", "holes", "first"])
def test_masks(mask):
    check(cross(mask=mask, state="elu1" if mask != "first" else None))


def test_groups():
    check(cross(Hq=6, Hk=2, mask="holes", state="elu1"))


@pytest.mark.parametrize("D, E", [(8, 256), (256, 8), (20, 80)])
def test_widths(D, E):
    check(cross(B=1, T=18, S=20, Hq=1, D=D, E=E, state="elu1"))


@pytest.mark.parametrize("mask, state", [(None, None), ("holes", "elu1")])
def test_packed_documents(mask, state):
    check(cross(35, B=1, mask=mask, state=state, cu_seqlens=[0, 3, 3, 20, 35]))


def test_segments_of_both_sides(segments):
    made = cross(70, 150, mask="left", state="elu1", B=1)
    assert launch.plan(1, 150, 1, None, made.q.device).rows == 3
    assert launch.plan(1, 70, 1, None, made.q.device).rows == 2
    check(made, chunk_size=32)


def test_segments_of_packed_documents(segments):
    check(cross(170, 170, B=1, Hq=1, mask="holes", state="elu1", cu_seqlens=[0, 5, 5, 100, 170]), chunk_size=32)


def test_segments_that_start_from_nothing(segments):
    check(cross(20, 150, B=1, Hq=1), chunk_size=32)


@pytest.mark.parametrize("name, dtype", [("elu1", torch.float32), ("softmax", torch.bfloat16)], ids=str)
def test_nothing_under_a_mask_matters(name, dtype):
    made = cross(17, 20, mask="first", dtype=dtype)
    hidden = ~made.key_mask[:, :, None, None]
    poisoned = replace(made, k=made.k.masked_fill(hidden, float("nan")), v=made.v.masked_fill(hidden, float("inf")))
    outputs, grads = run(poisoned, name)
    expected, expected_grads = run(made, name)
    for actual, wanted in zip([*outputs, *grads], [*expected, *expected_grads], strict=True):
        assert torch.equal(actual, wanted)
    assert not outputs[0][0].any()  # the first row has no real key
    assert not grads[0][0].any()
    for grad in grads[1:3]:
        assert not grad.masked_select(hidden).any()


def test_mask_of_ones_is_no_mask_to_the_bit():
    made = cross(B=1)
    expected, actual = run(made), run(replace(made, key_mask=torch.ones(1, 35, dtype=torch.bool)))
    for a, e in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("name", ["hedgehog", "t2r"])
def test_learnable_maps_are_applied_first(name):
    made = to_device(cross(B=1, D=4, mask="holes"))
    results = []
    for form in (triton_linear_attention, chunk_linear_attention):
        feature_map = make_feature_map(name, 4, 2, 1)
        with torch.no_grad():
            for i, weight in enumerate(feature_map.parameters()):
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)))
        feature_map.to(DEVICE)
        leaves = made.leaves()
        outputs = leaves.run(form, feature_map)
        inputs = [*leaves.tensors(), *feature_map.parameters()]
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs])])
    assert_close(*results, 2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)], ids=str)
def test_half_precision(dtype, tolerance):
    """Twice the rounding of the output; the sums stay float32."""
    made = cross(150, 300, B=1, Hq=1, D=16, E=16, dtype=dtype)
    (out, mu, nu), _ = run(made, chunk_size=None)
    assert (out.dtype, mu.dtype, nu.dtype) == (dtype, torch.float32, torch.float32)
    expected = made.solve("elu1")
    assert_close(nu, expected[2], 1e-5)
    assert_close((out, mu), expected[:2], tolerance)


def test_offsets_beyond_two_to_the_31():
    """Rows 2^28 elements apart: only the pages that hold them are touched."""
    apart, made = 2**28, cross(18, 18, B=1, Hq=1, dtype=torch.bfloat16)
    buffer = torch.empty(17 * apart + 64, dtype=torch.bfloat16, device=DEVICE)
    plain = [x.to(DEVICE) for x in (made.q, made.k, made.v)]
    views = [buffer[8 * i :].as_strided(x.shape, (0, apart, 8, 1)).copy_(x) for i, x in enumerate(plain)]
    results = []
    for tensors in (views, plain):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out, _ = triton_linear_attention(*tensors, feature_map="elu1", causal=False)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_the_gradients_asked_for():
    made = to_device(cross(B=1, state="elu1"))
    full = made.leaves()
    expected = torch.autograd.grad(full.run(triton_linear_attention, "elu1")[0].sum(), full.tensors())
    for i in range(5):
        tensors = made.tensors()
        tensors[i] = leaf = tensors[i].clone().requires_grad_()
        one = Problem(*tensors[:3], None, tuple(tensors[3:]), causal=False)
        (grad,) = torch.autograd.grad(one.run(triton_linear_attention, "elu1")[0].sum(), [leaf])
        assert torch.equal(grad, expected[i])


def test_gradient_of_the_state_alone():
    made = cross(B=1, mask="holes", state="elu1")
    leaves, oracle = to_device(made).leaves(), made.leaves()
    actual = torch.autograd.grad(leaves.run(triton_linear_attention, "elu1")[2].square().sum(), leaves.tensors())
    expected = torch.autograd.grad(
        oracle.solve("elu1")[2].square().sum(), oracle.tensors(), allow_unused=True, materialize_grads=True
    )
    assert_close([x.cpu() for x in actual], expected, 1e-5)


def test_second_derivatives_are_refused():
    leaves = to_device(cross(B=1, Hq=1)).leaves()
    out = leaves.run(triton_linear_attention, "elu1")[0]
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), [leaves.q], create_graph=True)
