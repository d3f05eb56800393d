"""The recurrent state of linear attention: one context summary and one key summary per key head.

Dimension letters, used by every file of this folder:
B batch, T queries, S keys, Hq query heads, Hk key heads, G = Hq / Hk, D head dim, F feature dim, E value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LinearAttentionState(NamedTuple):
    """Everything a linear attention layer remembers of the keys and values it has read.

        mu = sum_j phi(k_j)^T v_j      context summary, [B, Hk, F, E]
        nu = sum_j phi(k_j)            key summary,     [B, Hk, F]

    Both are float32 (float64 for float64 inputs) whatever the dtype of the model, because a running sum in half
    precision stops growing. One state is kept per key head; query heads of a group share it.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236, equations 18 to 20.
    """

    mu: Tensor
    nu: Tensor

    @classmethod
    def zeros(
        cls,
        batch_size: int,
        num_key_value_heads: int,
        feature_dim: int,
        value_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> LinearAttentionState:
        """The state before the first key: all sums are empty."""
        shape = (batch_size, num_key_value_heads, feature_dim)
        return cls(
            torch.zeros(*shape, value_dim, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes held: 4 * B * Hk * F * (E + 1) in float32, independent of how many keys were read."""
        return self.mu.nbytes + self.nu.nbytes

    def to(self, *args, **kwargs) -> LinearAttentionState:
        """`Tensor.to` on both parts."""
        return LinearAttentionState(self.mu.to(*args, **kwargs), self.nu.to(*args, **kwargs))

    def detach(self) -> LinearAttentionState:
        """The same values without their gradient history."""
        return LinearAttentionState(self.mu.detach(), self.nu.detach())

    def clone(self) -> LinearAttentionState:
        """A copy that shares no memory."""
        return LinearAttentionState(self.mu.clone(), self.nu.clone())

    def batch_select(self, indices: Tensor) -> LinearAttentionState:
        """The rows `indices` of the batch, in that order (repeats allowed)."""
        indices = indices.to(self.mu.device)
        return LinearAttentionState(self.mu[indices], self.nu[indices])


def state_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of sums and products over `tensors`: float64 if any of them is, float32 otherwise."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
