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
from transformers import StaticCache

from hf_linattn import LinearAttentionCache

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


KINDS = {"own": LinearAttentionCache, "static": lambda config: StaticCache(config=config, max_cache_len=24)}
each_kind = pytest.mark.parametrize("kind", KINDS)


def recording(name, ids, lengths, mask=None, kind="own"):
    model = shared_model(name)
    cache = read(model, ids, lengths, mask, KINDS[kind](model.config))[1]
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


@pytest.mark.parametrize("name", [*FEW, "cosformer"])
@pytest.mark.parametrize("undone", [1, 2, 5, 6, 9])
@each_kind
def test_undoing_part_of_a_call_leaves_the_rest(name, undone, kind):
    model, ids = shared_model(name), random_ids(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :2] = mask[1, 9] = mask[1, 14] = 0  # before, and inside, what is recorded
    cache = recording(name, ids, [6], mask, kind)
    addresses = [tensor.data_ptr() for tensor in states(cache)]
    read(model, ids[:, 6:], [4, 7], mask, cache)
    cache.crop(-undone)
    if kind == "static":
        assert [tensor.data_ptr() for tensor in states(cache)] == addresses
    _, expected = read(model, ids, [17 - undone], mask)
    assert cache.get_seq_length() == 17 - undone
    assert drift(states(cache), states(expected)) < EXACT
    assert torch.equal(cache.layers[0].padding, expected.layers[0].padding)
    again = read(model, ids[:, 17 - undone :], [3], mask, cache)[0]
    assert drift([again], [read(model, ids, [17 - undone, 3], mask)[0][:, 17 - undone :]]) < EXACT


@pytest.mark.parametrize("name", FEW)
@each_kind
def test_a_layer_that_does_not_settle_can_go_back_further(name, kind):
    model, ids = shared_model(name), random_ids(1, 20)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, 8] = 0
    cache = recording(name, ids, [4], mask, kind)
    for layer in cache.layers:
        layer.settles = False
    read(model, ids[:, 4:], [3, 6], mask, cache)
    for undone, left in ((2, 11), (3, 8), (0, 8), (3, 5)):
        cache.crop(-undone)
        assert cache.get_seq_length() == left
        assert drift(states(cache), states(read(model, ids, [left], mask)[1])) < EXACT
    cache.layers[0].deactivate_past_recording()
    assert cache.layers[0].settles


@pytest.mark.parametrize("name", ["linear", "conv", "cosformer", "sliding"])
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


@each_kind
@pytest.mark.parametrize("name", ["conv", "sliding"])
def test_the_first_tokens_can_be_undone_too(name, kind):
    model, ids = shared_model(name), random_ids(1, 6)
    cache = KINDS[kind](model.config)
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


@pytest.mark.parametrize("name", [*FEW, "cosformer"])
def test_static_steps_after_a_rollback(name):
    """Token by token too, where the mask of full attention layers must hide the rest of their buffers."""
    model, ids = make_model(name), random_ids(1, 9)
    cache = StaticCache(config=model.config, max_cache_len=24)
    cache.activate_past_recording()
    read(model, torch.cat([ids[:, :4], random_ids(1, 3, seed=1)], 1), [7], cache=cache)
    cache.crop(-3)
    logits = read(model, ids[:, 4:], [1, 1, 3], cache=cache)[0]
    assert drift([logits], [model(ids).logits[:, 4:]]) < 1e-5


def test_room_for_a_long_draft_can_be_asked_for():
    model, ids = shared_model("linear"), random_ids(1, 14)
    cache = read(model, ids, [3])[1]
    for layer in cache.layers:
        layer.max_rollback = 4
        layer.make_room(2)
        assert layer.max_rollback == 4
        layer.make_room(9)
    before = contents(cache)
    cache.activate_past_recording()
    read(model, ids[:, 3:], [9], cache=cache)
    cache.crop(-9)
    assert_same_bits(contents(cache), before)


@pytest.mark.parametrize("name", ["conv", "sliding"])
def test_rows_of_a_recording_cache_can_be_reordered(name):
    model, ids = shared_model(name), random_ids(3, 12)
    order = torch.tensor([2, 0, 0])
    cache = recording(name, ids, [5])
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
