import gzip
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from baselines import NGram, gzip_bits_per_byte, measure_baselines

TRAIN = [b"abracadabra abracadabra", b"", b"a", "déjà vu, déjà lu".encode(), bytes(range(256))]
HELD_OUT = [b"abracadabru", "déjà".encode(), b"\xff\x00zz"]


def by_definition(order: int, train: list[bytes], data: bytes) -> list[float]:
    """Witten-Bell by its formula, with dictionaries and one byte at a time."""
    counts: defaultdict[bytes, Counter] = defaultdict(Counter)
    for document in train:
        for i, byte in enumerate(document):
            for n in range(min(i, order - 1) + 1):
                counts[bytes([n]) + document[i - n : i]][byte] += 1
    result = []
    for i, byte in enumerate(data):
        p = 1 / 256
        for n in range(min(i, order - 1) + 1):
            seen = counts[bytes([n]) + data[i - n : i]]
            if seen:
                p = (seen[byte] + len(seen) * p) / (seen.total() + len(seen))
        result.append(p)
    return result


@pytest.mark.parametrize("order", [1, 2, 3, 6, 7])
def test_ngram_is_the_formula(order):
    expected = [p for document in HELD_OUT for p in by_definition(order, TRAIN, document)]
    model = NGram(order).fit(TRAIN)
    np.testing.assert_allclose(model.probabilities(HELD_OUT), expected, rtol=1e-12)
    assert model.bits_per_byte(HELD_OUT) == pytest.approx(-sum(map(math.log2, expected)) / len(expected))


def test_probabilities_of_all_continuations_sum_to_one():
    model = NGram(6).fit(TRAIN)
    for context in (b"", b"a", b"abracad", b"never"):
        continuations = [context + bytes([x]) for x in range(256)]
        last = np.cumsum([len(c) for c in continuations]) - 1
        assert model.probabilities(continuations)[last].sum() == pytest.approx(1)


def test_order_must_fit_in_64_bits():
    with pytest.raises(ValueError, match="order is 9"):
        NGram(9)


def test_gzip_counts_each_document_alone_at_the_highest_level():
    documents = [*HELD_OUT, " ".join(str(i * i) for i in range(3000)).encode()]
    best, fast = (sum(len(gzip.compress(document, level)) for document in documents) for level in (9, 1))
    assert best < fast
    assert gzip_bits_per_byte(documents) == 8 * best / sum(map(len, documents))


def test_measured_baselines_say_what_they_are():
    text = "the same words again and again. " * 50
    result = measure_baselines([text] * 3, [text], train_limit=2000)
    assert result["6-gram"]["what"].endswith("6-gram of 2,000 training bytes")
    assert result["6-gram"]["bits_per_byte"] < 0.1
    assert result["gzip"]["bits_per_byte"] == gzip_bits_per_byte([text.encode()])
