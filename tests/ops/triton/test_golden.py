"""The stored cases of data/linear_attention.json, from explicit float64 loops, through the kernels."""

from dataclasses import replace

import pytest
import torch
from reference import Problem, assert_close, golden_cases

from hf_linattn.ops import make_feature_map
from hf_linattn.ops.triton import triton_linear_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = golden_cases()


def tensor(case, key):
    return torch.tensor(case[key], dtype=torch.float32, device=DEVICE)[None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", sorted({case["feature_map"] for case in CASES}))
def test_stored_cases(name, causal):
    for i, case in enumerate(CASES):
        if (case["feature_map"], case["causal"]) != (name, causal):
            continue
        start = case.get("resumed_at", 0)
        q, k, v = (tensor(case, key)[:, start:].requires_grad_() for key in "qkv")
        state = (tensor(case, "mu0"), tensor(case, "nu0")) if "mu0" in case else None
        bounds = torch.tensor(case["cu_seqlens"]) if "cu_seqlens" in case else None
        mask = torch.tensor(case["mask"][start:], dtype=torch.bool, device=DEVICE)[None]
        feature_map = name
        if name == "hedgehog_identity":
            feature_map = make_feature_map("hedgehog", q.shape[3], q.shape[2], k.shape[2]).to(DEVICE)
        made = Problem(q, k, v, mask, state, bounds, causal)
        out, mu, nu = made.run(triton_linear_attention, feature_map, chunk_size=16)
        real = mask[0].cpu()
        expected = {key: torch.tensor(case[key], dtype=torch.float64) for key in ("out", "mu", "nu") if key in case}
        assert_close(out[0].cpu()[real], expected["out"][start:][real], 1e-5, f"case {i}: out")
        for key, actual in (("mu", mu), ("nu", nu)):
            if key in expected:
                assert_close(actual[0].cpu(), expected[key], 1e-5, f"case {i}: {key}")
        if "grad_out" in case:
            out.backward(tensor(case, "grad_out"))
            # a gradient is a difference of terms of size v / denominator: that is what its rounding is relative to
            ones = replace(made, v=torch.ones_like(v), initial_state=None, normalize=False)
            denominators = ones.solve(name.removesuffix("_identity"))[0].detach()
            tolerance = 1e-5 / min(1, denominators[denominators > 0].min().item())
            for key, x in zip("qkv", (q, k, v)):
                expected_grad = torch.tensor(case["d" + key], dtype=torch.float64)
                assert_close(x.grad[0].cpu(), expected_grad, tolerance, f"case {i}: d{key}")
