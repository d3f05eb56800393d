"""The stored cases of data/linear_attention.json, from explicit float64 loops, through every form."""

import itertools
from dataclasses import replace

import pytest
import torch
from reference import Problem, assert_close, golden_cases

from hf_linattn.ops import (
    chunk_linear_attention,
    linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)

CASES = golden_cases()
MAPS = sorted({case["feature_map"] for case in CASES})
FORMS = {
    "parallel": (parallel_linear_attention, {}),
    "chunk": (chunk_linear_attention, {}),
    "chunk2": (chunk_linear_attention, {"chunk_size": 2}),
    "chunk4": (chunk_linear_attention, {"chunk_size": 4}),
    "recurrent": (recurrent_linear_attention, {}),
    "auto": (linear_attention, {}),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def load(case, dtype):
    """The case's problem (from the row it resumes at), its feature map, and that row."""
    start = case.get("resumed_at", 0)
    q, k, v = (torch.tensor(case[name], dtype=dtype)[None, start:].requires_grad_() for name in "qkv")
    state = tuple(torch.tensor(case[s], dtype=dtype)[None] for s in ("mu0", "nu0")) if "mu0" in case else None
    bounds = torch.tensor(case["cu_seqlens"]) if "cu_seqlens" in case else None
    mask = torch.tensor(case["mask"][start:], dtype=torch.bool)[None]
    feature_map = case["feature_map"]
    if feature_map == "hedgehog_identity":
        feature_map = make_feature_map("hedgehog", q.shape[3], q.shape[2], k.shape[2]).to(dtype)
    return Problem(q, k, v, mask, state, bounds, case["causal"]), feature_map, start


def smallest_denominator(problem, name):
    """A gradient is a difference of terms of size v / denominator: that is what its rounding is relative to."""
    ones = replace(problem, v=torch.ones_like(problem.v), initial_state=None, normalize=False)
    denominators = ones.solve(name)[0].detach()
    return denominators[denominators > 0].min().item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MAPS)
def test_stored_cases(name, form, dtype):
    function, options = FORMS[form]
    for i, case in enumerate(CASES):
        if case["feature_map"] != name:
            continue
        problem, feature_map, start = load(case, dtype)
        out, mu, nu = problem.run(function, feature_map, **options)

        real = problem.key_mask[0]
        expected = {key: torch.tensor(case[key], dtype=torch.float64) for key in ("out", "mu", "nu") if key in case}
        assert_close(out[0, real], expected["out"][start:][real], TOLERANCE[dtype], f"case {i}: out")
        for key, actual in (("mu", mu), ("nu", nu)):
            if key in expected:
                assert_close(actual[0], expected[key], TOLERANCE[dtype], f"case {i}: {key}")

        if "grad_out" in case:
            out.backward(torch.tensor(case["grad_out"], dtype=dtype)[None])
            tolerance = 1e-6  # the stored ones are central differences, good to 1e-7
            if dtype == torch.float32:
                tolerance = TOLERANCE[dtype] / min(1, smallest_denominator(problem, name.removesuffix("_identity")))
            for key in "qkv":
                grad = torch.tensor(case["d" + key], dtype=torch.float64)
                assert_close(getattr(problem, key).grad[0], grad, tolerance, f"case {i}: d{key}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in CASES if "cu_seqlens" in case], ids=lambda c: c["feature_map"])
def test_packed_case_state_is_that_of_each_document(case, form):
    problem, feature_map, _ = load(case, torch.float64)
    function, options = FORMS[form]
    _, mu, nu = problem.run(function, feature_map, **options)
    for n, (start, end) in enumerate(itertools.pairwise(case["cu_seqlens"])):
        document = Problem(*(x[:, start:end] for x in (problem.q, problem.k, problem.v)))
        _, mu_n, nu_n = document.solve(case["feature_map"])
        assert_close((mu[n : n + 1], nu[n : n + 1]), (mu_n, nu_n), 1e-10)
