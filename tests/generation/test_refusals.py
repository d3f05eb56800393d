"""What cannot be generated says so in one line, and the cache stays as it was."""

import pytest
import torch
from helpers import VOCAB, assert_same_bits, contents, make_model, random_ids, read

from hf_linattn import LinearAttentionCache

IDS = random_ids(1, 6)


def refuses(call, match, error=ValueError):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["linear", "hybrid"])
def test_caches_made_for_keys_and_values(name):
    model = make_model(name)
    call = lambda **options: model.generate(IDS, max_new_tokens=2, **options)  # noqa: E731
    refuses(lambda: call(cache_implementation="quantized"), "a state has a constant size and stays float32")
    refuses(lambda: call(cache_implementation="nonsense"), "nonsense")


def test_ids_outside_the_vocabulary():
    model = make_model("linear")
    cache = LinearAttentionCache(model.config)
    for bad in (VOCAB, -1):
        ids = torch.tensor([[3, bad]])
        refuses(lambda ids=ids: model.generate(ids, cache=cache, max_new_tokens=2), f"input_ids holds {bad}")
    assert cache.get_seq_length() == 0


def test_an_empty_prompt():
    model = make_model("linear")
    refuses(lambda: model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2), "the input is empty")


@pytest.mark.parametrize("name", ["linear", "hybrid"])
@pytest.mark.parametrize("padded", [True, False])
def test_masks_that_do_not_fit(name, padded):
    """Also a mask of ones, which transformers drops once it has counted positions from it."""
    model = make_model(name)
    _, cache = read(model, IDS, [6])
    before = contents(cache)
    new = random_ids(1, 2)
    for length in (5, 7, 9):
        mask = torch.ones(1, length, dtype=torch.long)
        mask[0, 0] = 0 if padded else 1
        words = f"attention_mask covers {length} tokens; it must cover"
        refuses(lambda mask=mask: model.generate(new, attention_mask=mask, cache=cache, max_new_tokens=2), words)
        for use_cache in (True, False):
            options = {"attention_mask": mask, "use_cache": use_cache, "max_new_tokens": 2}
            refuses(lambda options=options: model.generate(IDS, **options), words)
    mask = torch.ones(1, 1, 8, 8)
    refuses(lambda: model.generate(new, attention_mask=mask, cache=cache, max_new_tokens=2), "must be 2D")
    assert_same_bits(contents(cache), before)


def test_a_cache_of_another_batch_size():
    model = make_model("linear")
    _, cache = read(model, random_ids(3, 4), [4])
    before = contents(cache)
    mask = torch.ones(2, 6, dtype=torch.long)
    refuses(
        lambda: model.generate(random_ids(2, 2), attention_mask=mask, cache=cache, max_new_tokens=2),
        "the cache holds batch size 3, but the input has 2",
    )
    assert_same_bits(contents(cache), before)


def test_two_caches_at_once():
    model = make_model("linear")
    cache = LinearAttentionCache(model.config)
    refuses(lambda: model.generate(IDS, cache=cache, cache_implementation="static", max_new_tokens=2), "Passing both")


def test_misspelt_arguments():
    refuses(lambda: make_model("linear").generate(IDS, max_new_token=3), "not used by the model")
