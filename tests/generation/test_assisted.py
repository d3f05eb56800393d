"""Assisted decoding and prompt lookup give the tokens of plain greedy decoding, whoever drafts, wherever they start."""

import pytest
import torch
from helpers import VOCAB, assert_same_bits, contents, drift, make_llama, make_model, random_ids, read, states
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache

from hf_linattn import LinearAttentionCache
from hf_linattn.cache import KernelLinearAttentionLayer

GREEDY = {"max_new_tokens": 24, "do_sample": False}
NAMES = pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "sliding"])
LOOKUP = {"prompt_lookup_num_tokens": 4}


@pytest.fixture(scope="module")
def llama():
    return make_llama()


def prompt():
    """A prompt that repeats itself, so that lookup finds drafts, most of them wrong."""
    return random_ids(1, 7).repeat(1, 4)


def assistants(name, llama):
    return {
        "lookup": LOOKUP,
        "ours": {"assistant_model": make_model(name, num_hidden_layers=1, layer_types=None, sliding_window=None)},
        "llama": {"assistant_model": llama},
        "itself": {"assistant_model": make_model(name)},
        "early exit": {"assistant_early_exit": 1},
    }


each_drafter = pytest.mark.parametrize("drafter", ["lookup", "ours", "llama", "itself", "early exit"])


def assert_holds(model, cache, ids, mask=None):
    """The cache is that of having read `ids`, and records nothing."""
    with torch.no_grad():
        _, expected = read(model, ids, [ids.shape[1]], mask)
    assert int(cache.get_seq_length()) == ids.shape[1]
    assert drift(states(cache), states(expected)) < 1e-5
    for layer, fresh in zip(cache.layers, expected.layers, strict=True):
        if hasattr(layer, "mu"):
            assert not layer.record_past
            assert layer.recorded_tokens == 0
            assert layer.max_rollback == fresh.max_rollback


# ---- from the start


@NAMES
@each_drafter
@pytest.mark.parametrize("padded", [False, True])
def test_from_the_start(name, drafter, padded, llama):
    model, ids = make_model(name), prompt()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0 if padded else 1
    expected = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
    options = {**assistants(name, llama)[drafter], **GREEDY, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(out.sequences, expected)
    grown = torch.cat([mask, torch.ones(1, 23, dtype=torch.long)], 1)
    assert_holds(model, out.cache, expected[:, :-1], grown)


@NAMES
def test_as_the_assistant_of_a_llama(name, llama):
    expected = llama.generate(prompt(), **GREEDY)
    assert torch.equal(llama.generate(prompt(), assistant_model=make_model(name), **GREEDY), expected)


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "cosformer"])
@pytest.mark.parametrize("kind", ["empty", "static"])
def test_in_a_cache_of_the_user(name, kind):
    model = make_model(name)
    cache = DynamicCache() if kind == "empty" else StaticCache(config=model.config, max_cache_len=60)
    expected = model.generate(prompt(), use_cache=False, **GREEDY)
    assert torch.equal(model.generate(prompt(), cache=cache, **LOOKUP, **GREEDY), expected)
    assert_holds(model, cache, expected[:, :-1])


def test_nothing_is_compiled_while_it_records():
    """A compiled step would not see the Python list of what can be undone."""
    model = make_model("linear")
    cache = StaticCache(config=model.config, max_cache_len=60)
    config = GenerationConfig(compile_config=CompileConfig(backend="eager"))
    config.compile_config._compile_all_devices = True
    assert model._valid_auto_compile_criteria({"cache": cache}, config)
    cache.activate_past_recording()
    assert not model._valid_auto_compile_criteria({"cache": cache}, config)


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


def test_a_draft_longer_than_what_is_usually_kept(monkeypatch):
    model = make_model("linear")
    monkeypatch.setattr(KernelLinearAttentionLayer, "max_rollback", 3)
    expected = model.generate(prompt(), use_cache=False, **GREEDY)
    assert torch.equal(model.generate(prompt(), prompt_lookup_num_tokens=12, **GREEDY), expected)
    draft = make_model("linear", num_hidden_layers=1)
    draft.generation_config.num_assistant_tokens = 12
    draft.generation_config.assistant_confidence_threshold = 0.0  # all of them, however unsure it is
    monkeypatch.setattr("hf_linattn.generation.assisted.REENCODED", 1)
    assert torch.equal(model.generate(prompt(), assistant_model=draft, **GREEDY), expected)


def test_early_exit_runs_fewer_layers(monkeypatch):
    model = make_model("linear", num_hidden_layers=3)
    calls = {0: 0, 2: 0}
    for index in calls:
        layer = model.model.layers[index]
        count = lambda *_, index=index: calls.update({index: calls[index] + 1})  # noqa: E731
        layer.register_forward_hook(count)
    model.generate(prompt(), assistant_early_exit=1, **GREEDY)
    assert calls[0] > calls[2] > 0


# ---- on from a filled cache


def filled(model, ids, mask=None):
    with torch.no_grad():
        return read(model, ids, [ids.shape[1]], mask)[1]


@NAMES
@each_drafter
@pytest.mark.parametrize("padded", [False, True])
def test_from_a_filled_cache(name, drafter, padded, llama):
    """By the full history; then a plain turn and an assisted turn on the same cache."""
    model, ids = make_model(name), prompt()
    mask = torch.ones_like(ids)
    mask[0, 1] = 0 if padded else 1
    cache, options = filled(model, ids[:, :20], mask[:, :20]), assistants(name, llama)[drafter]
    for turn, how in enumerate((options, {}, options)):
        expected = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
        assert torch.equal(model.generate(ids, attention_mask=mask, cache=cache, **how, **GREEDY), expected)
        mask = torch.cat([mask, torch.ones(1, 24, dtype=torch.long)], 1)
        assert_holds(model, cache, expected[:, :-1], mask[:, :-1])
        ids = torch.cat([expected, random_ids(1, 3, seed=turn)], 1)
        mask = torch.cat([mask, torch.ones(1, 3, dtype=torch.long)], 1)


@NAMES
@pytest.mark.parametrize("kind", ["own", "static"])
def test_lookup_from_a_filled_cache_by_new_tokens_only(name, kind):
    model, ids = make_model(name), prompt()
    cache = LinearAttentionCache(model.config) if kind == "own" else StaticCache(config=model.config, max_cache_len=60)
    with torch.no_grad():
        read(model, ids[:, :10], [10], cache=cache)
    expected = model.generate(ids, use_cache=False, **GREEDY)
    out = model.generate(ids[:, 10:], attention_mask=torch.ones_like(ids), cache=cache, **LOOKUP, **GREEDY)
    assert torch.equal(out[:, -24:], expected[:, -24:])
    assert_holds(model, cache, expected[:, :-1])


def test_the_last_token_of_the_history_alone_can_be_new():
    model, ids = make_model("conv"), prompt()
    expected = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, cache=filled(model, ids[:, :-1]), **LOOKUP, **GREEDY), expected)


def test_recording_that_the_user_turned_on_stays_on():
    model, ids = make_model("linear"), prompt()
    cache = filled(model, ids[:, :5])
    cache.activate_past_recording()
    model.generate(ids, cache=cache, **LOOKUP, **GREEDY)
    assert all(layer.record_past for layer in cache.layers)


# ---- what cannot be done


def refuses(model, cache, ids, match, error=ValueError, **options):
    before = contents(cache)
    with pytest.raises(error, match=match) as caught:
        model.generate(ids, cache=cache, **{**LOOKUP, **GREEDY, **options})
    assert "\n" not in str(caught.value)
    assert_same_bits(contents(cache), before)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert not hasattr(cache, "_assisted")


@pytest.mark.parametrize("name", ["linear", "hybrid"])
def test_refusals_touch_nothing(name, llama):
    model, ids = make_model(name, attn_implementation="eager"), prompt()
    mask = torch.ones_like(ids)
    cache = filled(model, ids[:, :20])
    refuses(model, cache, ids[:, :20], "the cache has read 20 tokens and input_ids has 20")
    refuses(model, cache, ids, "attention_mask covers 27 tokens", attention_mask=mask[:, 1:])
    refuses(model, cache, torch.full((1, 22), VOCAB), f"input_ids holds {VOCAB}")
    refuses(model, cache, ids.repeat(2, 1), "one row at a time, got 2")
    new = {"attention_mask": mask}
    for drafter in ({"assistant_model": llama}, {"assistant_early_exit": 1}):
        options = {"prompt_lookup_num_tokens": None, **drafter, **new}
        refuses(model, cache, ids[:, 20:], "the draft model has not read the 20 tokens", **options)
    wanted = {"output_hidden_states": True, "return_dict_in_generate": True}
    refuses(model, cache, ids, "output_hidden_states needs the whole prompt in one call", **wanted)
    padded = mask.clone()
    padded[0, 0] = 0
    cache = filled(model, ids[:, :20], padded[:, :20])
    refuses(model, cache, ids[:, 20:], "have padding: pass the full history", attention_mask=padded)
    other = LinearAttentionCache(make_model(name, num_hidden_layers=5, layer_types=None, sliding_window=None).config)
    refuses(model, other, ids, "the cache has 5 layers")
    with pytest.raises(ValueError, match="drop use_cache=False"):
        model.generate(ids, use_cache=False, **LOOKUP, **GREEDY)


def test_an_error_in_a_draft_leaves_model_and_cache_usable():
    model, ids = make_model("linear"), prompt()
    cache = LinearAttentionCache(model.config)

    def fail_in_a_draft(*_):
        if model.config.num_hidden_layers == 1:
            raise KeyError("broken")

    hook = model.model.layers[0].register_forward_hook(fail_in_a_draft)
    with pytest.raises(KeyError):
        model.generate(ids, cache=cache, assistant_early_exit=1, **GREEDY)
    hook.remove()
    assert model.config.num_hidden_layers == 2
    assert not any(layer.record_past for layer in cache.layers)
    expected = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, cache=cache, **GREEDY), expected)
