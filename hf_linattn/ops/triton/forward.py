"""The causal forward: one pass over the chunks of a segment, the state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .maps import features, product, real_keys, scores, segment, state_tile, store_state, tile, values


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def forward_kernel(
    q, k, v, key_mask, bounds, mu_start, nu_start, out, denominator, mu_end, nu_end,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_START: tl.constexpr, NORMALIZE: tl.constexpr, KEEP_DENOMINATOR: tl.constexpr, KEEP_END: tl.constexpr,
):  # fmt: skip
    """One program per (segment, key head, tile of E) walks the chunks; phi stays in registers. For each chunk

        n = tril(phi(Q) phi(K)^T) V + phi(Q) mu         d = the same with ones for V and nu for mu
        out = n / d, 0 where d = 0                      for each of the G query heads
        mu += phi(K)^T V,   nu += sum phi(K)

    d is kept, in float32 and infinite where it is 0: x / inf = 0 gives the zero output here and the zero gradient in
    the backward.

    With X = E / BE tiles, N segments and s, 4 bytes for float32, of the element:
        reads   X s B T (Hq F + Hk F) + s B T Hk E, the mask X B T Hk, states 4 N Hk (F E + X F) if there is a start
        writes  s B T Hq E + 4 B T Hq (the denominator), states 4 N Hk (F E + F) if the end is kept
        flops   2 B T (X Hq BT F + Hq BT E + Hq F E + Hk F E)
    """
    program = tl.program_id(0)
    part = program % TILES
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = tl.arange(0, BF)
    e = part * BE + tl.arange(0, BE)
    at = row.to(tl.int64) * HK + head
    mu, nu = state_tile(mu_start, nu_start, at, f, e, F, E, HAS_START)
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h

    for first in range(start, stop, BT):
        t = first + tl.arange(0, BT)
        rows = t < stop
        real = real_keys(key_mask, batch, t, stop, T, HAS_MASK)
        phi_k = features(k, t, f, real, k_t, k_d, F, MAP)
        key_sum = tl.sum(phi_k, 0)
        phi_k = phi_k.to(DOT)
        value = values(v, t, e, real, v_t, v_d, E, DOT)
        past = mu.to(DOT)
        for group in range(G):
            q_head = head * G + group
            phi_q = features(q + batch * q_b + q_head * q_h, t, f, rows, q_t, q_d, F, MAP)
            if NORMALIZE:
                below = tl.sum(phi_q * nu[None, :], 1)
            phi_q = phi_q.to(DOT)
            weights = scores(phi_q, phi_k, PRECISION, DOT == tl.float32 and BF < 128)
            weights = tl.where(t[:, None] >= t[None, :], weights, 0.0).to(DOT)
            sums = product(phi_q, past, None, PRECISION)
            sums = product(weights, value, sums, PRECISION)
            to = (batch * T + t) * (HK * G) + q_head
            if NORMALIZE:
                below += tl.sum(weights.to(tl.float32), 1)
                below = tl.where(below == 0, float("inf"), below)
                sums = sums / below[:, None]
                if KEEP_DENOMINATOR:
                    if part == 0:
                        tl.store(denominator + to, below, mask=rows)
            tl.store(tile(out, to, e, E, 1), sums, mask=rows[:, None] & (e < E)[None, :])
        mu = product(tl.trans(phi_k), value, mu, PRECISION)
        nu += key_sum

    if KEEP_END:
        store_state(mu_end, nu_end, at, f, e, mu, nu, part == 0, F, E)
