"""favor: what its random matrix is, what its products estimate, and the range of its features."""

import copy
import math

import pytest
import torch
from reference import assert_close

from hf_linattn.ops import (
    chunk_linear_attention,
    linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)


def favor(dim, **options):
    return make_feature_map("favor", dim, **options)


def products(feature_map, q, k):
    """phi(q_n) phi(k_n)^T of rows q, k [N, D]."""
    phi_q, phi_k = (feature_map.key(x[:, None, None])[:, 0, 0] for x in (q, k))
    return (phi_q * phi_k).sum(-1)


@pytest.mark.parametrize("m", [8, 64, 512, 4096])
def test_products_estimate_softmax_weights_within_the_monte_carlo_error(m):
    """One feature is off by exp(|q' + k'|^2) - 1, relatively and squared; m of them by its m-th part, or less."""
    dim, pairs = 8, 60
    q, k = 0.7 * torch.randn(2, pairs, dim, dtype=torch.float64)
    exact = (q * k).sum(-1).div(math.sqrt(dim)).exp()
    seeds = range(max(20, 2048 // m))
    relative = torch.stack([products(favor(dim, num_features=m, seed=s), q, k) / exact - 1 for s in seeds])
    spread = ((q + k).square().sum(-1).div(math.sqrt(dim)).exp() - 1).div(m).sqrt()
    errors = relative / spread
    assert errors.square().mean() < 1.1  # 1 where columns are independent; orthogonal ones do better
    assert errors.square().mean() > 0.05
    mean = errors.mean(0) * math.sqrt(len(seeds))
    assert mean.abs().max() < 4.5
    assert mean.square().mean() < 1.5


def test_columns_are_orthogonal_in_blocks_and_as_long_as_gaussian_ones():
    dim, blocks = 16, 60
    w = favor(dim, num_features=dim * blocks).projection.double()
    for block in w.split(dim, 1):
        cosines = torch.nn.functional.normalize(block, dim=0)
        assert_close(cosines.T @ cosines, torch.eye(dim, dtype=torch.float64), 2**-7)  # rounded to 8 bits
    squares = w.square().sum(0)  # chi squared of 16: mean 16, variance 32
    assert abs(squares.mean() - dim) < 4 * math.sqrt(2 * dim / (dim * blocks))
    assert 0.8 < squares.var() / (2 * dim) < 1.25
    assert abs(w.mean()) < 4 / math.sqrt(w.numel())
    assert abs(w[0] @ w[1]) / (dim * blocks) < 0.15


@pytest.mark.parametrize("m", [1, 4, 5, 11])
def test_any_number_of_features(m):
    feature_map = favor(5, num_features=m)
    assert feature_map.projection.shape == (5, m)
    assert torch.equal(feature_map.projection, favor(5, num_features=15).projection[:, :m])
    assert feature_map.key(torch.randn(1, 2, 3, 5)).shape[-1] == m == feature_map.feature_dim(5, num_features=m)
    assert favor(5).num_features == feature_map.feature_dim(5) == 5


def test_the_matrix_depends_on_the_seed_alone():
    before = torch.get_rng_state()
    first = favor(6, seed=3).projection
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    with torch.device("meta"):  # as a model that is loaded is built
        assert favor(6, seed=3).projection.is_meta
    again = favor(6, seed=3)
    assert torch.equal(again.projection, first)
    assert torch.equal(again.initial_parameters()["projection"], first)
    assert not torch.equal(favor(6, seed=4).projection, first)
    # on every machine: a checkpoint that was written without it still has this one
    drawn = [[0.66796875, 1.328125, -1.0546875], [-0.9453125, 0.94140625, -0.875]]
    assert favor(2, num_features=3).projection.tolist() == drawn


def test_no_cast_and_no_copy_changes_the_matrix():
    feature_map = favor(64, seed=5)
    before = feature_map.projection.clone()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        feature_map = copy.deepcopy(feature_map).to(dtype)
        assert feature_map.projection.dtype == dtype
        assert torch.equal(feature_map.projection.float(), before)
    assert list(feature_map.state_dict()) == ["projection"]


@pytest.mark.parametrize("dim", [1, 8, 32, 64, 128, 256])
def test_float32_holds_features_and_their_sums(dim):
    """Queries and keys from 0 to far beyond, and those that a column of W was made for, a million times over."""
    feature_map = favor(dim)
    directions = torch.cat([torch.randn(8, dim), feature_map.projection.T[:8] / math.sqrt(dim)])
    scales = torch.tensor([0, 0.01, 0.5, 1, 2, 3, 4, 10, 100, 1e4])
    at_columns = feature_map.projection.T * dim**0.25  # x' = w
    x = torch.cat([(scales[:, None, None] * directions).flatten(0, 1), at_columns])
    x = x[:, None, None].requires_grad_()
    phi = feature_map.key(x)
    phi.sum().backward()
    assert x.grad.isfinite().all()
    phi = phi.detach()[:, 0, 0]
    assert phi.min() > 0
    weights = phi @ phi.T
    assert weights.min() > torch.finfo(torch.float32).tiny
    assert (1e6 * weights).isfinite().all()
    # what a vector that does not know W meets is never limited from above
    phi = feature_map.key(torch.randn(500, 1, 1, dim) * torch.logspace(-2, 2, 500)[:, None, None, None])
    assert phi.max() * math.sqrt(dim) < math.exp(31)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_every_form_has_one_scale(dtype, tolerance):
    """Chunks of every size, steps, and a cut with queries and keys ten times as long after it."""
    feature_map = favor(32, num_features=48)
    q, k, v = (torch.randn(2, 150, heads, 32, dtype=dtype) for heads in (4, 2, 2))
    q[:, 100:], k[:, 100:] = 3 * q[:, 100:], 3 * k[:, 100:]
    expected, state = parallel_linear_attention(q, k, v, feature_map=feature_map, output_final_state=True)
    for form, options in (
        (chunk_linear_attention, {"chunk_size": 16}),
        (chunk_linear_attention, {"chunk_size": 64}),
        (recurrent_linear_attention, {}),
        (linear_attention, {}),
    ):
        out, final = form(q, k, v, feature_map=feature_map, output_final_state=True, **options)
        assert_close((out, *final), (expected, *state), tolerance)
    head, carry = linear_attention(*(x[:, :100] for x in (q, k, v)), feature_map=feature_map, output_final_state=True)
    tail, final = linear_attention(
        *(x[:, 100:] for x in (q, k, v)), feature_map=feature_map, initial_state=carry, output_final_state=True
    )
    assert_close((torch.cat([head, tail], 1), *final), (expected, *state), tolerance)


@pytest.mark.parametrize("options", [{"num_features": 0}, {"seed": -1}], ids=str)
def test_options_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be at least"):
        favor(4, **options)
