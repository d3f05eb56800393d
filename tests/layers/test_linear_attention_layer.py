"""The attention layer against its formula, written out from projections to output in float64."""

import pytest
import torch
from helpers import CONFIGS, GROUPED, fill, make_config, pull_back
from reference import PHI, assert_close, features, linear_attention
from sliding_reference import sliding_attention

from hf_linattn import FEATURE_MAPS, FeatureMap, LinearAttentionCache, LinearAttentionState
from hf_linattn.layers import NORMALIZERS, ROPE_POSITIONS, LinearAttention, Packing, SlidingLinearAttention

LAYERS = {
    **{name: changes for name, changes in CONFIGS.items() if "hybrid" not in name},
    "none": {"normalizer": "none"},
    "everything": {
        **GROUPED, "qk_norm": True, "attention_bias": True, "conv_kernel_size": 3, "feature_map": "hedgehog",
        "normalizer": "rmsnorm",
    },
    **{name: {"feature_map": name, "head_dim": 4} for name in ("relu", "exp", "softmax", "t2r", "hedgehog_joint")},
    "favor": {**GROUPED, "feature_map": "favor", "feature_map_kwargs": {"num_features": 9, "seed": 1}},
    "cosformer": {
        **GROUPED, "feature_map": "cosformer", "feature_map_kwargs": {"horizon": 9}, "max_position_embeddings": 9
    },
    "dpfp": {"feature_map": "dpfp", "feature_map_kwargs": {"nu": 2}, "head_dim": 4},
    "rebased": {**GROUPED, "feature_map": "rebased", "feature_map_kwargs": {"query_heads": "query"}},
}  # fmt: skip
each_layer = pytest.mark.parametrize("name", LAYERS)


def make_layer(name):
    config = make_config(**LAYERS[name])
    cls = SlidingLinearAttention if config.sliding_window else LinearAttention
    return fill(cls(config, layer_idx=0)).double()


def rotations(config, positions):
    """cos and sin of every pair of dimensions: angle = position / theta^(2 i / D)."""
    half = config.head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.unsqueeze(-1).double() * frequency
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x, cos, sin):
    """Turn the pairs (x_i, x_{i + D/2}) of each head by their angles: x [B, T, H, D], cos and sin [B, T, D]."""
    half = x.shape[-1] // 2
    a, b, cos, sin = x[..., :half], x[..., half:], cos[:, :, None, :half], sin[:, :, None, :half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x, module):
    return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()


def convolve(x, module, real):
    """Causal filter over the real tokens of each row."""
    out = torch.zeros_like(x)
    for b in range(len(x)):
        places = torch.nonzero(real[b]).flatten()
        for n, t in enumerate(places):
            for back in range(min(n + 1, module.kernel_size)):
                out[b, t] = out[b, t] + module.weight[:, module.kernel_size - 1 - back] * x[b, places[n - back]]
    return out


def by_hand(layer, x, cos, sin, mask=None, cu_seqlens=None, positions=None):
    """The output of the layer, and the tensors of its state."""
    config = layer.config
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    parts = []
    for side in "qkv":
        projection = getattr(layer, f"{side}_proj")
        part = x @ projection.weight.T + (0 if projection.bias is None else projection.bias)
        if config.conv_kernel_size:
            part = convolve(part, getattr(layer, f"{side}_conv"), real)
        parts.append(part.unflatten(-1, (-1, config.head_dim)))
    q, k, v = parts
    if config.qk_norm:
        q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
    if config.rope_position == "before":
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    assert config.feature_map in (*PHI, "cosformer")
    options = {"key_mask": real, "cu_seqlens": cu_seqlens}
    if config.sliding_window:
        options |= {"mix": layer.window_mix, "feature_map": layer.feature_map}
        out, *state = sliding_attention(q, k, v, config.feature_map, config.sliding_window, **options)
    else:
        phi_q, phi_k = features(config.feature_map, q, k, layer.feature_map, positions)
        out, *state = linear_attention(phi_q, phi_k, v, normalize=config.normalizer == "denominator", **options)
    if config.normalizer == "rmsnorm":
        out = norm(out, layer.o_norm)
    return out.flatten(2) @ layer.o_proj.weight.T + (0 if layer.o_proj.bias is None else layer.o_proj.bias), *state


def inputs(config, rows=2, length=6):
    x = torch.randn(rows, length, config.hidden_size, dtype=torch.float64)
    return x.requires_grad_(), rotations(config, torch.arange(length).expand(rows, -1))


@each_layer
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_its_formula(name, masked):
    """Output, state, and gradients of the input and of every parameter."""
    layer = make_layer(name)
    x, rope = inputs(layer.config)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]]).bool() if masked else None
    positions = torch.tensor([[0, 0, 1, 1, 2, 3], [0, 1, 2, 3, 3, 3]])
    cache = LinearAttentionCache(layer.config)
    out, weights = layer(x, rope, mask, cache, position_ids=positions)
    assert weights is None
    state = cache.layers[0].state
    expected, *expected_state = by_hand(layer, x, *rope, mask, positions=positions)
    real = slice(None) if mask is None else mask
    # norms of queries, keys and outputs work in float32
    assert_close([out[real], *state], [expected[real], *expected_state], 1e-6)
    leaves = [x, *layer.parameters()]
    actual = pull_back([out[real], *state[:4]], leaves)  # but for the count of a window
    assert_close(actual, pull_back([expected[real], *expected_state[:4]], leaves), 2e-6, "gradient")


@each_layer
def test_token_by_token(name):
    layer = make_layer(name)
    x, (cos, sin) = inputs(layer.config)
    positions = torch.stack([torch.arange(6), torch.arange(3, 9)])
    expected = by_hand(layer, x, cos, sin, positions=positions)
    cache = LinearAttentionCache(layer.config)
    steps = [
        layer(x[:, [t]], (cos[:, [t]], sin[:, [t]]), cache=cache, position_ids=positions[:, [t]])[0] for t in range(6)
    ]
    assert_close([torch.cat(steps, 1), *cache.layers[0].state], list(expected), 1e-6)


@pytest.mark.parametrize("name", ["linear", "gqa", "hedgehog_key", "rmsnorm", "favor", "cosformer", "sliding"])
def test_packed(name):
    layer = make_layer(name)
    x, rope = inputs(layer.config, rows=1, length=9)
    bounds = torch.tensor([0, 4, 5, 9])
    packing = Packing(bounds, torch.tensor([[0] * 4 + [1] + [2] * 4]))
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3]])
    expected, *_ = by_hand(layer, x, *rope, cu_seqlens=bounds, positions=positions)
    out, weights = layer(x, rope, packing=packing, output_attentions=True, position_ids=positions)
    assert_close(out, expected, 1e-6)
    assert weights.shape == (1, layer.num_heads, 9, 9)


@pytest.mark.parametrize("name", ["linear", "gqa", "hedgehog_key", "none", "cosformer"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_layer_reads_all_keys_for_every_query(name, masked):
    layer = fill(LinearAttention(make_config(**LAYERS[name]), layer_idx=0, causal=False)).double()
    x, rope = inputs(layer.config)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]]).bool() if masked else None
    positions = torch.arange(6)[None]
    out, weights = layer(x, rope, mask, output_attentions=True, position_ids=positions)
    q, k, v = (getattr(layer, f"{side}_proj")(x).unflatten(-1, (-1, layer.head_dim)) for side in "qkv")
    q, k = rotate(q, *rope), rotate(k, *rope)
    phi_q, phi_k = features(layer.config.feature_map, q, k, layer.feature_map, positions)
    normalize = layer.config.normalizer == "denominator"
    expected, _, _ = linear_attention(phi_q, phi_k, v, causal=False, key_mask=mask, normalize=normalize)
    assert_close(out, layer.o_proj(expected.flatten(2)), 1e-6)
    if normalize and name != "cosformer":  # where relu(q) relu(k)^T is 0 for all keys, so are the weights
        assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)), 1e-6)


def test_without_positions_nothing_is_rotated():
    layer = make_layer("linear")
    x, rope = inputs(layer.config)
    still = rotations(layer.config, torch.zeros(2, 6, dtype=torch.long))
    assert_close(layer(x)[0], layer(x, still)[0], 1e-12)
    assert not torch.allclose(layer(x)[0], layer(x, rope)[0], atol=1e-3)


def test_a_map_of_positions_asks_for_them():
    layer = make_layer("cosformer")
    with pytest.raises(ValueError, match="pass position_ids to the layer"):
        layer(inputs(layer.config)[0])


def test_few_tokens_are_mapped_as_many_by_a_map_that_tells_queries_from_keys(monkeypatch):
    """Up to 32 tokens the layer maps queries and keys in one go, where one function maps both."""

    class Tempered(FeatureMap):
        def query(self, q, positions=None):
            return (q / 2).exp()

        def key(self, k, positions=None):
            return k.exp()

    monkeypatch.setitem(FEATURE_MAPS, "tempered", Tempered)
    layer = fill(LinearAttention(make_config(feature_map="tempered"), layer_idx=0)).double()
    x, rope = inputs(layer.config, length=40)
    first = tuple(each[:, :6] for each in rope)
    assert_close(layer(x[:, :6], first)[0], layer(x, rope)[0][:, :6], 1e-12)


def test_a_sliding_layer_has_a_side():
    with pytest.raises(ValueError, match="causal=False: sliding layers are causal"):
        SlidingLinearAttention(make_config("sliding"), layer_idx=0, causal=False)


def test_parameter_names_are_those_of_llama_and_qwen3():
    names = {key for key, _ in make_layer("everything").named_parameters()}
    sides = ("q_proj", "k_proj", "v_proj", "o_proj")
    llama = {f"{side}.{kind}" for side in sides for kind in ("weight", "bias")}
    ours = {"o_norm.weight", "feature_map.q_weight", "feature_map.k_weight"} | {f"{s}_conv.weight" for s in "qkv"}
    assert names == llama | {"q_norm.weight", "k_norm.weight"} | ours
    assert {key for key, _ in make_layer("linear").named_parameters()} == {f"{side}.weight" for side in sides}


def test_the_state_stays_float32_in_half_precision():
    layer = make_layer("conv").to(torch.bfloat16)
    cache = LinearAttentionCache(layer.config)
    x = torch.randn(2, 6, 16, dtype=torch.bfloat16)
    for part in (x[:, :5], x[:, 5:]):
        out, _ = layer(part, cache=cache)
        assert out.dtype == torch.bfloat16
        state = cache.layers[0].state
        assert isinstance(state, LinearAttentionState)
        assert state.mu.dtype == state.nu.dtype == torch.float32


def test_the_choices_are_public():
    assert NORMALIZERS == ("denominator", "rmsnorm", "none")
    assert ROPE_POSITIONS == ("before", "none")
