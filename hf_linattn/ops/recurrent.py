"""The recurrent form: one state, one token at a time. O(F E) time and memory per token; what decoding runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_maps import FeatureMap
from .inputs import check_feature_dim, check_inputs, divide, features, per_document, resolve_feature_map
from .state import LinearAttentionState


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap | str | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    initial_state: LinearAttentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    normalize: bool = True,
    chunk_size: int | None = None,
) -> tuple[Tensor, LinearAttentionState | None]:
    """Linear attention as a recurrence over keys.

        mu_i = mu_{i-1} + phi(k_i)^T v_i
        nu_i = nu_{i-1} + phi(k_i)
        out_i = phi(q_i) mu_i / (phi(q_i) nu_i)            causal
        out_i = phi(q_i) mu_S / (phi(q_i) nu_S)            not causal

    Arguments, result and errors are those of `linear_attention`; `chunk_size` is accepted and unused. The initial
    state is never modified. Source: arXiv:2006.16236, equations 16 to 20.
    """
    feature_map = resolve_feature_map(feature_map, q)
    check_inputs(q, k, v, feature_map, causal, key_mask, initial_state, cu_seqlens, normalize, chunk_size)
    if cu_seqlens is not None:
        return per_document(
            recurrent_linear_attention,
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            key_mask=key_mask,
            initial_state=initial_state,
            feature_map=feature_map,
            causal=causal,
            output_final_state=output_final_state,
            normalize=normalize,
        )
    v_dtype = v.dtype
    phi_q, phi_k, values = features(q, k, v, feature_map, key_mask)
    check_feature_dim(initial_state, phi_k.shape[-1])
    batch, keys, heads, dim = phi_k.shape
    grouped = phi_q.unflatten(2, (heads, -1))  # [B, T, Hk, G, F]
    state = initial_state
    if state is None:
        state = LinearAttentionState.zeros(batch, heads, dim, values.shape[-1], dtype=phi_k.dtype, device=phi_k.device)
    else:
        state = state.to(phi_k.dtype)

    outs = []
    for i in range(keys):
        k, v = phi_k[:, i], values[:, i]
        state = LinearAttentionState(
            torch.addcmul(state.mu, k.unsqueeze(-1), v.unsqueeze(-2)),
            state.nu + k,
        )
        if causal:
            outs.append(_read(grouped[:, i], state, normalize))
    if causal:
        out = outs[0].unsqueeze(1) if keys == 1 else torch.stack(outs, 1)  # [B, T, Hk, G, E]
    else:
        out = _read(grouped.permute(0, 2, 1, 3, 4).flatten(2, 3), state, normalize)
        out = out.unflatten(2, (q.shape[1], -1)).transpose(1, 2)
    return out.flatten(2, 3).to(v_dtype), state if output_final_state else None


def _read(grouped: Tensor, state: LinearAttentionState, normalize: bool) -> Tensor:
    """phi(q) mu / (phi(q) nu) for queries [B, Hk, rows, F]."""
    # one batch dimension: a product of four-dimensional tensors takes a dozen views more
    rows, (mu, nu) = grouped.flatten(0, 1), (sums.flatten(0, 1) for sums in state)
    numerator = torch.bmm(rows, mu)
    if normalize:
        numerator = divide(numerator, torch.bmm(rows, nu.unsqueeze(-1)).squeeze(-1))
    return numerator.unflatten(0, grouped.shape[:2])
