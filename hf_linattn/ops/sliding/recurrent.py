"""The recurrent form: a window that moves by one token at a time. O(W D + F E) per token; what decoding runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..feature_maps import FeatureMap
from ..inputs import divide, per_document
from ..state import state_dtype
from .inputs import check_sliding_inputs, check_state_features, held, scores_of, window_weights
from .state import SlidingAttentionState


def recurrent_sliding_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap | str,
    window: int,
    mix: Tensor | None = None,
    key_mask: Tensor | None = None,
    initial_state: SlidingAttentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, SlidingAttentionState | None]:
    """Sliding window and linear attention as a recurrence: the key that leaves the window enters the sums.

        mu_i = mu_{i-1} + phi(k_{i-W})^T v_{i-W},   nu_i = nu_{i-1} + phi(k_{i-W})
        out_i = (sum_{j in window(i)} s_ij v_j + phi(q_i) mu_i) / (sum_{j in window(i)} s_ij + phi(q_i) nu_i)

    Arguments, result and errors are those of `sliding_linear_attention`; `chunk_size` is accepted and unused. The
    initial state is never modified.
    """
    feature_map = check_sliding_inputs(
        q, k, v, feature_map, window, mix, key_mask, initial_state, cu_seqlens, chunk_size
    )
    if cu_seqlens is not None:
        return per_document(
            recurrent_sliding_attention,
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            key_mask=key_mask,
            initial_state=initial_state,
            output_final_state=output_final_state,
            feature_map=feature_map,
            window=window,
            mix=mix,
        )
    dtype, heads = state_dtype(q, k, v), k.shape[2]
    mix = (q.new_zeros(q.shape[2]) if mix is None else mix).to(dtype).view(heads, -1, 1)
    state, outs = initial_state, []
    for i in range(q.shape[1]):
        token = slice(i, i + 1)
        real = None if key_mask is None else key_mask[:, i].bool()
        parts = [x[:, token] for x in (q, k, v)]
        if real is not None:
            parts = [x.masked_fill(~real[:, None, None, None], 0) for x in parts]
        out, state = _step(*parts, state, real, feature_map, window, mix, dtype)
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    return out.to(v.dtype), state if output_final_state else None


def _step(q, k, v, state, real, feature_map, window, mix, dtype) -> tuple[Tensor, SlidingAttentionState]:
    """Read one token of every row: out [B, 1, Hq, E] and the state after it."""
    heads = k.shape[2]
    phi_q = feature_map.query(q).to(dtype).unflatten(2, (heads, -1)).squeeze(1)  # [B, Hk, G, F]
    if state is None:
        state = _empty(k, v, phi_q.shape[-1], window, dtype)
    check_state_features(state, phi_q.shape[-1])
    leaves = state.count == window
    leaves = leaves if real is None else leaves & real
    phi_k = feature_map.key(state.keys[:, :1]).to(dtype).squeeze(1).masked_fill(~leaves[:, None, None], 0)
    mu = torch.addcmul(state.mu.to(dtype), phi_k.unsqueeze(-1), state.values[:, 0].to(dtype).unsqueeze(-2))
    nu = state.nu.to(dtype) + phi_k

    keys = torch.cat([state.keys[:, 1:].to(k.dtype), k], 1)
    values = torch.cat([state.values[:, 1:].to(v.dtype), v], 1)
    count = (state.count + 1).clamp(max=window)
    visible = held(count, window)[:, None, None, :]
    grouped = q.squeeze(1).unflatten(1, (heads, -1)).to(dtype)
    weights = window_weights(scores_of(grouped, keys.to(dtype), "bhgd,bshd->bhgs"), visible, mix)
    numerator = torch.einsum("bhgs,bshe->bhge", weights, values.to(dtype)) + torch.matmul(phi_q, mu)
    denominator = weights.sum(-1) + torch.matmul(phi_q, nu.unsqueeze(-1)).squeeze(-1)
    out = divide(numerator, denominator).flatten(1, 2).unsqueeze(1)
    if real is not None:
        out = out.masked_fill(~real[:, None, None, None], 0)
        is_real = real[:, None, None, None]
        keys = torch.where(is_real, keys, state.keys.to(k.dtype))
        values = torch.where(is_real, values, state.values.to(v.dtype))
        count = torch.where(real, count, state.count)
    return out, SlidingAttentionState(mu, nu, keys, values, count)


def _empty(k: Tensor, v: Tensor, features: int, window: int, dtype: torch.dtype) -> SlidingAttentionState:
    (batch, _, heads, dim), values = k.shape, v.shape[-1]
    return SlidingAttentionState(
        k.new_zeros(batch, heads, features, values, dtype=dtype),
        k.new_zeros(batch, heads, features, dtype=dtype),
        k.new_zeros(batch, window, heads, dim),
        v.new_zeros(batch, window, heads, values),
        torch.zeros(batch, dtype=torch.long, device=k.device),
    )
