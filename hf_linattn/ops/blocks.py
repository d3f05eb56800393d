"""Blocks: how the chunk form cuts a sequence into pieces that stay in cache, and the buffers it computes them in."""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """`chunks` chunks of `size` tokens, starting at token `start`."""

    start: int
    chunks: int
    size: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.chunks * self.size)


def cut(length: int, heads: int, state_size: int, chunk_size: int | None, device: torch.device) -> list[Block]:
    """Cut `length` tokens into blocks of whole chunks, and a last short chunk where C does not divide T.

    `heads` counts batch and query heads, `state_size` is F E. The products cost T C (F + E) + 2 T F E operations and
    the states T F E / C of traffic, so C grows with the state.
    """
    if chunk_size is None:
        chunk_size = min(256, max(64, 2 ** round(math.log2(max(1, state_size / 128)))))
    size = min(chunk_size, length)
    rows = 4096 if device.type == "cpu" else 1 << 18  # cache on a CPU, few launches on a GPU
    per_block = max(1, rows // (heads * size))
    chunks = length // size
    blocks = [Block(first * size, min(per_block, chunks - first), size) for first in range(0, chunks, per_block)]
    if length % size:
        blocks.append(Block(chunks * size, 1, length % size))
    return blocks


class Workspace:
    """Buffers by name, handed out as views and overwritten by the next block; none outlives a call.

    On a CPU, where touching fresh pages costs more than the arithmetic, a thread keeps its buffers from call to call
    (a few MB: their size follows the block, not the sequence).
    """

    _kept = threading.local()

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    @classmethod
    def current(cls, dtype: torch.dtype, device: torch.device) -> Workspace:
        """The workspace of this thread for `dtype` on a CPU; a new one elsewhere."""
        if device.type != "cpu" or torch.compiler.is_compiling():
            return cls(dtype, device)
        kept = cls._kept.__dict__
        if dtype not in kept:
            kept[dtype] = cls(dtype, device)
        return kept[dtype]

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised contiguous view of `shape`; what `name` held before is lost."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # it may serve a later call outside inference mode
                buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b for equal leading dimensions, in the buffer `name`."""
        out = self.get(name, (*a.shape[:-1], b.shape[-1]))
        torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out=out.flatten(0, -3))
        return out


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b for equal leading dimensions, in place."""
    total.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3))


def as_rows(x: Tensor) -> Tensor:
    """The query heads of a group are more rows of one product: [B, Hk, n, G, C, X] -> [B, Hk, n, G C, X]."""
    return x.flatten(3, 4)


def write_ratio(sums: Tensor, target: Tensor, denominator: Tensor | None) -> None:
    """Divide hat n [..., E + 1] into `target`, and keep the denominator (infinite where it is 0: x / inf = 0)."""
    total = sums[..., -1:]
    total.masked_fill_(total == 0, math.inf)
    torch.div(sums[..., :-1], total, out=target)
    if denominator is not None:
        denominator.copy_(total)


def without_autocast(function):
    """Run `function(q, ...)` with autocast off on the device of q: the sums stay float32."""

    @functools.wraps(function)
    def wrapper(q, *args, **kwargs):
        if not torch.is_autocast_enabled(q.device.type):
            return function(q, *args, **kwargs)
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *args, **kwargs)

    return wrapper


def first_order_only(backward):
    """Refuse `create_graph=True`: torch's own `once_differentiable` lets a wrong second derivative of 0 through."""

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives of the chunk form are not implemented; use parallel_linear_attention, or "
                "backward without create_graph=True"
            )
        return backward(ctx, *grads)

    return wrapper
