"""Assisted decoding and prompt lookup give the tokens of plain greedy decoding, whoever drafts."""

import pytest
import torch
from helpers import VOCAB, make_model, random_ids
from transformers import LlamaConfig, LlamaForCausalLM

GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, initializer_range=0.3, eos_token_id=None, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config).eval()


def prompt():
    """A prompt that repeats itself, so that lookup finds drafts, most of them wrong."""
    return random_ids(1, 7).repeat(1, 4)


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])
def test_prompt_lookup(name):
    model = make_model(name)
    expected = model.generate(prompt(), **GREEDY)
    assert torch.equal(model.generate(prompt(), prompt_lookup_num_tokens=4, **GREEDY), expected)


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])
@pytest.mark.parametrize("drafter", ["itself", "ours", "llama"])
def test_assistants(name, drafter, llama):
    model = make_model(name)
    assistant = {"itself": model, "ours": make_model(name, num_hidden_layers=1, layer_types=None), "llama": llama}
    expected = model.generate(prompt(), **GREEDY)
    actual = model.generate(prompt(), assistant_model=assistant[drafter], **GREEDY)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])
def test_as_the_assistant_of_a_llama(name, llama):
    expected = llama.generate(prompt(), **GREEDY)
    assert torch.equal(llama.generate(prompt(), assistant_model=make_model(name), **GREEDY), expected)


def test_lookup_takes_fewer_calls_where_the_text_repeats(monkeypatch):
    """A model that repeats its prompt: drafts are accepted, so that there are fewer forwards than tokens."""
    model = make_model("linear")
    ids = prompt()
    plain = model.generate(ids, max_new_tokens=200, do_sample=False)
    calls = []
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    assisted = model.generate(ids, max_new_tokens=200, do_sample=False, prompt_lookup_num_tokens=8)
    assert torch.equal(assisted, plain)
    assert len(calls) < 150
