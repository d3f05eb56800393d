"""The state of sliding window linear attention: a window of keys and values, and sums over the keys older than it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SlidingAttentionState(NamedTuple):
    """Everything a sliding layer remembers: its size does not depend on how much was read.

        mu = sum_j phi(k_j)^T v_j,   nu = sum_j phi(k_j)          over keys that have left the window

    Attributes:
        mu: context summary [B, Hk, F, E], float32 (float64 for float64 inputs).
        nu: key summary [B, Hk, F], likewise.
        keys: the last W real keys, before phi, [B, W, Hk, D] in their own dtype; the newest stands last.
        values: their values [B, W, Hk, E].
        count: how many of the W are keys that were read, [B] int64; the places before them hold zeros.
    """

    mu: Tensor
    nu: Tensor
    keys: Tensor
    values: Tensor
    count: Tensor
