"""Train or eval, cache or none, gradients or none, checkpointed, half precision: the same function."""

from itertools import product

import pytest
import torch
from helpers import (
    CONFIGS,
    EXACT,
    FEW,
    assert_same_bits,
    contents,
    drift,
    make_model,
    pull_back,
    random_ids,
    read,
    shared_model,
    states,
)
from reference import assert_close
from transformers import StaticCache

from hf_linattn import LinearAttentionCache

each_config = pytest.mark.parametrize("name", CONFIGS)
few_configs = pytest.mark.parametrize("name", FEW)
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])


@each_config
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_every_mode_gives_the_same_logits(name, mask):
    model, ids = make_model(name).double(), random_ids(2, 9)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    for train, cached, grad in product([True, False], repeat=3):
        model.train(train)
        with torch.set_grad_enabled(grad):
            out = model(ids, attention_mask=mask, use_cache=cached)
        assert_close(out.logits, expected, EXACT, f"{train=} {cached=} {grad=}")
        assert out.logits.requires_grad == grad
        assert (out.cache is not None) == cached
    with torch.inference_mode():
        assert_close(model(ids, attention_mask=mask).logits, expected, EXACT)


def losses(model, ids, mask=None, **kwargs):
    """The loss, and the gradients after `backward`."""
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    loss = model(ids, attention_mask=mask, labels=labels, **kwargs).loss
    loss.backward()
    return [loss.detach()], [parameter.grad for parameter in model.parameters()]


@few_configs
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_backward_does_not_depend_on_the_mode(name, mask):
    model, ids = make_model(name).double(), random_ids(2, 9)
    expected = losses(model.train(), ids, mask, use_cache=False)
    assert_close(losses(model.eval(), ids, mask), expected, EXACT, "eval, the default cache")
    assert_close(losses(model.eval(), ids, mask, cache=LinearAttentionCache(model.config)), expected, EXACT)


CACHES = {
    "own": lambda config: LinearAttentionCache(config),
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
}


@pytest.mark.parametrize(
    "name, kind",  # transformers writes static keys and values in place, which autograd refuses
    [(name, kind) for name in FEW for kind in CACHES if (name, kind) != ("hybrid", "static")],
)
def test_gradients_flow_through_a_carried_state(name, kind):
    """Backward through three calls equals backward through one, also with the fixed buffers of a static cache."""
    model, ids = shared_model(name), random_ids(2, 9)
    uncut = model(ids, use_cache=False).logits
    cut, _ = read(model, ids, [4, 1, 4], cache=CACHES[kind](model.config))
    parameters = list(model.parameters())
    assert_close(pull_back([cut], parameters), pull_back([uncut], parameters), EXACT)
    # the last call alone already reaches the first through the state
    last, _ = read(model, ids, [4, 1, 4], cache=CACHES[kind](model.config))
    assert_close(pull_back([last[:, 5:]], parameters), pull_back([model(ids).logits[:, 5:]], parameters), EXACT)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("trained", ["q_proj", "v_proj", "mlp", "embed_tokens"])
@pytest.mark.parametrize("lengths", [[4, 3], [4, 2, 1], [1, 1, 1]], ids=str)
def test_a_state_is_never_overwritten_under_autograd(kind, trained, lengths):
    """Whatever part is trained, later calls leave what an earlier one saved for its backward."""
    model, ids = make_model("linear").double(), random_ids(2, 9)
    parameters = [p.requires_grad_(trained in key) for key, p in model.named_parameters()]
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    length = sum(lengths)
    expected = pull_back([model(ids, use_cache=False).logits[:, :length]], parameters)
    cache = CACHES[kind](model.config)
    logits, _ = read(model, ids, lengths, cache=cache)
    kept = [state.clone() for state in states(cache)], states(cache), [state._version for state in states(cache)]
    with torch.no_grad():
        for token in range(length, 9):
            model(ids[:, token : token + 1], cache=cache)
    assert_close(pull_back([logits], parameters), expected, EXACT)
    if kind == "own":
        copies, tensors, versions = kept
        assert_same_bits(tensors, copies)
        assert [tensor._version for tensor in tensors] == versions


# ---- gradient checkpointing


@few_configs
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(name, reentrant):
    model, ids = make_model(name).double().train(), random_ids(2, 9)
    expected = losses(model, ids, MASK)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    assert_close(losses(model, ids, MASK), expected, EXACT)
    assert len(calls) == 2, "the layer was not recomputed"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_packed_documents_and_half_precision(reentrant):
    model, ids = make_model("conv").double().train(), random_ids(1, 9)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])
    expected = losses(model, ids, position_ids=positions)
    half = losses(model.to(torch.bfloat16), ids, position_ids=positions)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_bits(losses(model, ids, position_ids=positions)[1], half[1])
    assert_close(losses(model.double(), ids, position_ids=positions), expected, 1e-1)


def test_checkpointing_leaves_eval_and_generation_alone():
    model, ids = make_model("linear").train(), random_ids(2, 9)
    model.activation_checkpointing_enable()
    expected = make_model("linear")(ids).logits
    assert model(ids).cache is None
    with torch.no_grad():
        logits, cache = read(model, ids, [5, 4])
    assert_close(logits, expected, 1e-5)
    assert cache.get_seq_length() == 9


# ---- half precision


@each_config
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_stay_close_and_keep_float32_states(name, dtype):
    model, ids = make_model(name), random_ids(2, 24)
    expected = model(ids, use_cache=False).logits
    model = model.to(dtype)
    logits, cache = read(model, ids, [20, 1, 3])
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    # eight (eleven) bits of mantissa, through two or three layers
    assert drift([logits], [expected]) < (0.05 if dtype == torch.bfloat16 else 0.01)
    for layer in cache.layers:
        if hasattr(layer, "mu"):
            assert layer.mu.dtype == layer.nu.dtype == torch.float32
            assert all(tail.dtype == dtype for tail in layer.conv_tails)
    losses(model, ids)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@each_config
def test_autocast_stays_close_and_keeps_float32_states(name):
    model, ids = make_model(name), random_ids(2, 24)
    expected = model(ids, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits, cache = read(model, ids, [20, 1, 3])
    assert logits.isfinite().all()
    assert drift([logits], [expected]) < 0.05
    assert all(
        state.dtype == torch.float32 for layer in cache.layers if hasattr(layer, "mu") for state in layer.state[:2]
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_state_counts_past_the_end_of_its_mantissa(dtype):
    """nu in bfloat16 would stop at 256 tokens; here a key adds to it at any length."""
    model = make_model("linear", num_hidden_layers=1).to(dtype)
    ids = torch.ones(1, 6000, dtype=torch.long)
    with torch.no_grad():
        first = model(ids[:, :1000], logits_to_keep=1).cache.layers[0].nu
        cache = model(ids, logits_to_keep=1).cache
        before = cache.layers[0].nu
        model(ids[:, :1], cache=cache)
    assert (before > 2 * first).any()
    assert (cache.layers[0].nu > before).any()


def test_a_failed_call_leaves_the_cache():
    model, ids = shared_model("linear"), random_ids(2, 9)
    _, cache = read(model, ids, [5])
    before = contents(cache)
    with pytest.raises(ValueError):
        model(ids, attention_mask=torch.ones(2, 3), cache=cache)
    assert_same_bits(contents(cache), before)
