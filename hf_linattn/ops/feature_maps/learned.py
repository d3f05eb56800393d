"""Maps with parameters of their own for each head."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from .base import FeatureMap, register_feature_map, upcast


class _PerHeadMap(FeatureMap):
    """Maps with a weight for each head, [heads, ...], and perhaps a bias; what they do to x is `_weigh`.

    Args:
        shapes: of the weight (and the bias) of one head, by name.
        tied: queries and keys share the weights of their key head.
        query_heads: `"key"` gives a group of query heads the weights of its key head, `"query"` gives each its own.
    """

    is_learnable = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        num_key_value_heads: int | None,
        shapes: dict[str, tuple[int, ...]],
        tied: bool,
        query_heads: str,
    ):
        super().__init__(head_dim, num_heads, num_key_value_heads)
        if query_heads not in ("key", "query"):
            raise ValueError(f"query_heads={query_heads!r} is unknown; choose 'key' or 'query'")
        if tied and query_heads == "query" and self.num_heads != self.num_key_value_heads:
            raise ValueError("tied=True shares the weights of key heads, so query_heads must be 'key'")
        self.tied, self.separate_qk = tied, not tied
        q_heads = self.num_heads if query_heads == "query" else self.num_key_value_heads
        heads = {"": self.num_key_value_heads} if tied else {"q_": q_heads, "k_": self.num_key_value_heads}
        for prefix, count in heads.items():
            for name, shape in shapes.items():
                self.register_parameter(prefix + name, nn.Parameter(torch.empty(count, *shape)))
        self.reset_parameters()

    def query(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._map(q, "" if self.tied else "q_")

    def key(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._map(k, "" if self.tied else "k_")

    def _map(self, x: Tensor, prefix: str) -> Tensor:
        x = upcast(x)
        weight, bias = (getattr(self, prefix + name, None) for name in ("weight", "bias"))
        # a group of query heads reads the weights of one head: [B, T, heads, group, D]
        grouped = x.unflatten(2, (weight.shape[0], -1))
        with torch.autocast(x.device.type, enabled=False):
            weighed = self._weigh(grouped, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
            return self(weighed.flatten(2, 3))

    def _weigh(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What `forward` takes, of x [B, T, heads, group, D]."""
        raise NotImplementedError(f"{type(self).__name__} does not define _weigh")

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, tied={self.tied}"


class _ProjectedMap(_PerHeadMap):
    """Maps with a learnable projection W [heads, D, P] per head, and optionally a bias [heads, P].

    Args:
        projection_dim: P; `None` means D.
        tied, query_heads: as in `_PerHeadMap`.
    """

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
        if projection_dim is not None and projection_dim < 1:
            raise ValueError(f"projection_dim={projection_dim} must be at least 1")
        size = head_dim if projection_dim is None else projection_dim
        shapes = {"weight": (head_dim, size)} | ({"bias": (size,)} if self.has_bias else {})
        super().__init__(head_dim, num_heads, num_key_value_heads, shapes, tied, query_heads)
        self.projection_dim = size

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        return cls.pairs * (kwargs.get("projection_dim") or head_dim)

    def _weigh(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        projected = torch.einsum("bthgd,hdp->bthgp", x, weight)
        return projected if bias is None else projected + bias.unsqueeze(1)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, projection_dim={self.projection_dim}, tied={self.tied}"


class _HedgehogBase(_ProjectedMap):
    pairs = 2

    def initial_parameters(self) -> dict[str, Tensor]:
        return {
            name: torch.eye(*parameter.shape[1:]).expand_as(parameter)
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


@register_feature_map("rebased")
class Rebased(_PerHeadMap):
    """x' = gamma * layernorm(x) + beta, phi(x) = [x'_i^2, sqrt(2) x'_i x'_j for i < j] / sqrt(D), so that
    phi(q) phi(k)^T = (q' k'^T)^2 / D: the square of scaled dot products. F = D (D + 1) / 2.

    gamma (`weight`) and beta (`bias`) are [heads, D] and start at 1 and 0; layernorm is over D, with epsilon 1e-5. The
    `forward` takes x'.

    Its features are signed and its products are squares, which may come near 0: then the denominator is a small rest
    of large terms, and a float32 output of the first few tokens has fewer good digits than with other maps.

    Args:
        tied: queries and keys share gamma and beta of their key head.
        query_heads: `"key"` gives a group of query heads those of its key head, `"query"` gives each its own.

    Source: arXiv:2402.10644 (ReBased); here only one of the equal products x'_i x'_j and x'_j x'_i, and scaled by D.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_key_value_heads: int | None = None,
        *,
        tied: bool = False,
        query_heads: str = "key",
    ):
        shapes = {"weight": (head_dim,), "bias": (head_dim,)}
        super().__init__(head_dim, num_heads, num_key_value_heads, shapes, tied, query_heads)

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        return head_dim * (head_dim + 1) // 2

    def initial_parameters(self) -> dict[str, Tensor]:
        return {
            name: torch.ones_like(parameter) if name.endswith("weight") else torch.zeros_like(parameter)
            for name, parameter in self.named_parameters(recurse=False)
        }

    def _weigh(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return layer_norm(x, x.shape[-1:]) * weight.unsqueeze(1) + bias.unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.shape[-1] ** 0.25
        first, second = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
        pairs = x.index_select(-1, first) * x.index_select(-1, second)
        return torch.cat([x.square(), math.sqrt(2) * pairs], -1)
