"""Bad input: one line that names the field, the value and what is allowed."""

import re

import pytest
import torch
from reference import LEARNABLE, PHI

from hf_linattn.ops import (
    LinearAttentionState,
    chunk_linear_attention,
    linear_attention,
    make_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)

CALLS = (linear_attention, parallel_linear_attention, chunk_linear_attention, recurrent_linear_attention)
each_call = pytest.mark.parametrize("call", CALLS)


def good(**changes):
    """Arguments of a call that works, with some replaced."""
    arguments = {
        "q": torch.randn(2, 6, 4, 3),
        "k": torch.randn(2, 6, 2, 3),
        "v": torch.randn(2, 6, 2, 5),
        "feature_map": "elu1",
    }
    return arguments | changes


def packed(bounds, **changes):
    one = {name: x[:1] for name, x in good().items() if name in "qkv"}
    return good(**one, cu_seqlens=torch.tensor(bounds), **changes)


def state(*shapes):
    return LinearAttentionState(*(torch.ones(shape) for shape in shapes))


def fails(call, arguments, *words, error=ValueError):
    """The call raises a one-line message that holds every word."""
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(error) as caught:
        call(q, k, v, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        pattern = rf"(?<![\w.]){re.escape(str(word)).replace('_', '[_ ]')}(?!\w)"
        assert re.search(pattern, message, re.IGNORECASE), f"{word!r} not in: {message}"


@each_call
def test_the_good_call_is_good(call):
    q, k, v = (good()[name] for name in "qkv")
    call(q, k, v)
    call(**good())
    call(**packed([0, 2, 6]))
    call(**good(initial_state=state((2, 2, 3, 5), (2, 2, 3)), key_mask=torch.ones(2, 6, dtype=torch.long)))


@each_call
def test_heads_that_do_not_divide(call):
    fails(call, good(k=torch.randn(2, 6, 3, 3), v=torch.randn(2, 6, 3, 5)), "heads", 4, 3)


@each_call
@pytest.mark.parametrize("shape", [(2, 5), (1, 6), (6, 2), (6,), (2, 1, 1, 6), (2, 6, 6), (3, 6)], ids=str)
def test_mask_of_another_shape(call, shape):
    fails(call, good(key_mask=torch.ones(shape, dtype=torch.bool)), "key_mask", *shape, 2, 6)


@each_call
def test_fractional_mask(call):
    fails(call, good(key_mask=torch.full((2, 6), 0.5)), "key_mask", error=(ValueError, TypeError))


@each_call
@pytest.mark.parametrize("value", [2, -1])
def test_mask_of_other_integers(call, value):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 3] = value
    fails(call, good(key_mask=mask), "key_mask", value)


@each_call
@pytest.mark.parametrize(
    "mu, nu, words",
    [
        ((1, 2, 3, 5), (1, 2, 3), [1, 2]),  # batch
        ((2, 4, 3, 5), (2, 4, 3), [4, 2]),  # repeated for the query heads
        ((2, 2, 4, 5), (2, 2, 4), [4, 3]),  # feature size
        ((2, 2, 3, 4), (2, 2, 3), [4, 5]),  # value size
        ((2, 2, 5, 3), (2, 2, 3), [5, 3]),  # transposed
        ((2, 2, 3, 5), (2, 2, 4), [4, 3]),  # mu and nu at odds
        ((2, 2, 3), (2, 2, 3, 5), []),  # swapped
    ],
    ids=str,
)
def test_state_of_another_shape(call, mu, nu, words):
    fails(call, good(initial_state=state(mu, nu)), "initial_state", *words)


@each_call
def test_state_has_a_row_a_document(call):
    fails(call, packed([0, 2, 6], initial_state=state((1, 2, 3, 5), (1, 2, 3))), "initial_state", 1, 2)


@each_call
def test_unknown_map(call):
    fails(call, good(feature_map="elu2"), "feature_map", "elu2", *PHI)


@each_call
@pytest.mark.parametrize("name", [*LEARNABLE, "favor"])
def test_map_that_has_weights_by_name(call, name):
    fails(call, good(feature_map=name), "feature_map", name)


@each_call
@pytest.mark.parametrize("feature_map", ["identity", make_feature_map("identity", 3)], ids=["name", "instance"])
def test_signed_map_with_a_denominator(call, feature_map):
    fails(call, good(feature_map=feature_map), "feature_map", "identity", "normalize")
    call(**good(feature_map=feature_map, normalize=False))


@pytest.mark.parametrize("backend", ["cuda", "", "Torch"])
def test_unknown_backend(backend):
    with pytest.raises(ValueError) as caught:
        linear_attention(**good(backend=backend))
    message = str(caught.value)
    assert all(word in message for word in ("backend", repr(backend), "auto", "torch"))
    assert "\n" not in message


@each_call
def test_nothing_to_attend(call):
    fails(call, good(q=torch.randn(2, 0, 4, 3), k=torch.randn(2, 0, 2, 3), v=torch.randn(2, 0, 2, 5)), 0)
    fails(call, good(q=torch.randn(2, 0, 4, 3), causal=False), "q", 0)


@each_call
def test_causal_needs_a_key_a_query(call):
    fails(call, good(q=torch.randn(2, 5, 4, 3)), "causal", 5, 6)


@each_call
@pytest.mark.parametrize(
    "bounds, words",
    [([1, 6], [1]), ([0, 5], [5, 6]), ([0, 7], [7, 6]), ([0, 4, 3, 6], [4, 3]), ([0, 8, 6], [8]), ([0, -1, 6], [-1])],
    ids=str,
)
def test_bad_bounds(call, bounds, words):
    fails(call, packed(bounds), "cu_seqlens", *words)


@each_call
def test_bounds_need_one_batch_row(call):
    fails(call, good(cu_seqlens=torch.tensor([0, 2, 6])), "cu_seqlens", 2)


@each_call
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"k": torch.randn(3, 6, 2, 3)}, ["k", 3, 2]),  # batch
        ({"v": torch.randn(3, 6, 2, 5)}, ["v", 3, 2]),
        ({"k": torch.randn(2, 6, 2, 4)}, ["k", 4, 3]),  # head dim
        ({"v": torch.randn(2, 5, 2, 5)}, ["v", 5, 6]),  # key length
        ({"v": torch.randn(2, 6, 4, 5)}, ["v", 4, 2]),  # key heads
        ({"q": torch.randn(6, 4, 3)}, ["q"]),  # no batch axis
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_shapes_that_do_not_match(call, changes, words):
    fails(call, good(**changes), *words)


@each_call
def test_dtypes_that_do_not_match(call):
    fails(
        call, good(k=torch.randn(2, 6, 2, 3).bfloat16()), "k", "torch.bfloat16", "torch.float32",
        error=(ValueError, TypeError),
    )  # fmt: skip


@each_call
@pytest.mark.parametrize("chunk_size", [0, -4])
def test_chunk_of_no_size(call, chunk_size):
    fails(call, good(chunk_size=chunk_size), "chunk_size", chunk_size)
