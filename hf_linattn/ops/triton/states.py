"""States at the ends of segments: each segment's own sum, all at once, then a scan over the few segments.

This is what lets a long sequence fill a GPU: forward and backward then run every segment from its own state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maps import features, product, real_keys, segment, store_state, values


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def key_sums_kernel(
    k, v, key_mask, bounds, mu_sum, nu_sum,
    k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """mu = sum phi(k)^T v and nu = sum phi(k) over one segment; a program per (segment, key head, tile of E).

    With X = E / BE tiles and N segments: reads X s B T Hk F + s B T Hk E and the mask X B T Hk, writes
    4 N Hk (F E + F), flops 2 B T Hk F E.
    """
    program = tl.program_id(0)
    part = program % TILES
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = tl.arange(0, BF)
    e = part * BE + tl.arange(0, BE)
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    mu = tl.zeros([BF, BE], tl.float32)
    nu = tl.zeros([BF], tl.float32)
    for first in range(start, stop, BT):
        t = first + tl.arange(0, BT)
        real = real_keys(key_mask, batch, t, stop, T, HAS_MASK)
        phi_k = features(k, t, f, real, k_t, k_d, F, MAP)
        value = values(v, t, e, real, v_t, v_d, E, DOT)
        nu += tl.sum(phi_k, 0)
        mu = product(tl.trans(phi_k.to(DOT)), value, mu, PRECISION)
    store_state(mu_sum, nu_sum, row.to(tl.int64) * HK + head, f, e, mu, nu, part == 0, F, E)


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def query_sums_kernel(
    q, grad_out, denominator, delta, bounds, mu_sum, nu_sum,
    q_b, q_t, q_h, q_d, o_b, o_t, o_h, o_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """R = sum p^T hat g over one segment and the G query heads: what it adds to the gradient of the state.
    p = phi(q) / den and hat g = [dout, -(dout . out)], as in backward.py.

    With X = E / BE tiles and N segments: reads X s B T Hq F + s B T Hq E + (X + X) 4 B T Hq (denominator, delta),
    writes 4 N Hk (F E + F), flops 2 B T Hq F E.
    """
    program = tl.program_id(0)
    part = program % TILES
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = tl.arange(0, BF)
    e = part * BE + tl.arange(0, BE)
    mu = tl.zeros([BF, BE], tl.float32)
    nu = tl.zeros([BF], tl.float32)
    for first in range(start, stop, BT):
        t = first + tl.arange(0, BT)
        rows = t < stop
        for group in range(G):
            q_head = head * G + group
            p = features(q + batch * q_b + q_head * q_h, t, f, rows, q_t, q_d, F, MAP)
            to = (batch * T + t) * (HK * G) + q_head
            grad = values(grad_out + batch * o_b + q_head * o_h, t, e, rows, o_t, o_d, E, DOT)
            if NORMALIZE:
                p = p / tl.load(denominator + to, mask=rows, other=1.0)[:, None]
                nu += tl.sum(p * tl.load(delta + to, mask=rows, other=0.0)[:, None], 0)
            mu = product(tl.trans(p.to(DOT)), grad, mu, PRECISION)
    store_state(mu_sum, nu_sum, row.to(tl.int64) * HK + head, f, e, mu, nu, part == 0, F, E)


@triton.jit
def scan_kernel(
    sums, initial, final, first_segment, SEGMENTS, SIZE,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    KEEP_STARTS: tl.constexpr, KEEP_FINAL: tl.constexpr,
):  # fmt: skip
    """final = initial + all sums, and with KEEP_STARTS sums[i] <- initial + the sums before i (after i: REVERSE), in
    place, over the segments i of each document.

    A program per (document, block of the SIZE state entries). Reads every sum once, 4 N SIZE bytes, and writes as much
    with KEEP_STARTS; initial and final where there are any.
    """
    document = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    if PACKED:
        start = tl.load(first_segment + document)
        count = tl.load(first_segment + document + 1) - start
    else:
        start = document * SEGMENTS
        count = start * 0 + SEGMENTS
    carry = tl.zeros([BLOCK], tl.float32)
    if HAS_INITIAL:
        carry = tl.load(initial + document * SIZE + at, mask=inside, other=0.0)
    for i in range(0, count):
        if REVERSE:
            slot = start + count - 1 - i
        else:
            slot = start + i
        own = tl.load(sums + slot * SIZE + at, mask=inside, other=0.0)
        if KEEP_STARTS:
            tl.store(sums + slot * SIZE + at, carry, mask=inside)
        carry += own
    if KEEP_FINAL:
        tl.store(final + document * SIZE + at, carry, mask=inside)
