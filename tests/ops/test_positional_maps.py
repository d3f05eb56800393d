"""cosformer: its formula, the weights it implies, its horizon, and who maps with it."""

import math

import pytest
import torch
from reference import PHI, assert_close, cosformer, gradients
from reference import linear_attention as oracle

from hf_linattn.ops import (
    attention_weights,
    chunk_linear_attention,
    decode_step,
    linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)

B, T, HQ, HK, D, HORIZON = 2, 9, 4, 2, 5, 12
FORMS = (parallel_linear_attention, chunk_linear_attention, recurrent_linear_attention, linear_attention)
POSITIONS = {
    "one row for all": torch.arange(3, 3 + T)[None],
    "a row each": torch.stack([torch.arange(T), torch.tensor([0, 0, 0, 1, 2, 3, 0, 1, 2])]),  # padding, a new document
}


def make(horizon=HORIZON, dim=D):
    return make_feature_map("cosformer", dim, HQ, HK, horizon=horizon)


def inputs(dtype=torch.float64):
    return (torch.randn(B, T, heads, D, dtype=torch.float64).to(dtype) for heads in (HQ, HK))


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_formula_and_gradient(positions):
    feature_map, (q, k) = make(), (x.requires_grad_() for x in inputs())
    actual = feature_map.query(q, positions), feature_map.key(k, positions)
    expected = [cosformer(x, positions.expand(B, T), HORIZON) for x in (q, k)]
    assert actual[0].shape == (B, T, HQ, feature_map.feature_dim(D)) == (B, T, HQ, 2 * D)
    assert_close(actual, expected, 1e-12)
    assert_close(gradients(actual, [q, k]), gradients(expected, [q, k]), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_are_those_of_relu_times_a_cosine_of_the_distance(dtype):
    horizon = 200
    feature_map, places = make(horizon), torch.arange(horizon)
    q, k = torch.randn(2, 1, horizon, 1, D, dtype=dtype)
    weights = torch.einsum("bihf,bjhf->ij", feature_map.query(q, places[None]), feature_map.key(k, places[None]))
    relu = torch.einsum("bihf,bjhf->ij", PHI["relu"](q.double()), PHI["relu"](k.double()))
    distance = (places[:, None] - places).double()
    assert_close(weights, relu * torch.cos(math.pi / 2 * distance / horizon), 1e-12 if dtype == torch.float64 else 1e-6)
    assert weights.min() >= 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
def test_mapped_first_in_every_form(form, causal):
    feature_map, positions = make(), POSITIONS["a row each"]
    (q, k), v = inputs(), torch.randn(B, T, HK, 3, dtype=torch.float64)
    phi = feature_map.query(q, positions), feature_map.key(k, positions)
    out, state = form(*phi, v, causal=causal, output_final_state=True)
    expected = oracle(*(cosformer(x, positions, HORIZON) for x in (q, k)), v, causal=causal)
    assert_close((out, *state), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_it_maps_in_float32(dtype, autocast):
    positions = POSITIONS["a row each"]
    q, _ = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        phi = make().to(dtype).query(q, positions)
    assert phi.dtype == torch.float32
    assert_close(phi, cosformer(q.double(), positions, HORIZON), 1e-6)


@pytest.mark.parametrize("feature_map", ["cosformer", make()], ids=["name", "instance"])
def test_functions_do_not_map_with_it(feature_map):
    q, k = inputs(torch.float32)
    mu, nu = torch.zeros(B, HK, 2 * D, D), torch.zeros(B, HK, 2 * D)
    calls = [
        *(lambda form=form: form(q, k, k, feature_map=feature_map) for form in FORMS),
        lambda: attention_weights(q, k, feature_map=feature_map),
        lambda: decode_step(q[:, :1], k[:, :1], k[:, :1], mu, nu, feature_map=feature_map),
        *(
            lambda backend=backend: linear_attention(q, k, k, feature_map=feature_map, backend=backend)
            for backend in ("native", "triton")
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"Cosformer depends on positions: map first.* feature_map=None$"):
            call()


def test_positions_are_asked_for():
    q, _ = inputs()
    with pytest.raises(ValueError, match=r"depends on positions: pass position_ids.* map q and k first"):
        make().query(q)
    for wrong in (torch.arange(T), torch.zeros(3, T).long(), torch.zeros(B, T - 1).long()):
        with pytest.raises(ValueError, match=r"positions has shape .* must be \[B, T\] = \[2, 9\]"):
            make().query(q, wrong)


@pytest.mark.parametrize("position", [-1, HORIZON])
def test_positions_beyond_the_horizon(position):
    q, _ = inputs()
    positions = POSITIONS["a row each"].clone()
    positions[1, 4] = position
    with pytest.raises(ValueError, match=f"position {position} is outside of the horizon=12 .* from 0 to 11 "):
        make().query(q, positions)


def test_a_graph_clamps_positions_and_weights_stay_nonnegative():
    """Where no position is read: on a device, or here, in a compiled graph."""
    feature_map, q = make(), torch.rand(1, T, 1, D)
    compiled = torch.compile(feature_map.key, fullgraph=True, backend="eager", dynamic=False)
    far = compiled(q, torch.arange(HORIZON - 1, HORIZON - 1 + T)[None])
    assert_close(far, feature_map.key(q, torch.full((1, T), HORIZON - 1)), 1e-6)
    assert torch.einsum("bihf,bjhf->ij", far, feature_map.key(q, torch.arange(T)[None])).min() > 0


def test_horizon_out_of_range():
    with pytest.raises(ValueError, match="horizon=0 must be at least 1"):
        make(0)
