"""The chunk form as one graph, for `torch.compile` and `torch.export`: a loop over blocks would fix the length.

All chunks are computed side by side, so the state before every chunk is held at once: O(T F E / C) memory, where the
chunk form, which runs everywhere else, holds the states of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .feature_maps import FeatureMap
from .inputs import check_feature_dim, check_inputs, divide, features, resolve_feature_map
from .state import LinearAttentionState

CHUNK = 64


def traced_linear_attention(
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
    """Linear attention whose graph is the same for every batch size and length.

        hat mu_c = sum of phi(K)^T [V, 1] of the chunks before c
        [num, den] = tril(phi(Q) phi(K)^T) [V, 1] + phi(Q) hat mu_c        within chunk c

    Arguments, result and errors are those of `linear_attention`; packed documents are refused. Differentiable by
    autograd. Source: arXiv:2006.16236, equation 9, in chunks as in arXiv:2202.10447, section 3.2.

    Raises:
        ValueError: also for `cu_seqlens`, whose number of documents no graph can hold.
    """
    feature_map = resolve_feature_map(feature_map, q)
    check_inputs(q, k, v, feature_map, causal, key_mask, initial_state, cu_seqlens, normalize, chunk_size)
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: packed documents cannot be exported; export the model without packing")
    phi_q, phi_k, values = features(q, k, v, feature_map, key_mask)
    check_feature_dim(initial_state, phi_k.shape[-1])
    grouped = phi_q.unflatten(2, (phi_k.shape[2], -1))  # [B, T, Hk, G, F]
    values = functional.pad(values, (0, 1), value=1.0)
    if initial_state is None:
        start = phi_k.new_zeros(phi_k.shape[0], *phi_k.shape[2:], values.shape[-1])
    else:
        start = torch.cat([initial_state.mu, initial_state.nu.unsqueeze(-1)], -1).to(phi_k.dtype)
    if causal:
        sums, final = _causal(grouped, phi_k, values, start, chunk_size or CHUNK)
    else:
        final = start + torch.einsum("bshf,bshe->bhfe", phi_k, values)
        sums = torch.einsum("bthgf,bhfe->bthge", grouped, final)
    out = divide(sums[..., :-1], sums[..., -1]) if normalize else sums[..., :-1]
    out = out.flatten(2, 3).to(v.dtype)
    return out, LinearAttentionState(final[..., :-1], final[..., -1]) if output_final_state else None


def _causal(q: Tensor, k: Tensor, v: Tensor, start: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sums [B, T, Hk, G, E + 1] over all keys up to each query, and the state after the last."""
    length = q.shape[1]
    q, k, v = (_in_chunks(x, length, size) for x in (q, k, v))
    added = torch.einsum("bnshf,bnshe->bnhfe", k, v)
    states = torch.cat([start.unsqueeze(1), added], 1).cumsum(1)  # before each chunk, and after the last
    weights = torch.einsum("bnthgf,bnshf->bnhgts", q, k).tril()
    sums = torch.einsum("bnhgts,bnshe->bnthge", weights, v)
    sums = sums + torch.einsum("bnthgf,bnhfe->bnthge", q, states[:, :-1])
    return sums.flatten(1, 2)[:, :length], states[:, -1]


def _in_chunks(x: Tensor, length: int, size: int) -> Tensor:
    """[B, T, ...] -> [B, n, C, ...], with padding at the end."""
    # n of one more than T needs, and at least 2: no remainder and no case of one chunk, either of which a tracer would
    # turn into a condition on T
    chunks = length // size + 2
    padding = [0, 0] * (x.dim() - 2) + [0, chunks * size - length]
    return functional.pad(x, padding).unflatten(1, (chunks, size))
