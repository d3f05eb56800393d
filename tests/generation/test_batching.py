"""A request in a shared batch gets the tokens that generate() of it alone gives."""

import copy
import gc
import weakref
from functools import lru_cache

import pytest
import torch
from helpers import VOCAB, assert_same_bits, contents, make_model, random_ids, read, shared_model
from reference import assert_close
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from hf_linattn.generation import ContinuousBatch

models = pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "gqa", "cosformer", "sliding", "sliding_hybrid"])

# settings, prompt length, most new tokens
REQUESTS = [
    ({}, 9, 12),
    ({"do_sample": True, "temperature": 1.3}, 2, 5),
    ({"do_sample": True, "top_k": 12, "top_p": 0.8}, 17, 9),
    ({"repetition_penalty": 1.7}, 5, 14),
    ({"no_repeat_ngram_size": 2}, 1, 20),
    ({"do_sample": True, "min_p": 0.05, "temperature": 0.7}, 12, 3),
    ({"do_sample": True, "temperature": 1.3}, 30, 8),
    ({"bad_words_ids": [[3], [4, 5]], "min_new_tokens": 4, "eos_token_id": [7, 11]}, 4, 16),
    ({"do_sample": True, "suppress_tokens": [1, 2], "repetition_penalty": 1.2, "eos_token_id": 5}, 8, 25),
    ({"do_sample": True, "typical_p": 0.9, "renormalize_logits": True}, 3, 1),
    ({"eos_token_id": list(range(15))}, 6, 30),
    ({"encoder_repetition_penalty": 1.5, "exponential_decay_length_penalty": (2, 1.3), "eos_token_id": 9}, 7, 11),
]


def prompt(index: int, length: int):
    return random_ids(1, length, seed=100 + index)


def alone(model, ids, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(ids, **{"do_sample": False, **options})[0, ids.shape[1] :].tolist()


@lru_cache
def expected_tokens(name: str) -> list[list[int]]:
    """What each of `REQUESTS` gives alone, with its number as the seed."""
    return [
        alone(shared_model(name), prompt(index, length), seed=index, max_new_tokens=limit, **options)
        for index, (options, length, limit) in enumerate(REQUESTS)
    ]


def run(batch, steps=None) -> dict:
    """Tokens of every request that ends, checked against the events on the way."""
    seen, ended = {}, {}
    while batch.has_work and steps != 0:
        steps = None if steps is None else steps - 1
        for event in batch.step():
            new = [] if event.token is None else [event.token]
            before = event.request.tokens[: event.count - len(new)]
            tokens = seen.setdefault(event.request_id, before)
            tokens += new
            assert event.count == len(tokens)
            if event.finished:
                assert event.request.tokens == tokens
                ended[event.request_id] = tokens
    return ended


@models
@pytest.mark.parametrize("slots, chunk", [(3, 7), (1, 100), (16, 64)])
def test_tokens_are_those_of_generate(name, slots, chunk):
    """More requests than seats, prompts in chunks and several in one, ends at different times, settings of each."""
    model = shared_model(name)
    batch = ContinuousBatch(model, slots=slots, prefill_chunk=chunk)
    for index, (options, length, limit) in enumerate(REQUESTS):
        options = {"do_sample": False, "max_new_tokens": limit, **options}
        batch.submit(prompt(index, length)[0].tolist(), seed=index, **options)
    expected = expected_tokens(name)
    assert len({len(tokens) for tokens in expected}) > 5
    assert run(batch) == {f"req_{index}": tokens for index, tokens in enumerate(expected)}


@models
def test_requests_that_come_while_others_decode(name):
    batch, got = ContinuousBatch(shared_model(name), slots=3, prefill_chunk=5), {}
    for index, (options, length, limit) in enumerate(REQUESTS):
        config = GenerationConfig(**{"do_sample": False, "max_new_tokens": limit, **options})
        batch.submit(prompt(index, length), config, request_id=f"number {index}", seed=index)
        got |= run(batch, steps=index % 4)
    assert got | run(batch) == {f"number {index}": tokens for index, tokens in enumerate(expected_tokens(name))}


def test_float32():
    model, options = shared_model("conv", torch.float32), {"do_sample": True, "max_new_tokens": 10}
    batch, prompts = ContinuousBatch(model, slots=4, prefill_chunk=16), [prompt(0, n) for n in (3, 20, 7, 11, 5)]
    for index, ids in enumerate(prompts):
        batch.submit(ids, seed=index, **options)
    assert run(batch) == {f"req_{index}": alone(model, ids, index, **options) for index, ids in enumerate(prompts)}


def test_a_long_prompt_does_not_hold_up_decoding():
    batch = ContinuousBatch(shared_model("linear"), slots=2, prefill_chunk=4)
    batch.submit([1, 2], request_id="short", max_new_tokens=50)
    batch.step()
    batch.submit(prompt(0, 23), request_id="long", max_new_tokens=2)
    turns = [[event.request_id for event in batch.step()] for _ in range(6)]
    assert turns[:5] == [["short"]] * 5
    assert sorted(turns[5]) == ["long", "long", "short"]


def test_a_step_is_one_forward_of_one_token_a_row(monkeypatch):
    model = make_model("hybrid")
    batch, shapes = ContinuousBatch(model, slots=3, prefill_chunk=50), []
    for length in (4, 9, 2):
        batch.submit(prompt(length, length), max_new_tokens=3 + length)
    forward = model.forward

    def counted(ids, **options):
        shapes.append(tuple(ids.shape))
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", counted)
    run(batch)
    # the prompts together, then as many steps as each needs after its first token
    assert shapes == [(3, 9)] + [(3, 1)] * 4 + [(2, 1)] * 2 + [(1, 1)] * 5


def test_processors_that_read_no_ids_see_equal_settings_together(monkeypatch):
    from transformers import TopKLogitsWarper

    rows = []
    plain = TopKLogitsWarper.__call__
    monkeypatch.setattr(
        TopKLogitsWarper, "__call__", lambda self, ids, scores: rows.append(len(scores)) or plain(self, ids, scores)
    )
    batch = ContinuousBatch(shared_model("linear"), slots=4)
    for top_k in (5, 5, 5, 6):
        batch.submit([3, 4], do_sample=True, top_k=top_k, max_new_tokens=2, seed=1)
    run(batch)
    assert rows == [3, 1, 3, 1]


def test_requests_without_a_seed_draw_from_the_default_generator():
    model = shared_model("linear")

    def draw(count):
        batch = ContinuousBatch(model)
        for _ in range(count):
            batch.submit([3, 4], do_sample=True, max_new_tokens=20)
        torch.manual_seed(5)
        return run(batch)

    assert draw(1)["req_0"] == alone(model, torch.tensor([[3, 4]]), seed=5, do_sample=True, max_new_tokens=20)
    assert draw(3) == draw(3)
    assert len({tuple(tokens) for tokens in draw(3).values()}) == 3


@models
def test_log_probabilities(name):
    model, ids = shared_model(name), prompt(0, 6)
    batch = ContinuousBatch(model, slots=2)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 7}
    batch.submit(ids, seed=4, logprobs=True, **options)
    batch.submit(prompt(1, 9), max_new_tokens=9)
    found = {event.request_id: event.request for _ in range(20) for event in batch.step() if event.finished}
    torch.manual_seed(4)
    out = model.generate(ids, **options, return_dict_in_generate=True, output_scores=True)
    scores = torch.stack(out.scores, 1)[0].log_softmax(-1)
    expected = scores.gather(-1, out.sequences[0, 6:].unsqueeze(-1)).squeeze(-1)
    assert_close(torch.tensor(found["req_0"].logprobs), expected, 1e-5)
    assert found["req_1"].logprobs == []


def test_half_precision_is_processed_in_float32():
    model, ids = make_model("conv").to(torch.bfloat16), prompt(0, 6)
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}
    batch = ContinuousBatch(model)
    batch.submit(ids, seed=4, logprobs=True, **options)
    (request,) = [event.request for _ in range(20) for event in batch.step() if event.finished]
    torch.manual_seed(4)
    out = model.generate(ids, **options, return_dict_in_generate=True, output_scores=True)
    assert request.tokens == out.sequences[0, 6:].tolist()
    scores = torch.stack(out.scores, 1)[0].log_softmax(-1)
    assert_close(torch.tensor(request.logprobs), scores.gather(-1, out.sequences[0, 6:, None]).squeeze(-1), 1e-5)


@models
@pytest.mark.parametrize("when, tokens", [(0, 0), (1, 0), (3, 0), (6, 3)])
def test_cancelling_harms_nobody(name, when, tokens):
    """While it waits, while its prompt is read, and while it decodes."""
    model = shared_model(name)
    batch = ContinuousBatch(model, slots=3, prefill_chunk=4)
    lengths = {"a": 2, "gone": 13, "b": 7, "late": 5}
    for index, (request_id, length) in enumerate(lengths.items()):
        batch.submit(prompt(index, length), request_id=request_id, max_new_tokens=15)
    got = run(batch, steps=when)
    assert batch.cancel("gone")
    assert not batch.cancel("gone")
    assert not batch.cancel("nobody")
    events = batch.step()
    (end,) = [event for event in events if event.request_id == "gone"]
    assert (end.finished, end.token, end.request.error) == (True, None, "cancelled")
    rest = {event.request_id: event.request.tokens for event in events if event.finished}
    while batch.has_work:
        rest |= {event.request_id: event.request.tokens for event in batch.step() if event.finished}
    rest = got | rest
    assert len(rest.pop("gone")) == tokens
    for index, request_id in enumerate(lengths):
        if request_id != "gone":
            assert rest[request_id] == alone(model, prompt(index, lengths[request_id]), max_new_tokens=15)


@models
def test_requests_share_a_prefix_and_leave_it_as_it_is(name):
    model, text = shared_model(name), prompt(0, 11)
    with torch.no_grad():
        _, cache = read(model, text, [11])
    before = contents(cache)
    batch, expected = ContinuousBatch(model, slots=2, prefill_chunk=4), {}
    for index, length in enumerate((1, 6, 3)):
        new, options = prompt(index + 1, length), {"do_sample": index > 0, "max_new_tokens": 4 + index}
        mask = torch.ones(1, 11 + length, dtype=torch.long)
        expected[batch.submit(new, cache=cache, seed=index, **options)] = alone(
            model, new, index, attention_mask=mask, cache=copy.deepcopy(cache), **options
        )
    expected[batch.submit(prompt(9, 5), max_new_tokens=4)] = alone(model, prompt(9, 5), max_new_tokens=4)
    assert run(batch) == expected
    assert_same_bits(contents(cache), before)


@models
def test_several_samples_of_a_prompt(name):
    model, ids = shared_model(name), prompt(0, 6)
    options = {"do_sample": True, "max_new_tokens": 8}
    batch = ContinuousBatch(model, slots=2)
    batch.submit(ids, seed=3, num_return_sequences=3, **options)
    batch.submit(ids, seed=9, **options)
    assert batch.live_ids == ["req_0__child#0", "req_0__child#1", "req_0", "req_1"]
    expected = {"req_0": 3, "req_0__child#0": 4, "req_0__child#1": 5, "req_1": 9}
    assert run(batch) == {key: alone(model, ids, seed, **options) for key, seed in expected.items()}


def test_cancelling_one_sample_leaves_the_others():
    batch = ContinuousBatch(shared_model("conv"))
    batch.submit([1, 2, 3], num_return_sequences=3, do_sample=True, max_new_tokens=5)
    batch.cancel("req_0__child#0")
    assert {key: len(tokens) for key, tokens in run(batch).items()} == {
        "req_0__child#0": 0, "req_0__child#1": 5, "req_0": 5,
    }  # fmt: skip
    batch.submit([1, 2, 3], request_id="x", num_return_sequences=2, do_sample=True, max_new_tokens=5)
    batch.cancel("x")
    assert run(batch) == {"x": [], "x__child#0": []}


BAD = {
    "empty prompt": (([],), {}, "the prompt is empty"),
    "id too large": (([1, VOCAB],), {}, f"the prompt holds {VOCAB}; ids must be in"),
    "negative id": (([-1],), {}, "the prompt holds -1"),
    "text": ((["a"],), {}, "got str in it"),
    "two rows": ((torch.ones(2, 3, dtype=torch.long),), {}, r"got \[2, 3\]"),
    "no new tokens": (([1],), {"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0"),
    "no room": (([1, 2, 3],), {"max_length": 3}, "max_length=3 leaves no new token"),
    "beams": (([1],), {"num_beams": 3}, "num_beams=3 does not go with continuous batching: use generate"),
    "assisted": (([1],), {"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens=2"),
    "static": (([1],), {"cache_implementation": "static"}, "cache_implementation='static'"),
    "misspelt": (([1],), {"max_new_token": 3}, "max_new_token: no option"),
    "temperature": (([1],), {"do_sample": True, "temperature": -1.0}, "temperature"),
    "stop strings": (([1],), {"stop_strings": ["a"]}, "tokenizer"),
    "id in use": (([1],), {"request_id": "good"}, "request_id 'good' is in use"),
    "cache": (([1],), {"cache": 3}, "cache must be a LinearAttentionCache"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_refused_and_harms_nobody(what):
    arguments, options, words = BAD[what]
    model = shared_model("hybrid")
    batch = ContinuousBatch(model)
    batch.submit(prompt(0, 5), request_id="good", max_new_tokens=6)
    got = run(batch, steps=2)
    with pytest.raises(ValueError, match=words) as caught:
        batch.submit(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert batch.live_ids == ["good"]
    assert got | run(batch) == {"good": alone(model, prompt(0, 5), max_new_tokens=6)}


@pytest.mark.parametrize("name", ["slots", "prefill_chunk"])
def test_sizes_below_one(name):
    with pytest.raises(ValueError, match=f"{name}=0; it must be at least 1"):
        ContinuousBatch(shared_model("linear"), **{name: 0})


def test_other_ways_to_end():
    """A criterion of the user, a time limit, and a chunk size of a request's own."""
    model, ids = shared_model("linear"), prompt(0, 9)
    batch = ContinuousBatch(model)

    def at_12(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= 12)

    options = {"max_new_tokens": 9}
    batch.submit(ids, stopping_criteria=StoppingCriteriaList([at_12]), **options)
    batch.submit(ids, max_time=0.0, **options)
    batch.submit(ids, prefill_chunk_size=4, **options)
    expected = alone(model, ids, **options)
    assert run(batch) == {"req_0": expected[:3], "req_1": expected[:1], "req_2": expected}


def test_a_request_that_fails_ends_alone():
    model = shared_model("conv")

    def third_time_fails(ids, scores):
        if ids.shape[1] >= 7:
            raise KeyError("no such\nthing")
        return scores

    batch = ContinuousBatch(model)
    batch.submit(prompt(0, 5), logits_processor=LogitsProcessorList([third_time_fails]), max_new_tokens=9)
    nothing_left = LogitsProcessorList([lambda ids, scores: torch.full_like(scores, -torch.inf)])
    for _ in range(2):
        batch.submit(prompt(1, 6), do_sample=True, logits_processor=nothing_left, max_new_tokens=9)
        batch.submit(prompt(1, 6), do_sample=True, max_new_tokens=9)
    batch.submit(prompt(2, 4), max_new_tokens=9)
    found = {}
    while batch.has_work:
        found |= {event.request_id: event.request for event in batch.step() if event.finished}
    assert found["req_0"].error == "KeyError: 'no such\\nthing'"
    assert found["req_0"].tokens == alone(model, prompt(0, 5), max_new_tokens=2)
    assert [len(found[f"req_{i}"].tokens) for i in (1, 2, 3, 4)] == [0, 9, 0, 9]
    assert found["req_1"].error.startswith("RuntimeError")
    assert found["req_5"].tokens == alone(model, prompt(2, 4), max_new_tokens=9)


def test_the_model_failing_is_reported_and_the_batch_goes_on(monkeypatch):
    model = make_model("linear")
    batch = ContinuousBatch(model, slots=2)
    for index in range(3):
        batch.submit(prompt(index, 4), max_new_tokens=6)
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda *a, **k: (_ for _ in ()).throw(MemoryError("full")))
        events = batch.step()
    assert [(event.request_id, event.request.error) for event in events] == [
        ("req_0", "MemoryError: full"), ("req_1", "MemoryError: full"),
    ]  # fmt: skip
    assert run(batch) == {"req_2": alone(model, prompt(2, 4), max_new_tokens=6)}


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_a_row_takes_the_same_memory_whatever_it_has_read(name):
    model = shared_model(name)
    sizes = set()
    for length in (2, 40, 300):
        batch = ContinuousBatch(model, slots=3, prefill_chunk=64)
        for index in range(3):
            batch.submit(prompt(index, length + index), max_new_tokens=50)
        for _ in range(40):
            batch.step()
        assert len(batch._seated) == 3
        sizes.add(batch.nbytes)
    (size,) = sizes
    assert size == 3 * read(model, prompt(0, 5), [5])[1].nbytes


@models
def test_nothing_is_left_of_requests_that_have_ended(name):
    batch = ContinuousBatch(shared_model(name), slots=2, prefill_chunk=8)
    left = []
    for index in range(12):
        batch.submit(prompt(index, 1 + 3 * index % 10), max_new_tokens=1 + index % 3, repetition_penalty=1.1)
        batch.cancel(f"req_{index}") if index % 5 == 4 else None
        left += [weakref.ref(event.request) for event in batch.step()]
    while batch.has_work:
        left += [weakref.ref(event.request) for event in batch.step()]
    batch.step()
    gc.collect()
    assert len(left) > 12
    assert [one() for one in left] == [None] * len(left)
    assert batch.nbytes == 0


def test_steps_may_be_taken_in_any_mode_and_draw_no_graph():
    model, ids = make_model("hybrid"), prompt(0, 5)
    expected = alone(model, ids, max_new_tokens=8, repetition_penalty=1.2)
    batch = ContinuousBatch(model)
    with torch.inference_mode():
        batch.submit(ids, max_new_tokens=8, repetition_penalty=1.2)
        batch.step()
    batch.step()
    with torch.enable_grad():
        batch.step()
    assert not batch._cache.layers[0].mu.requires_grad
    with torch.inference_mode():
        got = run(batch)
    assert expected[-len(got["req_0"]) :] == got["req_0"]
