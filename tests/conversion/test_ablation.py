"""A model with a part turned off computes the other part, and is whole again afterwards."""

import pytest
import torch
from helpers import FULL, LINEAR, make_model, random_ids
from reference import assert_close

from hf_linattn.conversion.ablation import PARTS, ablated

SLIDING = "kernel_linear_attention_sliding"


def make(*layer_types, **fields):
    if SLIDING in layer_types:
        fields["sliding_window"] = 3
    return make_model(num_hidden_layers=len(layer_types), layer_types=list(layer_types), **fields).double()


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_linear_only_is_the_linear_model():
    sliding, ids = make(SLIDING, FULL, SLIDING), random_ids(2, 9)
    linear = make(LINEAR, FULL, LINEAR)
    linear.load_state_dict({k: v for k, v in sliding.state_dict().items() if "window_mix" not in k})
    with ablated(sliding, "linear only"):
        assert_close(logits(sliding, ids), logits(linear, ids), 1e-9)


def test_window_only_is_softmax_over_the_window():
    sliding, ids = make(SLIDING), random_ids(2, 9)
    attention = sliding.model.layers[0].self_attn
    hidden = sliding.model.layers[0].input_layernorm(sliding.model.embed_tokens(ids))
    positions = sliding.model.rotary_emb(hidden, torch.arange(9)[None])
    q, k = attention.queries_and_keys(hidden, positions)
    v = attention.v_proj(hidden).unflatten(-1, (-1, attention.head_dim))
    near = torch.ones(9, 9).tril().bool() & ~torch.ones(9, 9).tril(-3).bool()
    scores = torch.einsum("bthd,bshd->bhts", q, k) * attention.head_dim**-0.5
    weights = scores.masked_fill(~near, -torch.inf).softmax(-1)
    expected = attention.o_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))
    with ablated(sliding, "window only"), torch.no_grad():
        assert_close(attention(hidden, positions)[0], expected, 1e-9)


def test_no_attention_says_nothing_and_keeps_softmax_layers():
    model, ids = make(SLIDING, FULL, LINEAR), random_ids(2, 9)
    said = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda _, __, out, i=index: said.__setitem__(i, out[0]))
    with ablated(model, "no attention"):
        logits(model, ids)
    assert said[1].abs().max() > 0
    other = model.model.layers[0]
    hidden = model.model.embed_tokens(ids)
    with ablated(model, "no attention"), torch.no_grad():
        alone = other(hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(9)[None]))
        alone = alone[0] if isinstance(alone, tuple) else alone
        assert_close(alone, hidden + other.mlp(other.post_attention_layernorm(hidden)), 1e-12)


@pytest.mark.parametrize("part", PARTS)
def test_the_model_is_whole_again(part):
    model, ids = make(SLIDING, FULL, LINEAR), random_ids(2, 9)
    before = logits(model, ids)
    with ablated(model, part):
        during = logits(model, ids)
    assert (during - before).abs().max() > 1e-3
    assert torch.equal(logits(model, ids), before)


def test_refusals():
    model = make(SLIDING)
    with pytest.raises(ValueError, match="part='softmax' is unknown; choose one of"), ablated(model, "softmax"):
        pass
    with ablated(model, "window only"), pytest.raises(ValueError, match="only='window' keeps no state"):
        model(random_ids(1, 4), use_cache=True)
