"""Blocks: how the chunk form cuts a sequence into pieces that stay in cache, and the buffers it computes them in.

Inside a block of n chunks of C tokens, chunks come first and heads before time: queries [n, B, Hk, G, C, X], keys and
values [n, B, Hk, C, X]. A product over them has N = n B Hk matrices, in which the G query heads of a key head are
more rows.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

KEPT_BYTES = 64 * 2**20  # buffers that a CPU thread keeps from call to call


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


class Shape(NamedTuple):
    """Everything that the buffers of a block depend on."""

    chunks: int
    batch: int
    heads: int  # Hk
    group: int  # G
    size: int  # C
    features: int  # F
    values: int  # E
    dtype: torch.dtype
    device: torch.device


class Frame:
    """The buffers of a block, and the views that the products take; overwritten by the next block.

    `products` are what `torch.bmm` reads and writes: [N, rows, columns]. `states` has a slot more than there are
    chunks: slot c is hat mu before chunk c, and the last is hat mu after the block.
    """

    def __init__(self, shape: Shape):
        self.shape = shape
        chunks, batch, heads, group, size, features, values = shape[:7]
        count, rows = chunks * batch * heads, group * size
        self.phi_q = self._new(chunks, batch, heads, group, size, features)
        self.q = self.phi_q.view(count, rows, features)
        self.phi_k = self._new(chunks, batch, heads, size, features)
        self.k = self.phi_k.view(count, size, features)
        self.k_columns = self.k.transpose(1, 2)
        self.values = self._new(chunks, batch, heads, size, values + 1)
        self.values[..., -1] = 1
        self.ones_are_masked = False
        self.v = self.values.view(count, size, values + 1)
        self.states = self._new(chunks + 1, batch, heads, features, values + 1)
        self.entering = self.states[:-1].view(count, features, values + 1)
        self.leaving = self.states[1:].view(count, features, values + 1)
        self.slots = self.states.unbind()
        self.weights = self._new(count, rows, size)
        self.weights_by_head = self.weights.view(chunks, batch, heads, group, size, size)
        self.sums = self._new(count, rows, values + 1)
        by_head = self.sums.view(chunks, batch, heads, group, size, values + 1)
        self.numerator, self.denominator = by_head[..., :-1], by_head[..., -1:]

    @functools.cached_property
    def grad_weights(self) -> Tensor:
        return torch.empty_like(self.weights)

    @functools.cached_property
    def grad_q(self) -> Tensor:
        return torch.empty_like(self.q)

    @functools.cached_property
    def grad_k(self) -> Tensor:
        return torch.empty_like(self.k)

    @functools.cached_property
    def grad_v(self) -> Tensor:
        return self._new(*self.k.shape[:2], self.shape.values)

    @functools.cached_property
    def grad_states(self) -> Tensor:
        """Slot c + 1 is R, the gradient of hat mu after chunk c; slot 0 that of hat mu before the block."""
        return torch.empty_like(self.states)

    @functools.cached_property
    def grad_slots(self) -> tuple[Tensor, ...]:
        return self.grad_states.unbind()

    @functools.cached_property
    def scratch(self) -> dict[tuple[int, ...], Tensor]:
        return {}

    def scratch_like(self, source: Tensor) -> Tensor:
        """A contiguous buffer of the shape of `source`."""
        if source.shape not in self.scratch:
            self.scratch[source.shape] = self._new(*source.shape)
        return self.scratch[source.shape]

    @property
    def nbytes(self) -> int:
        own = (x for x in self.__dict__.values() if isinstance(x, Tensor) and x._base is None)
        return sum(x.nbytes for x in (*own, *self.scratch.values()))

    def _new(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # it may serve a later call outside inference mode
            return torch.empty(shape, dtype=self.shape.dtype, device=self.shape.device)


_kept = threading.local()


def frame_of(shape: Shape) -> Frame:
    """The frame for `shape`. On a CPU, where touching fresh pages costs more than the arithmetic, a thread keeps its
    latest frames (up to `KEPT_BYTES`; their size follows the block, not the sequence)."""
    if shape.device.type != "cpu" or torch.compiler.is_compiling():
        return Frame(shape)
    frames = _kept.__dict__.setdefault("frames", OrderedDict())
    if shape not in frames:
        frames[shape] = Frame(shape)
        while len(frames) > 1 and sum(frame.nbytes for frame in frames.values()) > KEPT_BYTES:
            frames.popitem(last=False)
    frames.move_to_end(shape)
    return frames[shape]


def divide_sums(frame: Frame, target: Tensor) -> Tensor:
    """target = numerator / denominator of `frame.sums`; returns the denominator, infinite where it is 0.

    x / inf = 0: a row that sees no key gets 0 here, and a gradient of 0 in the backward, which divides by the same.
    """
    denominator = frame.scratch_like(frame.denominator).copy_(frame.denominator)
    denominator.masked_fill_(denominator == 0, math.inf)
    torch.div(frame.numerator, denominator, out=target)
    return denominator


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
