"""Maps whose features are drawn once at random and then stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import FeatureMap, register_feature_map

LIMIT = 32  # of an exponent: products of two features, and sums of a million of those, stay within float32


@register_feature_map("favor")
class Favor(FeatureMap):
    """phi(x) = exp(x' W - |x'|^2 / 2) / sqrt(m) with x' = x / D^(1/4): the positive random features of Performer.

    The mean of phi(q) phi(k)^T over W is exp(q k^T / sqrt(D)), the weight of softmax attention; one W misses it by a
    relative error of order 1 / sqrt(m) that grows with |q + k|. F = m.

    W [D, m] is the buffer `projection`, shared by all heads and saved in the checkpoint. Columns come in blocks of D
    that are orthogonal, with the norms of Gaussian vectors (chi distributed). They are drawn on the CPU in float64 from
    a generator of `seed` alone and rounded to bfloat16, so that a model cast to half precision and back has the very
    same map.

    Nothing is subtracted from the exponent, so every chunk and step has one scale. It is limited to -32 ... 32: the
    products of two features between x = 0 and x' = w, a column of W, differ by a factor of exp(|w|^2), about exp(D),
    and float32 ends at exp(88). Up to D = 32 or so no x reaches the upper limit; above, one that W knows nothing of
    would have to lie 8 standard deviations out. Features at the lower limit weigh next to nothing, but where all of
    them are there (|x'| beyond the columns of W), the weights become equal instead of 0 / 0.

    Args:
        num_features: m; `None` means D, a state as large as that of elu1. The paper takes 256 for heads of 64.
        seed: of W, at least 0. The seed of a checkpoint is part of its config.

    Raises:
        ValueError: `num_features` below 1, `seed` below 0.

    Source: arXiv:2009.14794, lemma 1 and section 2.4 (FAVOR+, without redrawing).
    """

    is_random = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_key_value_heads: int | None = None,
        *,
        num_features: int | None = None,
        seed: int = 0,
    ):
        super().__init__(head_dim, num_heads, num_key_value_heads)
        if num_features is not None and num_features < 1:
            raise ValueError(f"num_features={num_features} must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed} must be at least 0")
        self.num_features = head_dim if num_features is None else num_features
        self.seed = seed
        self.register_buffer("projection", torch.empty(head_dim, self.num_features))
        self.reset_parameters()

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        return kwargs.get("num_features") or head_dim

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"projection": draw_projection(self.head_dim, self.num_features, self.seed)}

    def forward(self, x: Tensor) -> Tensor:
        x = x / self.head_dim**0.25
        with torch.autocast(x.device.type, enabled=False):
            exponent = x @ self.projection.to(x.dtype) - x.square().sum(-1, keepdim=True) / 2
        return exponent.clamp(-LIMIT, LIMIT).exp() / self.num_features**0.5

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_features={self.num_features}, seed={self.seed}"


def draw_projection(head_dim: int, num_features: int, seed: int) -> Tensor:
    """W of `Favor`: [D, m], float32 on the CPU, of values that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(0, num_features, head_dim):
        directions, norms = (
            torch.randn(head_dim, head_dim, dtype=torch.float64, device="cpu", generator=generator) for _ in range(2)
        )
        q, r = torch.linalg.qr(directions)
        # with a positive diagonal the factors are unique, whichever library finds them
        blocks.append(q * r.diagonal().sign() * norms.norm(dim=0))
    return torch.cat(blocks, 1)[:, :num_features].bfloat16().float()
