"""Maps without parameters: their formula is all there is to them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .base import FeatureMap, register_feature_map


@register_feature_map("elu1")
class Elu1(FeatureMap):
    """phi(x) = elu(x) + 1 = exp(x) for x <= 0, 1 + x otherwise. Source: arXiv:2006.16236, equation 7.

    Written as exp(min(x, 0)) + max(x, 0): `elu(x) + 1` rounds to 0 where exp(x) is far below 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(max=0).exp() + x.clamp(min=0)

    def map_into(self, out: Tensor, x: Tensor, scratch: Tensor) -> None:
        torch.clamp(x, min=0, out=scratch)
        torch.clamp(x, max=0, out=out).exp_().add_(scratch)

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad.mul_(phi.clamp(max=1))


@register_feature_map("relu")
class Relu(FeatureMap):
    """phi(x) = max(x, 0). Source: arXiv:2103.13076."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()

    def map_into(self, out: Tensor, x: Tensor, scratch: Tensor) -> None:
        torch.clamp(x, min=0, out=out)

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad.masked_fill_(phi <= 0, 0)


@register_feature_map("squared_relu")
class SquaredRelu(FeatureMap):
    """phi(x) = max(x, 0)^2. Source: arXiv:2109.08668."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()

    def map_into(self, out: Tensor, x: Tensor, scratch: Tensor) -> None:
        torch.clamp(x, min=0, out=out).square_()

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad.mul_(phi.sqrt()).mul_(2)


@register_feature_map("exp")
class Exp(FeatureMap):
    """phi(x) = exp(x), elementwise. Overflows float32 above x = 88, as exp does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def map_into(self, out: Tensor, x: Tensor, scratch: Tensor) -> None:
        torch.exp(x, out=out)

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad.mul_(phi)


@register_feature_map("softmax")
class Softmax(FeatureMap):
    """phi(x) = softmax(x) over the head dimension. Source: arXiv:1812.01243 (efficient attention)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad.sub_((grad * phi).sum(-1, keepdim=True)).mul_(phi)


@register_feature_map("taylor2")
class Taylor2(FeatureMap):
    """phi(x) = [1, x / d^(1/4), vec(x x^T) / sqrt(2 d)], so that
    phi(q) phi(k)^T = 1 + s + s^2 / 2 with s = q k^T / sqrt(d): the second-order Taylor series of exp(s).

    Its features are signed, but the inner product is at least 1/2, so the denominator is safe.
    F = 1 + D + D^2: meant for narrow heads. Source: arXiv:2402.18668 (Based), section 4.1.
    """

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        return 1 + head_dim + head_dim**2

    def forward(self, x: Tensor) -> Tensor:
        dim = x.shape[-1]
        second = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2 * dim)
        return torch.cat([torch.ones_like(x[..., :1]), x / dim**0.25, second], -1)

    def map_into(self, out: Tensor, x: Tensor, scratch: Tensor) -> None:
        dim = x.shape[-1]
        out[..., 0] = 1
        torch.div(x, dim**0.25, out=out[..., 1 : 1 + dim])
        torch.div(x, (2 * dim) ** 0.25, out=scratch)
        torch.mul(scratch.unsqueeze(-1), scratch.unsqueeze(-2), out=out[..., 1 + dim :].unflatten(-1, (dim, dim)))

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        dim = x.shape[-1]
        second = grad[..., 1 + dim :].unflatten(-1, (dim, dim))
        both = torch.einsum("...ij,...j->...i", second, x) + torch.einsum("...ji,...j->...i", second, x)
        return both.div_(math.sqrt(2 * dim)).add_(grad[..., 1 : 1 + dim], alpha=dim**-0.25)


@register_feature_map("dpfp")
class DPFP(FeatureMap):
    """phi(x) = [r_i r_{i+j} for j = 1 .. nu, i = 1 .. 2 D], r = relu([x, -x]) and i + j taken round the end.

    The deterministic parameter-free projection: sparse, each input is near few others. F = 2 D nu.

    Args:
        nu: 1 to 2 D - 1, how many neighbours each entry of r is multiplied with.

    Raises:
        ValueError: `nu` outside that range.

    Source: arXiv:2102.11174, section 5.3.
    """

    def __init__(self, head_dim: int, num_heads: int = 1, num_key_value_heads: int | None = None, *, nu: int = 1):
        super().__init__(head_dim, num_heads, num_key_value_heads)
        if not 1 <= nu < 2 * head_dim:
            raise ValueError(f"nu={nu} must be at least 1 and at most 2 D - 1 = {2 * head_dim - 1}")
        self.nu = nu

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        return 2 * head_dim * kwargs.get("nu", 1)

    def forward(self, x: Tensor) -> Tensor:
        r = torch.cat([x, -x], -1).relu()
        return torch.cat([r * r.roll(-shift, -1) for shift in range(1, self.nu + 1)], -1)

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        r = torch.cat([x, -x], -1).relu()
        grad_r = torch.zeros_like(r)
        for shift, part in enumerate(grad.chunk(self.nu, -1), 1):
            grad_r.addcmul_(part, r.roll(-shift, -1)).add_((part * r).roll(shift, -1))
        ahead, behind = grad_r.masked_fill_(r <= 0, 0).chunk(2, -1)
        return ahead - behind

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, nu={self.nu}"


@register_feature_map("identity")
class Identity(FeatureMap):
    """phi(x) = x. Signed: there is no denominator that stays positive, so it goes with another normalizer."""

    is_nonnegative = False

    def forward(self, x: Tensor) -> Tensor:
        return x

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad
