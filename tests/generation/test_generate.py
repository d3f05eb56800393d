"""Every way of calling generate() gives what it gives without a cache: scores, logits and tokens."""

import warnings

import pytest
import torch
from helpers import CONFIGS, FEW, VOCAB, make_model, random_ids, states
from reference import assert_close
from transformers import DynamicCache, LogitsProcessorList, StaticCache
from transformers.generation import StoppingCriteriaList, TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer

from hf_linattn import LinearAttentionCache

IDS = random_ids(2, 7)
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])  # the first row is left padded
NEW = 6


def models(names=FEW):
    return pytest.mark.parametrize("name", names)


def generate(model, ids=IDS, mask=MASK, seed=0, **options):
    """A dict with sequences, scores and logits; the same random numbers at every call."""
    torch.manual_seed(seed)
    defaults = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return model.generate(ids, attention_mask=mask, **{**defaults, "do_sample": False, **options})


def assert_same(actual, expected):
    """Sequences equal, scores and logits within 1e-4 of their scale, and tokens that could have differed."""
    assert torch.equal(actual.sequences, expected.sequences)
    for key in ("scores", "logits"):
        a, e = torch.stack(actual[key]), torch.stack(expected[key])
        assert torch.equal(a.isfinite(), e.isfinite())
        assert_close(a[a.isfinite()], e[e.isfinite()], 1e-4, key)
    if "sequences_scores" in expected:
        assert_close(actual.sequences_scores, expected.sequences_scores, 1e-4)
        assert torch.equal(actual.beam_indices, expected.beam_indices)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "top k and p": {"do_sample": True, "top_k": 12, "top_p": 0.8},
    "min p": {"do_sample": True, "min_p": 0.05},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "suppressed tokens": {"suppress_tokens": [1, 2, 3]},
}


@models(CONFIGS)
@pytest.mark.parametrize("mode", ["sampling", "several beams"])
def test_every_config(name, mode):
    model = make_model(name)
    assert_same(generate(model, **MODES[mode]), generate(model, use_cache=False, **MODES[mode]))


@models(["conv", "hybrid"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(name, mode):
    model = make_model(name)
    assert_same(generate(model, **MODES[mode]), generate(model, use_cache=False, **MODES[mode]))


CACHES = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 3},
    "chunks of one": {"prefill_chunk_size": 1},
    "chunked static prefill": {"prefill_chunk_size": 3, "cache_implementation": "static"},
}


@models(["linear", "conv", "hybrid"])
@pytest.mark.parametrize("how", CACHES)
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_every_cache(name, how, mode):
    model = make_model(name)
    assert_same(generate(model, **CACHES[how], **MODES[mode]), generate(model, use_cache=False, **MODES[mode]))


@models(["linear", "conv", "hybrid"])
@pytest.mark.parametrize("kind", ["own", "dynamic", "empty", "static"])
@pytest.mark.parametrize("word", ["cache", "past_key_values"])
def test_a_cache_of_the_user(name, kind, word):
    model = make_model(name)
    cache = {
        "own": lambda: LinearAttentionCache(model.config),
        "dynamic": lambda: DynamicCache(config=model.config),
        "empty": lambda: DynamicCache(),
        "static": lambda: StaticCache(config=model.config, max_cache_len=20),
    }[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old name still works
        out = generate(model, **{word: cache})
    assert_same(out, generate(model, use_cache=False))
    assert cache.get_seq_length() == 7 + NEW - 1
    assert out.cache is cache


@models(CONFIGS)
def test_the_first_token_is_the_best_of_the_full_forward(name):
    model = make_model(name)
    logits = model(IDS, attention_mask=MASK).logits[:, -1]
    out = generate(model)
    assert_close(out.logits[0], logits, 1e-5)
    assert torch.equal(out.sequences[:, 7], logits.argmax(-1))
    assert isinstance(out.cache, LinearAttentionCache)
    assert out.cache.get_seq_length() == 7 + NEW - 1


@models()
def test_left_padding_gives_the_unpadded_row(name):
    model = make_model(name)
    alone = generate(model, IDS[:1, 3:], MASK[:1, 3:])
    both = generate(model)
    assert torch.equal(both.sequences[0, 3:], alone.sequences[0])
    assert_close(torch.stack(both.logits)[:, 0], torch.stack(alone.logits)[:, 0], 1e-4)


def test_the_mask_is_inferred_from_padding_ids():
    model = make_model("linear")
    padded = IDS.masked_fill(MASK == 0, model.config.pad_token_id)
    assert_same(generate(model, padded, None), generate(model, padded))


@models(["linear", "hybrid"])
def test_rows_that_end_early_are_padded(name):
    """Each row stops at its own end-of-sequence token; the others go on as if alone."""
    model = make_model(name)
    free = generate(model, max_new_tokens=12).sequences
    end = int(free[0, 9])  # what the first row says third
    for use_cache in (True, False):
        out = generate(model, max_new_tokens=12, eos_token_id=end, use_cache=use_cache).sequences
        for row, expected in zip(out, free, strict=True):
            stops = torch.nonzero(expected[7:] == end).flatten()
            stop = 7 + int(stops[0]) + 1 if len(stops) else 19
            assert torch.equal(row[:stop], expected[:stop])
            assert (row[stop:] == model.config.pad_token_id).all()


@models(["conv", "hybrid"])
def test_prompts_of_embeddings(name):
    model = make_model(name)
    embeds = model.get_input_embeddings()(IDS)
    expected = generate(model)
    for options in ({}, {"use_cache": False}, {"num_beams": 2}):
        out = generate(model, None, MASK, inputs_embeds=embeds, **options)
        assert torch.equal(out.sequences, generate(model, **options).sequences[:, 7:])
    out = generate(model, None, MASK, inputs_embeds=embeds)
    assert_close(torch.stack(out.logits), torch.stack(expected.logits), 1e-4)


class Collector(BaseStreamer):
    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, value):
        self.parts.append(value.flatten())

    def end(self):
        self.ended = True


def test_a_streamer_sees_prompt_and_tokens_as_they_come():
    model, streamer = make_model("conv"), Collector()
    out = generate(model, IDS[:1], MASK[:1], streamer=streamer)
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.parts), out.sequences[0])
    assert len(streamer.parts) == 1 + NEW


def test_processors_and_criteria_of_the_user():
    model, lengths = make_model("linear"), []

    def criterion(ids, scores, **kwargs):
        lengths.append(ids.shape[1])
        return torch.full((len(ids),), ids.shape[1] >= 10)

    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    options = {"logits_processor": processors, "stopping_criteria": StoppingCriteriaList([criterion])}
    out = generate(model, **options)
    assert out.sequences.shape == (2, 10)
    assert lengths == [8, 9, 10]
    assert_close(torch.stack(out.scores), 2 * torch.stack(out.logits), 1e-6)


def test_outputs_of_every_step():
    model = make_model("hybrid", attn_implementation="eager")
    out = generate(model, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == len(out.hidden_states) == NEW
    assert out.attentions[0][0].shape == (2, 2, 7, 7)
    assert out.attentions[3][0].shape == (2, 2, 1, 1)  # a state has no keys: weights over the tokens of the call
    assert out.attentions[3][1].shape == (2, 2, 1, 10)
    assert out.hidden_states[1][-1].shape == (2, 1, 16)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 9)


def test_scores_of_the_sequence_can_be_recomputed():
    model = make_model("conv")
    out = generate(model, num_beams=3, num_return_sequences=2)
    transition = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    assert_close(transition.sum(1) / NEW, out.sequences_scores, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@models(["conv", "hybrid"])
def test_half_precision(name, dtype):
    model = make_model(name).to(dtype)
    out = generate(model)
    expected = generate(model, use_cache=False)
    forced = model(out.sequences[:, :-1], attention_mask=torch.cat([MASK, torch.ones(2, NEW - 1)], 1)).logits[:, 6:]
    # the tokens may part where two logits round alike; along one path they agree
    assert_close(torch.stack(out.logits, 1).float(), forced.float(), 0.06 if dtype == torch.bfloat16 else 0.01)
    assert torch.equal(out.sequences[:, :8], expected.sequences[:, :8])
    assert all(
        state.dtype == torch.float32 for layer in out.cache.layers if hasattr(layer, "mu") for state in layer.state[:2]
    )


def test_generating_in_train_mode_and_with_gradients_around():
    model = make_model("conv")
    expected = generate(model)
    model.train()
    with torch.enable_grad():
        assert_same(generate(model), expected)
    model.activation_checkpointing_enable()
    assert_same(generate(model), expected)


def test_long_generation_holds_no_more_than_short():
    model = make_model("conv", num_hidden_layers=1)
    short = generate(model, max_new_tokens=10, output_scores=False, output_logits=False)
    long = generate(model, max_new_tokens=200, output_scores=False, output_logits=False)
    assert long.sequences.shape == (2, 207)
    assert long.cache.nbytes == short.cache.nbytes == model.config.state_nbytes(2)
    assert [state.shape for state in states(long.cache)] == [state.shape for state in states(short.cache)]
    assert int(long.sequences.max()) < VOCAB
