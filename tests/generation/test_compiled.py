"""Decoding with a static cache is one graph, compiled once, whatever the step; its states keep their addresses."""

import pytest
import torch
from helpers import make_model, random_ids, states
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, StaticCache


@pytest.mark.parametrize(
    "name", ["linear", "conv", "hybrid", "hedgehog_query", "favor", "cosformer", "sliding", "sliding_hybrid"]
)
@torch.no_grad()
def test_one_graph_for_all_steps(name):
    model, ids = make_model(name), random_ids(2, 20)
    expected = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :10], cache=cache)
    addresses = [tensor.data_ptr() for tensor in states(cache)]
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter)
    logits = [
        step(input_ids=ids[:, [i]], cache=cache, position_ids=torch.full((2, 1), i)).logits for i in range(10, 20)
    ]
    assert counter.frame_count == 1
    torch.testing.assert_close(torch.cat(logits, 1), expected[:, 10:], rtol=0, atol=1e-5 * expected.abs().max().item())
    assert [tensor.data_ptr() for tensor in states(cache)] == addresses
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("name", ["conv", "hybrid", "sliding", "sliding_hybrid"])
@torch.no_grad()
def test_a_mask_at_every_step_is_still_one_graph(name):
    """Padding in the prompt, in a later step, or nowhere: the compiled step finds the same kinds of tensors."""
    model, ids = make_model(name), random_ids(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 10] = mask[0, 12] = 0
    expected = model(ids, attention_mask=mask).logits
    cache = StaticCache(config=model.config, max_cache_len=24)
    model(ids[:, :8], attention_mask=mask[:, :8], cache=cache)
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter)
    logits = []
    for i in range(8, 16):
        inputs = model.prepare_inputs_for_generation(
            ids[:, : i + 1], next_sequence_length=1, attention_mask=mask[:, : i + 1], cache=cache
        )
        logits.append(step(**inputs).logits)
    assert counter.frame_count == 1
    real = mask[:, 8:].bool()
    torch.testing.assert_close(
        torch.cat(logits, 1)[real], expected[:, 8:][real], rtol=0, atol=1e-5 * expected.abs().max().item()
    )


@pytest.mark.parametrize("name", ["conv", "hybrid", "cosformer", "sliding"])
def test_generate_compiles_once(name):
    """Whatever the prompt, its padding and the number of tokens, up to the length the cache was made for."""
    model = make_model(name)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    padded = torch.ones(2, 9, dtype=torch.long)
    padded[0, :4] = 0
    results = []
    for length, mask, new in ((9, None, 8), (5, None, 12), (9, padded, 8)):
        options = {"attention_mask": mask, "max_length": length + new, "do_sample": False}
        ids = random_ids(2, length, seed=length)
        options["cache_implementation"] = "static"
        tokens = model.generate(ids, compile_config=config, **options)
        results.append(len(graphs))
        del options["cache_implementation"]
        assert torch.equal(tokens, model.generate(ids, **options))
    assert results == [1, 1, 1]


def test_rows_are_reordered_where_they_are():
    model = make_model("conv")
    cache, plain = StaticCache(config=model.config, max_cache_len=32), None
    ids = random_ids(3, 6)
    with torch.no_grad():
        model(ids, cache=cache)
        plain = model(ids, use_cache=True).cache
    addresses = [tensor.data_ptr() for tensor in states(cache)]
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    plain.reorder_cache(order)
    assert [tensor.data_ptr() for tensor in states(cache)] == addresses
    assert all(torch.equal(a, b) for a, b in zip(states(cache), states(plain)))
