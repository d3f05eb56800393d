"""Packed documents do not see each other: a packed batch equals its documents one by one."""

import pytest
import torch
from helpers import (
    CONFIGS,
    EXACT,
    assert_same_bits,
    contents,
    make_model,
    pull_back,
    random_ids,
    read,
    shared_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close
from transformers import DataCollatorWithFlattening, DynamicCache

from hf_linattn import LinearAttentionCache

LENGTHS = {1: [[3, 1, 5]], 2: [[3, 1, 5], [6, 3]]}  # document lengths of each row


def position_ids(rows):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def offsets(rows):
    lengths = torch.tensor([0, *(length for row in rows for length in row)])
    return lengths.cumsum(0).int()


def document_numbers(rows):
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]).int()


# Every way to say where documents begin.
WAYS = {
    "position_ids": lambda rows: {"position_ids": position_ids(rows)},
    "cu_seq_lens_q": lambda rows: {"cu_seq_lens_q": offsets(rows)},
    "seq_idx": lambda rows: {"seq_idx": document_numbers(rows)},
    "all": lambda rows: {
        "position_ids": position_ids(rows),
        "cu_seq_lens_q": offsets(rows),
        "cu_seq_lens_k": offsets(rows),
        "max_length_q": 6,
        "max_length_k": 6,
        "seq_idx": document_numbers(rows),
    },
}


def one_by_one(model, ids, rows):
    """Logits of every document by itself, joined as packed."""
    joined = []
    for row, lengths in zip(ids, rows, strict=True):
        documents = row.split(lengths)
        joined.append(torch.cat([model(x.unsqueeze(0), use_cache=False).logits for x in documents], 1))
    return torch.cat(joined)


def compare(model, ids, rows, tolerance=EXACT, **how):
    packed = model(ids, **how)
    assert packed.cache is None
    expected = one_by_one(model, ids, rows)
    assert_close(packed.logits, expected, tolerance)
    parameters = list(model.parameters())
    assert_close(pull_back([packed.logits], parameters), pull_back([expected], parameters), tolerance, "gradient")


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize(
    "name, way",
    [(name, "position_ids") for name in CONFIGS] + [(name, way) for name in ("conv", "hybrid") for way in WAYS],
)
def test_packed_equals_separate(name, way, batch):
    rows = LENGTHS[batch]
    compare(shared_model(name), random_ids(batch, 9), rows, **WAYS[way](rows))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", LENGTHS)
def test_packed_in_eager_mode(way, batch):
    rows = LENGTHS[batch]
    model = shared_model("hybrid", attn_implementation="eager")
    compare(model, random_ids(batch, 9), rows, tolerance=1e-6, **WAYS[way](rows))  # its softmax is float32


@st.composite
def packings(draw):
    """Documents that fill rows of one length."""
    length = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted({0, *draw(st.sets(st.integers(1, length), max_size=4)), length})
        rows.append([end - start for start, end in zip(cuts[:-1], cuts[1:], strict=True)])
    return rows


@pytest.mark.parametrize("name", ["linear", "conv", "hybrid"])
@settings(max_examples=8)
@given(rows=packings(), way=st.sampled_from(["position_ids", "cu_seq_lens_q", "seq_idx"]))
def test_any_packing_equals_separate(name, rows, way):
    model, ids = shared_model(name), random_ids(len(rows), sum(rows[0]))
    logits = model(ids, use_cache=False, **WAYS[way](rows)).logits
    assert_close(logits, one_by_one(model, ids, rows), EXACT)


def test_documents_of_no_tokens():
    model, ids = shared_model("conv"), random_ids(1, 9)
    compare(model, ids, [[4, 5]], cu_seq_lens_q=torch.tensor([0, 0, 4, 4, 4, 9, 9]))


@pytest.mark.parametrize("name", ["conv", "hybrid"])
def test_a_mask_of_ones_beside_packing(name):
    model, ids, rows = shared_model(name), random_ids(2, 9), LENGTHS[2]
    compare(model, ids, rows, position_ids=position_ids(rows), attention_mask=torch.ones(2, 9))


@pytest.mark.parametrize("name", ["linear", "conv", "rmsnorm", "cosformer"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_packed_row(name, way, side):
    """Rows packed to different totals: what is left over belongs to no document."""
    model, rows, totals = shared_model(name), [[3, 1, 5], [4, 2]], [9, 6]
    real = torch.arange(9) < torch.tensor(totals).unsqueeze(1)
    real = real.flip(1) if side == "left" else real
    ids = random_ids(2, 9)
    # padding has position 0 and counts, for offsets and numbers, to a neighbouring document
    spread = [row[:] for row in rows]
    spread[1][0 if side == "left" else -1] += 3
    how = WAYS[way](spread)
    if "position_ids" in how:  # otherwise they are counted, over real tokens
        how["position_ids"] = torch.zeros(2, 9, dtype=torch.long)
        how["position_ids"][real] = torch.cat([torch.arange(length) for row in rows for length in row])
    packed = model(ids, attention_mask=real.long(), use_cache=False, **how).logits[real]
    expected = torch.cat([one_by_one(model, ids[row : row + 1, real[row]], [rows[row]])[0] for row in (0, 1)])
    assert_close(packed, expected, EXACT)
    parameters = list(model.parameters())
    assert_close(pull_back([packed], parameters), pull_back([expected], parameters), EXACT, "gradient")


def test_attentions_of_packed_documents():
    rows, ids = LENGTHS[2], random_ids(2, 9)
    for model in (shared_model("gqa"), shared_model("hybrid", torch.float32, "eager")):
        attentions = model(ids, position_ids=position_ids(rows), output_attentions=True).attentions
        documents = document_numbers(rows)
        apart = documents.unsqueeze(1).unsqueeze(-1) != documents.unsqueeze(1).unsqueeze(-2)
        for weights in attentions:
            assert weights.shape == (2, model.config.num_attention_heads, 9, 9)
            assert not weights.masked_select(apart).any()
            assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)), 1e-6)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}], ids=str)
@pytest.mark.parametrize("name", ["conv", "hybrid"])
def test_batches_of_the_flattening_collator(name, options):
    model = shared_model(name)
    documents = [random_ids(1, length, seed=length)[0] for length in (3, 1, 5)]
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    out = model(**batch)
    expected = torch.cat([model(document.unsqueeze(0)).logits for document in documents], 1)
    assert_close(out.logits, expected, EXACT)
    assert out.loss.isfinite()


# ---- what a packed batch cannot do


@pytest.mark.parametrize("way", ["position_ids", "cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("make", [LinearAttentionCache, lambda config: DynamicCache()], ids=["own", "dynamic"])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("name", ["linear", "hybrid"])
def test_a_cache_cannot_take_packed_documents(name, way, make, filled):
    model, rows = shared_model(name), LENGTHS[2]
    cache = make(model.config)
    if filled:
        read(model, random_ids(2, 4), [4], cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match="cannot fill a cache of one state per row: pass use_cache=False") as caught:
        model(random_ids(2, 9), cache=cache, **WAYS[way](rows))
    assert "\n" not in str(caught.value)
    if cache.layers:
        assert_same_bits(contents(cache)[1:], before[1:])
    assert cache.get_seq_length() == int(before[0])


def test_a_hybrid_cannot_take_padding_in_packed_rows():
    with pytest.raises(ValueError, match="packed documents and padding do not go together"):
        shared_model("hybrid")(
            random_ids(1, 9), attention_mask=torch.tensor([[1] * 7 + [0] * 2]), seq_idx=document_numbers([[3, 4, 2]])
        )


@pytest.mark.parametrize("offsets", [[0, 4], [1, 9], [0, 6, 4, 9], [0, 4, 12]], ids=str)
def test_wrong_offsets(offsets):
    with pytest.raises(ValueError, match="cu_seq_lens_q must go from 0 to B T = 9 without decreasing"):
        shared_model("linear")(random_ids(1, 9), cu_seq_lens_q=torch.tensor(offsets))


def test_wrong_document_numbers():
    with pytest.raises(ValueError, match=r"seq_idx has shape \[1, 8\]; it must be \[B, T\] = \[1, 9\]"):
        shared_model("linear")(random_ids(1, 9), seq_idx=torch.zeros(1, 8))


def test_positions_that_do_not_restart_pack_nothing():
    """A gap, a late start and one token a row are one document each, and fill a cache as ever."""
    model, ids = make_model("linear").double(), random_ids(2, 4)
    for positions in ([[0, 1, 7, 8]], [[5, 6, 7, 8]], [[0, 1, 2, 3], [4, 5, 6, 9]]):
        out = model(ids, position_ids=torch.tensor(positions))
        assert out.cache.get_seq_length() == 4
