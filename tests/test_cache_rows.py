"""Rows of different caches in one: what a left-padded batch of the same texts would have left."""

import pytest
import torch
from helpers import FULL, assert_same_bits, contents, make_model, random_ids, read, shared_model
from reference import assert_close
from transformers import StaticCache

from hf_linattn import LinearAttentionCache
from hf_linattn.cache.rows import Row, gather_rows, share_prefix

LENGTHS = (9, 3, 6)
models = pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "gqa", "sliding"])


def texts():
    return [random_ids(1, length, seed=length) for length in LENGTHS]


def alone(model, text):
    return read(model, text, [text.shape[1]])[1]


def padded(model, chosen):
    longest = max(text.shape[1] for text in chosen)
    ids, mask = torch.zeros(len(chosen), longest, dtype=torch.long), torch.zeros(len(chosen), longest, dtype=torch.long)
    for row, text in enumerate(chosen):
        ids[row, longest - text.shape[1] :], mask[row, longest - text.shape[1] :] = text[0], 1
    cache = LinearAttentionCache(model.config)
    model(ids, attention_mask=mask, cache=cache)
    return cache, mask


def assert_same_cache(actual, expected, mask):
    assert actual.get_seq_length() == expected.get_seq_length() == mask.shape[1]
    for a, e in zip(actual.layers, expected.layers, strict=True):
        if hasattr(a, "mu"):
            assert_close(a.mu, e.mu, 1e-7)
            assert_close(a.nu, e.nu, 1e-7)
            assert_close(a.state[2:], e.state[2:], 1e-7)
            for a_tail, e_tail in zip(a.conv_tails, e.conv_tails, strict=True):
                assert_close(a_tail, e_tail, 1e-7)
            has_padding = bool((mask == 0).any())
            assert torch.equal(a.padding, (mask == 0).sum(1)) if has_padding else a.padding is None
        else:
            real = mask[:, None, :, None].bool()
            for a_part, e_part in ((a.keys, e.keys), (a.values, e.values)):
                assert a_part.shape == e_part.shape
                assert_close(a_part.where(real, 0), e_part.where(real, 0), 1e-7)
                assert (a_part.masked_select(~real) == 0).all()


@models
@torch.no_grad()
def test_joined_rows_are_a_left_padded_batch(name):
    model = shared_model(name)
    sources = [alone(model, text) for text in texts()]
    before = [contents(source) for source in sources]
    joined = gather_rows([Row(source, 0, n) for source, n in zip(sources, LENGTHS, strict=True)])
    expected, mask = padded(model, texts())
    assert_same_cache(joined, expected, mask)
    new, longer = random_ids(3, 1, seed=8), torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
    logits = [model(new, attention_mask=longer, cache=cache).logits for cache in (joined, expected)]
    assert_close(*logits, 1e-7)
    for source, was in zip(sources, before, strict=True):
        assert_same_bits(contents(source), was)


@models
@torch.no_grad()
def test_common_padding_goes_with_the_longest_row(name):
    model = shared_model(name)
    batch, _ = padded(model, texts())
    left = gather_rows([Row(batch, 2, LENGTHS[2]), Row(batch, 1, LENGTHS[1])])
    assert_same_cache(left, *padded(model, [texts()[2], texts()[1]]))
    last = gather_rows([Row(left, 1, LENGTHS[1])])
    assert_same_cache(last, alone(model, texts()[1]), torch.ones(1, LENGTHS[1], dtype=torch.long))


@models
@torch.no_grad()
def test_a_row_can_be_replaced_and_taken_twice(name):
    model = shared_model(name)
    batch, _ = padded(model, texts())
    other = random_ids(1, 12, seed=12)
    rows = [Row(batch, 0, 9), Row(alone(model, other), 0, 12), Row(batch, 2, 6), Row(batch, 2, 6)]
    assert_same_cache(gather_rows(rows), *padded(model, [texts()[0], other, texts()[2], texts()[2]]))


@torch.no_grad()
def test_nothing_of_a_source_is_shared():
    model = shared_model("hybrid")
    source = alone(model, texts()[0])
    joined = gather_rows([Row(source, 0, 9)])
    pointers = [{tensor.data_ptr() for tensor in contents_of(cache)} for cache in (source, joined)]
    assert pointers[0].isdisjoint(pointers[1])


def contents_of(cache):
    return [t for layer in cache.layers for t in (getattr(layer, "mu", layer.keys), getattr(layer, "nu", layer.values))]


@torch.no_grad()
def test_a_model_of_full_attention_only():
    model = make_model("linear", layer_types=[FULL, FULL]).double()
    sources = [alone(model, text) for text in texts()]
    joined = gather_rows([Row(source, 0, n) for source, n in zip(sources, LENGTHS, strict=True)])
    assert_same_cache(joined, *padded(model, texts()))


@models
@torch.no_grad()
def test_a_shared_prefix_stays_as_it_is(name):
    model = shared_model(name)
    prefix, more = alone(model, texts()[0]), random_ids(1, 4, seed=3)
    before = contents(prefix)
    one, two = share_prefix(prefix, model.config), share_prefix(prefix, model.config)
    logits = [model(more, cache=cache).logits for cache in (one, two)]
    assert torch.equal(*logits)
    assert_close(logits[0], model(torch.cat([texts()[0], more], 1)).logits[:, 9:], 1e-7)
    assert_same_bits(contents(prefix), before)


@torch.no_grad()
def test_padding_of_a_prefix_is_forgotten_where_nothing_keeps_it():
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    ids = random_ids(1, 5)
    caches = {}
    for name in ("conv", "hybrid"):
        caches[name] = LinearAttentionCache(shared_model(name).config)
        shared_model(name)(ids, attention_mask=mask, cache=caches[name])
    shared = share_prefix(caches["conv"], shared_model("conv").config)
    assert_same_cache(shared, alone(shared_model("conv"), ids[:, 2:]), torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="the cache was padded"):
        share_prefix(caches["hybrid"], shared_model("hybrid").config)


@torch.no_grad()
def test_refusals():
    model = shared_model("linear")
    with pytest.raises(ValueError, match="at least one row"):
        gather_rows([])
    static = StaticCache(config=model.config, max_cache_len=20)
    model(texts()[0], cache=static)
    with pytest.raises(ValueError, match="StaticKernelLinearAttentionLayer cannot be moved"):
        share_prefix(static, model.config)
    for empty in (LinearAttentionCache(model.config), None, 3):
        with pytest.raises(ValueError, match="has read something"):
            share_prefix(empty, model.config)
    two = LinearAttentionCache(model.config)
    model(random_ids(2, 3), cache=two)
    with pytest.raises(ValueError, match="holds batch size 2, but the input has 1"):
        share_prefix(two, model.config)
    with pytest.raises(ValueError, match="comes from another model"):
        share_prefix(alone(model, texts()[0]), shared_model("hybrid").config)
