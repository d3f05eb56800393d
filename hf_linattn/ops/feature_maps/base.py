"""The base of all feature maps phi: R^D -> R^F, and the registry that finds them by name.

A map is a small `nn.Module`. Half-precision input is mapped in float32, and the features stay float32: they feed
sums. To add one, subclass `FeatureMap`, give `forward` and, where F is not D, `feature_dim`, and register it:

    @register_feature_map("cube")
    class Cube(FeatureMap):
        is_nonnegative = False

        def forward(self, x):
            return x**3
"""

from __future__ import annotations

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
    `is_learnable` (has parameters), `separate_qk` (queries and keys are mapped with different parameters), `is_random`
    (holds a random matrix, so functions take an instance and not its name), `uses_positions` (depends on positions,
    which functions do not know: they take its features). `horizon` is how many positions such a map has.
    Parameters have the heads first, [Hq or Hk, ...], so that tensor parallel ranks can share them.
    """

    is_nonnegative: ClassVar[bool] = True
    is_learnable: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    uses_positions: ClassVar[bool] = False
    separate_qk: bool = False
    horizon: int | None = None

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

    @property
    def is_one_function(self) -> bool:
        """Whether `forward`, without parameters, is all there is to queries and keys alike."""
        kind = type(self)
        is_plain = kind.query is FeatureMap.query and kind.key is FeatureMap.key
        return is_plain and next(self.parameters(), None) is None

    def query(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """phi of queries: [B, T, Hq, D] -> [B, T, Hq, F], float32 for half-precision input.

        `positions` [B, T], each token's place in its sequence, matter to maps that have `uses_positions`.
        """
        return self(upcast(q))

    def key(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """phi of keys: [B, S, Hk, D] -> [B, S, Hk, F], float32 for half-precision input; `positions` as in `query`."""
        return self(upcast(k))

    def initial_parameters(self) -> dict[str, Tensor]:
        """Fresh values for this map's own parameters and buffers, by name; for construction and `_init_weights`."""
        return {}

    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its initial value."""
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
            # a view, because torch's counter of operations hooks modules and fails where their input is a leaf
            (grad_x,) = torch.autograd.grad(self(x.view_as(x)), x, grad)
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


def upcast(x: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
