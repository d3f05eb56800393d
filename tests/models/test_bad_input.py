"""Bad input: one line that names the argument, its value and what is allowed; and the cache as it was."""

import pytest
import torch
from helpers import FULL, LINEAR, SLIDING, VOCAB, assert_same_bits, contents, make_model, random_ids, read, shared_model
from transformers import DynamicCache, StaticCache

from hf_linattn import LinAttnModel, LinearAttentionCache

IDS = random_ids(2, 5)


def refuses(call, *words, cache=None):
    """The call raises a one-line ValueError with all words, and leaves the cache alone."""
    before = None if cache is None else contents(cache)
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, f"{word!r} not in: {message}"
    if cache is not None:
        assert_same_bits(contents(cache), before)


MASKS = {
    "too short": (torch.ones(2, 4), ["attention_mask covers 4", "must cover 5 or 9", "4 already read + 5 new"]),
    "too long": (torch.ones(2, 10), ["attention_mask covers 10", "must cover 5 or 9"]),
    "another batch": (torch.ones(3, 9), ["attention_mask has 3 rows", "2"]),
    "one row": (torch.ones(1, 9), ["attention_mask has 1 rows", "2"]),
    "1-D": (torch.ones(9), ["attention_mask has 1 dimensions [9]", "[B, T]"]),
    "3-D": (torch.ones(2, 5, 9), ["attention_mask has 3 dimensions [2, 5, 9]", "[B, T]"]),
    "4-D": (torch.ones(2, 1, 5, 9), ["attention_mask has 4 dimensions [2, 1, 5, 9]", "[B, T]"]),
    "fractional": (torch.full((2, 9), 0.5), ["attention_mask", "0.5", "0 (padding) and 1"]),
    "two": (torch.full((2, 9), 2), ["attention_mask", "2", "0 (padding) and 1"]),
    "additive": (torch.zeros(2, 9).masked_fill(torch.ones(2, 9).triu(1) > 0, float("-inf")), ["-inf", "0 (padding)"]),
    "nan": (torch.full((2, 9), float("nan")), ["nan", "0 (padding) and 1"]),
    "a list": ([[1] * 9] * 2, ["attention_mask must be a tensor", "list"]),
}


@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("name", ["linear", "hybrid"])
def test_masks(case, name):
    model = shared_model(name)
    _, cache = read(model, random_ids(2, 4), [4])
    mask, words = MASKS[case]
    if name == "hybrid":
        words = [word.replace("5 or 9", "9") for word in words]
    refuses(lambda: model(IDS, attention_mask=mask, cache=cache), *words, cache=cache)


@pytest.mark.parametrize("value", [0.5, 2, float("nan")])
def test_masks_of_a_single_token(value):
    model = shared_model("linear")
    _, cache = read(model, random_ids(2, 4), [4])
    mask = torch.tensor([[1.0] * 4 + [value]] * 2)
    for part in (mask, mask[:, -1:]):
        refuses(lambda part=part: model(IDS[:, :1], attention_mask=part, cache=cache), "attention_mask", cache=cache)


def test_masks_per_layer_type():
    mask = {LINEAR: None, "sliding_attention": None}
    refuses(lambda: shared_model("hybrid")(IDS, attention_mask=mask), "sliding_attention", LINEAR, FULL)


# ---- ids, embeddings, positions

INPUTS = {
    "id too high": ({"input_ids": torch.tensor([[3, VOCAB]])}, [f"input_ids holds {VOCAB}", f"[0, {VOCAB})"]),
    "id negative": ({"input_ids": torch.tensor([[3, -100]])}, ["input_ids holds -100", f"[0, {VOCAB})"]),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, ["empty", "[2, 0]"]),
    "no rows": ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, ["empty", "[0, 3]"]),
    "no embeddings": ({"inputs_embeds": torch.zeros(2, 0, 16)}, ["empty", "[2, 0]"]),
    "nothing": ({}, ["exactly one of input_ids and inputs_embeds"]),
    "both": (
        {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 5, 16)},
        ["exactly one of input_ids and inputs_embeds"],
    ),
    "1-D ids": ({"input_ids": IDS[0]}, ["input_ids must be [B, T]", "[5]"]),
    "2-D embeddings": ({"inputs_embeds": torch.zeros(5, 16)}, ["inputs_embeds [B, T, hidden_size]", "[5, 16]"]),
    "short positions": (
        {"input_ids": IDS, "position_ids": torch.arange(4).unsqueeze(0)},
        ["position_ids has shape [1, 4]", "[2, 5]"],
    ),
    "1-D positions": ({"input_ids": IDS, "position_ids": torch.arange(5)}, ["position_ids has shape [5]", "[2, 5]"]),
    "positions of another batch": (
        {"input_ids": IDS, "position_ids": torch.zeros(3, 5, dtype=torch.long)},
        ["position_ids has shape [3, 5]", "[2, 5]"],
    ),
}


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("base", [False, True], ids=["with head", "base"])
def test_inputs(case, base):
    model = make_model("linear", LinAttnModel) if base else shared_model("linear")
    inputs, words = INPUTS[case]
    cache = LinearAttentionCache(model.config)
    refuses(lambda: model(**inputs, cache=cache), *words, cache=cache)


# ---- caches

OTHERS = {
    "more layers": ("linear", {"num_hidden_layers": 3}, ["3 layers, the model 2", "another model"]),
    "more heads": (
        "linear",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
        ["another model", "[2, 4, 8, 8]", "[B, 2, F, 8]"],
    ),
    "wider heads": ("linear", {"head_dim": 4}, ["another model", "[2, 2, 4, 4]", "[B, 2, F, 8]"]),
    "another feature map": ("linear", {"feature_map": "hedgehog"}, ["F=16", "F=8"]),
    "a convolution": ("conv", {}, ["another model", "convolution", "((3, 16), (3, 16), (3, 16))", "()"]),
    "a window": ("linear", {"layer_types": [LINEAR, SLIDING], "sliding_window": 2}, ["layer 1 is a Sliding", LINEAR]),
    "softmax layers": ("linear", {"layer_types": [LINEAR, FULL]}, ["layer 1 is a DynamicLayer", LINEAR]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_caches_of_another_model(case):
    name, changes, words = OTHERS[case]
    _, cache = read(make_model(name, **changes), random_ids(2, 4), [4])
    refuses(lambda: make_model("linear")(IDS, cache=cache), *words, cache=cache)


def test_caches_of_another_window():
    _, cache = read(make_model("sliding", sliding_window=2), random_ids(2, 4), [4])
    words = ["keys [2, 2, 2, 6]", "[2, 3, 2, 6]"]
    for length in (1, 4):
        refuses(lambda length=length: make_model("sliding")(IDS[:, :length], cache=cache), *words, cache=cache)
    _, cache = read(make_model("gqa"), random_ids(2, 4), [4])
    refuses(lambda: make_model("sliding")(IDS, cache=cache), "layer 0 is a KernelLinear", SLIDING, cache=cache)


@pytest.mark.parametrize("kernel", [0, 3])
def test_caches_of_another_convolution(kernel):
    _, cache = read(make_model("conv", conv_kernel_size=kernel), random_ids(2, 4), [4])
    refuses(lambda: make_model("conv")(IDS, cache=cache), "another model", "convolution", "(3, 16)", cache=cache)


def test_a_linear_cache_in_a_softmax_layer():
    _, cache = read(make_model("hybrid", layer_types=[LINEAR] * 3), random_ids(2, 4), [4])
    refuses(lambda: make_model("hybrid")(IDS, cache=cache), "cache layer 1", FULL, cache=cache)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layer_types", [[LINEAR] * 3, [LINEAR, FULL, LINEAR], [FULL, LINEAR, LINEAR]], ids=str)
@pytest.mark.parametrize(
    "make",
    [LinearAttentionCache, lambda config: DynamicCache(), lambda config: StaticCache(config=config, max_cache_len=16)],
    ids=["own", "dynamic", "static"],
)
def test_caches_of_another_batch_size(rows, layer_types, make):
    """Said before any layer is written, also where a softmax layer would be the first to notice."""
    model = make_model("hybrid", layer_types=layer_types)
    with torch.no_grad():
        _, cache = read(model, random_ids(rows, 4), [4], cache=make(model.config))
        refuses(
            lambda: model(IDS, cache=cache), f"batch size {rows}", "input has 2", "batch_select_indices", cache=cache
        )


@pytest.mark.parametrize("cache", [((torch.zeros(1), torch.zeros(1)),), [], "static"], ids=["tuple", "list", "str"])
def test_things_that_are_no_cache(cache):
    refuses(lambda: shared_model("linear")(IDS, cache=cache), "Cache", type(cache).__name__)


def test_a_cache_under_gradient_checkpointing():
    """transformers would drop the cache in every layer, and the state with it."""
    model = make_model("linear")
    with torch.no_grad():
        cache = model(random_ids(1, 5)).cache
    model.train()
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing would drop the cache"):
        model(random_ids(1, 3), cache=cache)
    assert cache.get_seq_length() == 5
