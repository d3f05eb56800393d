"""What does not carry is refused in one line that names it, before weights are read."""

import json
from pathlib import Path

import pytest
import torch
from helpers import make_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from softmax_models import make_source, source_config
from transformers import AutoConfig, LlamaForSequenceClassification, LlamaModel

from hf_linattn import linearize
from hf_linattn.conversion.families import ENCODERS, FAMILIES, FOREIGN_PARTS, check_source


def refusal(*arguments, **options) -> str:
    with pytest.raises(ValueError) as error:
        linearize(*arguments, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_part_is_named_for_every_family_that_has_it():
    seen = set(FAMILIES) | set(ENCODERS)
    for part, model_types in FOREIGN_PARTS.items():
        for model_type in model_types:
            assert model_type not in seen, model_type  # said once, and not of a family that carries
            seen.add(model_type)
            with pytest.raises(ValueError) as error:
                check_source(AutoConfig.for_model(model_type))
            assert f"model_type={model_type!r} has {part}, which" in str(error.value)
            assert str(sorted(FAMILIES)) in str(error.value)


@pytest.mark.parametrize("model_type", [*ENCODERS, "t5", "bart"])
def test_encoders(model_type):
    with pytest.raises(ValueError, match=f"^model_type='{model_type}' has an encoder, and only decoders are converted"):
        check_source(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("model_type", ["mamba", "rwkv", "cwm", "seed_oss"])
def test_other_families(model_type):
    with pytest.raises(ValueError) as error:
        check_source(AutoConfig.for_model(model_type))
    assert f"model_type={model_type!r} is not known to have the same blocks; choose one of {sorted(FAMILIES)}" == str(
        error.value
    )


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (quant_method='gptq')"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 rotates a part of each head",
        ),
    ],
)
def test_parts_of_a_family_that_carries(fields, words, tmp_path):
    source_config("llama", **fields).save_pretrained(tmp_path)
    assert words in refusal(tmp_path)


def test_a_model_that_is_linear_already(tmp_path):
    model = make_model("linear")
    assert refusal(model) == "model_type='linattn' is linear already: load it with AutoModelForCausalLM"
    model.save_pretrained(tmp_path)
    assert refusal(tmp_path) == refusal(model)


def test_adapters_are_merged_first(tmp_path):
    adapters = LoraConfig(target_modules=["q_proj"], r=2)
    wrapped = get_peft_model(make_source("llama"), adapters)
    assert refusal(wrapped).startswith("PeftModel has adapters: merge the adapters first: ")
    wrapped.save_pretrained(tmp_path)
    assert refusal(tmp_path).startswith(f"{tmp_path} holds adapters and no whole model: merge the adapters first")
    added = make_source("llama")
    added._hf_peft_config_loaded = True  # what add_adapter, which wants a later peft, sets
    assert "LlamaForCausalLM has adapters: merge the adapters first" in refusal(added)
    assert linearize(wrapped.merge_and_unload()).config.num_hidden_layers == 3


def test_what_is_no_language_model():
    config = source_config("llama", num_labels=2)
    for cls in (LlamaForSequenceClassification, LlamaModel):
        assert refusal(cls(config)).startswith(f"{cls.__name__} is no LlamaForCausalLM, whose head and blocks carry")
    assert refusal(torch.nn.Linear(2, 2)).startswith("model_or_path is a Linear; give a transformers model")
    with torch.device("meta"):
        empty = make_source("llama")
    assert refusal(empty) == "the weights lie on ['meta']; load the model onto one device"


def test_options_that_only_a_path_takes():
    words = "gguf_file, revision: only a folder or a hub id takes this"
    assert words in refusal(make_source("llama"), revision="main", gguf_file="model.gguf")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"feature_map": "softmin"}, "feature_map='softmin' is unknown; choose one of"),
        ({"feature_map": "identity", "normalizer": "denominator"}, "feature_map='identity' is signed"),
        ({"normalizer": "layernorm"}, "normalizer='layernorm' is unknown"),
        ({"feature_map_kwargs": {"bits": 4}}, "does not take feature_map_kwargs={'bits': 4}"),
        ({"keep_layers": [9]}, "keep_layers has 9"),
        ({"dtype": "int8"}, "dtype='int8' is unknown"),
        ({"dtype": "bits"}, "dtype='bits' is unknown"),
    ],
)
def test_what_a_linear_model_cannot_be(options, words):
    assert words in refusal(make_source("llama"), **options)


def test_a_folder_that_is_not_there(tmp_path):
    assert refusal(tmp_path / "none").startswith(f"{tmp_path / 'none'}: no config that transformers can read")
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path).startswith(f"{tmp_path}: no config that transformers can read")


# ---- tensors


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    make_source("qwen3").save_pretrained(tmp_path)
    return tmp_path


def test_missing_tensors_are_named(folder):
    gone = [f"model.layers.{i}.self_attn.q_norm.weight" for i in range(3)]
    rewrite(folder, lambda weights: [weights.pop(key) for key in (*gone, "lm_head.weight", "model.norm.weight")])
    words = ", ".join(sorted([*gone, "lm_head.weight", "model.norm.weight"])[:4])
    assert refusal(folder) == f"{folder} lacks tensors: {words} and 1 more"


def test_tensors_left_over_are_named(folder):
    rewrite(folder, lambda weights: weights.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(24)}))
    assert refusal(folder) == f"{folder} has tensors that do not carry: model.layers.1.self_attn.q_proj.bias"


def test_tensors_of_another_shape_are_named(folder):
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.zeros(8)}))
    assert refusal(folder) == f"{folder} has tensors of another shape: model.norm.weight [8] for [16]"


def test_frequencies_that_old_checkpoints_hold_are_no_tensors(folder):
    rewrite(folder, lambda weights: weights.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(3)}))
    assert linearize(folder).config.num_hidden_layers == 3


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        linearize(folder)


def test_a_model_whose_config_does_not_say_what_it_holds():
    """A loaded model is held to its config as a folder is."""
    source = make_source("qwen3")
    del source.model.layers[1].self_attn.q_norm.weight
    assert "Qwen3ForCausalLM lacks tensors: model.layers.1.self_attn.q_norm.weight" == refusal(source)


def test_config_files_say_what_the_source_is(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen5"}))
    assert refusal(folder).startswith(f"{folder}: no config that transformers can read")
