"""Precision, dtypes, strides, and what a call may not do to its inputs."""

import math
from dataclasses import replace

import pytest
import torch
from reference import assert_close, gradients, random_problem

from hf_linattn.ops import (
    LinearAttentionState,
    chunk_linear_attention,
    linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)

FORMS = (parallel_linear_attention, chunk_linear_attention, recurrent_linear_attention)
HALF = (torch.bfloat16, torch.float16)
each_form = pytest.mark.parametrize("form", FORMS)
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)


# ---- long sums


@pytest.mark.parametrize("form", [chunk_linear_attention, recurrent_linear_attention, linear_attention])
def test_key_summary_after_100_000_bf16_steps(form):
    """A bfloat16 sum of ones stops at 256."""
    T = 100_000
    k = torch.randn(1, T, 1, 2).bfloat16()
    v = torch.ones(1, T, 1, 1).bfloat16()
    with torch.no_grad():
        out, state = form(k, k, v, feature_map="elu1", output_final_state=True)
    x = k.double()
    expected = torch.where(x > 0, x + 1, x.exp()).sum(1)
    assert ((state.nu - expected).abs() / expected).max() < 1e-3
    assert ((state.mu[..., 0] - expected).abs() / expected).max() < 1e-3
    assert (out - 1).abs().max() <= 2**-7  # a mean of ones, to an ulp or two


@each_form
def test_key_summary_over_many_calls(form):
    """The same, a call a token: the state that travels must not be rounded either."""
    step = torch.zeros(1, 1, 1, 1).bfloat16()
    state = LinearAttentionState(torch.full((1, 1, 1, 1), 4096.0), torch.full((1, 1, 1), 4096.0))
    with torch.no_grad():
        for _ in range(300):
            _, state = form(step, step, step + 1, feature_map="elu1", initial_state=state, output_final_state=True)
    assert state.nu.item() == state.mu.item() == 4396


# ---- small and large features


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elu1_far_below_zero(form, dtype):
    """x = -20: the key summary is exp(-20) to float32 accuracy and a single key still gives its value back."""
    x = torch.full((1, 1, 1, 4), -20.0, dtype=dtype)
    v = torch.tensor([[[[1.0, -2.0, 0.5]]]], dtype=dtype)
    out, state = form(x, x, v, feature_map="elu1", output_final_state=True)
    assert state.nu.flatten().tolist() == pytest.approx([math.exp(-20)] * 4, rel=1e-6)
    assert_close(out, v, 2**-8 if dtype == torch.bfloat16 else 1e-6)


@each_form
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_no_epsilon_in_the_denominator(form, causal, scale):
    """Out depends on no common factor of q or of k, and its square neither under- nor overflows in the gradient."""
    problem = random_problem(T=20, Hq=4, Hk=2, causal=causal, dtype=torch.float32)
    problem = replace(problem, q=problem.q.exp() * scale, k=problem.k.exp() * scale).leaves()
    oracle = problem.leaves()
    out, _, _ = problem.run(form, None, chunk_size=8)
    expected, _, _ = oracle.solve()
    assert_close(out, expected, 1e-5)
    actual = gradients(out, problem.tensors())
    for a, e in zip(actual, gradients(expected, oracle.tensors()), strict=True):
        size = e.abs().max()
        assert_close(a / size, e / size, 1e-4)


# ---- half precision


@pytest.mark.parametrize("form", [chunk_linear_attention, linear_attention])
@pytest.mark.parametrize("causal", [True, False])
def test_float16_sums_do_not_overflow(form, causal):
    """Sums over 20,000 keys pass 65,504; their ratio is a mean of the values."""
    q, k = ((3 * torch.randn(1, 20_000, 1, 64)).half() for _ in range(2))
    v = torch.full((1, 20_000, 1, 2), 3.0).half()
    out, state = form(q, k, v, feature_map="elu1", causal=causal, output_final_state=True)
    assert_close(out, v, 2**-10)
    assert state.nu.isfinite().all()
    assert state.mu.isfinite().all()


def plain_attention(q, k, v, causal):
    """What one would write in PyTorch without further thought: products and sums in the input's dtype."""
    phi_q, phi_k = ((torch.nn.functional.elu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1) for x in (q, k))
    scores = torch.einsum("bihf,bjhf->bhij", phi_q.to(q.dtype), phi_k.to(k.dtype))
    if causal:
        scores = scores.tril()
    return torch.einsum("bhij,bjhe->bihe", scores / scores.sum(-1, keepdim=True), v)


@each_form
@each_half
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_error_is_at_most_twice_the_plain_one(form, dtype, causal):
    problem = random_problem(B=1, T=300, Hq=2, Hk=2, D=16, E=16, causal=causal, dtype=dtype)

    def results(leaves, attention):
        out = attention(leaves)
        return [out, *gradients(out, leaves.tensors())]

    plain = lambda p: plain_attention(p.q, p.k, p.v, causal)  # noqa: E731
    double = replace(problem, q=problem.q.double(), k=problem.k.double(), v=problem.v.double())
    truth = results(double.leaves(), plain)
    for what, exact, usual, ours in zip(
        ("out", "dq", "dk", "dv"),
        truth,
        results(problem.leaves(), plain),
        results(problem.leaves(), lambda p: p.run(form, "elu1")[0]),
        strict=True,
    ):
        for norm in (lambda x: x.pow(2).mean().sqrt(), lambda x: x.abs().max()):
            allowed, error = 2 * norm(usual.double() - exact), norm(ours.double() - exact)
            assert error <= allowed, f"{what}: error {error:.3g}, twice that of plain PyTorch is {allowed:.3g}"


@each_form
@each_half
def test_state_is_float32_for_half_precision(form, dtype):
    problem = random_problem(B=1, T=200, Hq=2, Hk=1, D=8, mask="holes", dtype=dtype)
    out, mu, nu = problem.run(form, "elu1")
    assert out.dtype == dtype
    assert mu.dtype == nu.dtype == torch.float32
    expected = problem.solve("elu1")
    assert_close(nu, expected[2], 1e-5)  # sums of float32 features
    assert_close(mu, expected[1], 2**-8 if dtype == torch.bfloat16 else 2**-11)  # products may be in the input's dtype
    leaves = problem.leaves()
    out, mu, nu = leaves.run(form, "elu1")
    assert [g.dtype for g in gradients((out, mu, nu), leaves.tensors())] == [dtype] * 3


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_state_has_the_accumulation_dtype(form, dtype):
    out, mu, nu = random_problem(dtype=dtype).run(form, "elu1")
    assert out.dtype == mu.dtype == nu.dtype == dtype


@each_form
def test_values_of_another_dtype(form):
    """out follows v; the state follows the keys' accumulation dtype."""
    problem = random_problem(dtype=torch.float32)
    out, state = form(problem.q, problem.k, problem.v.bfloat16(), feature_map="elu1", output_final_state=True)
    assert out.dtype == torch.bfloat16
    assert state.mu.dtype == state.nu.dtype == torch.float32


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["elu1", "hedgehog"])
def test_autocast_changes_nothing(form, dtype, name):
    """The op does its own accumulation: autocast may neither round its state nor its float32 products."""
    feature_map = make_feature_map(name, 8, 4, 2)
    problem = random_problem(T=130, Hq=4, Hk=2, D=8, mask="holes", state=name, dtype=dtype)
    plain, cast = problem.leaves(), problem.leaves()
    expected = plain.run(form, feature_map)
    expected = (*expected, *gradients(expected, [*plain.tensors(), *feature_map.parameters()]))
    with torch.autocast("cpu", torch.bfloat16):
        actual = cast.run(form, feature_map)
    actual = (*actual, *gradients(actual, [*cast.tensors(), *feature_map.parameters()]))
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert actual[1].dtype == actual[2].dtype == torch.float32
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, 1e-5)


# ---- strides


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
def test_strided_and_expanded_inputs(form):
    problem = random_problem(B=3, T=13, Hq=4, Hk=2, D=4, E=6, mask="holes", state="elu1")

    def transposed(x):  # [B,T,H,D] over memory laid out as [B,H,T,D]
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def sliced(x):  # every other element of a larger buffer
        buffer = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
        buffer[..., ::2] = x
        return buffer[..., ::2]

    oracle = problem.leaves()
    expected = oracle.solve("elu1")
    expected_grads = gradients(expected, oracle.tensors())
    for layout in (transposed, sliced):
        ours = problem.leaves()
        views = replace(
            ours,
            q=layout(ours.q),
            k=layout(ours.k),
            v=layout(ours.v),
            key_mask=transposed(problem.key_mask[..., None, None])[..., 0, 0],
            initial_state=tuple(layout(s) for s in ours.initial_state),
        )
        actual = views.run(form, "elu1", chunk_size=4)
        assert_close(actual, expected, 1e-10)
        assert_close(gradients(actual, ours.tensors()), expected_grads, 1e-10)


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
def test_inputs_expanded_over_the_batch(form):
    one = random_problem(B=1, T=13, Hq=4, Hk=2, mask="holes", state="elu1")
    ours, oracle = one.leaves(), one.leaves()

    def over_batch(p):
        wide = lambda x: x.expand(3, *x.shape[1:])  # noqa: E731
        state = tuple(wide(s) for s in p.initial_state)
        return replace(p, q=wide(p.q), k=wide(p.k), v=wide(p.v), key_mask=wide(p.key_mask), initial_state=state)

    actual, expected = over_batch(ours).run(form, "elu1", chunk_size=4), over_batch(oracle).solve("elu1")
    assert_close(actual, expected, 1e-10)
    assert_close(gradients(actual, ours.tensors()), gradients(expected, oracle.tensors()), 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_expanded_gradient(form):
    """sum() hands the backward pass a gradient of stride 0."""
    ours = random_problem(T=13, Hq=4, Hk=2).leaves()
    oracle = ours.leaves()
    ours.run(form, "elu1", chunk_size=4)[0].sum().backward()
    oracle.solve("elu1")[0].sum().backward()
    assert_close([x.grad for x in ours.tensors()], [x.grad for x in oracle.tensors()], 1e-10)


# ---- autograd's books


@each_form
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "mu", "nu", "qk", "weight", ""])
def test_only_what_asks_gets_a_gradient(form, causal, wanted):
    problem = random_problem(T=9, Hq=4, Hk=2, mask="holes", state="hedgehog", causal=causal)
    feature_map = make_feature_map("hedgehog", 3, 4, 2).double().requires_grad_(False)
    leaves = dict(zip(("q", "k", "v", "mu", "nu"), problem.tensors(), strict=True))
    leaves |= {"q_weight": feature_map.q_weight, "k_weight": feature_map.k_weight}
    names = {"qk": ["q", "k"], "weight": ["q_weight", "k_weight"]}.get(wanted, [wanted] if wanted else [])
    for name in names:
        leaves[name].requires_grad_()

    out, mu, nu = problem.run(form, feature_map, chunk_size=4)
    keys = {"k", "k_weight"} & set(names)
    assert out.requires_grad == bool(names)
    # one node may hand back out, mu and nu together: the states may ask in vain, never miss
    assert mu.requires_grad >= bool(keys or {"v", "mu"} & set(names))
    assert nu.requires_grad >= bool(keys or "nu" in names)
    if names:
        (out.sum() + mu.pow(2).sum() + nu.pow(2).sum()).backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in names), name


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(form, mode):
    problem = random_problem(T=9, Hq=4, Hk=2, mask="holes", state="elu1").leaves()
    expected = problem.run(form, "elu1", chunk_size=4)
    with mode():
        actual = problem.run(form, "elu1", chunk_size=4)
    assert not any(x.requires_grad for x in actual)
    assert_close(actual, expected, 1e-10)


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_are_left_alone(form, T, grad, dtype):
    problem = random_problem(T=T, Hq=4, Hk=2, mask="holes", state="elu1", dtype=dtype)
    if grad:
        problem = problem.leaves()
    watched = [*problem.tensors(), problem.key_mask]
    before = [(x.detach().clone(), x._version) for x in watched]
    outputs = problem.run(form, "elu1", chunk_size=4)
    if grad:
        gradients(outputs, problem.tensors())
    for x, (copy, version) in zip(watched, before, strict=True):
        assert torch.equal(x, copy)
        assert x._version == version
    # and the state that comes back is not the one that went in
    with torch.no_grad():
        for x in outputs[1:]:
            x.fill_(-1)
    for x, (copy, _) in zip(watched, before, strict=True):
        assert torch.equal(x, copy)


@each_form
def test_backward_twice_from_one_graph(form):
    problem = random_problem(T=9, Hq=4, Hk=2, mask="holes", state="elu1").leaves()
    out, _, _ = problem.run(form, "elu1", chunk_size=4)
    first = torch.autograd.grad(out.sum(), problem.tensors(), retain_graph=True)
    second = torch.autograd.grad(out.sum(), problem.tensors())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
