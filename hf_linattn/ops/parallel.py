"""The parallel form: the definition, written as an attention matrix. O(T S) time and memory; the readable one."""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_maps import FeatureMap
from .inputs import (
    check_feature_dim,
    check_inputs,
    divide,
    features,
    per_document,
    resolve_feature_map,
    segment_ids,
)
from .state import LinearAttentionState


def parallel_linear_attention(
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
    """Linear attention by its definition, one [T, S] similarity matrix per query head.

        s_ij = phi(q_i) phi(k_j)^T for visible j, else 0
        out_i = (sum_j s_ij v_j + phi(q_i) mu_0) / (sum_j s_ij + phi(q_i) nu_0)

    Arguments, result and errors are those of `linear_attention`; `chunk_size` is accepted and unused.
    """
    feature_map = resolve_feature_map(feature_map, q)
    check_inputs(q, k, v, feature_map, causal, key_mask, initial_state, cu_seqlens, normalize, chunk_size)
    if cu_seqlens is not None:
        return per_document(
            parallel_linear_attention,
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
    phi_q, phi_k, values = features(q, k, v, feature_map, key_mask)
    check_feature_dim(initial_state, phi_k.shape[-1])
    similarity = _similarity(phi_q, phi_k, causal)  # [B, Hk, G, T, S]
    numerator = torch.einsum("bhgts,bshe->bhgte", similarity, values)
    denominator = similarity.sum(-1)
    if initial_state is not None:
        grouped = _grouped(phi_q, phi_k)
        numerator = numerator + torch.einsum("bthgf,bhfe->bhgte", grouped, initial_state.mu.to(grouped))
        denominator = denominator + torch.einsum("bthgf,bhf->bhgt", grouped, initial_state.nu.to(grouped))
    out = divide(numerator, denominator) if normalize else numerator
    out = out.flatten(1, 2).transpose(1, 2).to(v.dtype)  # [B, T, Hq, E]
    return out, _final_state(phi_k, values, initial_state) if output_final_state else None


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    feature_map: FeatureMap | str | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    initial_state: LinearAttentionState | None = None,
    cu_seqlens: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """The weights that linear attention implies on the keys of this call: [B, Hq, T, S].

        w_ij = s_ij / (sum_j s_ij + phi(q_i) nu_0)

    With an `initial_state`, the keys it holds have their share of the denominator, so that rows sum to less than
    one. With `normalize=False` these are the similarities s_ij themselves.
    """
    feature_map = resolve_feature_map(feature_map, q)
    phi_q, phi_k, _ = features(q, k, k, feature_map, key_mask)
    similarity = _similarity(phi_q, phi_k, causal)
    if cu_seqlens is not None:
        document = segment_ids(cu_seqlens, q.shape[1])
        similarity = similarity * (document.unsqueeze(-1) == document.unsqueeze(-2))
    if normalize:
        denominator = similarity.sum(-1)
        if initial_state is not None:
            denominator = denominator + torch.einsum(
                "bthgf,bhf->bhgt", _grouped(phi_q, phi_k), initial_state.nu.to(phi_q)
            )
        similarity = divide(similarity, denominator)
    return similarity.flatten(1, 2)


def _grouped(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    """Query heads beside the key head they read: [B, T, Hk, G, F]."""
    return phi_q.unflatten(2, (phi_k.shape[2], -1))


def _similarity(phi_q: Tensor, phi_k: Tensor, causal: bool) -> Tensor:
    similarity = torch.einsum("bthgf,bshf->bhgts", _grouped(phi_q, phi_k), phi_k)
    if causal:
        rows, columns = similarity.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=similarity.device).triu(1)
        similarity = similarity.masked_fill(later, 0)
    return similarity


def _final_state(phi_k: Tensor, values: Tensor, initial_state: LinearAttentionState | None) -> LinearAttentionState:
    mu = torch.einsum("bshf,bshe->bhfe", phi_k, values)
    nu = phi_k.sum(1)
    if initial_state is not None:
        mu, nu = mu + initial_state.mu.to(mu), nu + initial_state.nu.to(nu)
    return LinearAttentionState(mu, nu)
