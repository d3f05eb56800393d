"""A state written to a file goes on where it stopped, and is refused where it does not belong."""

import json
import struct

import pytest
import torch
from helpers import CONFIGS, assert_same_bits, contents, make_model, random_ids, read, states
from safetensors.torch import save_file
from transformers import StaticCache

from hf_linattn import LinearAttentionCache


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_loaded_state_goes_on_bit_for_bit(name, padded, tmp_path):
    model, ids = make_model(name), random_ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    mask = mask if padded else None
    cache = read(model, ids, [8], mask)[1]
    before = contents(cache)
    cache.save(tmp_path / "a.state", model)
    loaded = LinearAttentionCache.load(tmp_path / "a.state", model)
    assert_same_bits(contents(loaded), before)
    assert loaded.get_seq_length() == 8
    more = read(model, ids[:, 8:], [4], mask, loaded)[0]
    assert torch.equal(more, read(model, ids[:, 8:], [4], mask, cache)[0])
    assert_same_bits(contents(LinearAttentionCache.load(tmp_path / "a.state", model)), before)  # nobody wrote to it
    assert [path.name for path in tmp_path.iterdir()] == ["a.state"]


def test_the_size_does_not_depend_on_what_was_read(tmp_path):
    model = make_model("conv")
    sizes = []
    for length in (3, 5000):
        read(model, random_ids(1, length), [length])[1].save(tmp_path / "a.state", model)
        sizes.append((tmp_path / "a.state").stat().st_size)
    assert abs(sizes[0] - sizes[1]) <= 8  # the digits of the token count, padded to a multiple of 8
    assert sizes[0] > model.config.state_nbytes()


def test_one_prefix_serves_many_prompts(tmp_path):
    model, prefix = make_model("linear"), random_ids(1, 20)
    read(model, prefix, [20])[1].save(tmp_path / "a.state", model)
    for seed in (1, 2):
        ids = torch.cat([prefix, random_ids(1, 5, seed)], 1)
        cache = LinearAttentionCache.load(tmp_path / "a.state", model)
        assert torch.equal(
            model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False),
            model.generate(ids, max_new_tokens=8, do_sample=False),
        )


def refused(path, model, words):
    with pytest.raises(ValueError, match=words) as error:
        LinearAttentionCache.load(path, model)
    assert "\n" not in str(error.value)


def test_another_model_is_refused(tmp_path):
    model, path = make_model("linear"), tmp_path / "a.state"
    cache = read(model, random_ids(1, 4), [4])[1]
    cache.save(path, model)
    refused(path, make_model("conv"), "another model: conv_kernel_size is 0 there, 4 here")
    refused(path, make_model("gqa"), "another model: num_attention_heads is 2 there, 4 here")
    windowed = tmp_path / "windowed.state"
    read(make_model("sliding"), random_ids(1, 4), [4])[1].save(windowed)
    refused(windowed, make_model("sliding", sliding_window=2), "another model: sliding_window is 3 there, 2 here")
    other = make_model("linear")
    other.lm_head.weight.mul_(1.5)
    refused(path, other, "with other weights")
    LinearAttentionCache.load(path, make_model("linear").to(torch.bfloat16))  # the same weights, rounded
    cache.save(path)
    LinearAttentionCache.load(path, other)  # saved without the model: weights were not noted


def test_a_file_that_is_no_state_is_refused(tmp_path):
    model, path = make_model("linear"), tmp_path / "a.state"
    refused(path, model, "no such state file")
    cache = read(model, random_ids(1, 4), [4])[1]
    cache.save(path, model)
    whole = path.read_bytes()
    for length in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, model, "not a whole safetensors file")
    path.write_bytes(b"book" * 100)
    refused(path, model, "not a whole safetensors file")
    save_file({"mu": torch.zeros(2)}, path)
    refused(path, model, "not a saved state")
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    header["__metadata__"]["version"] = "2"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    refused(path, model, "format version 2; this hf_linattn reads up to 1")


def test_half_precision_sums_and_missing_layers_are_refused(tmp_path):
    model, path = make_model("linear"), tmp_path / "a.state"
    cache = read(model, random_ids(1, 4), [4])[1]
    cache.layers[0].mu = cache.layers[0].mu.half()
    cache.save(path, model)
    refused(path, model, "layer 0 has mu torch.float16")
    cache.layers[0].mu = cache.layers[0].mu.float()
    cache.layers.pop()
    cache.save(path, model)
    refused(path, model, "layer 1 lacks mu, nu")


def test_what_cannot_be_saved(tmp_path):
    model, path = make_model("linear"), tmp_path / "a.state"
    with pytest.raises(ValueError, match="the cache is empty"):
        LinearAttentionCache(model.config).save(path)
    static = StaticCache(config=model.config, max_cache_len=8)
    model(random_ids(1, 4), cache=static)
    cache = LinearAttentionCache(model.config)
    cache.layers = static.layers
    with pytest.raises(ValueError, match="a static cache cannot be saved"):
        cache.save(path)
    assert not list(tmp_path.iterdir())
    assert len(states(static)) == 4
