"""Maps that also depend on where a token stands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .base import FeatureMap, register_feature_map, upcast


@register_feature_map("cosformer")
class Cosformer(FeatureMap):
    """phi_i(x) = [relu(x) cos(pi i / 2 M), relu(x) sin(pi i / 2 M)] of a token at position i, so that
    phi_i(q) phi_j(k)^T = relu(q) relu(k)^T cos(pi (i - j) / 2 M): relu's weights, less the farther apart. F = 2 D.

    It maps with positions, `query(q, positions)` and `key(k, positions)`, which the attention layer does before it
    calls `linear_attention`. For 0 <= i, j < M features and weights are not negative.

    Args:
        horizon: M, tokens; positions go from 0 to M - 1. Weights fall over a distance of about M, so M is best little
            more than the longest sequence: at a tenth of M they have lost 1 %. Hence the default of 4096, twice the
            default `max_position_embeddings`, and not a number that no sequence reaches. A model is bound to the M
            that it was trained with.

    Raises:
        ValueError: `horizon` below 1; no positions, or of another shape; on the CPU, outside of a compiled graph, a
            position that is not in 0 ... M - 1. Elsewhere reading them would wait for the device at every step: there
            they are clamped to that range, which leaves weights that are not negative, equally near to each other.

    Source: arXiv:2202.08791.
    """

    uses_positions = True

    def __init__(
        self, head_dim: int, num_heads: int = 1, num_key_value_heads: int | None = None, *, horizon: int = 4096
    ):
        super().__init__(head_dim, num_heads, num_key_value_heads)
        if horizon < 1:
            raise ValueError(f"horizon={horizon} must be at least 1")
        self.horizon = horizon

    @classmethod
    def feature_dim(cls, head_dim: int, **kwargs: Any) -> int:
        return 2 * head_dim

    def query(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return self(upcast(q), positions)

    def key(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self(upcast(k), positions)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T, H, D] at positions [B, T] (or [1, T]) -> [B, T, H, 2 D]."""
        angle = self._checked(positions, x).to(x.dtype)[..., None, None] * (math.pi / (2 * self.horizon))
        x = x.relu()
        return torch.cat([x * angle.cos(), x * angle.sin()], -1)

    def _checked(self, positions: Tensor | None, x: Tensor) -> Tensor:
        if positions is None:
            raise ValueError(
                "feature map Cosformer depends on positions: pass position_ids to the layer, or map q and k first, "
                "query(q, positions) and key(k, positions), and pass the features with feature_map=None"
            )
        if positions.dim() != 2 or positions.shape[0] not in (1, x.shape[0]) or positions.shape[1] != x.shape[1]:
            raise ValueError(
                f"positions has shape {list(positions.shape)}; it must be [B, T] = {list(x.shape[:2])} (or B = 1)"
            )
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            first, last = (int(each) for each in positions.aminmax())
            if first < 0 or last >= self.horizon:
                raise ValueError(
                    f"position {first if first < 0 else last} is outside of the horizon={self.horizon} of feature map "
                    f"Cosformer; positions go from 0 to {self.horizon - 1} (feature_map_kwargs={{'horizon': ...}})"
                )
        return positions.clamp(0, self.horizon - 1)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, horizon={self.horizon}"
