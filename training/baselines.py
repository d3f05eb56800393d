"""What the held-out text costs without a neural network: gzip, and a byte 6-gram model of the same training text."""

import gzip
from collections.abc import Iterable
from typing import Any

import numpy as np
from tqdm.auto import tqdm

ORDER = 6
TRAIN_BYTES = 16 << 20  # counting more would take too long; results say how many were counted


def measure_baselines(
    train_texts: Iterable[str], held_out_texts: list[str], train_limit: int = TRAIN_BYTES
) -> dict[str, Any]:
    """Bits per byte of both, and what each of them is. Neither pays for the ends of the documents; the model does."""
    held_out = [text.encode() for text in held_out_texts]
    train = []
    for text in train_texts:
        train.append(text.encode()[:train_limit])
        train_limit -= len(train[-1])
        if train_limit <= 0:
            break
    return {
        "gzip": {"bits_per_byte": gzip_bits_per_byte(held_out), "what": "gzip -9, each document on its own"},
        "6-gram": {
            "bits_per_byte": NGram(ORDER).fit(train).bits_per_byte(held_out),
            "what": f"interpolated Witten-Bell byte {ORDER}-gram of {sum(map(len, train)):,} training bytes",
        },
    }


def gzip_bits_per_byte(documents: list[bytes]) -> float:
    return 8 * sum(len(gzip.compress(data, 9)) for data in documents) / sum(map(len, documents))


class NGram:
    """Interpolated byte n-gram model with Witten-Bell smoothing (Witten & Bell 1991).

        P_n(x | c) = (count(c, x) + distinct(c) P_{n-1}(x | c')) / (count(c) + distinct(c))

    c is the n-1 bytes before x, c' all but the first of them, distinct(c) the number of different bytes seen after c,
    and P_0 = 1/256. At the start of a document, where c would reach outside it, only the shorter contexts are used.
    """

    def __init__(self, order: int):
        if not 1 <= order <= 7:
            raise ValueError(f"order is {order}; it must lie between 1 and 7, for a context and a byte fit in 64 bits")
        self.order = order
        self.tables: list[tuple[np.ndarray, ...]] = []

    def fit(self, documents: list[bytes]) -> "NGram":
        data, depth = flatten(documents)
        self.tables = []
        for n in tqdm(range(1, self.order + 1), desc=f"byte {self.order}-gram"):
            keys, counts = np.unique(ngram_keys(data, n)[depth >= n - 1], return_counts=True)
            contexts, first = np.unique(
                keys >> 8, return_index=True
            )  # keys are sorted: a context's bytes are neighbours
            totals = np.add.reduceat(counts, first) if len(first) else first
            distinct = np.diff(np.append(first, len(keys)))
            self.tables.append((keys, counts, contexts, totals, distinct))
        return self

    def probabilities(self, documents: list[bytes]) -> np.ndarray:
        """The probability of each byte of each document, given those before it in the same document."""
        data, depth = flatten(documents)
        p = np.full(len(data), 1 / 256)
        for n, (keys, counts, contexts, totals, distinct) in enumerate(self.tables, start=1):
            grams = ngram_keys(data, n)
            inside = depth >= n - 1
            total = np.where(inside, look_up(contexts, totals, grams >> 8), 0)
            kinds = look_up(contexts, distinct, grams >> 8)
            seen = look_up(keys, counts, grams)
            p = np.where(total > 0, (seen + kinds * p) / np.maximum(total + kinds, 1), p)
        return p

    def bits_per_byte(self, documents: list[bytes]) -> float:
        return float(-np.log2(self.probabilities(documents)).mean())


def flatten(documents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """All bytes end to end, and how many bytes of the same document come before each."""
    data = np.frombuffer(b"".join(documents), dtype=np.uint8)
    depth = [np.arange(len(d)) for d in documents]
    return data, np.concatenate(depth) if depth else np.zeros(0, np.int64)


def ngram_keys(data: np.ndarray, n: int) -> np.ndarray:
    """The last n bytes up to each position as one integer, the current byte lowest."""
    keys = data.astype(np.int64)
    for back in range(1, n):
        keys[back:] |= data[:-back].astype(np.int64) << (8 * back)
    return keys


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values[i] where keys[i] == wanted, 0 where there is none; keys are sorted."""
    if len(keys) == 0:
        return np.zeros(len(wanted), dtype=np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
