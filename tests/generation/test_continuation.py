"""Going on from a cache, turn by turn, by the full history or by new tokens only, equals reading everything again."""

import copy

import pytest
import torch
from helpers import FEW, assert_same_bits, contents, make_model, random_ids, read
from reference import assert_close
from transformers import DynamicCache, StaticCache

from hf_linattn import LinearAttentionCache

KINDS = {
    "own": LinearAttentionCache,
    "empty": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=40),
}
few_configs = pytest.mark.parametrize("name", FEW)
each_kind = pytest.mark.parametrize("kind", KINDS)
PROMPT, MASK = random_ids(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
NEW = 4


def generate(model, ids, mask, **options):
    torch.manual_seed(0)
    defaults = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=mask, **{**defaults, **options})


def ones(rows, length):
    return torch.ones(rows, length, dtype=torch.long)


def assert_same(actual, expected, new_tokens=NEW):
    assert torch.equal(actual.sequences[:, -new_tokens:], expected.sequences[:, -new_tokens:])
    assert_close(torch.stack(actual.logits), torch.stack(expected.logits), 1e-4)


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "cosformer", "sliding_hybrid"])
@each_kind
@pytest.mark.parametrize("only_new", [True, False], ids=["new tokens", "full history"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}], ids=str)
def test_turns(name, kind, only_new, options):
    """Three turns; what the user adds in the second is padded on the left, in the third on the right of one row."""
    model = make_model(name)
    cache = KINDS[kind](model.config)
    history, mask = PROMPT, MASK
    out = generate(model, history, mask, cache=cache)
    for turn, added in ((1, torch.tensor([[1, 1, 1], [0, 0, 1]])), (2, torch.tensor([[0, 1, 1], [1, 1, 1]]))):
        history = torch.cat(
            [
                out.sequences if not only_new or turn == 1 else torch.cat([history, out.sequences[:, -NEW:]], 1),
                random_ids(2, 3, seed=turn),
            ],
            1,
        )
        mask = torch.cat([mask, ones(2, NEW), added], 1)
        past = int(cache.get_seq_length())
        assert past == history.shape[1] - 4  # the last generated token was never read
        ids = history[:, past:] if only_new else history
        out = generate(model, ids, mask, cache=cache, **options)
        expected = generate(model, history, mask, use_cache=False)
        assert_same(out, expected)
        assert int(cache.get_seq_length()) == history.shape[1] + NEW - 1


@few_configs
def test_a_prefix_read_by_forward(name):
    """A prompt read once by the model, then continued several times from copies of its cache."""
    model = make_model(name)
    with torch.no_grad():
        _, prefix = read(model, PROMPT, [6], MASK)
    before = contents(prefix)
    for seed in (1, 2):
        history = torch.cat([PROMPT, random_ids(2, 3, seed=seed)], 1)
        mask = torch.cat([MASK, ones(2, 3)], 1)
        expected = generate(model, history, mask, use_cache=False)
        assert_same(generate(model, history, mask, cache=copy.deepcopy(prefix)), expected)
        assert_same(generate(model, history[:, 6:], mask, cache=copy.deepcopy(prefix)), expected)
    assert_same_bits(contents(prefix), before)


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "sliding"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_a_prefix_fanned_out(name, options):
    """One row read once, three continuations: the rows of the cache are repeated as generate() repeats the ids."""
    model, ids = make_model(name), random_ids(1, 8)
    with torch.no_grad():
        _, cache = read(model, ids, [5])
    cache.batch_repeat_interleave(3)
    out = generate(model, ids, ones(1, 8), cache=cache, **options)
    assert_same(out, generate(model, ids, ones(1, 8), use_cache=False, **options))


@few_configs
def test_without_a_mask(name):
    """Unpadded turns need none if they bring the full history."""
    model, ids = make_model(name), random_ids(2, 9)
    with torch.no_grad():
        _, cache = read(model, ids, [5])
    expected = generate(model, ids, None, use_cache=False, pad_token_id=None)
    assert_same(generate(model, ids, None, cache=cache, pad_token_id=None), expected)


@few_configs
def test_a_cache_filled_by_generate_goes_on_in_forward(name):
    model = make_model(name)
    out = generate(model, PROMPT, MASK)
    more = torch.cat([out.sequences[:, -1:], random_ids(2, 2)], 1)
    mask = torch.cat([MASK, ones(2, NEW + 2)], 1)
    logits = model(more, attention_mask=mask, cache=out.cache).logits
    history = torch.cat([out.sequences, more[:, 1:]], 1)
    assert_close(logits, model(history, attention_mask=mask, use_cache=False).logits[:, -3:], 1e-5)


# ---- nothing left to read


@pytest.mark.parametrize("name", ["linear", "hybrid"])
@pytest.mark.parametrize("length", [4, 6])
@pytest.mark.parametrize("masked", [True, False])
def test_a_prompt_wholly_in_the_cache_is_refused(name, length, masked):
    model = make_model(name)
    with torch.no_grad():
        _, cache = read(model, random_ids(1, 6), [6])
    before = contents(cache)
    ids = random_ids(1, 6)[:, :length]
    with pytest.raises(ValueError, match=f"the cache has read 6 tokens and input_ids has {length}") as error:
        model.generate(ids, attention_mask=ones(1, length) if masked else None, cache=cache, max_new_tokens=2)
    assert "\n" not in str(error.value)
    assert_same_bits(contents(cache), before)
