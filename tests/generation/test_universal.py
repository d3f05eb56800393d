"""Universal assisted decoding: the draft model has another tokenizer; the tokens stay those of greedy decoding."""

import pytest
import torch
from helpers import LETTERS, make_llama, make_model, merging_tokenizer, random_ids, tokenizer_of

NEW = 16
NAMES = pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])


def pair(name, target, draft):
    """Two models and what generate() takes of the second; all fresh, tokenizers too.

    Sampling prunes the head of the draft model in place, and transformers remembers by tokenizer that it has done so.
    """
    make = {"ours": lambda **sizes: make_model(name, **sizes), "llama": make_llama}
    own, other = tokenizer_of(LETTERS), merging_tokenizer()
    assistant = make[draft](vocab_size=len(other))
    return make[target](), {"assistant_model": assistant, "tokenizer": own, "assistant_tokenizer": other}


each_pair = pytest.mark.parametrize("target, draft", [("ours", "ours"), ("ours", "llama"), ("llama", "ours")])


def prompts():
    """Random letters, and words that the tokenizers divide differently."""
    return random_ids(1, 9), torch.tensor([tokenizer_of(LETTERS)("the queen then")["input_ids"]])


@NAMES
@each_pair
def test_greedy(name, target, draft):
    """Drafts are decoded to text and encoded again."""
    model, options = pair(name, target, draft)
    for ids in prompts():
        expected = model.generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=False)
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
        assert torch.equal(out, expected)


@NAMES
@each_pair
def test_sampling_from_the_shared_vocabulary(name, target, draft):
    """Speculative sampling; from the one best token it must give the greedy ones, whatever the draft proposes."""
    model, options = pair(name, target, draft)
    ids = prompts()[1]
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=False)
    for _ in range(2):
        out = model.generate(ids, max_new_tokens=NEW, do_sample=True, top_k=1, **options)
        assert torch.equal(out, expected)


@NAMES
def test_on_from_a_filled_cache(name):
    model, options = pair(name, "ours", "llama")
    ids = prompts()[1]
    cache = model(ids[:, :6]).cache
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=False)
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, cache=cache, **options)
    assert torch.equal(out, expected)
