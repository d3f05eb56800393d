"""One decoding step: the recurrence for a single token, written into the state."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import backends
from .feature_maps import FeatureMap
from .inputs import check_feature_dim, check_inputs, features, resolve_feature_map
from .state import LinearAttentionState


@torch.no_grad()
def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mu: Tensor,
    nu: Tensor,
    *,
    feature_map: FeatureMap | str | None = None,
    normalize: bool = True,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token for every row; **mu and nu are updated in place**. For inference: no gradient flows.

        mu += phi(k)^T v,   nu += phi(k),   out = phi(q) mu / (phi(q) nu)

    Six operations on the device once q and k are features: one on mu, one on nu, two products, a guard of the
    denominator and the division. One launch in all with `backend="triton"`.

    Args:
        q: [B, 1, Hq, D].
        k, v: [B, 1, Hk, D], [B, 1, Hk, E].
        mu, nu: [B, Hk, F, E] and [B, Hk, F], float32 (float64 for float64 input), any strides.
        feature_map: as in `linear_attention`. With `None`, q and k must be features of a map whose products are never
            negative: a denominator of 0 or below gives 0.
        normalize, backend: as in `linear_attention`.
        key_mask: [B, 1]; a row whose key is masked keeps its state.

    Returns:
        out [B, 1, Hq, E] in the dtype of v.

    Raises:
        ValueError: as `linear_attention`; more than one token; a state of another dtype than that of the sums.
        RuntimeError: the backend asked for by name cannot run this call here.

    Source: arXiv:2006.16236, equations 18 to 20.
    """
    feature_map = resolve_feature_map(feature_map, q)
    check_inputs(q, k, v, feature_map, True, key_mask, LinearAttentionState(mu, nu), None, normalize, None)
    if q.shape[1] != 1:
        raise ValueError(f"decode_step takes one token a row, got T={q.shape[1]}")
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend={backend!r} has no decoding step; choose one of ['auto', 'torch', 'triton']")
    if backend == "auto":
        backend = backends.choose(q, k, v, feature_map=feature_map).backend
    if backend == "triton":
        step = backends.kernels("triton").decode_step
        return step(q, k, v, mu, nu, feature_map=feature_map, normalize=normalize, key_mask=key_mask)
    phi_q, phi_k, values = features(q, k, v, feature_map, key_mask)
    check_feature_dim(LinearAttentionState(mu, nu), phi_k.shape[-1])
    if mu.dtype != phi_k.dtype or nu.dtype != phi_k.dtype:
        raise ValueError(f"mu and nu must be {phi_k.dtype}, the dtype of the sums; got {mu.dtype} and {nu.dtype}")
    mu.addcmul_(phi_k.transpose(1, 2).transpose(2, 3), values.transpose(1, 2))  # [B, Hk, F, 1] x [B, Hk, 1, E]
    nu.add_(phi_k.squeeze(1))
    rows = phi_q.reshape(mu.shape[0] * mu.shape[1], -1, mu.shape[2])  # [B Hk, G, F]
    out = torch.bmm(rows, mu.flatten(0, 1))
    if normalize:
        below = torch.bmm(rows, nu.flatten(0, 1).unsqueeze(-1))
        out.div_(torch.threshold_(below, 0, math.inf))  # where nothing is summed yet, 0 / inf = 0
    return out.view(*q.shape[:3], -1).to(v.dtype)
