"""torch.export and torch.compile: one graph of the forward for every batch and length, one of the decoding step."""

import copy

import pytest
import torch
from helpers import assert_same_bits, random_ids, states
from reference import assert_close
from torch.export import Dim, export
from transformers import StaticCache
from transformers.exporters import DynamoConfig, DynamoExporter

from hf_linattn.ops import LinearAttentionState, linear_attention, traced_linear_attention

FLOAT32 = 1e-5  # as logits are promised
OPTIONS = {"conv_kernel_size": 3, "feature_map": "hedgehog"}


def padded(rows, length):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    mask[-1, length - length // 4 :] = 0
    return mask


@torch.no_grad()
def test_one_graph_for_every_batch_and_length(make):
    model, any_size = make(**OPTIONS), {0: Dim.AUTO, 1: Dim.AUTO}
    inputs = {"input_ids": random_ids(2, 9), "attention_mask": padded(2, 9), "use_cache": False}
    shapes = {"input_ids": any_size, "attention_mask": any_size, "use_cache": None}
    graph = export(model, (), inputs, dynamic_shapes=shapes).module()
    for rows, length in [(1, 1), (2, 2), (3, 63), (2, 64), (1, 65), (3, 200)]:
        ids = random_ids(rows, length)
        for mask in (padded(rows, length), torch.ones(rows, length, dtype=torch.long)):
            found = graph(input_ids=ids, attention_mask=mask, use_cache=False).logits
            expected = model(ids, attention_mask=mask).logits
            assert_close(found[mask.bool()], expected[mask.bool()], FLOAT32, f"{rows} x {length}")


@torch.no_grad()
def test_one_graph_for_every_step(make):
    """transformers' exporter takes a static cache as an input and hands it back; the graph can be saved and loaded."""
    model, ids = make(**OPTIONS), random_ids(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :4], cache=cache)
    expected, kept = model(ids).logits, copy.deepcopy(cache)
    inputs = {"input_ids": ids[:, 4:5], "position_ids": torch.full((2, 1), 4), "cache": cache}
    step = DynamoExporter().export(model, inputs, config=DynamoConfig())
    assert_same_bits(states(cache), states(kept))  # exporting reads no token
    for place in range(4, 12):
        out = step(input_ids=ids[:, place : place + 1], position_ids=torch.full((2, 1), place), cache=cache)
        cache = out.cache
        assert_close(out.logits[:, 0], expected[:, place], FLOAT32)
        assert cache.get_seq_length() == place + 1
    for token in ids[:, 4:].split(1, dim=1):
        model(token, cache=kept)
    assert_close(states(cache), states(kept), FLOAT32)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_the_traced_form_is_the_function(length, causal, normalize):
    """In outputs, states and gradients, with grouped heads, padding and an initial state."""
    g = torch.Generator().manual_seed(0)
    q, k, v, mu, nu = (
        torch.randn(shape, generator=g, dtype=torch.float64).abs_().requires_grad_()
        for shape in [(2, length, 4, 6), (2, length, 2, 6), (2, length, 2, 5), (2, 2, 6, 5), (2, 2, 6)]
    )
    options = {"causal": causal, "normalize": normalize, "feature_map": "elu1", "output_final_state": True}
    options |= {"key_mask": padded(2, length).bool(), "initial_state": LinearAttentionState(mu, nu)}
    results = []
    for form in (traced_linear_attention, linear_attention):
        out, state = form(q, k, v, **options)
        loss = (out * out.detach().cos()).sum() + state.mu.sin().sum() + state.nu.cos().sum()
        results.append([out, *state, *torch.autograd.grad(loss, (q, k, v, mu, nu))])
    assert_close(*results, 1e-10)


def test_packed_documents_are_not_exported():
    q = torch.randn(1, 5, 2, 4)
    with pytest.raises(ValueError, match="cu_seqlens: packed documents cannot be exported"):
        traced_linear_attention(q, q, q, feature_map="elu1", cu_seqlens=torch.tensor([0, 2, 5]))


def test_a_compiled_training_step(make):
    model, ids, mask = make(conv_kernel_size=3).double().train(), random_ids(2, 70), padded(2, 70)
    inputs = {"labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    results = []
    torch._dynamo.reset()
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = forward(input_ids=ids, use_cache=False, **inputs).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert_close(*results, 1e-7)
