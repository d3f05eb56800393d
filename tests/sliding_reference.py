"""Sliding window and linear attention as the definition reads, in float64: an oracle that shares no code with the
package. Every sum is written out, one query row at a time. Autograd works through it.

    window(i) = the last W real keys j <= i of the same document
    s_ij      = exp(q_i k_j / sqrt(D) - max over the window + w_h) in the window, phi(q_i) phi(k_j) before it
    out_i     = sum_j s_ij v_j / sum_j s_ij
"""

import itertools
import math

import torch
from reference import features


def sliding_attention(q, k, v, name, window, *, mix=None, key_mask=None, cu_seqlens=None, feature_map=None):
    """q [B,T,Hq,D], k, v [B,T,Hk,...] -> out [B,T,Hq,E], then mu [N,Hk,F,E], nu [N,Hk,F] of what left the window,
    the window's keys and values [N,W,Hk,...], the newest last, zeros before the first, and their count [N]."""
    q, k, v = q.double(), k.double(), v.double()
    (B, T, Hq, D), Hk = q.shape, k.shape[2]
    mix = torch.zeros(Hq) if mix is None else mix
    if key_mask is not None:
        hidden = ~key_mask.bool()[..., None, None]
        q, k, v = (x.masked_fill(hidden, 0) for x in (q, k, v))
    phi_q, phi_k = features(name, q, k, feature_map)
    bounds = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        bounds = [(0, int(start), int(end)) for start, end in itertools.pairwise(cu_seqlens)]

    rows = {}
    ends = []
    for b, start, end in bounds:
        real = [j for j in range(start, end) if key_mask is None or bool(key_mask[b, j])]
        for i in range(start, end):
            read = [j for j in real if j <= i] if i in real else []
            near, far = read[-window:], read[:-window]
            for h in range(Hq):
                g = h * Hk // Hq
                scores = [(q[b, i, h] * k[b, j, g]).sum() / math.sqrt(D) for j in near]
                terms = [(phi_q[b, i, h] * phi_k[b, j, g]).sum() for j in far]
                if near:
                    top = torch.stack(scores).max()
                    terms += [torch.exp(score - top + mix[h].double()) for score in scores]
                total = sum(terms)
                zero = 0 * v[b, i, g]
                numerator = sum((term * v[b, j, g] for term, j in zip(terms, far + near, strict=True)), zero)
                rows[b, i, h] = numerator / total if terms and total.item() else zero
        far, near = real[:-window], real[-window:]
        phi, values = phi_k[b, far], v[b, far]
        mu, nu = torch.einsum("shf,she->hfe", phi, values), phi.sum(0)
        empty = window - len(near)
        pad = lambda x, empty=empty: torch.cat([x.new_zeros(empty, *x.shape[1:]), x])  # noqa: E731
        ends.append((mu, nu, pad(k[b, near]), pad(v[b, near]), torch.tensor(len(near))))
    out = torch.stack(
        [torch.stack([torch.stack([rows[b, i, h] for h in range(Hq)]) for i in range(T)]) for b in range(B)]
    )
    return out, *(torch.stack(part) for part in zip(*ends, strict=True))
