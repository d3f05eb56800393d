"""Decoding with a static cache is one graph, compiled once, whatever the step; its states keep their addresses."""

import pytest
import torch
from helpers import make_model, random_ids, states
from torch._dynamo.testing import CompileCounter
from transformers import StaticCache


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "hedgehog_query"])
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
