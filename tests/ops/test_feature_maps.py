"""Feature maps: the formula of each, its precision, its weights, and the registry."""

import math

import pytest
import torch
from reference import LEARNABLE, NONNEGATIVE, PARAMETER_FREE, PHI, assert_close, features, gradients

from hf_linattn.ops import (
    FEATURE_MAPS,
    FeatureMap,
    chunk_linear_attention,
    linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
    register_feature_map,
)

FORMS = (parallel_linear_attention, chunk_linear_attention, recurrent_linear_attention)
B, T, HQ, HK, D = 2, 9, 4, 2, 5
SHAPES = {  # of the weight and the bias of a head
    "hedgehog": ((D, D), None),
    "hedgehog_joint": ((D, D), None),
    "t2r": ((D, D), (D,)),
    "rebased": ((D,), (D,)),
}
SHARING = [{"tied": True}, {"query_heads": "key"}, {"query_heads": "query"}]


def inputs(dtype=torch.float64, scale=1.5):
    return ((scale * torch.randn(B, T, heads, D, dtype=torch.float64)).to(dtype) for heads in (HQ, HK))


def randomise(feature_map):
    with torch.no_grad():
        for weight in feature_map.parameters():
            weight.normal_()
    return feature_map


@pytest.mark.parametrize("name", PHI)
def test_formula_and_gradient(name):
    feature_map = randomise(make_feature_map(name, D, HQ, HK)).double()
    q, k = (x.requires_grad_() for x in inputs())
    actual = feature_map.query(q), feature_map.key(k)
    expected = features(name, q, k, feature_map)
    assert_close(actual, expected, 1e-12)
    leaves = [q, k, *feature_map.parameters()]
    assert_close(gradients(actual, leaves), gradients(expected, leaves), 1e-12)


@pytest.mark.parametrize("options", SHARING, ids=str)
@pytest.mark.parametrize("name", LEARNABLE)
def test_weights_of_each_head(name, options):
    """One matrix a key head, shared by its group of query heads; or one a query head; or the keys' own (tied)."""
    feature_map = randomise(make_feature_map(name, D, HQ, HK, **options)).double()
    q, k = inputs()
    assert_close((feature_map.query(q), feature_map.key(k)), features(name, q, k, feature_map), 1e-12)

    rows = {"q_weight": HQ if options.get("query_heads") == "query" else HK, "k_weight": HK}
    if options.get("tied"):
        rows = {"weight": HK}
    weight_shape, bias_shape = SHAPES[name]
    if bias_shape is not None:
        rows |= {key.replace("weight", "bias"): n for key, n in rows.items()}
    assert {key: tuple(p.shape) for key, p in feature_map.named_parameters()} == {
        key: (n, *(weight_shape if "weight" in key else bias_shape)) for key, n in rows.items()
    }


@pytest.mark.parametrize("name", PHI)
def test_declared_properties(name):
    feature_map = make_feature_map(name, D, HQ, HK)
    assert FEATURE_MAPS[name] is type(feature_map)
    assert feature_map.is_learnable == (name in LEARNABLE) == bool(list(feature_map.parameters()))
    assert feature_map.is_nonnegative == (name in NONNEGATIVE)
    q, k = inputs()
    phi_q, phi_k = randomise(feature_map).double().query(q), feature_map.key(k)
    assert phi_q.shape == (B, T, HQ, FEATURE_MAPS[name].feature_dim(D))
    assert phi_k.shape == (B, T, HK, FEATURE_MAPS[name].feature_dim(D))
    if feature_map.is_nonnegative:  # what the denominator needs of it
        assert torch.einsum("bihf,bjgf->bhgij", phi_q, phi_k).min() >= 0


@pytest.mark.parametrize("weights", ["float32", "input"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PHI)
def test_half_precision_input_is_mapped_in_float32(name, dtype, weights):
    feature_map = randomise(make_feature_map(name, D, HQ, HK))
    if weights == "input":
        feature_map = feature_map.to(dtype)
    q, k = inputs(dtype)
    actual = feature_map.query(q), feature_map.key(k)
    assert all(x.dtype == torch.float32 for x in actual)
    assert_close(actual, features(name, q, k, feature_map), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PHI)
def test_autocast_does_not_reach_the_map(name, dtype):
    feature_map = randomise(make_feature_map(name, D, HQ, HK))
    q, k = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        actual = feature_map.query(q), feature_map.key(k)
    assert all(x.dtype == torch.float32 for x in actual)
    assert_close(actual, features(name, q, k, feature_map), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PHI)
def test_dtype_is_kept(name, dtype):
    feature_map = make_feature_map(name, D, HQ, HK).to(dtype)
    q, k = inputs(dtype)
    assert feature_map.query(q).dtype == feature_map.key(k).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_elu1_does_not_cancel(dtype):
    """elu(x) + 1 rounds to 0 in bfloat16 from x = -6 on; exp(x) does not."""
    x = torch.tensor([-20.0, -10.0, -6.0, -0.5, 0.0, 3.0], dtype=dtype).reshape(1, -1, 1, 1)
    actual = make_feature_map("elu1", 1).key(x).flatten().tolist()
    expected = [math.exp(y) if y <= 0 else y + 1 for y in x.flatten().tolist()]
    assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["elu1", "softmax", "hedgehog", "hedgehog_joint", "relu", "favor"])
def test_large_input_stays_finite(name):
    feature_map = make_feature_map(name, 4)
    x = torch.tensor([1e4, -1e4, 500.0, -500.0]).reshape(1, 1, 1, 4).requires_grad_()
    y = feature_map.key(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, *SHARING], ids=str)
@pytest.mark.parametrize("name", ["hedgehog", "hedgehog_joint"])
def test_hedgehog_starts_from_the_identity(name, options):
    feature_map = make_feature_map(name, D, HQ, HK, **options).double()
    q, k = inputs()
    assert_close((feature_map.query(q), feature_map.key(k)), (PHI[name](q), PHI[name](k)), 1e-12)


@pytest.mark.parametrize("options", [{}, *SHARING], ids=str)
def test_rebased_starts_from_the_square_of_normalised_products(options):
    feature_map = make_feature_map("rebased", D, HQ, HK, **options).double()
    q, k = inputs()
    products = torch.einsum("bthf,bshf->bhts", feature_map.query(q), feature_map.key(k).repeat_interleave(HQ // HK, 2))
    q, k = (torch.nn.functional.layer_norm(x, (D,)) for x in (q, k))
    expected = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(HQ // HK, 2)) ** 2 / D
    assert_close(products, expected, 1e-12)


@pytest.mark.parametrize("nu", [1, 2, 2 * D - 1])
def test_dpfp_takes_the_products_with_nu_neighbours(nu):
    feature_map = make_feature_map("dpfp", D, nu=nu)
    assert feature_map.feature_dim(D, nu=nu) == 2 * D * nu
    x = next(inputs()).requires_grad_()
    actual, expected = feature_map.key(x), PHI["dpfp"](x, nu=nu)
    assert_close(actual, expected, 1e-12)
    (grad,) = gradients(expected, [x])
    assert_close(gradients(actual, [x]), [grad], 1e-12)
    cotangent = gradients(expected, [expected])[0]  # what `gradients` pulls back
    assert_close(feature_map.vjp(x.detach(), actual.detach(), cotangent), grad, 1e-12)


@pytest.mark.parametrize("nu", [0, 2 * D])
def test_dpfp_knows_which_neighbours_there_are(nu):
    with pytest.raises(ValueError, match=f"nu={nu} .* 2 D - 1 = {2 * D - 1}"):
        make_feature_map("dpfp", D, nu=nu)


@pytest.mark.parametrize("name", LEARNABLE)
def test_state_dict_round_trip(name):
    ours, theirs = (randomise(make_feature_map(name, D, HQ, HK)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    q, _ = inputs(torch.float32)
    assert torch.equal(ours.query(q), theirs.query(q))


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
@pytest.mark.parametrize("name", PARAMETER_FREE)
def test_name_and_instance_do_the_same(form, name):
    (q, k), v = inputs(), torch.randn(B, T, HK, 3, dtype=torch.float64)
    normalize = name in NONNEGATIVE
    by_name, _ = form(q, k, v, feature_map=name, normalize=normalize)
    by_instance, _ = form(q, k, v, feature_map=make_feature_map(name, D, HQ, HK), normalize=normalize)
    assert torch.equal(by_name, by_instance)


# ---- the registry


def test_registry_holds_the_documented_maps():
    assert set(PHI) <= set(FEATURE_MAPS)
    assert all(issubclass(cls, FeatureMap) for cls in FEATURE_MAPS.values())
    assert issubclass(FeatureMap, torch.nn.Module)


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match="eluu1") as error:
        make_feature_map("eluu1", D)
    assert all(name in str(error.value) for name in PHI)
    assert "\n" not in str(error.value)


def test_taken_name():
    before = FEATURE_MAPS["elu1"]
    with pytest.raises(ValueError, match="elu1"):

        @register_feature_map("elu1")
        class Mine(FeatureMap):
            pass

    assert FEATURE_MAPS["elu1"] is before


@pytest.fixture
def cosh():
    """A user's map, [exp(x), exp(-x)] with a temperature on the queries alone, registered for one test."""

    @register_feature_map("cosh")
    class Cosh(FeatureMap):
        is_nonnegative = True
        is_learnable = False

        @classmethod
        def feature_dim(cls, head_dim, **kwargs):
            return 2 * head_dim

        def query(self, q):
            return self.key(0.5 * q)

        def key(self, k):
            return torch.cat([k.exp(), (-k).exp()], dim=-1)

    yield Cosh
    del FEATURE_MAPS["cosh"]


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
def test_own_map(form, cosh):
    assert FEATURE_MAPS["cosh"] is cosh
    (q, k), v = inputs(), torch.randn(B, T, HK, 3, dtype=torch.float64)
    phi_q, phi_k = (torch.cat([x.exp(), (-x).exp()], dim=-1) for x in (0.5 * q, k))
    expected, _ = form(phi_q, phi_k, v)
    for feature_map in ("cosh", make_feature_map("cosh", D, HQ, HK)):
        assert_close(form(q, k, v, feature_map=feature_map)[0], expected, 1e-12)


@pytest.mark.parametrize("form", [*FORMS, linear_attention])
def test_own_map_that_extends_another(form):
    """A subclass that changes one side of a map the forms may know how to fuse."""

    class Sharp(FEATURE_MAPS["elu1"]):
        def query(self, q):
            return super().query(q) ** 2

    sharp, plain = Sharp(D), make_feature_map("elu1", D)
    (q, k), v = inputs(), torch.randn(B, T, HK, 3, dtype=torch.float64)
    expected, _ = form(plain.query(q) ** 2, plain.key(k), v)
    assert_close(form(q, k, v, feature_map=sharp)[0], expected, 1e-12)
