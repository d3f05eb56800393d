"""Sliding window and linear attention: every form against the float64 oracle, outputs, states and gradients."""

import math
from dataclasses import replace

import pytest
import torch
from reference import assert_close, gradients, random_problem
from sliding_reference import sliding_attention
from torch.autograd import gradcheck, gradgradcheck

from hf_linattn.ops import (
    SlidingAttentionState,
    chunk_sliding_attention,
    linear_attention,
    make_feature_map,
    parallel_sliding_attention,
    recurrent_sliding_attention,
    sliding_attention_weights,
    sliding_linear_attention,
)
from hf_linattn.ops.sliding.chunk import WindowSums

FORMS = {
    "parallel": (parallel_sliding_attention, {}),
    "chunk": (chunk_sliding_attention, {}),
    "chunk3": (chunk_sliding_attention, {"chunk_size": 3}),
    "recurrent": (recurrent_sliding_attention, {}),
    "auto": (sliding_linear_attention, {}),
}
each_form = pytest.mark.parametrize("form", FORMS)
each_mask = pytest.mark.parametrize("mask", [None, "left", "right", "holes", "first"])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MIX = torch.tensor([0.7, -1.1, 0.3, -0.2], dtype=torch.float64)


def call(form, problem, name="elu1", window=3, mix=MIX, **changes):
    """(out, mu, nu, keys, values, count) of a form."""
    function, options = FORMS[form]
    keywords = {"key_mask": problem.key_mask, "cu_seqlens": problem.cu_seqlens, "output_final_state": True}
    mix = MIX[: problem.q.shape[2]] if mix is MIX else mix
    keywords |= {"feature_map": name, "window": window, "mix": mix, **options, **changes}
    out, state = function(problem.q, problem.k, problem.v, **keywords)
    return (out, *(state or ()))


def solve(problem, name="elu1", window=3, mix=MIX, feature_map=None):
    given = {"key_mask": problem.key_mask, "cu_seqlens": problem.cu_seqlens, "feature_map": feature_map}
    mix = MIX[: problem.q.shape[2]] if mix is MIX else mix
    return sliding_attention(problem.q, problem.k, problem.v, name, window, mix=mix, **given)


# ---- outputs and states


@each_form
@each_mask
@pytest.mark.parametrize("window", [1, 2, 5, 11, 40])
def test_the_definition(form, mask, window):
    """Windows of a key, a few, as many as there are tokens, and more; GQA, any padding, a row without a token."""
    for dtype, tolerance in TOLERANCE.items():
        problem = random_problem(B=3, T=11, Hq=4, Hk=2, D=3, E=5, mask=mask, dtype=dtype, seed=window)
        assert_close(call(form, problem, window=window), solve(problem, window=window), tolerance, f"{dtype}")


@each_form
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 150])
def test_lengths_around_chunks(form, T):
    problem = random_problem(B=1, T=T, Hq=2, D=3, E=2, mask="holes" if T % 2 else None, seed=T)
    assert_close(call(form, problem, window=20), solve(problem, window=20), 1e-10)


@each_form
@pytest.mark.parametrize("name", ["relu", "exp", "taylor2", "softmax", "dpfp", "hedgehog"])
def test_every_kind_of_map(form, name):
    problem = random_problem(T=9, Hq=4, Hk=2, D=3, E=2, mask="holes")
    feature_map = make_feature_map(name, 3, 4, 2).double()
    with torch.no_grad():
        for weight in feature_map.parameters():
            weight += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    assert_close(call(form, problem, feature_map), solve(problem, name, feature_map=feature_map), 1e-10)


@each_form
@pytest.mark.parametrize("mask", [None, "holes"])
def test_packed_documents(form, mask):
    """Documents of one token, shorter and longer than the window; with and without states."""
    problem = random_problem(B=1, T=14, Hq=2, D=3, E=2, mask=mask, cu_seqlens=[0, 2, 3, 9, 14], seed=3)
    expected = solve(problem)
    assert_close(call(form, problem), expected, 1e-10)
    assert_close(call(form, problem, output_final_state=False), expected[:1], 1e-10)


@each_form
@pytest.mark.parametrize("mask", [None, "holes", "first"])
@pytest.mark.parametrize("cuts", [[4, 5], [1, 1, 7], [2, 3, 4], [8, 1], [1] * 9], ids=str)
def test_calls_that_go_on_from_a_state(form, mask, cuts):
    whole = random_problem(B=3, T=9, Hq=4, Hk=2, D=3, E=2, mask=mask, seed=5)
    outs, state, start = [], None, 0
    for length in cuts:
        part = slice(start, start := start + length)
        key_mask = None if mask is None else whole.key_mask[:, part]
        problem = replace(whole, q=whole.q[:, part], k=whole.k[:, part], v=whole.v[:, part], key_mask=key_mask)
        before = None if state is None else [x.clone() for x in state]
        out, *new = call(form, problem, initial_state=state)
        assert before is None or all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
        state = SlidingAttentionState(*new)
        outs.append(out)
    assert_close((torch.cat(outs, 1), *state), solve(whole), 1e-10)


def test_packed_documents_go_on_from_states():
    bounds = torch.tensor([0, 2, 2, 7])
    first = random_problem(B=1, T=7, Hq=2, D=3, E=2, seed=1)
    second = random_problem(B=1, T=7, Hq=2, D=3, E=2, seed=2)
    for form in FORMS:
        start = SlidingAttentionState(*call(form, replace(first, cu_seqlens=bounds))[1:])
        got = call(form, replace(second, cu_seqlens=bounds), initial_state=start)
        for document, (a, b) in enumerate([(0, 2), (2, 2), (2, 7)]):
            pair = [torch.cat([getattr(x, name)[:, a:b] for x in (first, second)], 1) for name in "qkv"]
            if a == b:
                assert all(not part[document].any() for part in got[1:])
                continue
            out, *state = solve(random_problem(B=1, T=1).__class__(*pair))
            assert_close(got[0][:, a:b], out[:, b - a :], 1e-10, form)
            assert_close([part[document : document + 1] for part in got[1:]], state, 1e-10, form)


@each_form
def test_a_window_of_everything_is_softmax_attention(form):
    problem = random_problem(T=12, Hq=4, Hk=2, D=4, E=3)
    heads = [x.transpose(1, 2) for x in (problem.q, problem.k, problem.v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    assert_close(call(form, problem, window=12)[0], expected.transpose(1, 2), 1e-10)


@each_form
def test_a_window_that_does_not_count_is_linear_attention_of_older_keys(form):
    """With e^w = 0 what is left is linear attention over the keys that have left the window."""
    problem = random_problem(T=12, Hq=2, Hk=1, D=3, E=3)
    out = call(form, problem, mix=torch.full((2,), -800.0, dtype=torch.float64))[0]
    expected, _ = linear_attention(problem.q[:, 3:], problem.k[:, :-3], problem.v[:, :-3], feature_map="elu1")
    assert_close(out[:, 3:], expected, 1e-10)
    assert not out[:, :3].any()


@each_form
@each_mask
def test_padding_leaves_the_run_without_it_to_the_bit_in_windows_and_closely_elsewhere(form, mask):
    problem = random_problem(B=3, T=11, Hq=2, D=3, E=2, mask=mask or "holes", seed=7)
    out, *state = call(form, problem)
    for row in range(3):
        real = problem.key_mask[row]
        if not real.any():
            assert not out[row].any()
            continue
        alone = replace(problem, **{name: getattr(problem, name)[row : row + 1, real] for name in "qkv"}, key_mask=None)
        expected, *alone_state = call(form, alone)
        assert_close(out[row : row + 1, real], expected, 1e-10)
        assert_close([part[row : row + 1] for part in state[:2]], alone_state[:2], 1e-10)
        for part, expected in zip(state[2:], alone_state[2:], strict=True):
            assert torch.equal(part[row : row + 1], expected)


@each_form
def test_a_mask_of_ones_is_no_mask(form):
    problem = random_problem(T=11, Hq=2, D=3, E=2, dtype=torch.float32)
    masked = replace(problem, key_mask=torch.ones(2, 11, dtype=torch.long))
    for actual, expected in zip(call(form, masked, mix=None), call(form, problem, mix=None), strict=True):
        assert torch.equal(actual, expected)


@each_form
def test_what_stands_under_a_mask_does_not_leak(form):
    """NaN in q, k and v of masked tokens: the same outputs, states and gradients."""
    clean = random_problem(B=2, T=10, Hq=2, D=3, E=2, mask="holes", seed=2)
    hidden = ~clean.key_mask[..., None, None]
    dirty = replace(clean, **{name: getattr(clean, name).masked_fill(hidden, math.nan) for name in "qkv"})
    results = []
    for problem in (clean.leaves(), dirty.leaves()):
        outputs = call(form, problem)
        results.append([*outputs, *gradients(outputs[:5], problem.tensors())])
    assert all(x.isfinite().all() for x in results[1])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(actual, expected)


@each_form
def test_half_precision(form):
    problem = random_problem(T=40, Hq=2, D=8, E=8, dtype=torch.bfloat16)
    out, mu, nu, keys, values, _ = call(form, problem, window=6, mix=MIX[:2].float())
    assert out.dtype == keys.dtype == values.dtype == torch.bfloat16
    assert mu.dtype == nu.dtype == torch.float32
    expected = solve(problem, window=6, mix=MIX[:2].float())
    assert_close(out, expected[0], 1e-2)  # eight bits of mantissa, rounded once
    assert_close((mu, nu), expected[1:3], 1e-5)


def test_large_scores_do_not_overflow():
    problem = random_problem(T=9, Hq=2, D=3, E=2, dtype=torch.float32)
    problem = replace(problem, q=300 * problem.q, k=300 * problem.k)
    for form in FORMS:
        assert_close(call(form, problem, mix=None)[0], solve(problem, mix=None)[0], 1e-5, form)


# ---- gradients


@each_form
@pytest.mark.parametrize("mask, bounds", [(None, None), ("holes", None), ("left", None), ("holes", [0, 3, 4, 11])])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_gradients_are_the_oracles(form, mask, bounds, window):
    """Through the maximum too: with respect to q, k, v, mix and the weights of the map."""
    name = "hedgehog"
    problem = random_problem(B=1 if bounds else 2, T=11, Hq=4, Hk=2, D=3, E=2, mask=mask, cu_seqlens=bounds)
    results = []
    for run in (lambda *a: call(form, *a), lambda p, m, w, mix: solve(p, name, w, mix, m)):
        feature_map = make_feature_map(name, 3, 4, 2).double()
        mix, fresh = MIX.clone().requires_grad_(), problem.leaves()
        outputs = run(fresh, feature_map, window, mix)
        results.append(gradients(outputs[:5], [*fresh.tensors(), mix, *feature_map.parameters()]))
    assert_close(*results, 1e-10)


@each_form
def test_gradients_at_a_tie_are_shared(form):
    """Equal keys share the gradient of the maximum."""
    problem = random_problem(B=1, T=6, Hq=1, D=2, E=2)
    problem = replace(problem, k=problem.k[:, :2].repeat(1, 3, 1, 1))
    results = []
    for run in (lambda p: call(form, p, window=4), lambda p: solve(p, window=4)):
        fresh = problem.leaves()
        results.append(gradients(run(fresh)[0], fresh.tensors()))
    assert_close(*results, 1e-10)


@each_form
def test_finite_differences_with_a_state(form):
    before = random_problem(B=2, T=5, Hq=2, D=2, E=1, mask="holes", seed=1)
    problem = random_problem(B=2, T=4, Hq=2, D=2, E=1, mask="holes", seed=2)
    *floats, count = call("parallel", before)[1:]
    mix = MIX[:2].clone().requires_grad_()

    def f(q, k, v, mix, *state):
        moved = replace(problem, q=q, k=k, v=v)
        return call(form, moved, mix=mix, initial_state=SlidingAttentionState(*state, count))[:5]

    leaves = [x.detach().clone().requires_grad_() for x in (*problem.tensors(), mix, *floats)]
    assert gradcheck(f, leaves)


def test_second_derivatives():
    """In the parallel form; the chunk form says that it has none."""
    problem = random_problem(B=1, T=4, Hq=1, D=2, E=1).leaves()

    def f(q, k, v):
        return call("parallel", replace(problem, q=q, k=k, v=v), "exp", window=2)[0]

    assert gradgradcheck(f, problem.tensors())
    out = call("chunk", problem)[0]
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), problem.tensors(), create_graph=True)


def test_no_matrix_of_all_pairs_is_kept():
    """Whatever is saved for the backward is linear in T, and no float tensor of the forward is quadratic."""
    saved = {}
    for T in (256, 512):
        problem = random_problem(B=1, T=T, Hq=2, D=4, E=4, dtype=torch.float32).leaves()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            call("chunk", problem, window=16, mix=None)
        saved[T] = sum(sizes)
        assert max(sizes) <= (T + 16) * 2 * 5
    assert saved[512] < 2.1 * saved[256]


def test_blocks_are_differentiated_one_by_one(monkeypatch):
    """The backward holds the weights of a block, not of all."""
    blocks = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda sums, *rest: blocks.append(sums.shape[1]) or real(sums, *rest))
    q = torch.randn(1, 40_000, 1, 2, requires_grad=True)
    sliding_linear_attention(q, q, q, feature_map="elu1", window=8)[0].sum().backward()
    assert sum(blocks) == 40_000
    assert max(blocks) <= 4096
    assert issubclass(WindowSums, torch.autograd.Function)


# ---- weights


@each_mask
def test_weights_give_the_output(mask):
    problem = random_problem(B=3, T=9, Hq=4, Hk=2, D=3, E=2, mask=mask)
    options = {"feature_map": "elu1", "window": 3, "mix": MIX}
    weights = sliding_attention_weights(problem.q, problem.k, key_mask=problem.key_mask, **options)
    values = problem.v if mask is None else problem.v.masked_fill(~problem.key_mask[..., None, None], 0)
    out = torch.einsum("bhts,bshe->bthe", weights, values.repeat_interleave(2, 2))
    assert_close(out, solve(problem)[0], 1e-10)


def test_weights_of_documents_and_of_a_state():
    whole = random_problem(B=1, T=9, Hq=2, D=3, E=2)
    options = {"feature_map": "elu1", "window": 3, "mix": MIX[:2]}
    all_weights = sliding_attention_weights(whole.q, whole.k, **options)
    state = SlidingAttentionState(
        *call("chunk", replace(whole, q=whole.q[:, :5], k=whole.k[:, :5], v=whole.v[:, :5]))[1:]
    )
    later = sliding_attention_weights(whole.q[:, 5:], whole.k[:, 5:], initial_state=state, **options)
    assert_close(later, all_weights[:, :, 5:, 5:], 1e-10)
    packed = sliding_attention_weights(whole.q, whole.k, cu_seqlens=torch.tensor([0, 4, 9]), **options)
    assert not packed[:, :, 4:, :4].any()
    assert_close(packed[:, :, :4, :4], all_weights[:, :, :4, :4], 1e-10)
    assert_close(packed[:, :, 4:, 4:], sliding_attention_weights(whole.q[:, 4:], whole.k[:, 4:], **options), 1e-10)


# ---- graphs


def test_one_graph_for_every_length():
    def attend(q, k, v, key_mask, state):
        return sliding_linear_attention(
            q, k, v, feature_map=feature_map, window=3, key_mask=key_mask, initial_state=state, output_final_state=True
        )

    torch._dynamo.reset()
    graphs, feature_map = [], make_feature_map("elu1", 3)
    compiled = torch.compile(
        attend, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    state = SlidingAttentionState(*call("parallel", random_problem(B=2, T=4, Hq=4, Hk=2, D=3, E=5, seed=9))[1:])
    for T in (70, 131, 5):
        problem = random_problem(B=2, T=T, Hq=4, Hk=2, D=3, E=5, mask="holes")
        out, new = compiled(problem.q, problem.k, problem.v, problem.key_mask, state)
        expected = call("parallel", problem, mix=None, initial_state=state)
        assert_close((out, *new), expected, 1e-10)
    assert len(graphs) == 1


# ---- errors


SHORT = SlidingAttentionState(*map(torch.zeros, ((2, 1, 3, 4), (2, 1, 3), (2, 5, 1, 3), (2, 5, 1, 4), (2,))))
ERRORS = {
    "no map": ({"feature_map": None}, "feature_map=None"),
    "signed map": ({"feature_map": "identity"}, "Identity is signed"),
    "map of positions": ({"feature_map": make_feature_map("cosformer", 3)}, "depends on positions"),
    "window": ({"window": 0}, "window=0 must be"),
    "half a window": ({"window": 2.5}, "window=2.5 must be"),
    "mix": ({"mix": torch.zeros(3)}, r"mix has shape \[3\]; it must be \[Hq\] = \[2\]"),
    "backend": ({"backend": "triton"}, r"backend='triton' has no .*\['auto', 'torch'\]"),
    "mask": ({"key_mask": torch.full((2, 7), 0.5)}, "key_mask .* holds 0.5"),
    "state": ({"initial_state": SHORT}, r"keys \[2, 5, 1, 3\]; they must be \[rows, W, Hk, ...\] = \[2, 3, 1, 3\]"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_teach(case):
    changes, words = ERRORS[case]
    problem = random_problem(D=3, E=4)
    with pytest.raises(ValueError, match=words) as error:
        call("auto", problem, **{"mix": None, **changes})
    assert "\n" not in str(error.value)
