"""Blocks: how the chunk form cuts a sequence, and loads a piece of it into buffers that are reused.

A block is a few chunks of all heads, small enough to stay in a CPU's cache. Inside, heads come before time:
queries [B, Hk, n, G, C, X], keys and values [B, Hk, n, C, X], for n chunks of C tokens.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .feature_maps import FeatureMap


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
        if dtype not in cls._kept.__dict__:
            cls._kept.__dict__[dtype] = cls(dtype, device)
        return cls._kept.__dict__[dtype]

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


class Loader:
    """phi(q), phi(k) and hat v = [v, 1] of a block, in the dtype of the sums."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        feature_map: FeatureMap | None,
        hidden: Tensor | None,
        dtype: torch.dtype,
    ):
        self.q, self.k, self.v = q, k, v
        self.feature_map, self.hidden, self.dtype = feature_map, hidden, dtype
        self.heads = k.shape[2]
        self.group = q.shape[2] // self.heads
        self.space = Workspace.current(dtype, q.device)

    def queries(self, x: Tensor, block: Block) -> Tensor:
        """A view of the block of any [B, T, Hq, X]: [B, Hk, n, G, C, X]."""
        part = x[:, block.tokens].unflatten(1, (block.chunks, block.size)).unflatten(3, (self.heads, self.group))
        return part.permute(0, 3, 1, 4, 2, 5)

    def keys(self, x: Tensor, block: Block) -> Tensor:
        """A view of the block of any [B, S, Hk, X]: [B, Hk, n, C, X]."""
        return x[:, block.tokens].unflatten(1, (block.chunks, block.size)).permute(0, 3, 1, 2, 4)

    def phi_q(self, block: Block) -> Tensor:
        """[B, Hk, n, G, C, F]."""
        return self._map("phi_q", self.queries(self.q, block))

    def phi_k(self, block: Block) -> Tensor:
        """[B, Hk, n, C, F], 0 where the key is masked."""
        return self.mask(self._map("phi_k", self.keys(self.k, block)), block)

    def values(self, block: Block) -> Tensor:
        """hat v: [B, Hk, n, C, E + 1], 0 where the key is masked."""
        source = self.keys(self.v, block)
        buffer = self.space.get("values", (*source.shape[:-1], source.shape[-1] + 1))
        buffer[..., :-1].copy_(source)
        buffer[..., -1] = 1
        return self.mask(buffer, block)

    def mask(self, x: Tensor, block: Block) -> Tensor:
        """Put 0 on masked keys of [B, Hk, n, C, X], in place; replacing, so that NaN goes too."""
        if self.hidden is None:
            return x
        hidden = self.hidden[:, block.tokens].unflatten(1, (block.chunks, block.size))
        return x.masked_fill_(hidden[:, None, ..., None], 0)

    def pull_back(self, source: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        """The gradient with respect to `source`, from that with respect to phi(source)."""
        if self.feature_map is None:
            return grad
        return self.feature_map.vjp(source.to(self.dtype), phi, grad)

    def _map(self, name: str, source: Tensor) -> Tensor:
        buffer = self.space.get(name, source.shape)
        buffer.copy_(source)
        if self.feature_map is None:
            return buffer
        return self.feature_map.block_(buffer, self.space.get("scratch", source.shape)).contiguous()


def as_rows(x: Tensor) -> Tensor:
    """The query heads of a group are more rows of one product: [B, Hk, n, G, C, X] -> [B, Hk, n, G C, X]."""
    return x.flatten(3, 4)


def grad_of_sums(
    loader: Loader, block: Block, grad_out: Tensor, out: Tensor, denominator: Tensor | None
) -> Tensor:
    """d hat n = [dout / den, -(dout . out) / den]: [B, Hk, n, G C, E + 1]. Without a denominator, [dout, 0]."""
    source = loader.queries(grad_out, block)
    buffer = loader.space.get("grad_sums", (*source.shape[:-1], source.shape[-1] + 1))
    numerator, total = buffer[..., :-1], buffer[..., -1:]
    if denominator is None:
        numerator.copy_(source)
        total.zero_()
    else:
        torch.div(source.to(buffer.dtype), loader.queries(denominator, block), out=numerator)
        torch.sum(numerator * loader.queries(out, block), -1, keepdim=True, out=total).neg_()
    return as_rows(buffer)


def write_ratio(sums: Tensor, target: Tensor, denominator: Tensor | None) -> None:
    """Divide hat n [..., E + 1] into `target`, and keep the denominator (infinite where it is 0: x / inf = 0)."""
    total = sums[..., -1:]
    total.masked_fill_(total == 0, math.inf)
    torch.div(sums[..., :-1], total, out=target)
    if denominator is not None:
        denominator.copy_(total)


def without_autocast(function):
    """Run `function` with autocast off on the device of its first tensor: the sums stay float32."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        device = next(x for x in args if isinstance(x, Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapper
