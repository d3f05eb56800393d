"""The package's sampling loop gives what transformers' own loop gives, to the bit, and does not grow."""

import logging
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from helpers import VOCAB, make_model, random_ids, states
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_linattn import LinAttnForCausalLM, LinearAttentionCache
from hf_linattn.generation import CallbackStreamer

IDS = random_ids(3, 9, seed=3)
MASK = torch.ones(3, 9, dtype=torch.long)
PADDED = MASK.clone()
PADDED[0, :4] = 0
PADDED[2, :1] = 0
NEW = 14
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


class Recorder(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.clone())

    def end(self):
        self.ended += 1


class HalfOfTheVocabulary(LogitsProcessor):
    """Reads all ids, and writes into the scores it was given."""

    def __call__(self, input_ids, scores):
        parity = input_ids.sum(-1, keepdim=True) % 2
        hidden = torch.arange(scores.shape[-1]) % 2 == parity
        scores[hidden] -= 3
        return scores


class SumOfIds(StoppingCriteria):
    """Ends each row at its own time; looks at all ids and at the scores."""

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None or (isinstance(scores, tuple) and len(scores) == input_ids.shape[1] - IDS.shape[1])
        return input_ids[:, IDS.shape[1] :].sum(-1) > 60


OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "rows end": {"eos_token_id": [3, 4, 7, 8], "do_sample": True},
    "first row ends": {"eos_token_id": 5, "min_new_tokens": 3, "do_sample": True},
    "no padding token": {"eos_token_id": [3, 9], "pad_token_id": None, "do_sample": True},
    "repetition": {"repetition_penalty": 1.8},
    "repetition sampled": {"repetition_penalty": 0.6, "do_sample": True, "eos_token_id": [3, 4]},
    "no pairs": {"no_repeat_ngram_size": 2, "do_sample": True, "temperature": 0.5},
    "no repeated token": {"no_repeat_ngram_size": 1, "max_new_tokens": 5},
    "both": {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "do_sample": True, "eos_token_id": 6},
    "time": {"max_time": 1000.0},
    "no time": {"max_time": 0.0},
    "bad words": {"bad_words_ids": [[3], [4, 5], [7, 8, 9]], "do_sample": True},
    "bias": {"sequence_bias": [[[3], 2.0], [[4, 5], -9.0]], "do_sample": True},
    "forced end": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 4, "do_sample": True},
    "begin": {"begin_suppress_tokens": [1, 2, 3, 4], "suppress_tokens": [5]},
    "guidance": {"guidance_scale": 1.7},
    "guidance away from a padded prompt": {
        "guidance_scale": 2.0,
        "negative_prompt_ids": random_ids(3, 5, seed=7),
        "negative_prompt_attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
    },
    "chunked": {"prefill_chunk_size": 4},
    "custom processor": {"logits_processor": LogitsProcessorList([HalfOfTheVocabulary()])},
    "custom criterion": {"stopping_criteria": StoppingCriteriaList([SumOfIds()]), "do_sample": True},
    "criterion and end": {"stopping_criteria": StoppingCriteriaList([SumOfIds()]), "eos_token_id": [3, 4, 8]},
    "prefix function": {"prefix_allowed_tokens_fn": lambda row, ids: [(len(ids) + row) % VOCAB, 3, 4]},
    "renormalised": {"renormalize_logits": True, "do_sample": True, "typical_p": 0.7},
}


@contextmanager
def loop(which):
    """Generate through "our" loop or through that of "transformers"."""
    stock = patch.object(LinAttnForCausalLM, "_sample", GenerationMixin._sample)
    if which == "transformers":
        with stock:
            yield
    else:
        yield


BOTH = ("our", "transformers")


def generate(model, which="our", mask=MASK, seed=0, **options):
    torch.manual_seed(seed)
    streamer = None if options.get("num_return_sequences") else Recorder()
    with loop(which):
        output = model.generate(
            IDS,
            attention_mask=mask,
            streamer=streamer,
            **{"max_new_tokens": NEW, "do_sample": False, **EVERYTHING, **options},
        )
    return output, streamer


def assert_identical(ours, stock):
    (a, streamed_a), (b, streamed_b) = ours, stock
    assert torch.equal(a.sequences, b.sequences)
    assert type(a) is type(b)
    for key in ("scores", "logits"):
        assert len(a[key]) == len(b[key]), key
        assert type(a[key]) is tuple
        assert all(torch.equal(x, y) for x, y in zip(a[key], b[key])), key
    for x, y in zip(a.hidden_states, b.hidden_states):
        assert all(torch.equal(i, j) for i, j in zip(x, y))
    for x, y in zip(states(a.cache), states(b.cache)):
        assert torch.equal(x, y)
    assert a.cache.get_seq_length() == b.cache.get_seq_length()
    if streamed_a is not None:
        assert streamed_a.ended == streamed_b.ended == 1
        assert len(streamed_a.values) == len(streamed_b.values)
        assert all(torch.equal(x, y) for x, y in zip(streamed_a.values, streamed_b.values))


@pytest.fixture
def warnings_of_the_package(caplog):
    """The stock loop must not be the one that is compared with itself."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    assert "transformers' own loop" not in caplog.text


@pytest.mark.parametrize("padding", ["whole", "padded"])
@pytest.mark.parametrize("name", ["conv", "hybrid"])
@pytest.mark.parametrize("option", OPTIONS)
def test_identical_to_the_stock_loop(option, name, padding, warnings_of_the_package):
    model, mask = make_model(name), MASK if padding == "whole" else PADDED
    ours = generate(model, "our", mask, **OPTIONS[option])
    stock = generate(model, "transformers", mask, **OPTIONS[option])
    assert_identical(ours, stock)


@pytest.mark.parametrize("name", ["conv", "hybrid", "sliding"])
@pytest.mark.parametrize("mask", [MASK, PADDED], ids=["whole", "padded"])
def test_identical_with_a_static_cache(name, mask):
    options = {"cache_implementation": "static", "do_sample": True, "eos_token_id": [3, 4]}
    model = make_model(name)
    assert_identical(generate(model, "our", mask, **options), generate(model, "transformers", mask, **options))


@pytest.mark.parametrize("name", ["conv", "hybrid", "sliding", "sliding_hybrid"])
def test_identical_when_continued_on_a_filled_cache(name):
    model, results = make_model(name), []
    for which in BOTH:
        cache = LinearAttentionCache(model.config)
        first, _ = generate(model, which, PADDED, cache=cache, max_new_tokens=3)
        ids = torch.cat([first.sequences, random_ids(3, 4, seed=8)], 1)
        mask = torch.cat([PADDED, torch.ones(3, 7, dtype=torch.long)], 1)
        torch.manual_seed(1)
        with loop(which):
            more = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=5, do_sample=True, **EVERYTHING)
        results.append((more, None))
    assert_identical(*results)


@pytest.mark.parametrize("name", ["conv", "hybrid"])
def test_identical_from_embeddings(name):
    model, results = make_model(name), []
    embeds = model.get_input_embeddings()(IDS).detach()
    for which in BOTH:
        with loop(which):
            output = model.generate(inputs_embeds=embeds, attention_mask=PADDED, max_new_tokens=4, **EVERYTHING)
        results.append((output, None))
    assert_identical(*results)


def test_identical_attentions():
    model = make_model("hybrid", attn_implementation="eager")
    results = []
    for which in BOTH:
        with loop(which):
            options = {"output_attentions": True, "return_dict_in_generate": True}
            results.append(model.generate(IDS, attention_mask=PADDED, max_new_tokens=3, **options).attentions)
    ours, stock = results
    assert len(ours) == len(stock) == 3
    assert all(torch.equal(a, b) for x, y in zip(ours, stock) for a, b in zip(x, y))


def test_a_row_that_ended_is_padded_and_the_others_go_on():
    model = make_model()
    free, _ = generate(model, do_sample=True)
    tokens = free.sequences[:, IDS.shape[1] :]
    eos = int(tokens[1, 2])
    output, _ = generate(model, do_sample=True, eos_token_id=eos)
    row = output.sequences[1, IDS.shape[1] :]
    first = int((row == eos).nonzero()[0])
    assert (row[first + 1 :] == model.config.pad_token_id).all()


def test_processors_see_a_history_they_may_keep():
    """Views of earlier steps stay what they were, although the ids grow in one buffer."""
    kept = []

    class Keeps(LogitsProcessor):
        def __call__(self, input_ids, scores):
            kept.append(input_ids)
            return scores

    output, _ = generate(make_model(), logits_processor=LogitsProcessorList([Keeps()]))
    assert [ids.shape[1] for ids in kept] == [IDS.shape[1] + i for i in range(NEW)]
    assert all(torch.equal(ids, output.sequences[:, : ids.shape[1]]) for ids in kept)


def test_ids_outgrow_their_first_buffer(monkeypatch):
    monkeypatch.setattr("hf_linattn.generation.columns.FIRST_CAPACITY", 2)
    model = make_model("hybrid")
    options = {"do_sample": True, "repetition_penalty": 1.2}
    ours = generate(model, "our", PADDED, **options)
    assert_identical(ours, generate(model, "transformers", PADDED, **options))
    assert ours[0].sequences.untyped_storage().nbytes() == ours[0].sequences.nbytes


def test_a_processor_that_lacks_an_argument_says_so():
    class NeedsMore(LogitsProcessor):
        def __call__(self, input_ids, scores, weight):
            return scores

    with pytest.raises(ValueError, match="weight"):
        generate(make_model(), logits_processor=LogitsProcessorList([NeedsMore()]))


class Written(TorchDispatchMode):
    """Counts the elements that operators return, views aside."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not any(info.alias_info for info in function._schema.returns):
            outs = result if isinstance(result, (tuple, list)) else [result]
            self.elements += sum(one.numel() for one in outs if isinstance(one, torch.Tensor))
        return result


FLAT = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5},
    "repetition": {"repetition_penalty": 1.3},
    "no pairs": {"no_repeat_ngram_size": 4},
    "bad words": {"bad_words_ids": [[3], [4, 5]]},
    "guidance": {"guidance_scale": 1.3},
    "end": {"eos_token_id": VOCAB - 1, "min_new_tokens": 300},
}


@pytest.mark.parametrize("mask", [MASK, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("option", FLAT)
def test_the_work_of_a_step_does_not_grow(option, mask):
    work = work_of_steps(300, mask, **FLAT[option])
    assert len(work) >= 297
    slack = 4 * len(IDS) * VOCAB if option == "no pairs" else 0  # a step may have nothing to ban
    assert max(work) - min(work) <= slack, (min(work), max(work))


def test_the_work_of_the_stock_loop_grows():
    """What the test above would show if the stock loop ran instead."""
    with loop("transformers"):
        work = work_of_steps(50, PADDED)
    assert work[-1] > work[0]


@pytest.mark.parametrize("option", ["greedy", "guidance"])
def test_the_work_of_a_step_with_a_window_does_not_grow(option):
    work = work_of_steps(100, PADDED, model=make_model("sliding"), **FLAT[option])
    assert max(work) == min(work)


def work_of_steps(count, mask, model=None, **options):
    """Elements written between two tokens, from the third token on."""
    marks = []

    class Marks(BaseStreamer):
        def put(self, value):
            marks.append(counter.elements)

        def end(self):
            pass

    with Written() as counter:
        options = {"max_new_tokens": count, "do_sample": False, "streamer": Marks(), **options}
        (model or make_model()).generate(IDS, attention_mask=mask, **options)
    return [b - a for a, b in zip(marks[2:], marks[3:])]


def test_stock_criteria_of_a_user_take_part():
    criteria = StoppingCriteriaList([MaxLengthCriteria(IDS.shape[1] + 4), EosTokenCriteria(torch.tensor([3]))])
    model = make_model()
    ours = generate(model, stopping_criteria=criteria, do_sample=True)
    assert ours[0].sequences.shape[1] <= IDS.shape[1] + 4
    assert_identical(ours, generate(model, "transformers", stopping_criteria=criteria, do_sample=True))


@pytest.mark.parametrize("hook", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
def test_an_overridden_hook_goes_through_the_stock_loop(hook, monkeypatch, caplog):
    calls, model = [], make_model()
    original = getattr(model, hook)

    def overridden(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    expected, _ = generate(model)
    monkeypatch.setattr(model, hook, overridden)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        output, _ = generate(model)
    finally:
        logger.removeHandler(caplog.handler)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(calls) >= NEW - 1
    assert hook in caplog.text


def test_callback_gets_the_scores_of_every_step():
    model, steps = make_model(), []
    expected, _ = generate(model, do_sample=True)
    torch.manual_seed(0)
    ids = model.generate(
        IDS,
        attention_mask=MASK,
        max_new_tokens=NEW,
        do_sample=True,
        streamer=CallbackStreamer(lambda tokens, scores: steps.append((tokens, scores))),
    )
    assert torch.equal(ids, expected.sequences)
    assert torch.equal(torch.stack([tokens for tokens, _ in steps], 1), ids[:, IDS.shape[1] :])
    assert all(torch.equal(scores, wanted) for (_, scores), wanted in zip(steps, expected.scores))


def test_an_error_in_a_callback_reaches_the_caller():
    def full(tokens, scores):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_model().generate(IDS, attention_mask=MASK, max_new_tokens=2, streamer=CallbackStreamer(full))


def test_callback_without_scores_is_refused():
    with pytest.raises(ValueError, match="scores of each step"):
        make_model().generate(
            IDS[:1],
            attention_mask=MASK[:1],
            max_new_tokens=4,
            prompt_lookup_num_tokens=2,
            do_sample=False,
            streamer=CallbackStreamer(print),
        )


def test_scores_outlive_the_logits_they_came_from():
    """A captured graph writes the logits of every step to the same memory."""
    model, kept = make_model(), []
    expected, _ = generate(model)
    memory = torch.empty(len(IDS), 1, VOCAB)
    model.lm_head.register_forward_hook(lambda module, inputs, output: memory.copy_(output))
    actual, _ = generate(model)
    for key in ("scores", "logits"):
        assert all(torch.equal(a, e) for a, e in zip(actual[key], expected[key])), key
    streamer = CallbackStreamer(lambda tokens, scores: kept.append(scores))
    model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert all(torch.equal(a, e) for a, e in zip(kept, expected.scores))
