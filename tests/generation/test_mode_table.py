"""The README's table of decoding modes: what every way of calling generate() gives, beside the same call of a Llama.

pytest tests/generation/test_mode_table.py                                              # checks the committed results
python -m pytest tests/generation/test_mode_table.py --write-modes model_cards/demo/modes.json      # writes them anew
"""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from helpers import FULL, LINEAR, SLIDING, make_llama, make_model, random_ids
from modes import GPU, MODES
from reference import assert_close

from hf_linattn.benchmark.record import record, write_json

COMMITTED = Path(__file__).parents[2] / "model_cards/demo/modes.json"


@lru_cache
def model_of(kind: str, eager: bool):
    """In float64, so that no draw and no cut-off hangs on rounding. No mode may change it."""
    how = "eager" if eager else None
    if kind == "llama":
        return make_llama(attn_implementation=how).double()
    name, changes = {
        "linear": ("conv", {}),
        "hybrid": ("hybrid", {"conv_kernel_size": 4}),
        "sliding": ("hybrid", {"layer_types": [SLIDING, FULL, LINEAR], "sliding_window": 3, "conv_kernel_size": 4}),
    }[kind]
    return make_model(name, attn_implementation=how, **changes).double()


def inputs(single: bool, padded: bool):
    """Two rows, or one that repeats itself so that lookup finds drafts; padding stands on the left of the first."""
    ids = random_ids(1, 7).repeat(1, 2) if single else random_ids(2, 7)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return ids, mask


def outcome(mode, kind, padded) -> tuple[str, Exception | None]:
    """ "exact", "inexact" or "refused", and the error that says so; of a Llama only whether it "works"."""
    ids, mask = inputs(mode.single, padded)
    try:
        got, by = mode.actual(model_of(kind, mode.eager), ids, mask)
    except Exception as error:  # whatever a mode raises is its answer; the test tells which are allowed
        return "refused", error
    if kind == "llama":
        return "works", None
    wanted, wanted_by = mode.wanted(model_of(kind, mode.eager), ids, mask)
    try:
        assert torch.equal(got, wanted)
        for a, e in zip(by or (), wanted_by or (), strict=True):
            assert torch.equal(a.isfinite(), e.isfinite())
            assert_close(a[a.isfinite()], e[e.isfinite()], 1e-4)
    except AssertionError as error:
        return "inexact", error
    return "exact", None


def cell(mode, padded, found, llama, llama_error) -> str:
    """What the table says; every result but an exact one needs a reason, and "as Llama" the very same error."""
    what, error = found
    if what == "exact":
        return "exact, one row" if padded and mode.single else "exact"
    if not mode.because:
        raise AssertionError(f"{mode.name}: {what}") from error
    if what == "refused" == llama:
        assert str(error) == str(llama_error)
        return f"as Llama: {mode.because}"
    assert what == "inexact" or "\n" not in str(error)
    return f"{what}: {mode.because}"


@pytest.fixture(scope="module")
def committed():
    return {row["mode"]: row for row in json.loads(COMMITTED.read_text())["rows"]} if COMMITTED.exists() else {}


@pytest.fixture(scope="module")
def rows():
    return []


@pytest.mark.filterwarnings("ignore")  # of the modes that transformers is about to drop
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_mode(mode, rows, committed, request):
    llama, error = (mode.llama, None) if mode.llama else outcome(mode, "llama", padded=True)
    row = {"mode": mode.name, "llama": llama}
    for kind in ("linear", "hybrid"):
        for padded in (False, True):
            what = cell(mode, padded, outcome(mode, kind, padded), llama, error)
            row[f"{kind}_padded" if padded else kind] = what
    rows.append(row)
    if not request.config.getoption("write_modes", None) and not (mode.because == GPU and torch.cuda.is_available()):
        assert row == committed.get(mode.name), f"write {COMMITTED.name} anew if this is an improvement"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_layer_with_a_window_changes_no_mode(mode, committed):
    """A model with all three kinds of layers does what the table says of a hybrid."""
    llama, error = (mode.llama, None) if mode.llama else outcome(mode, "llama", padded=True)
    for padded in (False, True):
        what = cell(mode, padded, outcome(mode, "sliding", padded), llama, error)
        if not (mode.because == GPU and torch.cuda.is_available()):
            assert what == committed[mode.name]["hybrid_padded" if padded else "hybrid"]


def test_the_committed_table_is_whole(rows, committed, request):
    path = request.config.getoption("write_modes", None)
    if path is None:
        assert list(committed) == [mode.name for mode in MODES]
        return
    assert len(rows) == len(MODES), "run the whole file to write it"
    write_json(path, {"kind": "modes", "record": record(seed=0), "rows": rows})


@pytest.mark.parametrize("kind", ["linear", "hybrid", "llama"])
def test_drafts_are_for_one_row(kind):
    """Why the table says "one row": a batch is refused, by transformers too."""
    ids, mask = inputs(False, False)
    with pytest.raises(ValueError, match="batch_size = 1|one row at a time"):
        model_of(kind, False).generate(ids, attention_mask=mask, prompt_lookup_num_tokens=3, max_new_tokens=2)
