"""Padding anywhere, in any turn, is as if it were not there: in logits, states and gradients."""

import pytest
import torch
from helpers import (
    CONFIGS,
    EXACT,
    FEW,
    VOCAB,
    assert_same_bits,
    contents,
    drift,
    pull_back,
    random_ids,
    read,
    shared_model,
    states,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close

from hf_linattn import LinearAttentionCache

each_config = pytest.mark.parametrize("name", CONFIGS)
few_configs = pytest.mark.parametrize("name", FEW)
KINDS = ("real", "left", "right", "holes", "nothing")


def turn_mask(kinds, length, seed):
    """[B, length] bool, one kind of padding per row."""
    g = torch.Generator().manual_seed(seed)
    place, rows = torch.arange(length), []
    for kind in kinds:
        cut = torch.randint(0, length + 1, (), generator=g)
        rows.append(
            {
                "real": torch.ones(length, dtype=torch.bool),
                "left": place >= cut,
                "right": place < cut,
                "holes": torch.rand(length, generator=g) > 0.4,
                "nothing": torch.zeros(length, dtype=torch.bool),
            }[kind]
        )
    return torch.stack(rows)


@st.composite
def padded_turns(draw, max_turns=3):
    """Masks of consecutive calls [B, T_i] of one batch."""
    rows = draw(st.integers(1, 3))
    turns = []
    for _ in range(draw(st.integers(1, max_turns))):
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=rows, max_size=rows))
        turns.append(turn_mask(kinds, draw(st.integers(1, 7)), draw(st.integers(0, 99))))
    return turns


def bits(*rows):
    return torch.tensor([[character == "1" for character in row] for row in rows])


# What must not be missed, by name.
EXAMPLES = {
    "left": [bits("0011", "1111")],
    "right": [bits("1100", "1111")],
    "padding first in a later turn": [bits("111", "111"), bits("0011", "1111"), bits("1", "1")],
    "padding last in a later turn": [bits("011", "111"), bits("1100", "1111"), bits("1", "1")],
    "a single token that is padding for one row": [bits("111", "111"), bits("0", "1"), bits("1", "1")],
    "a row without any token": [bits("0000", "1111"), bits("0", "1")],
    "a row that begins later": [bits("0000", "1011"), bits("011", "101"), bits("1", "1")],
}


def padded_and_unpadded(model, turns, whole):
    """(logits of the real tokens of each row, states, gradients) of the padded batch, and of every row by itself."""
    mask = torch.cat(turns, 1)
    ids = random_ids(*mask.shape)
    logits, cache = read(model, ids, [turn.shape[1] for turn in turns], mask.long(), whole=whole)
    padded = [row[keep] for row, keep in zip(logits, mask, strict=True)], states(cache)
    rows = []
    for row, keep in zip(ids, mask, strict=True):
        if keep.any():
            alone = model(row[keep].unsqueeze(0), use_cache=True)
            rows.append((alone.logits[0], states(alone.cache)))
        else:
            empty = [torch.zeros_like(state[:1]) for state in states(cache)]
            rows.append((logits.new_zeros(0, VOCAB), empty))
    alone_logits, alone_states = zip(*rows, strict=True)
    unpadded = list(alone_logits), [torch.cat(parts) for parts in zip(*alone_states, strict=True)]
    parameters = list(model.parameters())
    return tuple((*outcome, pull_back([*outcome[0], *outcome[1]], parameters)) for outcome in (padded, unpadded))


def must_be_whole(model):
    """Full attention needs to know which of the earlier keys are real."""
    return "full_attention" in model.config.layer_types


@each_config
@settings(max_examples=8)
@given(turns=padded_turns(), whole=st.booleans())
def test_padding_gives_the_unpadded_run(name, turns, whole):
    model = shared_model(name)
    padded, unpadded = padded_and_unpadded(model, turns, whole or must_be_whole(model))
    for actual, expected, what in zip(padded, unpadded, ("logits", "state", "gradient"), strict=True):
        assert_close(actual, expected, EXACT, what)


@pytest.mark.parametrize("name, attention", [*((name, None) for name in FEW), ("hybrid", "eager")])
@pytest.mark.parametrize("case", EXAMPLES)
def test_padding_in_float32(name, attention, case):
    model = shared_model(name, torch.float32, attention)
    padded, unpadded = padded_and_unpadded(model, EXAMPLES[case], whole=must_be_whole(model))
    assert_close(padded[0], unpadded[0], 1e-5, "logits")
    assert drift(padded[1], unpadded[1]) < 1e-6
    assert drift(padded[2], unpadded[2]) < 1e-5


# ---- what stands under the mask


def outcome(model, mask, turns, ids=None, embeds=None):
    """Everything a run yields: logits of real tokens, states, gradients of all parameters (and of the embeddings)."""
    cache, logits, start = LinearAttentionCache(model.config), [], 0
    for turn in turns:
        end = start + turn.shape[1]
        inputs = {"input_ids": ids[:, start:end]} if embeds is None else {"inputs_embeds": embeds[:, start:end]}
        logits.append(model(**inputs, attention_mask=mask[:, :end], cache=cache).logits)
        start = end
    real = torch.cat(logits, 1)[mask]
    inputs = list(model.parameters()) if embeds is None else [*model.parameters(), embeds]
    return [real, *states(cache), *pull_back([real, *states(cache)], inputs)]


@few_configs
@settings(max_examples=6)
@given(turns=padded_turns(max_turns=2), seed=st.integers(1, 99))
def test_ids_under_the_mask_change_nothing(name, turns, seed):
    model = shared_model(name)
    mask = torch.cat(turns, 1)
    ids = random_ids(*mask.shape)
    others = torch.where(mask, ids, random_ids(*mask.shape, seed=seed, low=0))
    assert_same_bits(outcome(model, mask, turns, others), outcome(model, mask, turns, ids))


@few_configs
@pytest.mark.parametrize("poison", [1e4, float("nan"), float("inf")])
@settings(max_examples=4)
@given(turns=padded_turns(max_turns=2))
def test_embeddings_under_the_mask_change_nothing(name, poison, turns):
    model = shared_model(name)
    mask = torch.cat(turns, 1)
    embeds = model.get_input_embeddings()(random_ids(*mask.shape)).detach().requires_grad_()
    hidden = ~mask.unsqueeze(-1)
    poisoned = embeds.detach().masked_fill(hidden, poison).requires_grad_()
    expected = outcome(model, mask, turns, embeds=embeds)
    assert_same_bits(outcome(model, mask, turns, embeds=poisoned), expected)
    assert all(tensor.isfinite().all() for tensor in expected)
    assert not expected[-1].masked_select(hidden).any()


@each_config
def test_a_mask_of_ones_is_no_mask(name):
    model, ids = shared_model(name, torch.float32), random_ids(2, 9)
    plain = read(model, ids, [6, 1, 2])
    for dtype in (torch.long, torch.bool, torch.float32):
        masked = read(model, ids, [6, 1, 2], torch.ones(2, 9, dtype=dtype))
        assert_same_bits([masked[0], *states(masked[1])], [plain[0], *states(plain[1])])


@few_configs
@settings(max_examples=5)
@given(turns=padded_turns(), seed=st.integers(0, 99))
def test_permuting_the_batch_permutes_the_result(name, turns, seed):
    model = shared_model(name)
    mask = torch.cat(turns, 1)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    ids, lengths = random_ids(*mask.shape), [turn.shape[1] for turn in turns]
    logits, cache = read(model, ids, lengths, mask)
    other_logits, other_cache = read(model, ids[order], lengths, mask[order])
    assert_close(other_logits[mask[order]], logits[order][mask[order]], EXACT)
    assert_close(states(other_cache), [state[order] for state in states(cache)], EXACT)


# ---- positions


def with_positions(model, ids, position_ids, mask=None):
    return model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits


@few_configs
def test_positions_come_from_the_mask(name):
    model, ids = shared_model(name), random_ids(3, 6)
    mask = bits("001111", "110110", "111111")
    positions = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5]])
    default = model(ids, attention_mask=mask, use_cache=False).logits
    assert_same_bits([with_positions(model, ids, positions, mask)[mask]], [default[mask]])


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])
def test_explicit_positions_are_honoured(name):
    """In the rotation, per row, and across calls."""
    model, ids = shared_model(name), random_ids(2, 6)
    places = torch.arange(6).unsqueeze(0)
    default = model(ids, use_cache=False).logits
    stretched = with_positions(model, ids, 3 * places)
    assert_same_bits(
        [with_positions(model, ids, places), with_positions(model, ids, places.expand(2, -1))], [default] * 2
    )
    assert (stretched - default).abs().max() > 1e-2
    mixed = with_positions(model, ids, torch.cat([places, 3 * places]))
    assert_close(mixed, torch.stack([default[0], stretched[1]]), EXACT)
    first, second = places[:, :4], places[:, 4:]
    cache = LinearAttentionCache(model.config)
    cut = [
        model(ids[:, :4], position_ids=3 * first, cache=cache).logits,
        model(ids[:, 4:], position_ids=3 * second, cache=cache).logits,
    ]
    assert_close(torch.cat(cut, 1), stretched, EXACT)


def test_without_rope_positions_do_not_matter():
    model, ids = shared_model("no_rope"), random_ids(2, 6)
    shuffled = torch.arange(6).unsqueeze(0) * 7 + 3
    assert_same_bits([with_positions(model, ids, shuffled)], [model(ids, use_cache=False).logits])


@pytest.mark.parametrize("name", [name for name in CONFIGS if "hybrid" not in name])
@settings(max_examples=4)
@given(turns=padded_turns(max_turns=1), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_later_calls_need_no_mask_after_a_padded_first(name, turns, lengths):
    """The cache remembers how much was padding: positions go on from the real tokens."""
    model = shared_model(name)
    (mask,) = turns
    mask = torch.cat([mask, torch.ones(len(mask), sum(lengths), dtype=torch.bool)], 1)
    ids = random_ids(*mask.shape)
    prefix = turns[0].shape[1]
    expected, expected_cache = read(model, ids, [prefix, *lengths], mask)
    first, cache = read(model, ids, [prefix], turns[0])
    rest, cache = read(model, ids[:, prefix:], lengths, cache=cache)
    assert_same_bits(
        [first, rest, *states(cache)], [expected[:, :prefix], expected[:, prefix:], *states(expected_cache)]
    )


def test_a_hybrid_needs_the_mask_of_everything_after_padding():
    model, ids = shared_model("hybrid"), random_ids(2, 5)
    _, cache = read(model, ids, [4], bits("0111", "1111"))
    before = contents(cache)
    with pytest.raises(ValueError, match=r"pass attention_mask \[B, past \+ T\]"):
        model(ids[:, 4:], cache=cache)
    with pytest.raises(ValueError, match="must cover 5"):
        model(ids[:, 4:], attention_mask=torch.ones(2, 1), cache=cache)
    assert_same_bits(contents(cache), before)
