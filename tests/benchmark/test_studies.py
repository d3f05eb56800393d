"""What a study's tables conclude from its rows."""

import pytest

from hf_linattn.benchmark.studies import bytes_verdict, recall_verdict


def row(feature_map, value, cache_bytes, conv=True, change="", field="accuracy"):
    """One row of two seeds, around `value`."""
    spread = {"accuracy": 0.01, "bits_per_byte": 0.1}[field]
    values = [value - spread, value + spread] if value is not None else [1.0, None]
    runs = [{field: {"9": v} if field == "accuracy" else v, "cache_bytes": cache_bytes} for v in values]
    conv = conv and feature_map is not None
    return {
        "feature_map": feature_map,
        "name": str(feature_map),
        "conv": conv,
        "full": False,
        "change": change,
        "runs": runs,
    }


def recall(*rows):
    return {"scale": {"pairs": [3, 9]}, "rows": [row(None, 0.94, 4096), *rows]}


def test_recall_verdict():
    rows = [
        row("near", 0.935, 1024),
        row("far", 0.92, 512),
        row("alone", 0.95, 64, conv=False),
        row("near", 0.94, 256, change="one head of 8"),
        row("far", 0.95, 128, change="rope"),
    ]
    verdict = recall_verdict(recall(*rows))
    assert "1 of 3 maps come within 2 points of softmax attention's best seed: near." in verdict
    assert "256 B (near with one head of 8); softmax attention keeps 4 KiB" in verdict
    assert "no map comes within 2 points" in recall_verdict(recall(row("far", 0.92, 512)))


def test_bytes_verdict():
    def verdict(*values):
        rows = [row(name, value, 64, field="bits_per_byte") for name, value in zip("abcd", values)]
        return bytes_verdict({"rows": [row(None, 3.0, 64, field="bits_per_byte"), *rows]})

    near = verdict(3.08, 3.2, 2.94, None)
    assert "2 of 4 maps are at most 3% worse than softmax attention: c, a." in near
    assert "The best is c with 2.940 bits, 2.0% less than softmax attention." in near
    assert (
        "0 of 1 maps are at most 3% worse than softmax attention. The best is a with 3.150 bits, 5.0% more"
        in verdict(3.15)
    )


@pytest.mark.parametrize("value, expected", [(0.9301, True), (0.9299, False)])
def test_two_points_are_the_bound(value, expected):
    assert ("of 1 maps come within" in recall_verdict(recall(row("map", value, 1)))) is expected
