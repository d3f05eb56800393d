"""transformers' entry points: generate_batch, the manager in its thread, generate(cache_implementation="paged")."""

import asyncio
import inspect
import queue
import threading
from string import ascii_letters

import pytest
import torch
from helpers import VOCAB, make_model, random_ids, shared_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, ContinuousMixin, RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_linattn.generation import BatchManager

PROMPTS = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 1, 12, 8, 3)]
models = pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])


def alone(model, ids, seed=0, **options):
    torch.manual_seed(seed)
    ids = torch.tensor([ids])
    return model.generate(ids, **{"do_sample": False, **options})[0, ids.shape[1] :].tolist()


@pytest.fixture
def manager():
    with shared_model("conv").continuous_batching_context_manager() as one:
        yield one


def parameters(function) -> list[str]:
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD]


def test_signatures_are_those_of_transformers():
    model = shared_model("linear")
    for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        wanted, own = parameters(getattr(ContinuousMixin, name))[1:], parameters(getattr(model, name))
        assert own[: len(wanted)] == wanted, name
    public = [name for name in vars(ContinuousBatchingManager) if not name.startswith("_")]
    for name in {*public, "__iter__"} - {"switch_to_cb_friendly_attn"}:  # there is no attention to switch
        wanted, own = parameters(getattr(ContinuousBatchingManager, name)), parameters(getattr(BatchManager, name))
        assert own[: len(wanted)] == wanted, name


@models
def test_generate_batch(name):
    model = shared_model(name)
    config = GenerationConfig(do_sample=False, repetition_penalty=1.2)
    out = model.generate_batch(
        PROMPTS, config, max_new_tokens=7, progress_bar=False, record_timestamps=True, warmup=True
    )
    assert list(out) == [f"req_{i}" for i in range(5)]
    for (request_id, one), ids in zip(out.items(), PROMPTS, strict=True):
        assert type(one) is GenerationOutput
        assert (one.request_id, one.prompt_ids, one.error) == (request_id, ids, None)
        assert one.status is RequestStatus.FINISHED
        assert one.is_finished()
        assert one.generated_tokens == alone(model, ids, max_new_tokens=7, repetition_penalty=1.2)
        assert one.logprobs == []
        assert len(one.timestamps) == 7
        assert one.created_time <= one.lifespan[0] <= one.timestamps[0] <= one.timestamps[-1] <= one.lifespan[1]
    assert model.generate_batch([]) == {}
    assert config.to_diff_dict() == GenerationConfig(do_sample=False, repetition_penalty=1.2).to_diff_dict()


def test_options_of_the_batch():
    model = shared_model("linear")
    options = {"max_requests_per_batch": 2, "max_batch_tokens": 4, "return_logprobs": True, "seed": 20}
    out = model.generate_batch(
        PROMPTS,
        GenerationConfig(do_sample=True, max_new_tokens=6),
        continuous_batching_config=ContinuousBatchingConfig(**options),
    )
    for index, (one, ids) in enumerate(zip(out.values(), PROMPTS, strict=True)):
        assert one.generated_tokens == alone(model, ids, seed=20 + index, do_sample=True, max_new_tokens=6)
        assert len(one.logprobs) == 6
        assert one.timestamps is None


def test_settings_of_each_prompt():
    model = shared_model("linear")
    configs = [GenerationConfig(do_sample=False, max_new_tokens=n) for n in (1, 2, 3, 4, 5)]
    out = model.generate_batch(PROMPTS, configs)
    assert [len(one.generated_tokens) for one in out.values()] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="generation_config has 5 entries for 2 inputs"):
        model.generate_batch(PROMPTS[:2], configs)


def test_several_samples_stand_in_transformers_order():
    out = shared_model("linear").generate_batch(
        PROMPTS[:2], GenerationConfig(do_sample=True, num_return_sequences=3, max_new_tokens=5)
    )
    assert list(out) == ["req_0__child#0", "req_0__child#1", "req_0", "req_1__child#0", "req_1__child#1", "req_1"]
    assert len({tuple(one.generated_tokens) for one in out.values()}) == 6


def test_a_bad_prompt_is_named_before_anything_runs():
    with pytest.raises(ValueError, match=rf"inputs\[2\]: the prompt holds {VOCAB}"):
        shared_model("linear").generate_batch([[1], [2], [VOCAB]], max_new_tokens=3)
    with pytest.raises(ValueError, match=r"inputs\[0\]: num_beams=2 does not go with continuous batching"):
        shared_model("linear").generate_batch([[1]], GenerationConfig(num_beams=2))


@pytest.mark.parametrize(
    "options", [{"num_blocks": 7}, {"page_size": 32}, {"use_cuda_graph": True}, {"scheduler_type": "prefill_first"}]
)
def test_options_for_pages_are_refused(options):
    model, (name,) = shared_model("linear"), options
    config = ContinuousBatchingConfig(**options)
    for call in (
        lambda: model.init_continuous_batching(None, config),
        lambda: model.generate_batch([[1]], None, config),
    ):
        with pytest.raises(ValueError, match=f"continuous_batching_config.{name}=") as caught:
            call()
        assert "\n" not in str(caught.value)


@models
def test_generate_with_a_paged_cache(name):
    model, ids = shared_model(name), random_ids(3, 6)
    out = model.generate(ids, cache_implementation="paged", max_new_tokens=5, do_sample=False)
    assert torch.equal(out[0], model.generate(ids, max_new_tokens=5, do_sample=False))
    assert model.generate(ids, cache_implementation="paged", do_sample=False).shape == (1, 3, 26)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1]])
    free = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "eos_token_id": int(free[0, 8])}
    out = model.generate(ids, cache_implementation="paged", **options)  # rows of several lengths
    assert torch.equal(out[0], model.generate(ids, **options))
    padded = ids.masked_fill(mask == 0, model.config.pad_token_id)
    out = model.generate(padded, cache_implementation="paged", max_new_tokens=9, do_sample=False)
    assert torch.equal(out[0, :, 6:], free[:, 6:])


def test_what_a_paged_cache_refuses():
    model = shared_model("linear")
    with pytest.raises(ValueError, match="num_beams=2"):
        model.generate(random_ids(1, 3), cache_implementation="paged", num_beams=2)
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(random_ids(1, 3), cache_implementation="paged", num_return_sequences=2, do_sample=True)
    with pytest.raises(ValueError, match="cache: not with cache_implementation='paged'"):
        model.generate(random_ids(1, 3), cache_implementation="paged", cache=3)


def test_results_of_a_manager(manager):
    model = shared_model("conv")
    ids = manager.add_requests(PROMPTS, max_new_tokens=6)
    seeded = manager.add_request(PROMPTS[0], max_new_tokens=4, do_sample=True, temperature=1.5, seed=3)
    assert [*ids, seeded] == [f"req_{i}" for i in range(6)]
    last = manager.get_result(seeded, timeout=20)
    assert last.generated_tokens == alone(model, PROMPTS[0], 3, do_sample=True, temperature=1.5, max_new_tokens=4)
    found = [manager.get_result(timeout=20) for _ in ids]
    assert {one.request_id: one.generated_tokens for one in found} == {
        request_id: alone(model, prompt, max_new_tokens=6) for request_id, prompt in zip(ids, PROMPTS, strict=True)
    }
    assert manager.get_result(timeout=0.01) is None


def test_streaming(manager):
    expected = alone(shared_model("conv"), PROMPTS[2], max_new_tokens=9)
    other = manager.add_request(PROMPTS[3], max_new_tokens=5)
    request_id = manager.add_request(PROMPTS[2], request_id="mine", max_new_tokens=9, streaming=True)
    parts = list(manager.request_id_iter(request_id))
    assert [one.generated_tokens for one in parts] == [expected[:count] for count in range(1, 10)]
    assert [one.status for one in parts] == [RequestStatus.DECODING] * 8 + [RequestStatus.FINISHED]
    assert manager.get_result(timeout=20).request_id == other


def test_iterating_ends_with_the_thread():
    manager = shared_model("linear").init_continuous_batching()
    manager.add_requests(PROMPTS, max_new_tokens=3)  # before it runs
    assert not manager.is_running()
    manager.start()
    assert manager.is_running()
    manager.stop(block=False)  # once all have ended
    assert sorted(one.request_id for one in manager) == [f"req_{i}" for i in range(5)]
    manager.destroy()
    assert not manager.is_running()
    assert manager.add_request([1]) is None
    manager.start()
    assert manager.add_request([1], max_new_tokens=1) == "req_6"
    assert len(manager.get_result(timeout=20).generated_tokens) == 1
    manager.destroy()


def test_cancelling_and_stopping_hard(manager):
    endless = {"max_new_tokens": 100_000}
    manager.add_request(PROMPTS[0], request_id="gone", streaming=True, **endless)
    parts = manager.request_id_iter("gone")
    next(parts)
    manager.cancel_request("gone")
    manager.cancel_request("nobody")
    *_, last = parts
    assert (last.status, last.error) == (RequestStatus.FAILED, "cancelled")
    assert manager.add_request(PROMPTS[0], request_id="gone", max_new_tokens=2) == "gone"  # its id is free again
    assert manager.get_result("gone", timeout=20).error is None
    manager.add_request(PROMPTS[0], request_id="long", **endless)
    manager.stop(hard_stop=True)
    assert "stopped before the request ended" in manager.get_result("long").error


def test_bad_requests_raise_where_they_are_added(manager):
    with pytest.raises(ValueError, match="the prompt is empty"):
        manager.add_request([])
    manager.add_request([1], request_id="a", max_new_tokens=3)
    with manager.pause():
        manager.add_request([1], request_id="b", max_new_tokens=3)
        with pytest.raises(ValueError, match="request_id 'b' is in use"):
            manager.add_request([1], request_id="b")
    assert {manager.get_result(timeout=20).request_id for _ in "ab"} == {"a", "b"}


def test_pausing(manager):
    with manager.pause():
        manager.add_request([1], max_new_tokens=2)
        assert manager.get_result(timeout=0.3) is None
        with pytest.raises(RuntimeError, match="leave the pause first"):
            manager.stop()
    assert manager.get_result(timeout=20).error is None
    with pytest.raises(RuntimeError, match="not running"), shared_model("conv").init_continuous_batching().pause():
        pass


def test_a_full_queue(monkeypatch):
    manager = shared_model("linear").init_continuous_batching(None, ContinuousBatchingConfig(max_queue_size=2))
    monkeypatch.setattr(manager._changed, "wait_for", lambda predicate, timeout=None: predicate())
    for _ in range(2):
        manager.add_request([1], max_new_tokens=1)
    with pytest.raises(queue.Full, match="max_queue_size=2"):
        manager.add_request([1], max_new_tokens=1)


def test_the_thread_dying_is_told_to_everybody(monkeypatch):
    manager = shared_model("linear").init_continuous_batching()
    monkeypatch.setattr(manager._batch, "step", lambda: 1 / 0)
    manager.start()
    request_id = manager.add_request([1], max_new_tokens=3)
    assert manager.get_result(request_id, timeout=20).error == "division by zero"
    manager._thread.join(20)
    assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)
    assert manager.add_request([1]) is None
    assert manager.get_result() is None


def test_requests_from_many_threads(manager):
    model, found, lock = shared_model("conv"), {}, threading.Lock()

    def ask(number):
        request_id = manager.add_request(PROMPTS[number], request_id=f"t{number}", max_new_tokens=10)
        result = manager.get_result(request_id, timeout=30)
        with lock:
            found[number] = result.generated_tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {number: alone(model, PROMPTS[number], max_new_tokens=10) for number in range(5)}


def test_warming_up():
    manager = make_model("hybrid").init_continuous_batching()
    manager.warmup()
    assert manager.warmed_up


@pytest.fixture
def tokenizer():
    """One letter an id."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ascii_letters[:VOCAB])}, []))
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters)


def letters(ids) -> str:
    return "".join(ascii_letters[i] for i in ids)


def test_stop_strings(tokenizer):
    model = shared_model("conv")
    free = alone(model, PROMPTS[2], max_new_tokens=9)
    options = {"max_new_tokens": 9, "stop_strings": [letters(free[3:5])]}
    expected = alone(model, PROMPTS[2], tokenizer=tokenizer, **options)
    assert len(expected) < 9
    out = model.generate_batch([PROMPTS[2]], do_sample=False, tokenizer=tokenizer, **options)
    assert out["req_0"].generated_tokens == expected
    with model.continuous_batching_context_manager(tokenizer=tokenizer) as manager:
        manager.add_request(PROMPTS[2], **options)
        assert manager.get_result(timeout=20).generated_tokens == expected


def test_transformers_serve(tokenizer):
    """Its manager for continuous batching, streaming and not."""
    serving = pytest.importorskip("transformers.cli.serving.utils")
    model, config = shared_model("conv"), GenerationConfig(do_sample=False, max_new_tokens=6, use_cache=False)
    server = serving.CBGenerateManager()

    async def ask():
        server.init_cb(model, config)
        text, length, ids = await server.generate_non_streaming(
            model, tokenizer, {"input_ids": PROMPTS[2]}, config, "one"
        )
        texts, streamer = server.generate_streaming(model, tokenizer, {"input_ids": PROMPTS[3]}, config, "two")
        parts = []
        while (part := await texts.get()) is not None:
            parts.append(part)
        return text, length, ids, parts, streamer

    text, length, ids, parts, streamer = asyncio.run(ask())
    assert (length, ids) == (12, alone(model, PROMPTS[2], max_new_tokens=6))
    assert text == letters(ids)
    assert "".join(parts) == letters(alone(model, PROMPTS[3], max_new_tokens=6))
    assert streamer.total_tokens == 6
    assert server.is_alive()
    server.stop()
    assert not server._cb.is_running()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_handler_may_come_after_its_results(manager, streaming):
    """As servers do it: the first tokens may be there before the handler is."""
    expected = alone(manager.model, PROMPTS[0], max_new_tokens=4)
    name = manager.add_request(PROMPTS[0], max_new_tokens=4, do_sample=False, streaming=streaming)
    with manager._changed:
        assert manager._changed.wait_for(lambda: len(manager._outputs) == (4 if streaming else 1), timeout=30)

    async def listen():
        results, done = [], asyncio.Event()

        def handle(output):
            results.append(output)
            if output.is_finished():
                done.set()

        manager.register_result_handler(name, handle)
        await asyncio.wait_for(done.wait(), timeout=30)
        return results

    results = asyncio.run(listen())
    assert [len(one.generated_tokens) for one in results] == ([1, 2, 3, 4] if streaming else [4])
    assert results[-1].generated_tokens == expected
    assert not manager._outputs
