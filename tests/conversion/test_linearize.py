"""A converted model is its source wherever softmax attention is kept, and says what is new, elsewhere."""

import copy
import logging
from contextlib import contextmanager

import pytest
import torch
from helpers import FULL, LINEAR, assert_same_bits, random_ids
from reference import assert_close
from softmax_models import SOURCES, make_source, source_config
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_linattn import LinAttnForCausalLM, linearize
from hf_linattn.conversion import ConversionWarning, linear_config, new_parameters
from hf_linattn.conversion.keeping import kept_layers

each_source = pytest.mark.parametrize("name", SOURCES)
MASK = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])


@contextmanager
def log_of_transformers():
    """Everything of warning level that transformers says."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


# ---- what is kept


@each_source
def test_with_every_layer_kept_it_is_the_source(name, tmp_path):
    source, ids = make_source(name), random_ids(2, 11)
    expected = source(ids, attention_mask=MASK).logits[MASK.bool()]
    assert expected.std() > 0.5
    source.save_pretrained(tmp_path)
    for given in (source, tmp_path, str(tmp_path)):
        model = linearize(given, keep_layers="all")
        assert type(model) is LinAttnForCausalLM
        assert not model.training
        assert new_parameters(model) == []
        assert_close(model(ids, attention_mask=MASK).logits[MASK.bool()], expected, 1e-5)
    tokens = source.generate(ids, max_new_tokens=8, eos_token_id=None)
    assert torch.equal(model.generate(ids, max_new_tokens=8, eos_token_id=None), tokens)


@each_source
def test_every_tensor_shows_in_the_logits(name):
    """A tensor in a wrong place, or one that is not read, would pass no test above."""
    model, ids = copy.deepcopy(linearize(make_source(name), keep_layers="all")), random_ids(2, 11)
    with torch.no_grad():
        before = model(ids).logits
        for key, parameter in model.named_parameters():
            kept = parameter.clone()
            parameter.copy_(parameter.roll(1, 0))
            assert (model(ids).logits - before).abs().max() > 1e-3, key
            parameter.copy_(kept)
    assert_same_bits([model(ids).logits], [before])


def test_layers_before_the_first_linear_one_are_the_source():
    source, ids = make_source("qwen3"), random_ids(2, 11)
    model = linearize(source, keep_layers=[0, 1])
    assert model.config.layer_types == [FULL, FULL, LINEAR]
    ours, theirs = (each(ids, output_hidden_states=True).hidden_states for each in (model, source))
    for depth in range(3):
        assert_close(ours[depth], theirs[depth], 1e-5)
    assert (ours[3] - theirs[3]).abs().max() > 1e-2


@each_source
def test_fields_of_the_config(name, tmp_path):
    source = make_source(name)
    source.generation_config = GenerationConfig(temperature=0.3, do_sample=True, top_k=7, eos_token_id=[4, 5])
    source.save_pretrained(tmp_path)
    theirs = source.config
    for model in (linearize(source), linearize(tmp_path)):
        ours = model.config
        for field in ("pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings", "rope_parameters"):
            assert getattr(ours, field) == getattr(theirs, field) is not None, field
        for field in ("tie_word_embeddings", "rms_norm_eps", "hidden_act", "attention_dropout", "initializer_range"):
            assert getattr(ours, field) == getattr(theirs, field), field
        assert (ours.conv_kernel_size, ours.rope_position, ours.normalizer) == (0, "before", "denominator")
        assert ours.layer_types == [LINEAR] * 3
        made = model.generation_config
        assert (made.temperature, made.do_sample, made.top_k, made.eos_token_id) == (0.3, True, 7, [4, 5])
        assert ours.name_or_path == ""


# ---- what is new


@pytest.mark.parametrize(
    "feature_map, normalizer, parts",
    [
        ("hedgehog", "denominator", {"feature_map"}),
        ("elu1", "denominator", set()),
        ("identity", "rmsnorm", {"o_norm"}),
        ("t2r", "denominator", {"feature_map"}),
        ("favor", "denominator", {"feature_map"}),
    ],
)
def test_what_is_new_starts_as_in_a_fresh_model(feature_map, normalizer, parts, tmp_path):
    source = make_source("llama")
    source.save_pretrained(tmp_path)
    for given in (source, tmp_path):
        with log_of_transformers() as said:
            model = linearize(given, feature_map=feature_map, keep_layers=[1])
        assert said == []
        assert model.config.normalizer == normalizer
        new = new_parameters(model)
        assert {key.split(".")[4] for key in new} == parts
        assert {key.split(".")[2] for key in new} == ({"0", "2"} if parts else set())
        assert set(new) == set(model.state_dict()) - set(source.state_dict())
        torch.manual_seed(1)
        fresh = LinAttnForCausalLM(model.config).state_dict()
        for key in new:
            value = model.state_dict()[key]
            assert value.shape == fresh[key].shape
            if feature_map == "t2r" and key.endswith("weight"):  # drawn anew
                assert 0.3 < value.std() * 2 < 3
            else:
                assert torch.equal(value, fresh[key]), key
        ids = random_ids(2, 11)
        loss = model(ids, labels=ids).loss
        loss.backward()
        learned = [key for key, parameter in model.named_parameters() if key in new and parameter.grad.abs().sum() > 0]
        assert bool(learned) == bool(parts - ({"feature_map"} if feature_map == "favor" else set()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_lends_its_storage(tied):
    source = make_source("llama", tie_word_embeddings=tied)
    model = linearize(source)
    ours, theirs = model.state_dict(), source.state_dict()
    assert all(ours[key].data_ptr() == value.data_ptr() for key, value in theirs.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    before = {key: value.clone() for key, value in theirs.items()}
    other = linearize(source, dtype="bfloat16")
    assert {parameter.dtype for parameter in other.parameters()} == {torch.bfloat16}
    assert other.config.dtype == torch.bfloat16
    assert other.model.rotary_emb.inv_freq.dtype == torch.float32
    assert_same_bits([*source.state_dict().values()], [*before.values()])
    assert source.dtype == torch.float32


def test_half_precision_stays(tmp_path):
    source = make_source("qwen2").to(torch.bfloat16)
    source.save_pretrained(tmp_path)
    for given in (source, tmp_path):
        model = linearize(given)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert_same_bits([model.state_dict()[key] for key in source.state_dict()], [*source.state_dict().values()])
    assert linearize(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_converted_model_is_saved_and_loaded(tmp_path):
    model, ids = linearize(make_source("qwen3, biases, tied"), keep_layers=[1]), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LinAttnForCausalLM
    assert_same_bits([again(ids).logits], [model(ids).logits])


# ---- which layers


@pytest.mark.parametrize(
    "keep, layers, kept",
    [
        ((), 4, []),
        ([3, 0, 3], 4, [0, 3]),
        ("all", 3, [0, 1, 2]),
        (0.25, 4, [2]),
        (0.25, 8, [2, 6]),
        (0.25, 32, [2, 6, 10, 14, 18, 22, 26, 30]),
        (0.01, 6, [3]),
        (0.5, 5, [1, 3]),
        (0.99, 3, [0, 1, 2]),
        (range(2), 4, [0, 1]),
    ],
)
def test_layers_that_stay(keep, layers, kept):
    assert kept_layers(keep, layers) == kept


@pytest.mark.parametrize(
    "keep, words",
    [
        ([4], "keep_layers has 4, and the model has layers 0 to 3"),
        ([-1], "keep_layers has -1"),
        ([True], "keep_layers has True"),
        ([0.5], "keep_layers has 0.5"),
        (1.0, "keep_layers=1.0 is no fraction"),
        (0.0, "keep_layers=0.0 is no fraction"),
        (2, "could be an index or a number of layers"),
        ("most", "keep_layers='most' is unknown"),
        ("auto:0.25", "keep_layers='auto:0.25' needs a ranking of layers, which is measured in training"),
    ],
)
def test_layers_that_cannot_stay(keep, words):
    with pytest.raises(ValueError) as error:
        kept_layers(keep, 4)
    assert words in str(error.value)
    assert 'give indices, a fraction between 0 and 1, or "all"' in str(error.value)
    assert "\n" not in str(error.value)


# ---- windows of the source

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    "name, fields, seen",
    [
        ("mistral", {"sliding_window": 8}, [0, 1, 2]),
        ("qwen2", QWEN_WINDOW, [1, 2]),
        ("qwen3", QWEN_WINDOW, [1, 2]),
        ("ministral", {"sliding_window": 8}, [0, 1, 2]),
    ],
)
def test_layers_that_see_a_window(name, fields, seen):
    source = make_source(name, **fields)
    ids = random_ids(1, 11)
    with pytest.warns(
        ConversionWarning, match=f"^{len(seen)} layers of the source see sliding_window=8 keys"
    ) as caught:
        model = linearize(source, keep_layers=[i for i in range(3) if i not in seen])
    assert caught[0].filename == __file__
    assert model(ids).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"^keep_layers has \[1, 2\], which see sliding_window=8 of max_position") as e:
        linearize(source, keep_layers=[1, 2])
    assert "\n" not in str(e.value)
    # the refusal is due: the window does change what the source says
    source.config.sliding_window = 64
    wide = linearize(source, keep_layers="all")(ids).logits
    source.config.sliding_window = 8
    assert (source(ids).logits - wide).abs().max() > 1e-2


@pytest.mark.parametrize("fields", [{"sliding_window": 64}, {"sliding_window": None}])
def test_windows_that_hide_nothing_are_none(fields, recwarn):
    linear_config(source_config("mistral", **fields), keep_layers="all")
    linear_config(source_config("qwen2", sliding_window=8), keep_layers="all")  # use_sliding_window is False
    assert not recwarn.list
