"""LoLCATs weights of the published shapes, against their formula in float64."""

import copy

import pytest
import torch
from helpers import FULL, LINEAR, random_ids
from reference import assert_close
from safetensors.torch import save_file
from softmax_models import make_source
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_linattn.conversion.imports import import_lolcats

HEADS, KEY_HEADS, SIZE, RANK, ALPHA = 4, 2, 4, 3, 6.0


def draw(*shape, seed):
    return 0.7 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def published(features=5, layers=(0, 1, 2), bias=False, prefix="model.layers", shared=False):
    """The first state dict: feature maps of each layer; `shared` gives a group of query heads the same key map."""
    state = {}
    for index in layers:
        for side in "qk":
            name = f"{prefix}.{index}.self_attn.feature_map_{side}.mlp."
            weight = draw(HEADS, SIZE, features, seed=10 * index + (side == "k"))
            if shared and side == "k":
                weight = weight[::2].repeat_interleave(2, 0)
            state[name + "layer"] = weight
            if bias:
                value = draw(1, HEADS, 1, 1, seed=100 + 10 * index + (side == "k"))
                state[name + "bias"] = value[:, ::2].repeat_interleave(2, 1) if shared and side == "k" else value
    return state


def lora(prefix="base_model.model.model.layers", layers=(0, 1, 2), adapter=".default"):
    """The second: LoRA on the four projections."""
    state = {}
    for index in layers:
        for place, x in enumerate("qkvo"):
            out = SIZE * (KEY_HEADS if x in "kv" else HEADS)
            name = f"{prefix}.{index}.self_attn.{x}_proj.lora_"
            state[f"{name}A{adapter}.weight"] = draw(RANK, 16, seed=1000 + 10 * index + place)
            state[f"{name}B{adapter}.weight"] = draw(out, RANK, seed=2000 + 10 * index + place)
    return state


def their_attention(source, index, hidden, maps, adapters, activation, skip=False):
    """The attention layer of LoLCATs without a window, [B, T, 16] to [B, T, 16], in float64."""
    weights = {}
    for x in "qkvo":
        weights[x] = source.model.layers[index].self_attn.get_submodule(f"{x}_proj").weight.double()
        if adapters:
            a, b = (
                adapters[f"base_model.model.model.layers.{index}.self_attn.{x}_proj.lora_{h}.default.weight"].double()
                for h in "AB"
            )
            weights[x] = weights[x] + ALPHA / RANK * b @ a
    q, k, v = ((hidden @ weights[x].T).unflatten(-1, (-1, SIZE)).transpose(1, 2) for x in "qkv")
    positions = torch.arange(hidden.shape[1])[None]
    cos, sin = (x.double() for x in source.model.rotary_emb(hidden.float(), positions))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    features = []
    for side, x in (("q", q), ("k", k)):
        name = f"model.layers.{index}.self_attn.feature_map_{side}.mlp."
        y = torch.einsum("hdf,bhld->bhlf", maps[name + "layer"].double(), x)
        y = y + maps.get(name + "bias", torch.zeros(1)).double()
        features.append(activation(x + y if skip else y).clamp(min=1e-12))
    scores = torch.einsum("bhmf,bhnf->bhmn", *features).tril()
    out = (scores / scores.sum(-1, keepdim=True)) @ v
    return out.transpose(1, 2).flatten(2) @ weights["o"].T


def softmax_dim(x):
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


def our_attention(model, index, hidden):
    positions = torch.arange(hidden.shape[1])[None]
    layer = model.double().model.layers[index].self_attn
    return layer(hidden, model.model.rotary_emb(hidden, positions))[0]


def check(model, source, maps, adapters=None, activation=softmax_dim, skip=False):
    hidden = draw(2, 9, 16, seed=5).double()
    for index, layer_type in enumerate(model.config.layer_types):
        if layer_type == LINEAR:
            expected = their_attention(source, index, hidden, maps, adapters, activation, skip)
            # projections merged in float32, angles in float32
            assert_close(our_attention(model, index, hidden), expected, 1e-6, f"layer {index}")


@pytest.mark.parametrize("prefix", ["model.layers", "model.model.layers", "base_model.model.model.layers"])
def test_feature_maps_and_adapters_give_their_attention(prefix):
    source = make_source("llama")
    maps, adapters = published(), lora()
    before = copy.deepcopy(source.state_dict())
    given = {name.replace("model.layers", prefix): value for name, value in maps.items()}
    model = import_lolcats(source, given, adapters, lora_alpha=ALPHA, expand_key_heads=True)
    assert model.config.num_key_value_heads == model.config.num_attention_heads == HEADS
    assert model(random_ids(2, 9)).logits.isfinite().all()
    check(model, source, maps, adapters)
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())


def test_key_maps_that_a_group_shares_need_no_more_heads():
    source, maps = make_source("llama"), published(shared=True)
    model = import_lolcats(source, maps)
    assert model.config.num_key_value_heads == KEY_HEADS
    check(model, source, maps)


def test_layers_that_stayed_softmax():
    source, maps = make_source("llama"), published(layers=(0, 2), shared=True)
    model = import_lolcats(source, maps, keep_layers=[1])
    assert model.config.layer_types == [LINEAR, FULL, LINEAR]
    check(model, source, maps)


def test_adapters_replace_feature_maps_of_the_first_stage():
    source, first, second = make_source("llama"), published(), published(features=5)
    second = {name: value.flip(0) for name, value in second.items()}
    renamed = {name.replace("model.layers", "base_model.model.model.layers"): value for name, value in second.items()}
    first = {name.replace("model.layers", "base_model.model.model.layers"): value for name, value in first.items()}
    model = import_lolcats(source, first, {**lora(), **renamed}, lora_alpha=ALPHA, expand_key_heads=True)
    check(model, source, second, lora())


def test_a_bias_cancels_in_a_softmax():
    source, maps = make_source("llama"), published(bias=True)
    listed = dict(sorted(maps.items()))  # as safetensors lists them, biases first
    check(import_lolcats(source, listed, expand_key_heads=True), source, maps)


def test_a_skip_connection_is_the_identity_in_the_weight():
    source, maps = make_source("llama"), published(features=SIZE)
    model = import_lolcats(source, maps, skip_connection=True, expand_key_heads=True)
    check(model, source, maps, skip=True)


def test_the_relu_map_keeps_its_bias():
    # many features and no bias that hides all of them, so that no sum of products vanishes: there both differ
    source, maps = make_source("llama"), published(bias=True, features=48)
    maps = {name: value.abs() if name.endswith("bias") else value for name, value in maps.items()}
    model = import_lolcats(source, maps, feature_map="relu", expand_key_heads=True)
    assert model.config.feature_map == "t2r"
    check(model, source, maps, activation=torch.relu)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_files(ending, tmp_path):
    source, maps, adapters = make_source("llama"), published(), lora()
    paths = [tmp_path / f"{name}.{ending}" for name in ("distilled", "finetuned")]
    for path, state, wrapped in zip(paths, (maps, adapters), (True, False)):
        if ending == "pt":
            torch.save({"model_state_dict": state} if wrapped else state, path)
        else:
            save_file(state, path)
    model = import_lolcats(source, paths[0], str(paths[1]), lora_alpha=ALPHA, expand_key_heads=True)
    check(model, source, maps, adapters)


def without(state, *parts):
    return {name: value for name, value in state.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    "states, options, words",
    [
        ([published()], {}, "model.layers.0.self_attn.feature_map_k.mlp.layer".removeprefix("model.")),
        ([published()], {}, "differs within the 2 query heads of a key head, whose map is one here: expand_key_heads"),
        ([published()], {"feature_map": "exp_dim"}, "feature_map='exp_dim' of LoLCATs has no map here"),
        ([lora()], {}, "have no feature_map_q.mlp.layer: these are no weights of LoLCATs"),
        ([published(layers=(0, 2))], {}, "layers [1] have no feature_map_q"),
        ([published()], {"keep_layers": [1]}, "layers [1] have no feature_map_q, or one that keep_layers"),
        ([without(published(), "1.self_attn.feature_map_k")], {}, "layers [1] have no feature_map_k"),
        ([published(), without(lora(), "2.self_attn.v_proj.lora_B")], {}, "model.layers.2.self_attn.v_proj has lora_A"),
        ([published(), {"model.layers.0.self_attn.q_proj.weight": torch.ones(1)}], {}, "weight (1 such) is neither"),
        ([published(), {"model.layers.0.self_attn.feature_map_q.mlp.layer0": torch.ones(1)}], {}, "layer0 (1 such)"),
        ([published(), {"model.layers.1.self_attn.window_factors": torch.ones(1, 4, 1, 1)}], {}, "give window"),
        ([published()], {"window": 4}, "window=4, and the state dicts have no window_factors: leave window=None"),
        ([published()], {"skip_connection": True, "expand_key_heads": True}, "skip_connection=True needs P = D"),
        (
            [{name: value[:2] for name, value in published().items()}],
            {},
            "feature_map_q.mlp.layer has shape [2, 4, 5], and the model needs [4, 4, 5]",
        ),
        (
            [published(), {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(1, 3)}
             | {"model.layers.0.mlp.up_proj.lora_B.weight": torch.ones(2, 1)}],
            {},
            "LoRA of model.layers.0.mlp.up_proj has shape [2, 3], its weight [24, 16]",
        ),
        ([{**published(), **published(features=3, layers=(1,))}], {}, "the feature maps have sizes [3, 5]"),
        ([published(shared=True), lora(layers=(7,))], {}, "layers.7.self_attn.q_proj, which the model has not"),
        (["none.pt"], {}, "none.pt: there is no such file of weights"),
        ([{"step": 3}], {}, "'step' is no tensor: give a state dict"),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_named(states, options, words):
    with pytest.raises(ValueError) as error:
        import_lolcats(make_source("llama"), *states, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
