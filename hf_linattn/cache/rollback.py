"""What a call of a layer adds to the cache, kept so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import LinearAttentionState, SlidingAttentionState
from ..ops.sliding.inputs import slide


class Recorded(NamedTuple):
    """One call of a layer that records: what it started from, and what its tokens added; enough to undo them.

    In a layer with a window of W keys a token adds the key that it pushes out. Such a call has `keys`, those of the
    window before its own, real ones first; `values` are lined up with them, and `phi_k` is of the first t.
    """

    state: LinearAttentionState | SlidingAttentionState | None
    tails_before: tuple[Tensor, ...]
    phi_k: Tensor  # [B, t, Hk, F], 0 where masked
    values: Tensor  # [B, t, Hk, E], 0 where masked; [B, W + t, Hk, E] with a window
    conv_inputs: tuple[Tensor, ...]  # what the convolutions read, [B, t, channels] each
    key_mask: Tensor | None  # [B, t]
    keys: Tensor | None = None  # [B, W + t, Hk, D]

    @property
    def num_tokens(self) -> int:
        return self.phi_k.shape[1]

    @property
    def window(self) -> int:
        """W; 0 without a window."""
        return 0 if self.keys is None else self.keys.shape[1] - self.num_tokens

    def after(self, kept: int) -> tuple[LinearAttentionState | SlidingAttentionState | None, tuple[Tensor, ...]]:
        """State and convolution tails after the first `kept` tokens of the call; for 0 the very tensors before it."""
        if kept == 0:
            return self.state, self.tails_before
        mask = None if self.key_mask is None else self.key_mask[:, :kept]
        phi_k, values = self.phi_k[:, :kept], self.values[:, :kept].to(self.phi_k)
        real = kept if mask is None else mask.sum(1)
        if self.window and mask is not None:
            pushed = torch.arange(kept, device=phi_k.device) < real.unsqueeze(1)
            phi_k = phi_k.masked_fill(~pushed[..., None, None], 0)
        mu, nu = torch.einsum("bshf,bshe->bhfe", phi_k, values), phi_k.sum(1)
        if self.state is not None:
            mu, nu = self.state.mu + mu, self.state.nu + nu
        tails = tuple(
            next_tail(tail, inputs[:, :kept], mask) for tail, inputs in zip(self.tails_before, self.conv_inputs)
        )
        if not self.window:
            return LinearAttentionState(mu, nu), tails
        count = None if self.state is None else self.state.count
        return SlidingAttentionState(mu, nu, *slide(self.keys, self.values, self.window, count, real)), tails

    def first(self, kept: int) -> Recorded:
        """The record of the first `kept` tokens of the call."""
        mask = None if self.key_mask is None else self.key_mask[:, :kept]
        inputs = tuple(each[:, :kept] for each in self.conv_inputs)
        end = self.window + kept
        keys = None if self.keys is None else self.keys[:, :end]
        sums = self.phi_k[:, :kept], self.values[:, :end]
        return Recorded(self.state, self.tails_before, *sums, inputs, mask, keys)

    def with_start(self, function: Callable[[Tensor], Tensor]) -> Recorded:
        """The same record with `function` applied to what the call started from."""
        state = None if self.state is None else type(self.state)(*map(function, self.state))
        return self._replace(state=state, tails_before=tuple(map(function, self.tails_before)))

    def map(self, function: Callable[[Tensor], Tensor]) -> Recorded:
        """The same record with `function` applied to every tensor (all have the batch first)."""

        def one(value):
            return tuple(map(function, value)) if isinstance(value, tuple) else function(value)

        changed = self.with_start(function)
        rest = (None if value is None else one(value) for value in self[2:])
        return Recorded(changed.state, changed.tails_before, *rest)


def real_first(key_mask: Tensor) -> Tensor:
    """The order of each row that puts its real tokens first, as they stand: [B, T]."""
    return (~key_mask).to(torch.uint8).argsort(dim=1, stable=True)


def next_tail(tail: Tensor, inputs: Tensor, key_mask: Tensor | None) -> Tensor:
    """The last real rows of [tail, inputs], as many as `tail` [B, reach, C] has."""
    reach = tail.shape[1]
    padded = torch.cat([tail.to(inputs.dtype), inputs], 1)
    if key_mask is None:
        return padded[:, -reach:].clone()
    inputs = inputs.gather(1, real_first(key_mask).unsqueeze(-1).expand_as(inputs))
    padded = torch.cat([tail.to(inputs.dtype), inputs], 1)
    last = key_mask.sum(1, keepdim=True) + torch.arange(reach, device=inputs.device)  # [B, reach]
    return padded.gather(1, last.unsqueeze(-1).expand_as(tail))
