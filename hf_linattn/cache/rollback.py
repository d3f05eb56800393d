"""What a call of a layer adds to the cache, kept so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import LinearAttentionState


class Recorded(NamedTuple):
    """One call of a layer that records: what it started from, and what its tokens added; enough to undo them."""

    mu: Tensor | None
    nu: Tensor | None
    tails_before: tuple[Tensor, ...]
    phi_k: Tensor  # [B, t, Hk, F], 0 where masked
    values: Tensor  # [B, t, Hk, E], 0 where masked
    conv_inputs: tuple[Tensor, ...]  # what the convolutions read, [B, t, channels] each
    key_mask: Tensor | None  # [B, t]

    @property
    def num_tokens(self) -> int:
        return self.phi_k.shape[1]

    def after(self, kept: int) -> tuple[LinearAttentionState | None, tuple[Tensor, ...]]:
        """State and convolution tails after the first `kept` tokens of the call; for 0 the very tensors before it."""
        if kept == 0:
            return None if self.mu is None else LinearAttentionState(self.mu, self.nu), self.tails_before
        phi_k, values = self.phi_k[:, :kept], self.values[:, :kept].to(self.phi_k)
        mu, nu = torch.einsum("bshf,bshe->bhfe", phi_k, values), phi_k.sum(1)
        if self.mu is not None:
            mu, nu = self.mu + mu, self.nu + nu
        mask = None if self.key_mask is None else self.key_mask[:, :kept]
        tails = tuple(
            next_tail(tail, inputs[:, :kept], mask) for tail, inputs in zip(self.tails_before, self.conv_inputs)
        )
        return LinearAttentionState(mu, nu), tails

    def first(self, kept: int) -> Recorded:
        """The record of the first `kept` tokens of the call."""
        mask = None if self.key_mask is None else self.key_mask[:, :kept]
        inputs = tuple(each[:, :kept] for each in self.conv_inputs)
        start = (self.mu, self.nu, self.tails_before)
        return Recorded(*start, self.phi_k[:, :kept], self.values[:, :kept], inputs, mask)

    def with_start(self, function: Callable[[Tensor], Tensor]) -> Recorded:
        """The same record with `function` applied to what the call started from."""
        mu, nu = (None if tensor is None else function(tensor) for tensor in (self.mu, self.nu))
        return self._replace(mu=mu, nu=nu, tails_before=tuple(map(function, self.tails_before)))

    def map(self, function: Callable[[Tensor], Tensor]) -> Recorded:
        """The same record with `function` applied to every tensor (all have the batch first)."""

        def one(value):
            return tuple(function(x) for x in value) if isinstance(value, tuple) else function(value)

        return Recorded(*(None if value is None else one(value) for value in self))


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
