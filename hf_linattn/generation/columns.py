"""A tensor that grows by a column at a time, at a cost that does not depend on its length."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CAPACITY = 1024


class Columns:
    """A tensor [B, n] that grows to the right in a buffer: `append` is O(B), `view` copies nothing."""

    def __init__(self, start: Tensor, most: int | None):
        self.length = start.shape[1]
        self.most = most  # columns it will ever have, if that is known
        self.buffer = start
        self._grow(self.length + FIRST_CAPACITY)

    @property
    def view(self) -> Tensor:
        return self.buffer[:, : self.length]

    def append(self, column: Tensor | int) -> None:
        """Add `column` [B], or the same number for all rows."""
        if self.length == self.buffer.shape[1]:
            self._grow(2 * self.length)
        self.buffer[:, self.length] = column
        self.length += 1

    def take(self) -> Tensor:
        """The columns, in memory of their own size."""
        return (
            self.buffer
            if self.length == self.buffer.shape[1]
            else self.view.clone(memory_format=torch.contiguous_format)
        )

    def _grow(self, capacity: int) -> None:
        if self.most is not None:
            capacity = max(min(capacity, self.most), self.length + 1)
        buffer = self.buffer.new_empty(self.buffer.shape[0], capacity)
        buffer[:, : self.length] = self.buffer[:, : self.length]
        self.buffer = buffer
