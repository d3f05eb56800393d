"""Saving, reloading, and taking over the weights of softmax models by name."""

import pytest
import torch
from helpers import (
    CONFIGS,
    FEW,
    FULL,
    LINEAR,
    VOCAB,
    assert_same_bits,
    fill,
    make_config,
    make_model,
    random_ids,
    read,
    states,
)
from reference import assert_close
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_linattn import (
    LinAttnConfig,
    LinAttnForCausalLM,
    LinAttnForSequenceClassification,
    LinAttnModel,
    make_feature_map,
)

each_config = pytest.mark.parametrize("name", CONFIGS)


def reload(path, cls=LinAttnForCausalLM, **kwargs):
    """The model, after checking that every weight came from the file and none was left over."""
    model, info = cls.from_pretrained(path, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model


# ---- our own checkpoints


@each_config
def test_reloading_is_bit_for_bit(name, tmp_path):
    model, ids = make_model(name), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    again = reload(tmp_path)
    assert not again.training
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert_same_bits(list(after.values()), list(before.values()))
    (logits, cache), (expected, expected_cache) = (read(m, ids, [5, 1, 3]) for m in (again, model))
    assert_same_bits([logits, *states(cache)], [expected, *states(expected_cache)])


@pytest.mark.parametrize("name", ["conv", "hybrid", "hedgehog_query"])
def test_values_that_would_stand_out_survive(name, tmp_path):
    """No part is initialised anew after loading: not filters, maps, norms, biases, nor the padding row."""
    model = make_model(name, attention_bias=True)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(index + 0.5)
    model.save_pretrained(tmp_path)
    for options in ({}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"low_cpu_mem_usage": True}):
        again = reload(tmp_path, **options)
        for index, (key, parameter) in enumerate(again.named_parameters()):
            assert (parameter == index + 0.5).all(), key
        assert_same_bits([again.model.rotary_emb.inv_freq], [model.model.rotary_emb.inv_freq])


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device_map": {"": "cpu"}}], ids=str)
def test_a_device_map(options, tmp_path):
    model, ids = make_model("hybrid", conv_kernel_size=4), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    assert_same_bits([reload(tmp_path, **options)(ids).logits], [model(ids).logits])


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_half_precision(name, dtype, tmp_path):
    model, ids = make_model(name), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    again = reload(tmp_path, dtype=dtype)
    for (key, parameter), original in zip(again.named_parameters(), model.parameters(), strict=True):
        assert parameter.dtype == dtype, key
        assert torch.equal(parameter, original.to(dtype)), key
    logits, cache = read(again, ids, [5, 4])
    model.to(
        dtype
    ).model.rotary_emb.inv_freq = again.model.rotary_emb.inv_freq  # loading keeps it float32, `to` does not
    assert_same_bits([logits], [read(model, ids, [5, 4])[0]])
    assert all(
        part.dtype == torch.float32 for layer in cache.layers if hasattr(layer, "mu") for part in layer.state[:2]
    )


def test_half_precision_checkpoints_keep_their_dtype(tmp_path):
    model = make_model("hedgehog_key").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = reload(tmp_path)
    assert again.dtype == torch.bfloat16
    assert_same_bits(list(again.state_dict().values()), list(model.state_dict().values()))
    assert reload(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied(tied, tmp_path):
    model, ids = make_model("linear", tie_word_embeddings=tied), random_ids(2, 5)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    for again in (reload(tmp_path), reload(tmp_path, device_map="cpu")):
        assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
        assert_same_bits([again(ids).logits], [model(ids).logits])


def test_a_head_can_be_put_on_a_base_and_taken_off(tmp_path):
    causal, ids = make_model("conv"), random_ids(2, 5)
    causal.save_pretrained(tmp_path / "causal")
    base = LinAttnModel.from_pretrained(tmp_path / "causal")
    assert_same_bits([base(ids).last_hidden_state], [causal.model(ids).last_hidden_state])
    base.save_pretrained(tmp_path / "base")
    classifier, info = LinAttnForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=3, output_loading_info=True
    )
    assert info["missing_keys"] == {"score.weight"}
    assert not info["unexpected_keys"]
    assert_same_bits(list(classifier.model.state_dict().values()), list(base.state_dict().values()))


def test_what_a_checkpoint_lacks_starts_as_in_a_fresh_model(tmp_path):
    """A linear checkpoint loaded with a convolution and a learnable map: both start at the identity."""
    model = make_model("gqa")
    model.save_pretrained(tmp_path)
    changes = {"conv_kernel_size": 4, "feature_map": "hedgehog"}
    for options in ({}, {"device_map": "cpu"}):
        again, info = LinAttnForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **changes, **options)
        assert not info["unexpected_keys"]
        assert {key.split(".")[4] for key in info["missing_keys"]} == {"q_conv", "k_conv", "v_conv", "feature_map"}
        fresh, before = LinAttnForCausalLM(again.config).state_dict(), model.state_dict()
        for key, value in again.state_dict().items():
            assert torch.equal(value, fresh[key] if key in info["missing_keys"] else before[key]), key


def test_half_a_feature_map_in_the_checkpoint(tmp_path):
    """What is there is kept, what is not starts at the identity, also within one module."""
    model = make_model("hedgehog_key")
    missing = "model.layers.0.self_attn.feature_map.k_weight"
    weights = {key: value for key, value in model.state_dict().items() if key != missing}
    model.save_pretrained(tmp_path, state_dict=dict(weights))
    again, info = LinAttnForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {missing}
    for key, value in again.state_dict().items():
        assert torch.equal(value, torch.eye(6).expand(2, 6, 6) if key == missing else weights[key]), key


def test_the_matrix_of_favor_is_that_of_the_checkpoint(tmp_path):
    """Loaded it is not drawn anew; lacking, it is that of the config's seed; and no cast changes it."""
    model, drawn = make_model("favor"), make_feature_map("favor", 6, num_features=9, seed=3).projection
    assert all(torch.equal(layer.self_attn.feature_map.projection, drawn) for layer in model.model.layers)
    name = "model.layers.1.self_attn.feature_map.projection"
    model.get_buffer(name).copy_(drawn.flip(1) + 1)
    model.save_pretrained(tmp_path / "changed")
    lacking = {key: value for key, value in model.state_dict().items() if "projection" not in key}
    model.save_pretrained(tmp_path / "lacking", state_dict=lacking)
    for options in ({}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}):
        again = reload(tmp_path / "changed", **options).float()
        assert torch.equal(again.get_buffer(name), model.get_buffer(name).to(options.get("dtype")).float())
        assert torch.equal(again.get_buffer(name.replace("1", "0", 1)), drawn)
        again, info = LinAttnForCausalLM.from_pretrained(tmp_path / "lacking", output_loading_info=True, **options)
        assert {key for key in info["missing_keys"] if "projection" in key} == info["missing_keys"] != set()
        assert all(torch.equal(layer.self_attn.feature_map.projection.float(), drawn) for layer in again.model.layers)


# ---- softmax models

TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 64,
}
WITHOUT_HEAD_DIM = {key: value for key, value in TINY.items() if key != "head_dim"}
# class, its config, and what a LinAttnConfig must say to hold its weights
SOURCES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**TINY), {}),
    "llama with biases": (
        LlamaForCausalLM,
        LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama tied, long": (
        LlamaForCausalLM,
        LlamaConfig(
            **TINY,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        {"tie_word_embeddings": True},
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**TINY, sliding_window=None), {}),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**WITHOUT_HEAD_DIM),
        {"attention_bias": True, "attention_out_bias": False},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY), {"qk_norm": True}),
    "qwen3 with biases": (
        Qwen3ForCausalLM,
        Qwen3Config(**TINY, attention_bias=True),
        {"qk_norm": True, "attention_bias": True},
    ),
}
each_source = pytest.mark.parametrize("source", SOURCES)


def source_and_config(source, **changes):
    cls, config, extra = SOURCES[source]
    model = fill(cls(config))
    return model, LinAttnConfig.from_preset(
        "seed",
        **{**TINY, "rms_norm_eps": config.rms_norm_eps, "rope_parameters": config.rope_parameters, **extra, **changes},
    )


@each_source
def test_softmax_weights_load_by_name_and_give_the_same_logits(source, tmp_path):
    model, config = source_and_config(source, layer_types=[FULL] * 2)
    ids = random_ids(2, 11)
    mask = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
    expected = model(ids, attention_mask=mask).logits
    assert expected.abs().max() > 1
    target = LinAttnForCausalLM(config).eval()
    target.load_state_dict(model.state_dict())  # strict: nothing missing, nothing unexpected
    assert_close(target(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()], 1e-5)
    model.save_pretrained(tmp_path)
    loaded = reload(tmp_path, config=config)
    assert_same_bits([loaded(ids).logits], [target(ids).logits])
    if config.tie_word_embeddings:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    cut, _ = read(loaded, ids, [6, 1, 4])
    assert_close(cut, model(ids).logits, 1e-5)


@each_source
@pytest.mark.parametrize("feature_map", ["elu1", "hedgehog"])
def test_softmax_weights_load_into_linear_layers(source, feature_map, tmp_path):
    model, config = source_and_config(source, layer_types=[LINEAR] * 2, feature_map=feature_map)
    model.save_pretrained(tmp_path)
    loaded, info = LinAttnForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert all("feature_map" in key for key in info["missing_keys"])
    assert bool(info["missing_keys"]) == (feature_map == "hedgehog")
    ours = loaded.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(ours[key], value), key
    assert loaded(random_ids(2, 11)).logits.isfinite().all()


def test_a_hybrid_takes_softmax_weights():
    model, config = source_and_config("qwen3", layer_types=[LINEAR, FULL])
    target = LinAttnForCausalLM(config)
    target.load_state_dict(model.state_dict())
    ids = random_ids(1, 6)
    assert target(ids).logits.isfinite().all()
    assert not torch.allclose(target(ids).logits, model(ids).logits, atol=1e-2)
    assert make_config("hybrid").layer_types[1] == FULL
