"""The parallel form: the definition, written as an attention matrix. O(T^2) time and memory; the readable one."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..feature_maps import FeatureMap
from ..inputs import divide, per_document
from ..state import state_dtype
from .inputs import check_sliding_inputs, check_state_features, held, scores_of, window_weights
from .state import SlidingAttentionState


def parallel_sliding_attention(
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
    """Sliding window and linear attention by their definition, one [T, W + T] matrix per query head.

    Arguments, result and errors are those of `sliding_linear_attention`; `chunk_size` is accepted and unused.
    """
    feature_map = check_sliding_inputs(
        q, k, v, feature_map, window, mix, key_mask, initial_state, cu_seqlens, chunk_size
    )
    options = {"feature_map": feature_map, "window": window, "mix": mix}
    if cu_seqlens is not None:
        return per_document(
            parallel_sliding_attention,
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            key_mask=key_mask,
            initial_state=initial_state,
            output_final_state=output_final_state,
            **options,
        )
    real = _real(k, window, key_mask, initial_state)
    old_keys, old_values = (None, None) if initial_state is None else initial_state[2:4]
    keys, values = _joined(old_keys, k, real), _joined(old_values, v, real)
    q, dtype = _real_queries(q, key_mask), state_dtype(q, k, v)
    similarity, phi_q, phi_k = _similarity(q, keys, real, feature_map, window, mix, dtype)
    check_state_features(initial_state, phi_k.shape[-1])
    numerator = torch.einsum("bhgts,bshe->bhgte", similarity, values.to(dtype))
    denominator = similarity.sum(-1)
    if initial_state is not None:
        numerator = numerator + torch.einsum("bthgf,bhfe->bhgte", phi_q, initial_state.mu.to(dtype))
        denominator = denominator + torch.einsum("bthgf,bhf->bhgt", phi_q, initial_state.nu.to(dtype))
    out = divide(numerator, denominator).flatten(1, 2).transpose(1, 2)  # [B, T, Hq, E]
    if key_mask is not None:
        out = out.masked_fill(~key_mask.bool()[..., None, None], 0)
    state = _final_state(keys, values, real, phi_k, window, initial_state, dtype) if output_final_state else None
    return out.to(v.dtype), state


def sliding_attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    feature_map: FeatureMap | str,
    window: int,
    mix: Tensor | None = None,
    key_mask: Tensor | None = None,
    initial_state: SlidingAttentionState | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The weights of sliding window and linear attention on the keys of this call: [B, Hq, T, T].

        w_ij = s_ij / sum_j s_ij

    The keys of an `initial_state` have their share of the denominator, so that rows sum to less than one. Rows of
    masked tokens are 0.
    """
    options = {"feature_map": feature_map, "window": window, "mix": mix}
    if cu_seqlens is not None:
        result = q.new_zeros(1, q.shape[2], q.shape[1], q.shape[1], dtype=state_dtype(q, k))
        for start, stop in itertools.pairwise(cu_seqlens.tolist()):
            part = slice(start, stop)
            mask = None if key_mask is None else key_mask[:, part]
            if start < stop:
                whole = sliding_attention_weights(q[:, part], k[:, part], key_mask=mask, **options)
                result[:, :, part, part] = whole
        return result
    feature_map = check_sliding_inputs(q, k, k, feature_map, window, mix, key_mask, None, None, None)
    real = _real(k, window, key_mask, initial_state)
    keys = _joined(None if initial_state is None else initial_state.keys, k, real)
    q, dtype = _real_queries(q, key_mask), state_dtype(q, k)
    similarity, phi_q, _ = _similarity(q, keys, real, feature_map, window, mix, dtype)
    denominator = similarity.sum(-1)
    if initial_state is not None:
        denominator = denominator + torch.einsum("bthgf,bhf->bhgt", phi_q, initial_state.nu.to(dtype))
    weights = divide(similarity[..., -q.shape[1] :], denominator).flatten(1, 2)
    return weights if key_mask is None else weights.masked_fill(~key_mask.bool()[:, None, :, None], 0)


def _real(k: Tensor, window: int, key_mask: Tensor | None, state: SlidingAttentionState | None) -> Tensor:
    """Which keys are real, those of the state's window first: [B, S]."""
    real = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask.bool()
    return real if state is None else torch.cat([held(state.count, window), real], 1)


def _joined(old: Tensor | None, x: Tensor, real: Tensor) -> Tensor:
    """What the window holds and x [B, T, ...] behind it, 0 where there is no real key: [B, S, ...]."""
    x = x.masked_fill(~real[:, -x.shape[1] :, None, None], 0)
    return x if old is None else torch.cat([old.to(x.dtype), x], 1)


def _real_queries(q: Tensor, key_mask: Tensor | None) -> Tensor:
    return q if key_mask is None else q.masked_fill(~key_mask.bool()[..., None, None], 0)


def _similarity(q, keys, real, feature_map, window, mix, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """s [B, Hk, G, T, S], phi(q) [B, T, Hk, G, F] and phi(k) [B, S, Hk, F]."""
    length, places, heads = q.shape[1], keys.shape[1], keys.shape[2]
    phi_q, phi_k = feature_map.query(q).to(dtype), feature_map.key(keys).to(dtype)
    phi_q, grouped = (x.unflatten(2, (heads, -1)) for x in (phi_q, q.to(dtype)))
    place = torch.arange(places, device=q.device)
    visible = (place <= place[-length:, None]) & real.unsqueeze(1)  # [B, T, S]
    read = real.cumsum(1)  # real keys up to each place
    distance = read[:, -length:, None] - read[:, None, :]
    near = (visible & (distance < window))[:, None, None]
    far = (visible & (distance >= window))[:, None, None]
    mix = q.new_zeros(q.shape[2]) if mix is None else mix
    mix = mix.to(dtype).view(heads, -1, 1, 1)
    softmax = window_weights(scores_of(grouped, keys.to(dtype), "bthgd,bshd->bhgts"), near, mix)
    linear = torch.einsum("bthgf,bshf->bhgts", phi_q, phi_k).masked_fill(~far, 0)
    return softmax + linear, phi_q, phi_k


def _final_state(keys, values, real, phi_k, window, state, dtype) -> SlidingAttentionState:
    read = real.cumsum(1)
    left = real & (read[:, -1:] - read >= window)  # real keys that W later ones have pushed out
    phi_k = phi_k.masked_fill(~left[..., None, None], 0)
    mu, nu = torch.einsum("bshf,bshe->bhfe", phi_k, values.to(dtype)), phi_k.sum(1)
    if state is not None:
        mu, nu = mu + state.mu.to(mu), nu + state.nu.to(nu)
    short = max(0, window - keys.shape[1])
    order = real.to(torch.uint8).argsort(dim=1, stable=True)[:, -window:]  # real ones last, as they stand
    keys, values = (
        torch.cat([x.new_zeros(x.shape[0], short, *x.shape[2:]), x.gather(1, _expand(order, x))], 1)
        for x in (keys, values)
    )
    return SlidingAttentionState(mu, nu, keys, values, read[:, -1].clamp(max=window))


def _expand(order: Tensor, x: Tensor) -> Tensor:
    return order[..., None, None].expand(-1, -1, *x.shape[2:])
