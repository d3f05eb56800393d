"""Gradients: against finite differences, between the forms, and against the oracle's autograd."""

import itertools

import pytest
import torch
from reference import LEARNABLE, PHI, Problem, assert_close, gradients, random_problem
from torch.autograd import gradcheck, gradgradcheck

from hf_linattn.ops import (
    chunk_linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)

FORMS = (parallel_linear_attention, chunk_linear_attention, recurrent_linear_attention)


def build(name, problem, **kwargs):
    """The named map in the problem's dtype, its weights moved off their start so that no symmetry hides a fault."""
    feature_map = make_feature_map(name, problem.q.shape[3], problem.q.shape[2], problem.k.shape[2], **kwargs)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in feature_map.parameters():
            weight += 0.5 * torch.randn(weight.shape, generator=g)
    return feature_map.to(problem.q.dtype)


def check(problem, form, feature_map=None):
    """gradcheck of out, mu and nu with respect to q, k, v and the initial state, or else to the map's parameters."""
    parameters = list(feature_map.parameters()) if isinstance(feature_map, torch.nn.Module) else []
    problem = problem if parameters else problem.leaves()

    def f(q, k, v, *rest):
        state = rest[:2] if problem.initial_state else None
        moved = Problem(q, k, v, problem.key_mask, state, problem.cu_seqlens, problem.causal, problem.normalize)
        return moved.run(form, feature_map, chunk_size=2)

    assert gradcheck(f, (*problem.tensors(), *parameters))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask, normalize", [(None, True), ("left", True), ("holes", True), ("holes", False)])
@pytest.mark.parametrize("causal", [True, False])
def test_finite_differences(form, causal, mask, normalize):
    check(
        random_problem(T=5, D=2, E=1, Hq=2, Hk=1, mask=mask, state="elu1", causal=causal, normalize=normalize),
        form,
        "elu1",
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", [None, "holes"])
@pytest.mark.parametrize("causal", [True, False])
def test_finite_differences_packed(form, causal, mask):
    bounds = [0, 3, 4, 6]
    check(
        random_problem(1, 6, D=2, E=1, Hk=1, mask=mask, state="elu1", cu_seqlens=bounds, causal=causal),
        form,
        "elu1",
    )


@pytest.mark.parametrize("form", FORMS)
def test_finite_differences_cross(form):
    problem = random_problem(T=3, S=6, D=2, E=2, mask="right", state="elu1", causal=False)
    check(problem, form, "elu1")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
def test_finite_differences_ready_features(form, causal):
    problem = random_problem(T=5, D=2, E=2, state="exp", causal=causal)
    problem = Problem(problem.q.exp(), problem.k.exp(), problem.v, None, problem.initial_state, None, causal)
    check(problem, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"tied": True}, {"query_heads": "key"}, {"query_heads": "query"}], ids=str)
@pytest.mark.parametrize("name", ["hedgehog", "t2r"])
def test_finite_differences_weights(form, name, options):
    problem = random_problem(1, 5, D=2, E=1, Hq=4, Hk=2, mask="holes")
    feature_map = build(name, problem, **options)
    check(problem, form, feature_map)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name, cu_seqlens", [("hedgehog", [0, 2, 5]), ("t2r", None)])
def test_finite_differences_weights_packed_or_not(form, name, cu_seqlens, causal):
    problem = random_problem(1, 5, D=2, E=1, state=name, cu_seqlens=cu_seqlens, causal=causal)
    check(problem, form, build(name, problem))


@pytest.mark.parametrize("name", PHI)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_forms_have_the_same_gradients(name, T):
    """With GQA and an initial state, from a loss on the output and the final state; causal or not, masked or not."""
    normalize = name != "identity"
    for causal, mask in itertools.product([True, False], [None, "left", "holes"]):
        problem = random_problem(
            T=T, Hq=4, Hk=2, D=4, E=3, mask=mask, state=name, causal=causal, normalize=normalize, seed=T
        )
        feature_map = build(name, problem, **({"query_heads": "query"} if name in LEARNABLE else {}))
        results = []
        for form, options in (
            (parallel_linear_attention, {}),
            (chunk_linear_attention, {"chunk_size": 64}),
            (chunk_linear_attention, {"chunk_size": 16}),
            *([(recurrent_linear_attention, {})] if mask == "holes" and T < 200 else []),
        ):
            fresh = problem.leaves()
            outputs = fresh.run(form, feature_map, **options)
            grads = gradients(outputs, [*fresh.tensors(), *feature_map.parameters()])
            results.append([*outputs, *grads])
        for result in results[1:]:
            assert_close(result, results[0], 1e-10, f"{name} T={T} causal={causal} mask={mask}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PHI)
@pytest.mark.parametrize("causal", [True, False])
def test_oracle_has_the_same_gradients(form, name, causal):
    problem = random_problem(
        T=11, Hq=4, Hk=2, D=3, E=2, mask="holes", state=name, causal=causal, normalize=name != "identity"
    )
    feature_map = build(name, problem)
    ours, oracle = problem.leaves(), problem.leaves()
    outputs = ours.run(form, feature_map, chunk_size=4)
    expected = oracle.solve(name, feature_map)
    assert_close(outputs, expected, 1e-10)
    parameters = list(feature_map.parameters())
    assert_close(
        gradients(outputs, [*ours.tensors(), *parameters]),
        gradients(expected, [*oracle.tensors(), *parameters]),
        1e-10,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("used", ["out", "mu", "nu"])
def test_loss_on_one_output_alone(form, causal, used):
    """An output that the loss leaves out hands the backward pass a missing or a zero gradient."""
    problem = random_problem(T=11, Hq=4, Hk=2, mask="holes", state="elu1", causal=causal)
    pick = ["out", "mu", "nu"].index(used)
    ours, oracle = problem.leaves(), problem.leaves()
    actual = gradients(ours.run(form, "elu1", chunk_size=4)[pick], ours.tensors())
    assert_close(actual, gradients(oracle.solve("elu1")[pick], oracle.tensors()), 1e-10, used)


@pytest.mark.parametrize("chunk_size", [8, 16, 3])
@pytest.mark.parametrize("map_name", ["elu1", "taylor2", "hedgehog"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 8]])
@pytest.mark.parametrize("normalize", [True, False])
def test_no_state_in_and_none_out(chunk_size, map_name, cu_seqlens, normalize):
    """A lone chunk then computes no states; what its buffers held before must not show."""
    problem = random_problem(1, 8, D=4, Hq=4, Hk=2, mask="holes", cu_seqlens=cu_seqlens, normalize=normalize)
    feature_map = build(map_name, problem)
    options = {"feature_map": feature_map, "key_mask": problem.key_mask, "normalize": normalize}
    options["cu_seqlens"] = None if cu_seqlens is None else torch.as_tensor(cu_seqlens)
    found = []
    for form, size in ((parallel_linear_attention, None), *[(chunk_linear_attention, chunk_size)] * 2):
        leaves = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        out, state = form(*leaves, **options, chunk_size=size)
        assert state is None
        found.append((out, *gradients(out, [*leaves, *feature_map.parameters()])))
    for each in found[1:]:
        assert_close(each, found[0], 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_crosses_calls(form):
    """Two calls joined by a state: the loss of the second reaches the inputs of the first."""
    problem = random_problem(T=20, Hq=4, Hk=2, mask="holes").leaves()
    expected = gradients(problem.solve("elu1"), problem.tensors())
    state, outs = None, []
    for piece in (slice(0, 7), slice(7, 20)):
        out, state = form(
            problem.q[:, piece], problem.k[:, piece], problem.v[:, piece], feature_map="elu1",
            key_mask=problem.key_mask[:, piece], initial_state=state, output_final_state=True, chunk_size=4,
        )  # fmt: skip
        outs.append(out)
    assert_close(gradients((torch.cat(outs, 1), *state), problem.tensors()), expected, 1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
def test_second_derivative_is_right_or_refused(form, causal):
    problem = random_problem(1, 5, D=2, E=1, causal=causal).leaves()

    def f(q, k, v):
        return Problem(q, k, v, causal=causal).run(form, "elu1", chunk_size=2)[0]

    try:
        right = gradgradcheck(f, problem.tensors(), raise_exception=False)
    except RuntimeError as refusal:
        right = "second derivative" in str(refusal) or "once_differentiable" in str(refusal)
    assert right


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changed", range(3), ids="qkv".__getitem__)
def test_input_changed_before_backward(form, changed):
    """What the backward pass reads again must be what the forward pass read; autograd says so."""
    problem = random_problem(T=20).leaves()
    inputs = [x * 1 for x in problem.tensors()]
    out, _ = form(*inputs, feature_map="elu1", chunk_size=4)
    with torch.no_grad():
        inputs[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
