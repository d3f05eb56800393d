"""The cache: what it holds, what it reports, what can be done to it between calls."""

import copy

import pytest
import torch
from helpers import (
    EXACT,
    FEW,
    FULL,
    LINEAR,
    SLIDING,
    assert_same_bits,
    contents,
    make_config,
    make_model,
    random_ids,
    read,
    shared_model,
    states,
)
from reference import assert_close
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from hf_linattn import LinearAttentionCache
from hf_linattn.cache import (
    KernelLinearAttentionLayer,
    SlidingKernelLinearAttentionLayer,
    StaticKernelLinearAttentionLayer,
    StaticSlidingKernelLinearAttentionLayer,
)

KINDS = {
    "own": LinearAttentionCache,
    "dynamic": lambda config: DynamicCache(config=config),
    "empty dynamic": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=32),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_name = pytest.mark.parametrize("name", ["linear", "conv", "hybrid", "sliding"])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


@pytest.fixture(autouse=True)
def no_gradients():
    """As in generation; static buffers keep their address only then."""
    with torch.no_grad():
        yield


def filled(name, kind="own", rows=3, mask=None):
    """A model and a cache that has read five tokens of each row."""
    model = shared_model(name)
    _, cache = read(model, random_ids(rows, 5), [5], mask, cache=KINDS[kind](model.config))
    return model, cache


def goes_on(model, cache, ids, mask=None):
    """Logits of three more tokens, read in two calls."""
    return read(model, ids, [2, 1], mask, cache=cache)[0]


# ---- kinds


@each_kind
@pytest.mark.parametrize("name", FEW)
def test_every_kind_of_cache_works(name, kind):
    model, ids = shared_model(name), random_ids(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1], [1] * 9])
    expected, expected_cache = read(model, ids, [9], mask)
    logits, cache = read(model, ids, [5, 1, 3], mask, cache=KINDS[kind](model.config))
    assert_close(logits[mask.bool()], expected[mask.bool()], EXACT)
    assert_close(states(cache), states(expected_cache), EXACT)


def test_layers_are_registered_under_a_new_name():
    assert DYNAMIC_LAYER_TYPE_MAPPING[LINEAR] is KernelLinearAttentionLayer
    assert STATIC_LAYER_TYPE_MAPPING[LINEAR] is StaticKernelLinearAttentionLayer
    assert DYNAMIC_LAYER_TYPE_MAPPING[SLIDING] is SlidingKernelLinearAttentionLayer
    assert STATIC_LAYER_TYPE_MAPPING[SLIDING] is StaticSlidingKernelLinearAttentionLayer
    assert "Kernel" not in DYNAMIC_LAYER_TYPE_MAPPING["linear_attention"].__name__
    cache = LinearAttentionCache(make_config("hybrid"))
    assert [type(layer).__name__ for layer in cache.layers] == [
        "KernelLinearAttentionLayer",
        "DynamicLayer",
        "KernelLinearAttentionLayer",
    ]


def test_the_state_is_mu_and_nu():
    """After one token, which stands at position 0 and is not rotated: phi(k)^T v and phi(k)."""
    model, seen = make_model("gqa").double(), {}
    attention = model.model.layers[1].self_attn
    for key in "kv":
        projection = getattr(attention, f"{key}_proj")
        projection.register_forward_hook(lambda module, args, out, key=key: seen.update({key: out}))
    layer = model(random_ids(2, 1)).cache.layers[1]
    k, v = (seen[key].unflatten(-1, (2, 6))[:, 0] for key in "kv")  # [B, Hk, D]
    phi = torch.where(k > 0, k + 1, k.exp())
    assert_close(layer.nu, phi, EXACT)
    assert_close(layer.mu, phi.unsqueeze(-1) * v.unsqueeze(-2), EXACT)
    assert_same_bits(list(layer.state), [layer.mu, layer.nu])
    assert layer.keys is None
    assert layer.values is None


def test_the_state_of_a_sliding_layer_is_its_window_and_what_left_it():
    """Layer 0, without rotation: the last three keys and values as projected, and phi(k)^T v of the two before."""
    model, seen = make_model("sliding", rope_position="none").double(), {}
    attention = model.model.layers[0].self_attn
    for key in "kv":
        projection = getattr(attention, f"{key}_proj")
        projection.register_forward_hook(lambda module, args, out, key=key: seen.update({key: out}))
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]])
    state = model(random_ids(2, 7), attention_mask=mask).cache.layers[0].state
    for row, tokens in ((0, [1, 2, 3, 5, 6]), (1, [0, 1])):
        k, v = (seen[key][row, tokens].unflatten(-1, (2, 6)) for key in "kv")  # [n, Hk, D]
        assert state.count[row] == min(3, len(tokens))
        assert_close(state.keys[row, -len(tokens) :], k[-3:], EXACT)
        assert_close(state.values[row, -len(tokens) :], v[-3:], EXACT)
        phi = torch.where(k > 0, k + 1, k.exp())[:-3]
        assert_close(state.nu[row], phi.sum(0), EXACT)
        assert_close(state.mu[row], torch.einsum("nhf,nhe->hfe", phi, v[:-3]), EXACT)
    assert not state.keys[1, 0].any()


# ---- length and size


@each_kind
@each_name
def test_the_length_before_between_and_after(name, kind):
    model, ids = shared_model(name), random_ids(2, 9)
    cache = KINDS[kind](model.config)
    assert cache.get_seq_length() == 0
    seen = 0
    for length in (4, 1, 1, 3):
        # a full mask, with padding: padding counts, as with keys and values
        mask = torch.ones(2, seen + length, dtype=torch.long)
        mask[0, 0] = 0
        model(ids[:, seen : seen + length], attention_mask=mask, cache=cache)
        seen += length
        assert cache.get_seq_length() == seen
        assert [layer.get_seq_length() for layer in cache.layers] == [seen] * len(cache.layers)


def test_lengths_for_masks():
    model, cache = filled("hybrid")
    for index in range(3):
        assert cache.get_mask_sizes(2, index) == (7, 0)
    assert cache.get_max_length() == -1
    _, static = filled("hybrid", "static")
    for index in range(3):
        assert static.get_mask_sizes(2, index) == (32, 0)
    assert static.get_max_length() == 32
    assert LinearAttentionCache(model.config).get_mask_sizes(4, 0) == (4, 0)


@each_kind
def test_the_batch_size(kind):
    model, cache = filled("linear", kind)
    assert cache.batch_size == 3
    assert len(cache) == 2
    assert KINDS[kind](model.config).batch_size == -1


def test_only_a_static_cache_is_for_compilation():
    assert not filled("linear")[1].is_compileable
    assert filled("linear", "static")[1].is_compileable


def test_a_static_cache_undoes_only_what_it_recorded():
    cache = filled("linear", "static")[1]
    assert cache.is_croppable
    before = contents(cache)
    with pytest.raises(ValueError, match=r"crop\(-1\): only 0 tokens are recorded"):
        cache.crop(-1)
    cache.crop(0)
    assert_same_bits(contents(cache), before)


def held(cache):
    """Bytes of memory behind the states, where views may share it."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in states(cache))}
    return sum(storages.values())


@pytest.mark.parametrize("name", ["linear", "conv", "hedgehog_query", "sliding"])
def test_bytes_do_not_grow(name):
    """A hundred tokens or a hundred thousand: what the config says."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"layer_types": [SLIDING]} if name == "sliding" else {}
    model = make_model(name, num_hidden_layers=1, head_dim=2, **sizes)
    ids, cache = random_ids(1, 20_000), LinearAttentionCache(model.config)
    expected = model.config.state_nbytes(1)
    model(ids[:, :100], cache=cache, logits_to_keep=1)
    nu = cache.layers[0].nu
    assert cache.nbytes == held(cache) == expected
    model(ids[:, 100:], cache=cache, logits_to_keep=1)
    for _ in range(4):
        model(ids, cache=cache, logits_to_keep=1)
    assert cache.get_seq_length() == 100_000
    assert cache.nbytes == held(cache) == expected
    assert (cache.layers[0].nu > 900 * nu).all()
    model(ids[:, :1], cache=cache)
    assert cache.nbytes == expected
    assert held(cache) < 1.5 * expected  # a tail may be a view of one token more


def test_bytes_of_a_hybrid_grow_with_its_keys_and_values_alone():
    model, cache = filled("hybrid")
    keys_and_values = 2 * 3 * 2 * 8 * 8  # k and v, rows, heads, head_dim, float64
    twice = 2 * model.config.state_nbytes(3)  # the model is float64
    assert cache.nbytes == twice + 5 * keys_and_values
    goes_on(model, cache, random_ids(3, 3))
    assert cache.nbytes == twice + 8 * keys_and_values
    assert LinearAttentionCache(model.config).nbytes == 0


# ---- what can be done between calls


@each_kind
@each_name
def test_reset(name, kind):
    model, cache = filled(name, kind, mask=MASK)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = random_ids(3, 8, seed=2)
    logits, cache = read(model, ids, [5, 3], cache=cache)
    assert_close(logits, model(ids, use_cache=False).logits, EXACT)


CHANGES = {
    "reorder_cache": (lambda cache, rows: cache.reorder_cache(rows), [2, 2, 0]),
    "batch_select_indices": (lambda cache, rows: cache.batch_select_indices(rows), [1, 0]),
    "batch_repeat_interleave": (lambda cache, rows: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["own", "dynamic", "empty dynamic"])
@each_name
def test_rows_can_be_reordered_selected_and_repeated(name, kind, change):
    """States, tails and the count of padding move together: generation goes on as with those rows from the start."""
    apply, rows = CHANGES[change]
    rows = torch.tensor(rows)
    model, cache = filled(name, kind, mask=MASK)
    _, expected = filled(name, kind, mask=MASK)
    apply(cache, rows)
    assert cache.batch_size == len(rows)
    assert_same_bits(states(cache), [state[rows] for state in states(expected)])
    ids = random_ids(len(rows), 3)
    mask = torch.cat([MASK[rows], torch.ones(len(rows), 3, dtype=torch.long)], 1) if name == "hybrid" else None
    history = torch.cat([random_ids(3, 5)[rows], ids], 1)
    uncut = read(model, history, [8], torch.cat([MASK[rows], torch.ones_like(ids)], 1))[0]
    assert_close(goes_on(model, cache, ids, mask), uncut[:, 5:], EXACT)


def test_a_static_cache_can_be_reordered():
    model, cache = filled("conv", "static")
    before = [state.clone() for state in states(cache)]
    rows = torch.tensor([2, 2, 0])
    cache.reorder_cache(rows)
    assert_same_bits(states(cache), [state[rows] for state in before])


@each_kind
def test_changing_an_empty_cache_does_nothing(kind):
    cache = KINDS[kind](make_config("linear"))
    for apply, rows in CHANGES.values():
        apply(cache, torch.tensor(rows))
    cache.reset()
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert cache.get_seq_length() == 0


@each_name
def test_offloading_and_bringing_back(name):
    model, cache = filled(name)
    before = contents(cache)
    for index, layer in enumerate(cache.layers):
        cache.offload(index, only_non_sliding=False)
        layer.prefetch()
    assert_same_bits(contents(cache), before)
    ids = random_ids(3, 3)
    assert_close(goes_on(model, cache, ids), goes_on(*filled(name), ids), EXACT)


@each_kind
@each_name
def test_a_deep_copy_goes_its_own_way(name, kind):
    model, cache = filled(name, kind)
    twin = copy.deepcopy(cache)
    before = contents(twin)
    one, two = random_ids(3, 3, seed=1), random_ids(3, 3, seed=2)
    first = goes_on(model, cache, one)
    assert_same_bits(contents(twin), before)
    second = goes_on(model, twin, two)
    history = random_ids(3, 5)
    for ids, logits in ((one, first), (two, second)):
        assert_close(logits, model(torch.cat([history, ids], 1), use_cache=False).logits[:, 5:], EXACT)


def test_steps_leave_earlier_states_alone():
    """A state kept from an earlier step is never written to: one prefix, many continuations."""
    model, cache = filled("conv")
    kept = states(cache)
    copies = [state.clone() for state in kept]
    goes_on(model, cache, random_ids(3, 3))
    assert_same_bits(kept, copies)


@pytest.mark.parametrize("name", ["linear", "conv", "sliding"])
def test_a_static_cache_keeps_its_addresses(name):
    model, ids = shared_model(name), random_ids(2, 12)
    cache = KINDS["static"](model.config)
    model(ids[:, :5], cache=cache)
    counters = [layer.cumulative_length for layer in cache.layers]
    addresses = [tensor.data_ptr() for tensor in (*states(cache), *counters)]
    for start, end in ((5, 6), (6, 7), (7, 11), (11, 12)):
        mask = torch.ones(2, end, dtype=torch.long)
        mask[0, 0] = 0
        model(ids[:, start:end], attention_mask=mask if start == 7 else None, cache=cache)
        counters = [layer.cumulative_length for layer in cache.layers]
        assert [tensor.data_ptr() for tensor in (*states(cache), *counters)] == addresses
    cache.reset()
    model(ids[:, :5], cache=cache)
    assert [tensor.data_ptr() for tensor in (*states(cache), *counters)] == addresses


def test_a_static_cache_owns_its_buffers():
    """What the first call computed is copied: it may be a view into something larger."""
    _, cache = filled("gqa", "static")
    for tensor in states(cache):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


# ---- what cannot be done yet


def test_keys_and_values_are_refused():
    _, cache = filled("hybrid")
    with pytest.raises(TypeError, match="holds mu and nu, not keys and values"):
        cache.update(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8), 0)
    assert cache.layers[1].keys.shape == (3, 2, 5, 8)
    assert make_config("hybrid").layer_types == [LINEAR, FULL, LINEAR]


# ---- written in place, or not


def addresses(cache):
    """Where each state lies; the layers' own names, since to look at `mu` is to hold it."""
    return [(layer._mu.data_ptr(), layer._nu.data_ptr()) for layer in cache.layers if hasattr(layer, "_mu")]


@pytest.mark.parametrize("kind", ["own", "dynamic", "static"])
@pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])
def test_a_decoding_step_writes_into_the_state(name, kind):
    model, cache = filled(name, kind)
    model(random_ids(3, 1), cache=cache)
    before = addresses(cache)
    for _ in range(3):
        model(random_ids(3, 1), cache=cache)
    assert addresses(cache) == before
    assert cache.get_seq_length() == 9


def test_a_padding_token_leaves_the_state():
    model, cache = filled("linear")
    before = [tensor.clone() for tensor in states(cache)]
    cache = filled("linear")[1]
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, -1] = 0
    assert all(layer.owns_state for layer in cache.layers)
    model(random_ids(3, 1), attention_mask=mask, cache=cache)
    changed = [(a != b).flatten(1).any(1).tolist() for a, b in zip(states(cache), before, strict=True)]
    assert changed == [[True, False, True]] * len(changed)


@each_name
def test_a_state_that_was_looked_at_stays(name):
    model, cache = filled(name)
    layer = cache.layers[0]
    for held in (lambda: [layer.mu], lambda: [layer.nu], lambda: list(layer.state)):
        tensors = held()
        before = [tensor.clone() for tensor in tensors]
        model(random_ids(3, 1), cache=cache)
        assert_same_bits(tensors, before)
        model(random_ids(3, 1), cache=cache)
        assert_same_bits(tensors, before)


@each_name
def test_a_copy_goes_its_own_way(name):
    model, cache = filled(name)
    other = copy.deepcopy(cache)
    before = [tensor.clone() for tensor in states(other)]
    model(random_ids(3, 1), cache=cache)
    assert_same_bits(states(other), before)


def test_a_state_before_a_recorded_call_comes_back():
    model, cache = filled("linear")
    model(random_ids(3, 1), cache=cache)  # in place
    before = [tensor.clone() for tensor in states(cache)]
    cache.activate_past_recording()
    for _ in range(2):
        model(random_ids(3, 1), cache=cache)
    cache.crop(-2)
    assert_same_bits(states(cache), before)


def test_a_backward_pass_stays_valid():
    """A graph over an earlier step, and then steps without one."""
    model, cache = filled("linear")
    with torch.enable_grad():
        loss = model(random_ids(3, 1), cache=cache).logits.sum()
    model(random_ids(3, 1), cache=cache)
    model(random_ids(3, 1), cache=cache)
    with torch.enable_grad():
        loss = loss + model(random_ids(3, 1), cache=cache).logits.sum()
    loss.backward()
    model.zero_grad()


def test_a_state_made_in_inference_mode_goes_on_outside():
    model, ids = shared_model("linear"), random_ids(3, 8)
    expected = read(model, ids, [8])[0]
    with torch.inference_mode():
        cache = model(ids[:, :6]).cache
        model(ids[:, 6:7], cache=cache)
    last = model(ids[:, 7:], cache=cache).logits
    assert_close(last, expected[:, -1:], EXACT)
