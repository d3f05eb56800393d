"""`linear_attn` checkpoints of flash-linear-attention, of their names and shapes, against their formula in float64."""

import json

import pytest
import torch
from helpers import VOCAB, random_ids
from reference import assert_close
from safetensors.torch import save_file

from hf_linattn import LinAttnForCausalLM
from hf_linattn.conversion.imports import import_fla

CONFIG = {
    "model_type": "linear_attn",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "norm_eps": 1e-2,  # large enough that the scale beside it shows
    "feature_map": "hedgehog",
    "hidden_act": "swish",
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def checkpoint(**changes):
    """Their config and state dict, everything drawn at random but the biases of hedgehog."""
    config = {**CONFIG, **changes}
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: 0.5 * torch.randn(*shape, generator=g)  # noqa: E731
    hidden, inner = config["hidden_size"], 24
    size = round(hidden * config.get("expand_k", 1.0)) // config["num_heads"]
    key_size = size * (config["num_kv_heads"] or config["num_heads"])
    state = {
        "model.embeddings.weight": draw(VOCAB, hidden),
        "model.norm.weight": 1 + draw(hidden),
        "lm_head.weight": draw(VOCAB, hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        state |= {
            f"{layer}attn_norm.weight": 1 + draw(hidden),
            f"{layer}mlp_norm.weight": 1 + draw(hidden),
            f"{layer}attn.q_proj.weight": draw(size * config["num_heads"], hidden),
            f"{layer}attn.k_proj.weight": draw(key_size, hidden),
            f"{layer}attn.v_proj.weight": draw(key_size, hidden),
            f"{layer}attn.o_proj.weight": draw(hidden, size * config["num_heads"]),
            f"{layer}mlp.gate_proj.weight": draw(inner, hidden),
            f"{layer}mlp.up_proj.weight": draw(inner, hidden),
            f"{layer}mlp.down_proj.weight": draw(hidden, inner),
        }
        if config.get("elementwise_affine", True):
            state[f"{layer}attn.norm.weight"] = 1 + draw(size)
        if config["feature_map"] in ("hedgehog", "t2r"):
            for side in "qk":
                state[f"{layer}attn.feature_map_{side}.layer.weight"] = draw(size, size)
            if config.get("tie_feature_map_qk"):
                state[f"{layer}attn.feature_map_k.layer.weight"] = state[f"{layer}attn.feature_map_q.layer.weight"]
        if config["feature_map"] == "hedgehog":
            for side in "qk":
                state[f"{layer}attn.feature_map_{side}.layer.bias"] = torch.zeros(size)
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embeddings.weight"]
    return config, state


def rmsnorm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def their_map(config, state, layer, side, x):
    name = config["feature_map"]
    if name in ("hedgehog", "t2r"):
        x = x @ state[f"{layer}attn.feature_map_{side}.layer.weight"].T
    if name == "hedgehog":
        return torch.cat([2 * x, -2 * x], -1).softmax(-1)
    if name in ("t2r", "relu"):
        return x.relu()
    if name == "elu":
        return torch.nn.functional.elu(x) + 1
    if name == "dpfp":
        x = torch.cat([x.relu(), (-x).relu()], -1)
        return torch.cat([x * x.roll(shift, -1) for shift in range(1, 5)], -1)
    assert name == "identity"
    return x


def their_logits(config, state, ids):
    """The whole model, token by token, in float64."""
    state = {name: value.double() for name, value in state.items()}
    eps, heads = config["norm_eps"], config["num_heads"]
    x = state["model.embeddings.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        y = rmsnorm(x, state[f"{layer}attn_norm.weight"], eps)
        q, k, v = (y @ state[f"{layer}attn.{name}_proj.weight"].T for name in "qkv")
        size = q.shape[-1] // heads
        q, k, v = (each.unflatten(-1, (-1, size)) for each in (q, k, v))
        k, v = (each.repeat_interleave(heads // each.shape[2], 2) for each in (k, v))
        q, k = their_map(config, state, layer, "q", q), their_map(config, state, layer, "k", k)
        total, outs = torch.zeros(len(ids), heads, q.shape[-1], size, dtype=torch.float64), []
        for t in range(ids.shape[1]):
            total = total + k[:, t, :, :, None] * v[:, t, :, None, :]
            outs.append(torch.einsum("bhf,bhfe->bhe", q[:, t] * q.shape[-1] ** -0.5, total))
        weight = state.get(f"{layer}attn.norm.weight", torch.ones(size, dtype=torch.float64))
        out = rmsnorm(torch.stack(outs, 1), weight, eps).flatten(2)
        x = x + out @ state[f"{layer}attn.o_proj.weight"].T
        y = rmsnorm(x, state[f"{layer}mlp_norm.weight"], eps)
        gate, up = (y @ state[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ state[f"{layer}mlp.down_proj.weight"].T
    return rmsnorm(x, state["model.norm.weight"], eps) @ state["lm_head.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"feature_map": "t2r"},
        {"feature_map": "elu"},
        {"feature_map": "relu"},
        {"feature_map": "identity"},
        {"feature_map": "dpfp"},
        {"num_kv_heads": None},
        {"expand_k": 0.75, "expand_v": 0.75, "feature_map": "elu"},  # heads of odd size
        {"elementwise_affine": False},
        {"tie_word_embeddings": True, "tie_feature_map_qk": True},
    ],
    ids=str,
)
def test_a_checkpoint_gives_their_logits(changes):
    config, state = checkpoint(**changes)
    model, ids = import_fla(config, state), random_ids(2, 11)
    assert type(model) is LinAttnForCausalLM
    assert model.config.eos_token_id == 2
    expected = their_logits(config, state, ids)
    assert expected.std() > 0.5
    assert_close(model(ids).logits, expected, 1e-5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is config["tie_word_embeddings"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder(shards, tmp_path):
    config, state = checkpoint()
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [
        f"model-0000{i + 1}-of-0000{shards}.safetensors" if shards > 1 else "model.safetensors" for i in range(shards)
    ]
    place = {key: names[i % shards] for i, key in enumerate(state)}
    for name in names:
        save_file({key: value for key, value in state.items() if place[key] == name}, tmp_path / name)
    if shards > 1:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    ids = random_ids(2, 7)
    assert_close(import_fla(tmp_path)(ids).logits, their_logits(config, state, ids), 1e-5)
    half = import_fla(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "gla"}, "model_type='gla' is not imported; choose 'linear_attn'"),
        ({"feature_map": "elementwise_product"}, "feature_map='elementwise_product' has no counterpart here"),
        ({"norm_q": True}, "norm_q=True means queries divided by their sum"),
        ({"norm_k": True}, "norm_k=True means keys divided by their sum"),
        ({"norm_feature_map": True}, "norm_feature_map=True means a denominator and a norm"),
        ({"attn": {"layers": [1]}}, "means layers of softmax attention"),
        ({"attnres_block_size": 4}, "attnres_block_size=4 means attention over residuals"),
        ({"hidden_act": "powlu"}, "hidden_act='powlu' means another activation"),
        ({"expand_v": 2.0}, "expand_k=1.0 and expand_v=2.0 give keys and values of two sizes"),
    ],
)
def test_fields_that_do_not_carry(changes, words):
    config, state = checkpoint()
    with pytest.raises(ValueError) as error:
        import_fla({**config, **changes}, state)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_that_do_not_carry(tmp_path):
    config, state = checkpoint()
    layer = "model.layers.1."
    with pytest.raises(
        ValueError, match=f"^{layer}attn.feature_map_k.layer.bias is not 0, and the map here has no bias"
    ):
        import_fla(config, {**state, f"{layer}attn.feature_map_k.layer.bias": torch.ones(4)})
    with pytest.raises(ValueError, match=f"has tensors that do not carry: {layer}attn.g_proj.weight$"):
        import_fla(config, {**state, f"{layer}attn.g_proj.weight": torch.ones(4)})
    for gone, theirs in (("attn.k_proj.weight", "self_attn.k_proj.weight"), ("mlp_norm.weight", "post_attention")):
        with pytest.raises(ValueError, match=f"^the checkpoint lacks what becomes {layer}{theirs}"):
            import_fla(config, {name: value for name, value in state.items() if name != layer + gone})
    with pytest.raises(ValueError, match=f"of another shape: {layer}self_attn.k_proj.weight"):
        import_fla(config, {**state, f"{layer}attn.k_proj.weight": torch.ones(4, 16)})
    with pytest.raises(ValueError, match="give the state dict too"):
        import_fla(config)
    with pytest.raises(ValueError, match=r"config.json: there is no such file"):
        import_fla(tmp_path)
