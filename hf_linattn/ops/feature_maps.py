"""Feature maps phi: R^D -> R^F, one formula per class, found by name in `FEATURE_MAPS`.

A map is a small `nn.Module`. Half-precision input is mapped in float32, and the features stay float32: they feed
sums. To add one, subclass `FeatureMap`, give `forward` and, where F is not D, `feature_dim`, and register it:

    @register_feature_map("cube")
    class Cube(FeatureMap):
        is_nonnegative = False

        def forward(self, x):
            return x**3
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

FEATURE_MAPS: dict[str, type[FeatureMap]] = {}
_Map = TypeVar("_Map", bound="type[FeatureMap]")


class FeatureMap(nn.Module):
    """Base of all feature maps; by itself parameter-free and the same for queries and keys.

    Args:
        head_dim: D, the size of a query or key head before the map.
        num_heads: Hq, query heads.
        num_key_value_heads: Hk, key heads; `None` means Hq.

    Class attributes: `is_nonnegative` (phi(q) phi(k)^T >= 0 for all q, k, so that no denominator cancels),
    `is_learnable` (has parameters), `separate_qk` (queries and keys are mapped with different parameters).
    Parameters have the heads first, [Hq or Hk, ...], so that tensor parallel ranks can share them.
    """

    is_nonnegative: ClassVar[bool] = True
    is_learnable: ClassVar[bool] = False
    separate_qk: bool = False

    def __init__(self, head_dim: int, num_heads: int = 1, num_key_value_heads: int | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        """F as a function of D (and of the map's own options)."""
        return head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension of `x` (float32 or float64): [..., D] -> [..., F]."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def query(self, q: Tensor) -> Tensor:
        """phi of queries: [B, T, Hq, D] -> [B, T, Hq, F], float32 for half-precision input."""
        return self(_upcast(q))

    def key(self, k: Tensor) -> Tensor:
        """phi of keys: [B, S, Hk, D] -> [B, S, Hk, F], float32 for half-precision input."""
        return self(_upcast(k))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Fresh values for this map's own parameters, by name; used at construction and by `_init_weights`."""
        return {}

    def reset_parameters(self) -> None:
        """Set every parameter to its initial value."""
        with torch.no_grad():
            for name, value in self.initial_parameters().items():
                getattr(self, name).copy_(value)

    # The chunk form applies parameter-free maps block by block and recomputes them in its backward, so that no
    # [B, T, H, F] tensor lives longer than a block. These two hooks are what it calls.

    def map_into(self, out: Tensor, x: Tensor, scratch: Tensor) -> None:
        """Write phi(x) into `out` [..., F], of the dtype of `x`; may overwrite `scratch`, shaped as `x`."""
        out.copy_(self(x))

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        """grad^T dphi/dx at `x`, where phi(x) is already known; may overwrite `grad`."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad_x,) = torch.autograd.grad(self(x), x, grad)
        return grad_x

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}"


def register_feature_map(name: str):
    """Class decorator that makes a `FeatureMap` available to configs under `name`; a taken name is a ValueError."""

    def decorate(cls: _Map) -> _Map:
        if name in FEATURE_MAPS and FEATURE_MAPS[name] is not cls:
            raise ValueError(f"feature map name {name!r} is taken by {FEATURE_MAPS[name].__name__}; choose another")
        if not (isinstance(cls, type) and issubclass(cls, FeatureMap)):
            raise TypeError(f"feature map {name!r} must be a subclass of FeatureMap, got {cls!r}")
        FEATURE_MAPS[name] = cls
        return cls

    return decorate


def feature_map_class(name: str) -> type[FeatureMap]:
    """The class registered under `name`; an unknown name is a ValueError that lists the choices."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r} is unknown; choose one of {sorted(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


def make_feature_map(
    name: str, head_dim: int, num_heads: int = 1, num_key_value_heads: int | None = None, **kwargs: Any
) -> FeatureMap:
    """Build the map registered under `name`; `kwargs` are the map's own options (`feature_map_kwargs`)."""
    cls = feature_map_class(name)
    try:
        return cls(head_dim, num_heads, num_key_value_heads, **kwargs)
    except TypeError as error:
        raise ValueError(f"feature_map={name!r} does not take feature_map_kwargs={kwargs}: {error}") from None


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


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

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        dim = x.shape[-1]
        second = grad[..., 1 + dim :].unflatten(-1, (dim, dim))
        symmetric = (second + second.transpose(-1, -2)) / math.sqrt(2 * dim)
        return (symmetric @ x.unsqueeze(-1)).squeeze(-1) + grad[..., 1 : 1 + dim] / dim**0.25


@register_feature_map("identity")
class Identity(FeatureMap):
    """phi(x) = x. Signed: there is no denominator that stays positive, so it goes with another normalizer."""

    is_nonnegative = False

    def forward(self, x: Tensor) -> Tensor:
        return x

    def vjp(self, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad


class _ProjectedMap(FeatureMap):
    """Maps with a learnable projection W [heads, D, P] per head, and optionally a bias [heads, P].

    Args:
        projection_dim: P; `None` means D.
        tied: queries and keys share one W per key head.
        query_heads: `"key"` gives a group of query heads the W of its key head, `"query"` gives each its own.
    """

    is_learnable = True
    has_bias: ClassVar[bool] = False
    pairs: ClassVar[int] = 1  # F = pairs * P

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_key_value_heads: int | None = None,
        *,
        projection_dim: int | None = None,
        tied: bool = False,
        query_heads: str = "key",
    ):
        super().__init__(head_dim, num_heads, num_key_value_heads)
        if query_heads not in ("key", "query"):
            raise ValueError(f"query_heads={query_heads!r} is unknown; choose 'key' or 'query'")
        if tied and query_heads == "query" and self.num_heads != self.num_key_value_heads:
            raise ValueError("tied=True shares the weights of key heads, so query_heads must be 'key'")
        if projection_dim is not None and projection_dim < 1:
            raise ValueError(f"projection_dim={projection_dim} must be at least 1")
        self.projection_dim = head_dim if projection_dim is None else projection_dim
        self.tied, self.separate_qk = tied, not tied
        q_heads = self.num_heads if query_heads == "query" else self.num_key_value_heads
        heads = {"": self.num_key_value_heads} if tied else {"q_": q_heads, "k_": self.num_key_value_heads}
        for prefix, count in heads.items():
            self.register_parameter(f"{prefix}weight", nn.Parameter(torch.empty(count, head_dim, self.projection_dim)))
            if self.has_bias:
                self.register_parameter(f"{prefix}bias", nn.Parameter(torch.empty(count, self.projection_dim)))
        self.reset_parameters()

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        return cls.pairs * (kwargs.get("projection_dim") or head_dim)

    def query(self, q: Tensor) -> Tensor:
        return self._project(q, "" if self.tied else "q_")

    def key(self, k: Tensor) -> Tensor:
        return self._project(k, "" if self.tied else "k_")

    def _project(self, x: Tensor, prefix: str) -> Tensor:
        x = _upcast(x)
        weight = getattr(self, f"{prefix}weight").to(x.dtype)
        # a group of query heads reads the weights of one head: [B, T, heads, group, D] x [heads, D, P]
        grouped = x.unflatten(2, (weight.shape[0], -1))
        with torch.autocast(x.device.type, enabled=False):
            projected = torch.einsum("bthgd,hdp->bthgp", grouped, weight)
            if self.has_bias:
                projected = projected + getattr(self, f"{prefix}bias").to(x.dtype).unsqueeze(1)
            return self(projected.flatten(2, 3))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, projection_dim={self.projection_dim}, tied={self.tied}"


class _HedgehogBase(_ProjectedMap):
    pairs = 2

    def initial_parameters(self) -> dict[str, Tensor]:
        return {
            name: torch.eye(self.head_dim, self.projection_dim).expand_as(parameter)
            for name, parameter in self.named_parameters(recurse=False)
        }


@register_feature_map("hedgehog")
class Hedgehog(_HedgehogBase):
    """phi(x) = [softmax(W x), softmax(-W x)], W starting at the identity; F = 2 P.

    Source: arXiv:2402.04347, section 4.2, with its softmax normalisation of each half. The `forward` takes W x.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


@register_feature_map("hedgehog_joint")
class HedgehogJoint(_HedgehogBase):
    """phi(x) = softmax([2 W x, -2 W x]), one softmax over both halves, W starting at the identity; F = 2 P.

    The second published form, used by flash-linear-attention. The `forward` takes W x.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([2 * x, -2 * x], -1).softmax(-1)


@register_feature_map("t2r")
class T2R(_ProjectedMap):
    """phi(x) = relu(W x + b); F = P. Source: arXiv:2103.13076 (T2R), equation 4. The `forward` takes W x + b."""

    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()

    def initial_parameters(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(parameter)
            if name.endswith("bias")
            else torch.randn_like(parameter) / math.sqrt(self.head_dim)
            for name, parameter in self.named_parameters(recurse=False)
        }
