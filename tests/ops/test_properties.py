"""What must hold for any shape, mask and split: drawn problems, every form."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import LEARNABLE, NONNEGATIVE, PARAMETER_FREE, PHI, Problem, assert_close, gradients, random_problem

from hf_linattn.ops import (
    LinearAttentionState,
    chunk_linear_attention,
    linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)

FORMS = (parallel_linear_attention, chunk_linear_attention, recurrent_linear_attention)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MASKS = st.sampled_from([None, "left", "right", "holes", "first"])
each_form = pytest.mark.parametrize("form", FORMS)


def examples(n):
    return settings(max_examples=n)


def build(name, problem, seed=0, **options):
    """An instance of the map with weights drawn about their start, in the problem's dtype."""
    feature_map = make_feature_map(name, problem.q.shape[3], problem.q.shape[2], problem.k.shape[2], **options)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in feature_map.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=g)
    return feature_map.to(problem.q.dtype)


@st.composite
def bounds(draw, T):
    """cu_seqlens of documents that fill T rows, some of them empty."""
    return sorted([0, *draw(st.lists(st.integers(0, T), max_size=5)), T])


@st.composite
def problems(draw, names=tuple(PHI), masks=MASKS, dtypes=(torch.float64,), packed=False, causal=None):
    """(problem, map name, map, chunk size)"""
    name = draw(st.sampled_from(names))
    causal = draw(st.booleans()) if causal is None else causal
    T, Hk = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    problem = random_problem(
        B=1 if packed else draw(st.integers(1, 3)),
        T=T,
        S=T if causal or packed else draw(st.integers(1, 24)),
        Hk=Hk,
        Hq=Hk * draw(st.integers(1, 3)),
        D=draw(st.integers(1, 5)),
        E=draw(st.integers(1, 5)),
        mask=draw(masks),
        state=name if draw(st.booleans()) else None,
        cu_seqlens=draw(bounds(T)) if packed else None,
        causal=causal,
        normalize=name in NONNEGATIVE and draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 999)),
    )
    options = {"query_heads": draw(st.sampled_from(["key", "query"]))} if name in LEARNABLE else {}
    chunk_size = draw(st.one_of(st.none(), st.integers(1, 26)))
    return problem, name, build(name, problem, **options), chunk_size


def run_with_gradients(problem, form, feature_map, **options):
    """[out, mu, nu] and the gradients of everything, of a loss on all three."""
    problem = problem.leaves()
    outputs = problem.run(form, feature_map, **options)
    parameters = list(feature_map.parameters()) if isinstance(feature_map, torch.nn.Module) else []
    return list(outputs), gradients(outputs, [*problem.tensors(), *parameters])


def assert_same_bits(actual, expected):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None and e is None) or torch.equal(a, e), f"entry {i} differs"


# ---- one function, three forms


@each_form
@examples(25)
@given(drawn=problems(dtypes=tuple(TOLERANCE)))
def test_form_equals_the_oracle(form, drawn):
    problem, name, feature_map, chunk_size = drawn
    actual = problem.run(form, feature_map, chunk_size=chunk_size)
    assert_close(actual, problem.solve(name, feature_map), TOLERANCE[problem.q.dtype])


@each_form
@examples(25)
@given(drawn=problems(packed=True, dtypes=tuple(TOLERANCE)))
def test_form_equals_the_oracle_packed(form, drawn):
    problem, name, feature_map, chunk_size = drawn
    actual = problem.run(form, feature_map, chunk_size=chunk_size)
    assert_close(actual, problem.solve(name, feature_map), TOLERANCE[problem.q.dtype])


@examples(25)
@given(drawn=st.one_of(problems(), problems(packed=True)))
def test_forms_agree_in_gradients(drawn):
    problem, _, feature_map, chunk_size = drawn
    outputs, grads = run_with_gradients(problem, parallel_linear_attention, feature_map)
    for form in (chunk_linear_attention, recurrent_linear_attention):
        others = run_with_gradients(problem, form, feature_map, chunk_size=chunk_size)
        assert_close(others, [outputs, grads], 1e-10)


@examples(20)
@given(drawn=problems(), backend=st.sampled_from(["auto", "torch"]))
def test_dispatcher_equals_the_oracle(drawn, backend):
    problem, name, feature_map, chunk_size = drawn
    actual = problem.run(linear_attention, feature_map, chunk_size=chunk_size, backend=backend)
    assert_close(actual, problem.solve(name, feature_map), 1e-10)


@each_form
@examples(10)
@given(drawn=problems())
def test_final_state_only_on_request(form, drawn):
    problem, _, feature_map, chunk_size = drawn
    state = problem.initial_state and LinearAttentionState(*problem.initial_state)
    keywords = problem.keywords() | {"initial_state": state, "feature_map": feature_map, "chunk_size": chunk_size}
    out, final_state = form(problem.q, problem.k, problem.v, **keywords)
    assert final_state is None
    assert_same_bits([out], problem.run(form, feature_map, chunk_size=chunk_size)[:1])


# ---- cuts and packing


@examples(40)
@given(drawn=problems(causal=True), data=st.data())
def test_any_cut_gives_the_uncut_run(drawn, data):
    problem, _, feature_map, chunk_size = drawn
    expected, expected_grads = run_with_gradients(problem, parallel_linear_attention, feature_map)
    whole = problem.leaves()
    T = problem.q.shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, T), max_size=4)) | {0, T})
    outs, state = [], whole.initial_state
    for start, end in itertools.pairwise(cuts):
        mask = None if problem.key_mask is None else problem.key_mask[:, start:end]
        piece = replace(
            whole, q=whole.q[:, start:end], k=whole.k[:, start:end], v=whole.v[:, start:end], key_mask=mask,
            initial_state=state,
        )  # fmt: skip
        out, *state = piece.run(data.draw(st.sampled_from(FORMS)), feature_map, chunk_size=chunk_size)
        outs.append(out)
    outputs = [torch.cat(outs, dim=1), *state]
    assert_close(outputs, expected, 1e-10)
    grads = gradients(outputs, [*whole.tensors(), *feature_map.parameters()])
    assert_close(grads, expected_grads, 1e-10)


@each_form
@examples(20)
@given(drawn=problems(packed=True))
def test_packed_equals_separate(form, drawn):
    problem, _, feature_map, chunk_size = drawn
    out, mu, nu = problem.run(form, feature_map, chunk_size=chunk_size)
    cuts = problem.cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(cuts)):
        state = problem.initial_state and tuple(s[n : n + 1] for s in problem.initial_state)
        if start == end:  # an empty document hands its state on
            expected = state or (torch.zeros_like(mu[:1]), torch.zeros_like(nu[:1]))
            assert_close((mu[n : n + 1], nu[n : n + 1]), tuple(expected), 0)
            continue
        mask = None if problem.key_mask is None else problem.key_mask[:, start:end]
        alone = replace(
            problem, q=problem.q[:, start:end], k=problem.k[:, start:end], v=problem.v[:, start:end], key_mask=mask,
            cu_seqlens=None, initial_state=state,
        )  # fmt: skip
        expected = alone.run(form, feature_map, chunk_size=chunk_size)
        assert_close((out[:, start:end], mu[n : n + 1], nu[n : n + 1]), expected, 1e-10)


@each_form
@examples(10)
@given(drawn=problems(packed=True), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_bounds_may_be_any_integer(form, drawn, dtype):
    problem, _, feature_map, chunk_size = drawn
    expected = problem.run(form, feature_map, chunk_size=chunk_size)
    problem = replace(problem, cu_seqlens=problem.cu_seqlens.to(dtype))
    assert_same_bits(problem.run(form, feature_map, chunk_size=chunk_size), expected)


# ---- masks


@each_form
@examples(25)
@given(
    drawn=problems(masks=MASKS.filter(bool), dtypes=(torch.float64, torch.float32, torch.bfloat16)),
    poison=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30, -1e30]),
    into=st.sampled_from(["k", "v", "both"]),
)
def test_nothing_under_a_mask_matters(form, drawn, poison, into):
    problem, _, feature_map, chunk_size = drawn
    hidden = ~problem.key_mask[:, :, None, None]
    poisoned = replace(
        problem,
        k=problem.k if into == "v" else problem.k.masked_fill(hidden, poison),
        v=problem.v if into == "k" else problem.v.masked_fill(hidden, poison),
    )
    outputs, grads = run_with_gradients(problem, form, feature_map, chunk_size=chunk_size)
    others, other_grads = run_with_gradients(poisoned, form, feature_map, chunk_size=chunk_size)
    assert_same_bits(others, outputs)
    assert_same_bits(other_grads, grads)
    for grad in (*grads, *other_grads):
        assert grad is None or grad.isfinite().all()
    for grad in other_grads[1:3]:
        assert grad is None or not grad.masked_select(hidden).any()


@each_form
@examples(10)
@given(drawn=problems(names=("exp",), masks=MASKS.filter(bool)), poison=st.sampled_from([float("nan"), float("inf")]))
def test_nothing_under_a_mask_matters_to_ready_features(form, drawn, poison):
    problem, _, _, chunk_size = drawn
    problem = replace(problem, q=problem.q.exp(), k=problem.k.exp())
    hidden = ~problem.key_mask[:, :, None, None]
    poisoned = replace(problem, k=problem.k.masked_fill(hidden, poison), v=problem.v.masked_fill(hidden, poison))
    for actual, expected in zip(
        run_with_gradients(poisoned, form, None, chunk_size=chunk_size),
        run_with_gradients(problem, form, None, chunk_size=chunk_size),
        strict=True,
    ):
        assert_same_bits(actual, expected)


@each_form
@examples(20)
@given(
    drawn=problems(masks=st.none(), dtypes=(torch.float64, torch.float32, torch.bfloat16)),
    dtype=st.sampled_from([torch.bool, torch.int64, torch.int32, torch.uint8]),
)
def test_mask_of_ones_is_no_mask_to_the_bit(form, drawn, dtype):
    problem, _, feature_map, chunk_size = drawn
    masked = replace(problem, key_mask=torch.ones(problem.k.shape[:2], dtype=dtype))
    for actual, expected in zip(
        run_with_gradients(masked, form, feature_map, chunk_size=chunk_size),
        run_with_gradients(problem, form, feature_map, chunk_size=chunk_size),
        strict=True,
    ):
        assert_same_bits(actual, expected)


@each_form
@examples(10)
@given(drawn=problems(masks=MASKS.filter(bool)), dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]))
def test_mask_of_integers_is_the_boolean_mask(form, drawn, dtype):
    problem, _, feature_map, chunk_size = drawn
    expected = problem.run(form, feature_map, chunk_size=chunk_size)
    problem = replace(problem, key_mask=problem.key_mask.to(dtype))
    assert_same_bits(problem.run(form, feature_map, chunk_size=chunk_size), expected)


@each_form
@examples(15)
@given(drawn=problems(causal=True, masks=st.just("left")), pad=st.integers(1, 9))
def test_padding_on_either_side_changes_no_real_row(form, drawn, pad):
    """Padding that carries arbitrary content, before or after: real rows and the state are the unpadded ones."""
    problem, _, feature_map, chunk_size = drawn
    problem = replace(problem, key_mask=None)
    expected = problem.run(form, feature_map, chunk_size=chunk_size)
    B, T = problem.q.shape[:2]
    for start in (pad, 0):
        mask = torch.zeros(B, T + pad, dtype=torch.bool)
        mask[:, start : start + T] = True
        q, k, v = (torch.full((B, T + pad, *x.shape[2:]), 7.0, dtype=x.dtype) for x in problem.tensors()[:3])
        for x, real in ((q, problem.q), (k, problem.k), (v, problem.v)):
            x[:, start : start + T] = real
        wide = replace(problem, q=q, k=k, v=v, key_mask=mask)
        out, mu, nu = wide.run(form, feature_map, chunk_size=chunk_size)
        assert_close((out[:, start : start + T], mu, nu), expected, 1e-10)


# ---- symmetries


@each_form
@examples(15)
@given(drawn=problems(), data=st.data())
def test_batch_rows_do_not_know_each_other(form, drawn, data):
    problem, _, feature_map, chunk_size = drawn
    order = data.draw(st.permutations(range(problem.q.shape[0])))
    order = order[: data.draw(st.integers(1, len(order)))]  # permute, and drop some
    chosen = replace(
        problem,
        q=problem.q[order],
        k=problem.k[order],
        v=problem.v[order],
        key_mask=None if problem.key_mask is None else problem.key_mask[order],
        initial_state=problem.initial_state and tuple(s[order] for s in problem.initial_state),
    )
    expected = [x[order] for x in problem.run(form, feature_map, chunk_size=chunk_size)]
    assert_close(list(chosen.run(form, feature_map, chunk_size=chunk_size)), expected, 1e-12)


@each_form
@examples(15)
@given(drawn=st.one_of(problems(names=PARAMETER_FREE), problems(names=PARAMETER_FREE, packed=True)))
def test_groups_equal_repeated_keys(form, drawn):
    problem, name, _, chunk_size = drawn
    group = problem.q.shape[2] // problem.k.shape[2]
    ours = problem.leaves()
    out, mu, nu = ours.run(form, name, chunk_size=chunk_size)
    repeat = lambda x, dim: x.repeat_interleave(group, dim=dim)  # noqa: E731
    theirs = problem.leaves()
    full = replace(
        theirs,
        k=repeat(theirs.k, 2),
        v=repeat(theirs.v, 2),
        initial_state=theirs.initial_state and tuple(repeat(s, 1) for s in theirs.initial_state),
    )
    full_out, full_mu, full_nu = full.run(form, name, chunk_size=chunk_size)
    assert_close((out, repeat(mu, 1), repeat(nu, 1)), (full_out, full_mu, full_nu), 1e-10)
    assert_close(gradients(out, ours.tensors()), gradients(full_out, theirs.tensors()), 1e-10)


@each_form
@examples(15)
@given(drawn=problems(causal=True), data=st.data())
def test_later_tokens_change_no_earlier_row(form, drawn, data):
    problem, _, feature_map, chunk_size = drawn
    T = problem.q.shape[1]
    at = data.draw(st.integers(0, T))
    changed = [torch.cat([x[:, :at], torch.randn_like(x[:, at:])], dim=1) for x in (problem.q, problem.k, problem.v)]
    other = replace(problem, q=changed[0], k=changed[1], v=changed[2])
    expected = problem.run(form, feature_map, chunk_size=chunk_size)[0][:, :at]
    assert_close(other.run(form, feature_map, chunk_size=chunk_size)[0][:, :at], expected, 1e-12)


# ---- denominators of zero


def relu_features(problem):
    return replace(problem, q=problem.q.relu(), k=problem.k.relu(), initial_state=None, normalize=True)


def assert_rows_are_dead(dead, out, dq):
    assert not out[dead].any()
    assert not dq[dead].any()


@each_form
@examples(15)
@given(drawn=problems(names=("elu1", "hedgehog", "relu"), causal=True, masks=st.sampled_from(["left", "first"])))
def test_no_key_yet(form, drawn):
    problem, name, feature_map, chunk_size = drawn
    problem = replace(problem, initial_state=None, normalize=True)
    outputs, grads = run_with_gradients(problem, form, feature_map, chunk_size=chunk_size)
    assert_rows_are_dead(problem.key_mask.cumsum(1) == 0, outputs[0], grads[0])
    assert all(x is None or x.isfinite().all() for x in (*outputs, *grads))
    empty = ~problem.key_mask.any(1)
    assert not any(summary[empty].any() for summary in outputs[1:])
    assert_close(outputs, problem.solve(name, feature_map), 1e-10)


@each_form
@examples(15)
@given(drawn=problems(names=("relu",), dtypes=(torch.float64, torch.float32, torch.bfloat16)), data=st.data())
def test_dead_queries(form, drawn, data):
    """Rows whose features are all 0: output 0, no gradient to them, none from them."""
    problem, _, _, chunk_size = drawn
    problem = relu_features(problem)
    dead = torch.rand(problem.q.shape[:3], generator=torch.Generator().manual_seed(1)) < 0.5
    problem = replace(problem, q=problem.q.masked_fill(dead[..., None], 0))
    fresh = problem.leaves()
    out, _, _ = fresh.run(form, None, chunk_size=chunk_size)
    grads = gradients(out, [fresh.q, fresh.k, fresh.v])
    assert_rows_are_dead(dead, out, grads[0])
    assert all(g.isfinite().all() for g in grads)
    if problem.q.dtype == torch.float64:
        oracle = problem.leaves()
        expected = gradients(oracle.solve()[0], [oracle.q, oracle.k, oracle.v])
        assert_close(grads, expected, 1e-10)


@each_form
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dead_keys(form, causal, dtype):
    """Live queries, keys whose features are all 0: nothing but zeros, forward and backward."""
    problem = random_problem(T=9, Hq=4, Hk=2, causal=causal, dtype=dtype)
    for name, k in (("relu", -problem.k.abs()), (None, torch.zeros_like(problem.k))):
        dead = replace(problem, q=problem.q.abs(), k=k)
        dead = dead.leaves()
        outputs = dead.run(form, name, chunk_size=4)
        assert not any(x.any() for x in outputs)
        assert not any(g is not None and g.any() for g in gradients(outputs[0], dead.tensors()))


@each_form
def test_dead_start_then_live(form):
    """Keys come alive half way: rows before are 0, rows after are those of the live keys alone."""
    problem = random_problem(T=20, Hq=2, Hk=1)
    k = torch.cat([-problem.k[:, :9].abs(), problem.k[:, 9:].abs()], dim=1)
    problem = replace(problem, q=problem.q.abs(), k=k)
    outputs, grads = run_with_gradients(problem, form, "relu", chunk_size=4)
    assert not outputs[0][:, :9].any()
    assert not grads[0][:, :9].any()
    live = Problem(problem.q[:, 9:], problem.k[:, 9:], problem.v[:, 9:])
    assert_close(outputs[0][:, 9:], live.solve("relu")[0], 1e-10)
    assert all(x.isfinite().all() for x in (*outputs, *grads))
