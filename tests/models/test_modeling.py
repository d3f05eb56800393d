"""The decoder as a function: cut anywhere, with any outputs asked for, it computes one thing."""

import pytest
import torch
from helpers import (
    CONFIGS,
    EXACT,
    FEW,
    FULL,
    LINEAR,
    VOCAB,
    assert_same_bits,
    drift,
    make_config,
    make_model,
    pull_back,
    random_ids,
    read,
    shared_model,
    states,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close

from hf_linattn import LinAttnForCausalLM, LinAttnModel, LinearAttentionCache
from hf_linattn.layers import LinearAttention

each_config = pytest.mark.parametrize("name", CONFIGS)
few_configs = pytest.mark.parametrize("name", FEW)


# ---- cuts


@each_config
@settings(max_examples=6)
@given(
    rows=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    masked=st.booleans(),
)
def test_any_cut_gives_the_uncut_run(name, rows, lengths, masked):
    model = shared_model(name)
    ids = random_ids(rows, sum(lengths))
    uncut = model(ids, use_cache=False).logits
    whole, whole_cache = read(model, ids, [sum(lengths)])
    cut, cut_cache = read(model, ids, lengths, torch.ones_like(ids) if masked else None)
    assert_close(cut, uncut, EXACT, "logits")
    assert_close(states(cut_cache), states(whole_cache), EXACT, "state")
    parameters = list(model.parameters())
    expected = pull_back([whole, *states(whole_cache)], parameters)
    assert_close(pull_back([cut, *states(cut_cache)], parameters), expected, EXACT, "gradient")


@few_configs
def test_cuts_in_float32(name):
    model, ids = shared_model(name, torch.float32), random_ids(2, 40)
    uncut, uncut_cache = read(model, ids, [40])
    assert_close(uncut, model(ids, use_cache=False).logits, 1e-5)
    for lengths in ([1] * 40, [39, 1], [1, 39], [16, 16, 8], [7, 1, 1, 31]):
        cut, cache = read(model, ids, lengths)
        assert_close(cut, uncut, 1e-5, "logits")
        assert drift(states(cache), states(uncut_cache)) < 1e-6
    grads = [pull_back([logits], model.parameters()) for logits in (uncut, cut)]
    assert drift(grads[1], grads[0]) < 1e-5


@few_configs
def test_later_tokens_change_nothing_before_them(name):
    model, ids = shared_model(name), random_ids(2, 12)
    other = torch.cat([ids[:, :7], random_ids(2, 5, seed=1)], 1)
    one, two = (model(x, use_cache=False).logits for x in (ids, other))
    assert_same_bits([two[:, :7]], [one[:, :7]])
    assert (two - one)[:, 7:].abs().max() > 1e-2


@each_config
def test_every_parameter_matters(name):
    model, ids = shared_model(name), random_ids(2, 12)
    grads = pull_back([model(ids, use_cache=False).logits], model.parameters())
    idle = [key for (key, _), grad in zip(model.named_parameters(), grads, strict=True) if not grad.any()]
    assert idle == []


def test_layer_types_are_followed():
    model = make_model("hybrid", layer_types=[FULL, LINEAR, FULL])
    kinds = [isinstance(layer.self_attn, LinearAttention) for layer in model.model.layers]
    assert kinds == [False, True, False]


def test_initialisation_follows_the_config():
    torch.manual_seed(1)
    model = LinAttnModel(make_config("hedgehog_query", hidden_size=64, conv_kernel_size=3, initializer_range=0.3))
    attention = model.layers[0].self_attn
    assert 0.27 < attention.q_proj.weight.std() < 0.33
    assert torch.equal(attention.q_conv.weight[:, -1], torch.ones(24))
    assert not attention.q_conv.weight[:, :-1].any()
    assert torch.equal(attention.feature_map.q_weight, torch.eye(6).expand(4, 6, 6))


# ---- outputs


def seen(attention):
    """Hooks on one attention layer: a dict that fills with its values [B, S, Hk, D] and what enters o_proj."""
    found = {}
    attention.v_proj.register_forward_hook(
        lambda module, args, out: found.update(v=out.unflatten(-1, (-1, attention.head_dim)))
    )
    attention.o_proj.register_forward_pre_hook(
        lambda module, args: found.update(out=args[0].unflatten(-1, (-1, attention.head_dim)))
    )
    if getattr(attention, "o_norm", None) is not None:  # look before the norm
        attention.o_norm.register_forward_pre_hook(lambda module, args: found.update(raw=args[0]))
    return found


def weigh(weights, v):
    """weights [B, Hq, T, S] times values [B, S, Hk, E], each query head reading its key head."""
    v = v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshe->bthe", weights, v)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "conv"])
@pytest.mark.parametrize("padded", [False, True])
def test_attentions_are_what_multiplies_the_values(name, padded):
    model = make_model(name, attn_implementation="eager" if "hybrid" in name else None)
    hooks = [seen(layer.self_attn) for layer in model.model.layers]
    ids = random_ids(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]]) if padded else None
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=False, output_attentions=True)
    real = torch.ones(2, 7, dtype=torch.bool) if mask is None else mask.bool()
    assert len(out.attentions) == model.config.num_hidden_layers
    for weights, found in zip(out.attentions, hooks, strict=True):
        assert weights.shape == (2, model.config.num_attention_heads, 7, 7)
        by_query = weights.transpose(1, 2)[real]  # what a padded query reads is undefined
        assert not weights.triu(1).transpose(1, 2)[real].any()
        assert not by_query.masked_select(~real[:, None].expand(2, 7, 7)[real].unsqueeze(1)).any()
        if model.config.normalizer == "denominator":
            sums = by_query.sum(-1)
            if model.config.feature_map == "cosformer":  # relu(q) relu(k)^T may be 0 for all keys
                assert sums.count_nonzero() > sums.numel() / 2
                sums = sums[sums != 0]
            assert_close(sums, torch.ones_like(sums), 1e-6)
            assert (by_query >= 0).all()
        expected = found.get("raw", found["out"])
        assert_close(weigh(weights, found["v"])[real], expected[real], 1e-5)
    assert_same_bits([out.logits], [model(ids, attention_mask=mask, use_cache=False).logits])


def test_generating_past_the_horizon_says_so():
    model = make_model("cosformer")
    assert model.generate(random_ids(1, 290), max_new_tokens=11, do_sample=False).shape == (1, 301)
    with pytest.raises(ValueError, match="position 300 is outside of the horizon=300 "):
        model.generate(random_ids(1, 290), max_new_tokens=12, do_sample=False)


def test_with_a_cache_earlier_keys_keep_their_share_of_the_attention():
    model, ids = shared_model("gqa"), random_ids(2, 8)
    _, cache = read(model, ids, [5])
    whole = model(ids, use_cache=False, output_attentions=True).attentions
    rest = model(ids[:, 5:], cache=cache, output_attentions=True).attentions
    assert_close(list(rest), [weights[:, :, 5:, 5:] for weights in whole], 1e-6)


def test_attentions_of_a_hybrid_need_eager():
    model = make_model("hybrid")
    cache = LinearAttentionCache(model.config)
    with pytest.raises(ValueError, match="attn_implementation='eager', got 'sdpa'"):
        model(random_ids(1, 4), cache=cache, output_attentions=True)
    assert cache.get_seq_length() == 0
    model.set_attn_implementation("eager")
    assert len(model(random_ids(1, 4), output_attentions=True).attentions) == 3


def test_attentions_can_be_asked_for_in_the_config():
    model = make_model("linear", output_attentions=True)
    assert len(model(random_ids(1, 4)).attentions) == 2
    assert model(random_ids(1, 4), output_attentions=False).attentions is None
    assert shared_model("linear")(random_ids(1, 4)).attentions is None


@few_configs
def test_hidden_states(name):
    model, ids = shared_model(name), random_ids(2, 5)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(ids))
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    state = out.hidden_states[0]
    for layer, expected in zip(model.model.layers[:1], out.hidden_states[1:2], strict=True):
        positions = model.model.rotary_emb(state, torch.arange(5).unsqueeze(0))
        assert_close(layer(state, position_embeddings=positions), expected, EXACT)


def test_tuples_instead_of_a_dict():
    model, ids = shared_model("linear"), random_ids(2, 5)
    out = model(ids, labels=ids, output_hidden_states=True)
    loss, logits, cache, hidden = model(ids, labels=ids, output_hidden_states=True, return_dict=False)
    assert_same_bits(
        [loss, logits, *states(cache), *hidden], [out.loss, out.logits, *states(out.cache), *out.hidden_states]
    )
    last, cache = model.model(ids, return_dict=False)
    assert_same_bits([model.lm_head(last), *states(cache)], [out.logits, *states(out.cache)])


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])], ids=str)
def test_logits_to_keep(keep):
    model, ids = shared_model("linear"), random_ids(2, 5)
    everything = model(ids).logits
    kept = slice(-keep, None) if isinstance(keep, int) else keep
    assert_close(model(ids, logits_to_keep=keep).logits, everything[:, kept], EXACT)


# ---- loss


@few_configs
def test_loss_is_the_mean_over_labelled_tokens(name):
    model, ids = shared_model(name), random_ids(2, 9)
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, attention_mask=mask, labels=labels)
    # token t predicts token t + 1; the first real token of a row is predicted by padding, as everywhere in transformers
    rows, places = torch.nonzero(labels[:, 1:] != -100, as_tuple=True)
    chosen = out.logits.log_softmax(-1)[rows, places, labels[rows, places + 1]]
    assert_close(out.loss, -chosen.mean().to(out.loss.dtype), 1e-6)
    summed = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    assert_close(summed, -(chosen.sum() / 50).to(summed.dtype), 1e-6)
    assert_close(model(ids, attention_mask=mask, labels=labels, num_items_in_batch=50).loss, summed, EXACT)


def test_tied_weights_are_one_tensor():
    tied = make_model("linear", tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert make_model("linear").lm_head.weight is not make_model("linear").model.embed_tokens.weight
    tied(random_ids(1, 5), labels=random_ids(1, 5)).loss.backward()
    assert tied.lm_head.weight.grad is tied.model.embed_tokens.weight.grad
    assert tied.lm_head.weight.grad.any()


def test_embeddings_instead_of_ids():
    model, ids = shared_model("conv"), random_ids(2, 7)
    embeds = model.get_input_embeddings()(ids)
    assert_same_bits([model(inputs_embeds=embeds).logits], [model(ids).logits])


def test_resizing_the_vocabulary():
    model = make_model("linear")
    model.resize_token_embeddings(VOCAB + 5)
    assert model(torch.tensor([[VOCAB + 4]])).logits.shape == (1, 1, VOCAB + 5)
    assert model.config.vocab_size == VOCAB + 5


# ---- two names of the cache


def test_both_names_of_the_cache_are_taken(recwarn):
    model, ids = shared_model("linear"), random_ids(2, 6)
    expected, _ = read(model, ids, [4, 2])
    first = model(ids[:, :4], use_cache=True)
    assert first.past_key_values is first.cache
    renamed = model(ids[:, 4:], past_key_values=first.cache)
    assert_close(renamed.logits, expected[:, 4:], EXACT)
    assert renamed.cache is first.cache
    base = LinearAttentionCache(model.config)
    model.model(ids[:, :4], past_key_values=base)
    assert base.get_seq_length() == 4


def test_a_cache_is_made_by_default_and_only_then():
    model = make_model("linear")
    assert isinstance(model(random_ids(1, 4)).cache, LinearAttentionCache)
    assert model(random_ids(1, 4), use_cache=False).cache is None
    model.config.use_cache = False
    assert model(random_ids(1, 4)).cache is None
    assert isinstance(model, LinAttnForCausalLM)
