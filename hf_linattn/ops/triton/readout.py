"""What the non-causal form does with sums that are complete: read them, and differentiate the reading.

With the notation of backward.py, hat mu = phi(K)^T hat V over all keys and R = p^T hat g over all queries,

    out = phi(Q) mu / (phi(Q) nu)             read_kernel
    dphi(Q) = hat g hat mu^T / den            grad_read_kernel
    dphi(K) = hat V R^T                       grad_read_kernel with K for Q, V for dout and 1 for delta
    dV      = phi(K) R                        read_kernel with K for Q and no denominator

No token needs another, so every segment starts at once, from the one state of its document.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maps import context_tile, document, features, phi_vjp, product, raw, real_keys, segment, tile, values


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def read_kernel(
    q, key_mask, bounds, mu_all, nu_all, out, denominator,
    q_b, q_t, q_h, q_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, HAS_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr, KEEP_DENOMINATOR: tl.constexpr,
):  # fmt: skip
    """out = phi(Q) mu, divided by d = phi(Q) nu if NORMALIZE; a program per (segment, key head, tile of E).

    d is kept in float32, infinite where it is 0, as forward_kernel keeps it. A masked row is not read, and gives 0.

    With X = E / BE tiles and N segments: reads X s B T Hq F, the mask X B T Hk, states 4 N Hk (F E + X F) (without
    NORMALIZE 4 N Hk F E); writes s B T Hq E + 4 B T Hq (the denominator); flops 2 B T Hq F E.
    """
    program = tl.program_id(0)
    part = program % TILES
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = tl.arange(0, BF)
    e = part * BE + tl.arange(0, BE)
    at = document(bounds, row, SEGMENTS, PACKED) * HK + head
    mu = context_tile(mu_all, at, f, e, F, E, True).to(DOT)
    if NORMALIZE:
        nu = tl.load(nu_all + at * F + f, mask=f < F, other=0.0)
    for first in range(start, stop, BT):
        t = first + tl.arange(0, BT)
        rows = t < stop
        real = real_keys(key_mask, batch, t, stop, T, HAS_MASK)
        for group in range(G):
            q_head = head * G + group
            phi_q = features(q + batch * q_b + q_head * q_h, t, f, real, q_t, q_d, F, MAP)
            sums = product(phi_q.to(DOT), mu, None, PRECISION)
            to = (batch * T + t) * (HK * G) + q_head
            if NORMALIZE:
                below = tl.sum(phi_q * nu[None, :], 1)
                below = tl.where(below == 0, float("inf"), below)
                sums = sums / below[:, None]
                if KEEP_DENOMINATOR:
                    if part == 0:
                        tl.store(denominator + to, below, mask=rows)
            tl.store(tile(out, to, e, E, 1), sums, mask=rows[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def grad_read_kernel(
    q, grad_out, denominator, delta, key_mask, bounds, mu_all, nu_all, grad_q,
    q_b, q_t, q_h, q_d, o_b, o_t, o_h, o_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, HAS_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq = vjp of phi at Q of (dout mu^T + delta nu) / den; a program per (segment, key head, tile of F).

    For KEYS delta is 1 and nothing is divided; for queries without NORMALIZE there is only the first term.

    With Y = F / BF tiles and N segments: reads s B T (Hq F + Y Hq E), for queries 8 Y B T Hq, the mask Y B T Hk, states
    4 N Hk (F E + F) (without nu 4 N Hk F E); writes s B T Hq F; flops 2 B T Hq F E.
    """
    program = tl.program_id(0)
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = program % TILES * BF + tl.arange(0, BF)
    e = tl.arange(0, BE)
    at = document(bounds, row, SEGMENTS, PACKED) * HK + head
    mu = tl.trans(context_tile(mu_all, at, f, e, F, E, True).to(DOT))
    if KEYS or NORMALIZE:
        nu = tl.load(nu_all + at * F + f, mask=f < F, other=0.0)
    for first in range(start, stop, BT):
        t = first + tl.arange(0, BT)
        real = real_keys(key_mask, batch, t, stop, T, HAS_MASK)
        for group in range(G):
            q_head = head * G + group
            to = (batch * T + t) * (HK * G) + q_head
            grad = values(grad_out + batch * o_b + q_head * o_h, t, e, real, o_t, o_d, E, DOT)
            result = product(grad, mu, None, PRECISION)
            if KEYS:
                result += nu[None, :]
            elif NORMALIZE:
                result += tl.load(delta + to, mask=real, other=0.0)[:, None] * nu[None, :]
                result = result / tl.load(denominator + to, mask=real, other=1.0)[:, None]
            x, live = raw(q + batch * q_b + q_head * q_h, t, f, real, q_t, q_d, F)
            inside = (t < stop)[:, None] & (f < F)[None, :]
            tl.store(grad_q + to[:, None] * F + f[None, :], phi_vjp(x, result, live, MAP), mask=inside)
