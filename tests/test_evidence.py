"""What the README concludes from the studies, and defaults follow, is what their results say."""

import statistics
from pathlib import Path

import pytest

from hf_linattn import LinAttnConfig, make_feature_map
from hf_linattn.benchmark.record import read_json
from hf_linattn.benchmark.studies import bits_of, by_change, by_map, recall_of, softmax_row
from hf_linattn.models.linattn.presets import PRESETS

CARDS = Path(__file__).parents[1] / "model_cards"
ALONE, CONV, FULL = (False, False), (True, False), (False, True)


@pytest.fixture(scope="module")
def recall():
    return read_json(CARDS / "recall" / "results.json")


@pytest.fixture(scope="module")
def bits():
    return read_json(CARDS / "bytes" / "results.json")


def mean(row, measure):
    return statistics.fmean(measure(row))


def test_a_convolution_is_worth_more_than_any_map(recall):
    accuracy = {
        name: {mix: mean(row, recall_of(recall)) for mix, row in rows.items()} for name, rows in by_map(recall).items()
    }
    assert min(rows[CONV] for rows in accuracy.values()) > max(rows[ALONE] for rows in accuracy.values())
    assert max(rows[ALONE] for name, rows in accuracy.items() if name != "taylor2") < 100 / 8
    assert sum(rows[CONV] > 98 for rows in accuracy.values()) > len(accuracy) / 2
    assert LinAttnConfig().conv_kernel_size == 4


def test_what_stands_beside_a_convolution_changes_little(recall, bits):
    cost = {change: mean(row, bits_of()) for change, row in by_change(bits)["elu1"].items()}
    of_maps = [mean(rows[CONV], bits_of()) for rows in by_map(bits).values()]
    assert max(cost["rope"], cost["qk_norm"]) < 1.01 * cost[""]
    assert cost["rmsnorm"] > max(of_maps)
    changes = {change: mean(row, recall_of(recall)) for change, row in by_change(recall)["elu1"].items()}
    for change in ("rope", "qk_norm", "rmsnorm"):
        assert abs(changes[change] - changes[""]) < 1
    config = LinAttnConfig()
    assert (config.rope_position, config.qk_norm, config.normalizer) == ("none", False, "denominator")


def test_softmax_attention_is_better_up_to_its_length_and_worse_beyond(bits):
    softmax, ours = softmax_row(bits), by_map(bits)["elu1"][CONV]
    best = min(mean(rows[CONV], bits_of()) for rows in by_map(bits).values())
    assert mean(ours, bits_of()) < 1.01 * best
    assert best > 1.03 * mean(softmax, bits_of())
    ends = {}
    for name, row in (("softmax", softmax), ("ours", ours)):
        by_length = [[each["bits_per_token"] for each in run["by_context"]] for run in row["runs"]]
        trained, beyond = (statistics.fmean(run[place] for run in by_length) for place in (-3, -1))
        ends[name] = beyond - trained
        ends[name, "beyond"] = beyond
    assert ends["softmax"] > 0.5 > 0.1 > ends["ours"]
    assert ends["ours", "beyond"] < ends["softmax", "beyond"]


def test_the_default_map_recalls_everything_in_the_smallest_state(recall):
    size = lambda row: row["runs"][0]["cache_bytes"]  # noqa: E731
    rows = {name: cells[CONV] for name, cells in by_map(recall).items()}
    whole = {name: row for name, row in rows.items() if min(recall_of(recall)(row)) > 99.9}
    default = LinAttnConfig().feature_map
    assert default in whole
    assert size(whole[default]) == min(size(row) for row in rows.values())
    assert not list(make_feature_map(default, 8).parameters())
    assert {name: getattr(LinAttnConfig(), name) for name in PRESETS["fast"]} == PRESETS["fast"]


def test_with_little_room_the_recall_preset_recalls_most_for_its_size(recall):
    narrow = {name: cells["one head of 8"] for name, cells in by_change(recall).items() if "one head of 8" in cells}
    whole = {name: row for name, row in narrow.items() if min(recall_of(recall)(row)) > 99.9}
    assert set(whole) == {"rebased", "taylor2"}
    assert PRESETS["recall"]["feature_map"] == min(whole, key=lambda name: whole[name]["runs"][0]["cache_bytes"])
