"""The attention functions that are compared, each as people would call it: (q, k, v, feature map) -> out, causal.

Tensors are [B, T, H, D] as the projections yield them, or [B, H, T, D] for the sides that want heads first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import backends, feature_map_class, linear_attention


class Side(NamedTuple):
    """One of the sides of a comparison.

    Attributes:
        title: what tables and plots call it.
        attend: (q, k, v, name of the feature map) -> out.
        heads_first: whether its tensors are [B, H, T, D].
        quadratic: whether its time grows with the square of the length.
        copies: a bound for the bytes that a forward pass holds at its peak, in multiples of those of q.
    """

    title: str
    attend: Callable[[Tensor, Tensor, Tensor, str], Tensor]
    heads_first: bool = False
    quadratic: bool = False
    copies: int = 5


def _ours(backend: str) -> Callable[[Tensor, Tensor, Tensor, str], Tensor]:
    return lambda q, k, v, name: linear_attention(q, k, v, feature_map=name, backend=backend)[0]


def softmax(q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, by torch's own kernels; the feature map has no part in it."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def bucketed(q: Tensor, k: Tensor, v: Tensor, feature_map: str, size: int = 64) -> Tensor:
    """Linear attention as it is usually written in PyTorch: whole tensors cut into buckets of `size` tokens, a running
    sum over the buckets' states, and a masked product within each."""
    length = q.shape[1]
    phi = feature_map_class(feature_map)(q.shape[-1])
    q, k = phi.query(q).to(v.dtype), phi.key(k).to(v.dtype)
    if length % size:
        q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, size - length % size)) for x in (q, k, v))
    q, k, v = (x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4) for x in (q, k, v))  # [B, H, buckets, size, D]
    mu, nu = torch.einsum("bhntf,bhnte->bhnfe", k, v).cumsum(2), k.sum(3).cumsum(2)
    mu, nu = (torch.cat([torch.zeros_like(x[:, :, :1]), x[:, :, :-1]], 2) for x in (mu, nu))
    weights = torch.einsum("bhntf,bhnsf->bhnts", q, k).tril()
    above = weights @ v + q @ mu
    below = weights.sum(-1) + torch.einsum("bhntf,bhnf->bhnt", q, nu)
    out = above / below.unsqueeze(-1)
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


def flash_linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
    """The kernels of the package `fla`, which take features: the map is applied first, by torch."""
    from fla.ops.linear_attn import chunk_linear_attn

    phi = feature_map_class(feature_map)(q.shape[-1])
    return chunk_linear_attn(phi.query(q).to(q.dtype), phi.key(k).to(k.dtype), v, scale=1.0, normalize=True)[0]


SIDES = {
    "native": Side("linear, C kernels", _ours("native")),
    "triton": Side("linear, Triton kernels", _ours("triton")),
    "torch": Side("linear, PyTorch", _ours("torch")),
    "bucketed": Side("linear, buckets in plain PyTorch", bucketed, copies=20),
    "fla": Side("flash-linear-attention", flash_linear_attention, copies=8),
    "softmax": Side("softmax (SDPA)", softmax, heads_first=True, quadratic=True),
}


def why_not(side: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a side cannot run here, in one line, or `None` if it can."""
    if side in ("native", "triton"):
        x = torch.empty(1, 2, 1, head_dim, device=device, dtype=dtype)
        return backends.kernels(side).unsupported(x, x, x)
    if side == "fla":
        if importlib.util.find_spec("fla") is None:
            return "the package fla is not installed"
        if device.type != "cuda":
            return "its kernels need a GPU"
    return None
