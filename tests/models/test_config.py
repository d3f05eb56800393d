"""The config: its defaults, its errors, its way to disk and back."""

import json

import pytest
import torch
from helpers import CONFIGS, FULL, LINEAR, SLIDING, WINDOW, make_config, make_model, random_ids, states
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaConfig

from hf_linattn import FEATURE_MAPS, LinAttnConfig, LinAttnForCausalLM, register_feature_map
from hf_linattn.models.linattn.presets import PRESETS
from hf_linattn.ops import FeatureMap
from variants import Variant


def test_defaults():
    config = LinAttnConfig()
    assert config.layer_types == [LINEAR] * 12
    assert (config.feature_map, config.normalizer, config.rope_position) == ("elu1", "denominator", "none")
    assert (config.head_dim, config.num_key_value_heads, config.conv_kernel_size) == (64, 12, 4)
    assert config.attention_out_bias is False
    assert LinAttnConfig(attention_bias=True).attention_out_bias is True
    assert LinAttnConfig(attention_bias=True, attention_out_bias=False).attention_out_bias is False


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = LinAttnConfig.from_preset(name, hidden_size=32, num_attention_heads=2, feature_map_kwargs={})
    assert (config.hidden_size, config.num_attention_heads, config.feature_map_kwargs) == (32, 2, {})
    fields = PRESETS[name].keys() - {"feature_map_kwargs"}
    assert {field: getattr(config, field) for field in fields} == {field: PRESETS[name][field] for field in fields}
    assert LinAttnConfig.from_preset(name, conv_kernel_size=3).conv_kernel_size == 3
    assert LinAttnConfig.from_preset(name).layer_types == [LINEAR] * 12


def test_presets_say_all_that_the_studies_compare():
    """So that none of them moves with a default."""
    compared = Variant("elu1").fields(1, 1).keys() - {"layer_types"}
    for fields in PRESETS.values():
        assert fields.keys() == compared


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"preset='best' is unknown; choose one of \['recall', 'fast', 'seed'\]"):
        LinAttnConfig.from_preset("best")


def test_every_field_of_llama_is_here():
    assert set(LlamaConfig().to_dict()) <= set(LinAttnConfig().to_dict())


@pytest.mark.parametrize("name", CONFIGS)
def test_to_disk_and_back(name, tmp_path):
    config = make_config(name)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "linattn"
    assert saved["format_version"] == 1
    for again in (LinAttnConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(again) is LinAttnConfig
        drop = {"transformers_version", "_name_or_path"}
        assert {k: v for k, v in again.to_dict().items() if k not in drop} == {
            k: v for k, v in config.to_dict().items() if k not in drop
        }


def test_fields_can_be_overridden_on_loading(tmp_path):
    make_config("linear").save_pretrained(tmp_path)
    config = LinAttnConfig.from_pretrained(tmp_path, feature_map="relu", conv_kernel_size=4)
    assert (config.feature_map, config.conv_kernel_size) == ("relu", 4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_nbytes_is_what_a_cache_holds(name, dtype):
    model = make_model(name).to(dtype)
    cache = model(random_ids(3, 5)).cache
    held = sum(tensor.nbytes for tensor in states(cache))
    assert model.config.state_nbytes(3, dtype) == held
    if FULL not in model.config.layer_types:
        assert cache.nbytes == held
    assert model.config.state_nbytes() * 3 == model.config.state_nbytes(3)


DIMS = {  # features of heads of 8
    "elu1": ({}, 8),
    "taylor2": ({}, 73),
    "hedgehog": ({}, 16),
    "dpfp": ({"nu": 3}, 48),
    "rebased": ({"tied": True}, 36),
    "favor": ({}, 8),
    "favor, more": ({"num_features": 20}, 20),
    "cosformer": ({}, 16),
}


@pytest.mark.parametrize("name", DIMS)
def test_feature_dim(name):
    options, features = DIMS[name]
    model = make_model(feature_map=name.split(",")[0], feature_map_kwargs=options)
    assert model.config.feature_dim == features
    cache = model(random_ids(3, 2)).cache
    assert cache.layers[0].nu.shape[-1] == features
    assert cache.nbytes == model.config.state_nbytes(3)


# ---- errors

BAD = {
    "feature map": ({"feature_map": "elu"}, ["feature_map='elu'", "unknown", "elu1", "taylor2"]),
    "layer type": (
        {"layer_types": [LINEAR, "linear_attention"]},
        ["layer_types='linear_attention'", LINEAR, FULL],
    ),
    "layer count": ({"layer_types": [LINEAR] * 3}, ["layer_types has 3 entries", "num_hidden_layers=2"]),
    "normalizer": ({"normalizer": "softmax"}, ["normalizer='softmax'", "denominator", "rmsnorm", "none"]),
    "rope": ({"rope_position": "after"}, ["rope_position='after'", "before", "none"]),
    "signed map": ({"feature_map": "identity"}, ["feature_map='identity'", "signed", "normalizer", "rmsnorm"]),
    "groups": (
        {"num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 4},
        ["num_attention_heads=4", "num_key_value_heads=3"],
    ),
    "head dim": ({"hidden_size": 17, "head_dim": None}, ["hidden_size=17", "num_attention_heads=2"]),
    "odd head dim": ({"head_dim": 5}, ["head_dim=5", "even", "rope_position='none'"]),
    "kernel of 1": ({"conv_kernel_size": 1}, ["conv_kernel_size=1", "0", "2"]),
    "negative kernel": ({"conv_kernel_size": -4}, ["conv_kernel_size=-4"]),
    "map options": (
        {"feature_map_kwargs": {"degree": 2}},
        ["feature_map='elu1'", "feature_map_kwargs={'degree': 2}"],
    ),
    "map option value": (
        {"feature_map": "hedgehog", "feature_map_kwargs": {"query_heads": "all"}},
        ["query_heads='all'", "'key'", "'query'"],
    ),
    "map option size": (
        {"feature_map": "hedgehog", "feature_map_kwargs": {"projection_dim": 0}},
        ["projection_dim=0"],
    ),
    "more positions than the map has": (
        {"feature_map": "cosformer", "feature_map_kwargs": {"horizon": 64}, "max_position_embeddings": 65},
        ["max_position_embeddings=65", "horizon=64", "feature_map='cosformer'", "feature_map_kwargs"],
    ),
    "map option seed": (
        {"feature_map": "favor", "feature_map_kwargs": {"seed": -3}},
        ["seed=-3", "at least 0"],
    ),
    "map option range": (
        {"feature_map": "dpfp", "feature_map_kwargs": {"nu": 16}},
        ["nu=16", "2 D - 1 = 15"],
    ),
    "no window": ({"layer_types": [SLIDING, LINEAR]}, ["sliding_window=None", "at least 1", SLIDING]),
    "empty window": ({**WINDOW, "sliding_window": 0}, ["sliding_window=0", "at least 1", SLIDING]),
    "window of nothing": ({"sliding_window": 4}, ["sliding_window=4", SLIDING, "None"]),
    "window without a denominator": (
        {**WINDOW, "normalizer": "rmsnorm"},
        ["normalizer='rmsnorm'", SLIDING, "'denominator'"],
    ),
    "window and a map of positions": (
        {**WINDOW, "feature_map": "cosformer"},
        ["feature_map='cosformer'", "positions", SLIDING],
    ),
    "later format": ({"format_version": 2}, ["format_version=2", "later", "1", "upgrade"]),
    **{
        f"{size} of {value}": ({size: value}, [f"{size}={value}", "at least 1"])
        for size in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for value in (-1, 0)
    },
}


def assert_teaches(error, words):
    message = str(error.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, f"{word!r} not in: {message}"


@pytest.mark.parametrize("case", BAD)
def test_errors_name_field_value_and_choices(case):
    changes, words = BAD[case]
    with pytest.raises(ValueError) as error:
        make_config("linear", **changes)
    assert_teaches(error, words)


@pytest.mark.parametrize("case", BAD)
def test_the_same_errors_on_loading(case, tmp_path):
    changes, words = BAD[case]
    make_config("linear").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError) as error:
        AutoConfig.from_pretrained(tmp_path)
    assert_teaches(error, words)


@pytest.mark.parametrize("case", ["feature map", "layer type", "layer count", "normalizer", "rope", "signed map"])
def test_the_same_errors_when_a_model_is_built_with_changed_fields(case, tmp_path):
    """from_pretrained sets fields of a config that was already checked."""
    changes, words = BAD[case]
    make_model("linear").save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        LinAttnForCausalLM.from_pretrained(tmp_path, **changes)
    assert_teaches(error, words)


def test_a_config_changed_for_the_worse_is_not_saved(tmp_path):
    config = make_config("linear")
    config.normalizer = "softmax"
    with pytest.raises(StrictDataclassError, match="normalizer='softmax'"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"feature_map": 3},
        {"feature_map_kwargs": [1]},
        {"conv_kernel_size": 2.5},
        {"layer_types": LINEAR},
        {"qk_norm": "yes"},
        {"hidden_size": 16.0},
        {"format_version": "1"},
    ],
    ids=str,
)
def test_wrong_types_are_refused(changes):
    (field,) = changes
    with pytest.raises(StrictDataclassError, match=field):
        make_config("linear", **changes)


def test_layer_types_may_be_a_tuple():
    assert make_config("hybrid", layer_types=(LINEAR, FULL, LINEAR)).layer_types == [LINEAR, FULL, LINEAR]


# ---- feature maps of one's own


@pytest.fixture
def shifted():
    """A registered map with an option and a parameter, taken back afterwards."""

    @register_feature_map("shifted_square")
    class ShiftedSquare(FeatureMap):
        is_learnable = True

        def __init__(self, head_dim, num_heads=1, num_key_value_heads=None, *, shift=1.0):
            super().__init__(head_dim, num_heads, num_key_value_heads)
            self.shift = shift
            self.scale = torch.nn.Parameter(torch.empty(head_dim))
            self.reset_parameters()

        @classmethod
        def feature_dim(cls, head_dim, **kwargs):
            return 2 * head_dim

        def initial_parameters(self):
            return {"scale": torch.full((self.head_dim,), 0.5)}

        def forward(self, x):
            return torch.cat([(self.scale * x + self.shift).square(), (self.scale * x - self.shift).square()], -1)

    yield ShiftedSquare
    FEATURE_MAPS.pop("shifted_square", None)


def test_a_registered_map_works_from_the_config_and_reloads(shifted, tmp_path):
    changes = {"feature_map": "shifted_square", "feature_map_kwargs": {"shift": 0.25}}
    fresh = LinAttnForCausalLM(make_config("linear", **changes))
    assert torch.equal(fresh.model.layers[0].self_attn.feature_map.scale, torch.full((8,), 0.5))
    model, ids = make_model("linear", **changes), random_ids(2, 6)
    assert isinstance(model.model.layers[0].self_attn.feature_map, shifted)
    out = model(ids, labels=ids)
    assert out.cache.layers[0].nu.shape == (2, 2, 16)
    out.loss.backward()
    assert all(layer.self_attn.feature_map.scale.grad.any() for layer in model.model.layers)
    model.save_pretrained(tmp_path)
    again = LinAttnForCausalLM.from_pretrained(tmp_path)
    assert again.model.layers[1].self_attn.feature_map.shift == 0.25
    assert torch.equal(again(ids).logits, out.logits)
    assert not torch.equal(again.model.layers[0].self_attn.feature_map.scale, torch.full((8,), 0.5))


def test_without_its_registration_the_map_is_named(shifted, tmp_path):
    make_config("linear", feature_map="shifted_square").save_pretrained(tmp_path)
    FEATURE_MAPS.pop("shifted_square")
    with pytest.raises(ValueError, match="feature_map='shifted_square' is unknown; choose one of"):
        LinAttnConfig.from_pretrained(tmp_path)
