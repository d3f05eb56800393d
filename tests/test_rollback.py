"""`crop` undoes tokens exactly, keeps what a rollback needs bounded, and refuses what it cannot undo."""

import pytest
import torch
from helpers import (
    CONFIGS,
    EXACT,
    FEW,
    LINEAR,
    assert_same_bits,
    contents,
    drift,
    make_model,
    random_ids,
    read,
    shared_model,
    states,
)

from hf_linattn import LinearAttentionCache

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def recording(name, ids, lengths, mask=None):
    cache = read(shared_model(name), ids, lengths, mask)[1]
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("name", CONFIGS)
def test_undoing_whole_calls_restores_every_bit(name):
    ids = random_ids(2, 16)
    cache = recording(name, ids, [5])
    before = contents(cache)
    read(shared_model(name), ids[:, 5:], [3, 1, 4], cache=cache)
    cache.crop(-8)
    assert_same_bits(contents(cache), before)
    read(shared_model(name), ids[:, 5:], [3], cache=cache)
    cache.crop(0)
    settled = contents(cache)
    read(shared_model(name), ids[:, 8:], [1, 4], cache=cache)
    cache.crop(-5)
    assert_same_bits(contents(cache), settled)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("undone", [1, 2, 5, 6, 9])
def test_undoing_part_of_a_call_leaves_the_rest(name, undone):
    model, ids = shared_model(name), random_ids(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :2] = mask[1, 9] = mask[1, 14] = 0  # before, and inside, what is recorded
    cache = recording(name, ids, [6], mask)
    read(model, ids[:, 6:], [4, 7], mask, cache)
    cache.crop(-undone)
    _, expected = read(model, ids, [17 - undone], mask)
    assert cache.get_seq_length() == 17 - undone
    assert drift(states(cache), states(expected)) < EXACT
    assert torch.equal(cache.layers[0].padding, expected.layers[0].padding)
    again = read(model, ids[:, 17 - undone :], [3], mask, cache)[0]
    assert drift([again], [read(model, ids, [17 - undone, 3], mask)[0][:, 17 - undone :]]) < EXACT


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_a_long_prompt_is_not_recorded(name, monkeypatch):
    model, ids = shared_model(name), random_ids(1, 40)
    cache = read(model, ids, [1])[1]
    for layer in cache.layers:
        layer.max_rollback = 4
    cache.activate_past_recording()
    logits = read(model, ids[:, 1:], [30], cache=cache)[0]
    assert drift([logits], [model(ids).logits[:, 1:31]]) < EXACT
    assert [layer.recorded_tokens for layer in cache.layers] == [4, 4]
    for _ in range(6):
        read(model, ids[:, :1], [1], cache=cache)
    assert all(4 <= layer.recorded_tokens < 8 for layer in cache.layers)
    assert cache.layers[0].record_past


def test_the_first_tokens_can_be_undone_too():
    model, ids = shared_model("conv"), random_ids(1, 6)
    cache = LinearAttentionCache(model.config)
    cache.activate_past_recording()
    read(model, ids, [6], cache=cache)
    cache.crop(-6)
    assert cache.get_seq_length() == 0
    assert drift([read(model, ids, [6], cache=cache)[0]], [model(ids).logits]) < EXACT


def test_refusals_leave_the_state_as_it_was():
    model, ids = shared_model("linear"), random_ids(1, 9)
    cache = read(model, ids, [4])[1]
    with pytest.raises(ValueError, match=r"crop\(-1\): only 0 tokens are recorded"):
        cache.crop(-1)
    cache.activate_past_recording()
    read(model, ids[:, 4:], [3], cache=cache)
    before = contents(cache)
    for count, words in ((-4, "only 3 tokens are recorded"), (2, "pass a negative number")):
        with pytest.raises(ValueError, match=words):
            cache.crop(count)
    assert_same_bits(contents(cache), before)


def test_rows_of_a_recording_cache_can_be_reordered():
    model, ids = shared_model("conv"), random_ids(3, 12)
    order = torch.tensor([2, 0, 0])
    cache = recording("conv", ids, [5])
    read(model, ids[:, 5:], [4], cache=cache)
    cache.reorder_cache(order)
    cache.crop(-3)
    assert drift(states(cache), states(read(model, ids[order], [6])[1])) < EXACT


def test_a_refused_crop_touches_no_layer_of_a_hybrid():
    model = make_model("hybrid", layer_types=["full_attention", LINEAR, LINEAR])
    ids = random_ids(1, 9)
    cache = read(model, ids, [6])[1]
    cache.activate_past_recording()
    read(model, ids[:, 6:], [3], cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match="only 3 tokens are recorded"):
        cache.crop(-5)
    assert_same_bits(contents(cache), before)
    cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [6, 6, 6]
