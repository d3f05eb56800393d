"""The causal backward, recomputing every state: dq in a forward sweep, dk and dv in sweeps from the end.

With p = phi(q) / den, hat v = [v, 1], hat g = [dout, -(dout . out)], and hat mu, R the sums of what came before and of
what comes after,

    dphi(Q) = (tril(hat g hat V^T) phi(K) + hat g hat mu^T) / den     hat mu = sum of earlier phi(K)^T hat V
    dphi(K) = tril(hat g hat V^T)^T p + hat V R^T                     R = sum of later p^T hat g
    dV      = (tril(phi(Q) phi(K)^T) / den)^T dout + phi(K) R

which is the backward of chunk.py with 1 / den moved from d hat n to phi(q): dout then goes into the products as it is.
Each is again a causal linear attention, so each is a kernel like the forward: a program holds the columns of its
result that a tile of F (dq, dk) or of E (dv) makes, and the rows of the state that they need. Nothing is added up
between programs, so the result does not depend on their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maps import (
    context_tile,
    features,
    phi_vjp,
    product,
    raw,
    real_keys,
    scores,
    segment,
    state_tile,
    store_state,
    values,
)


@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    grad_out, out, delta,
    o_b, o_t, o_h, o_d,
    T, HQ, BLOCKS,
    E: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """delta = -(dout . out), the gradient of den times den; a program per (batch row, tokens, query head).

    Reads 2 s B T Hq E, writes 4 B T Hq, flops 2 B T Hq E.
    """
    program = tl.program_id(0)
    head = (program % HQ).to(tl.int64)
    block = program // HQ % BLOCKS
    batch = (program // HQ // BLOCKS).to(tl.int64)
    t = block * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    to = (batch * T + t) * HQ + head
    grad, live = raw(grad_out + batch * o_b + head * o_h, t, e, t < T, o_t, o_d, E)
    result = tl.load(out + to[:, None] * E + e[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(delta + to, -tl.sum(grad * result, 1), mask=t < T)


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def grad_query_kernel(
    q, k, v, grad_out, denominator, delta, key_mask, bounds, mu_start, nu_start, grad_q,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h, o_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_START: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """dq: a program per (segment, key head, tile of F) sweeps forward, with mu, nu recomputed. For each chunk

        dA = tril(hat g hat V^T)
        dq = vjp of phi at Q of (dA phi(K) + hat g hat mu^T) / den        for each of the G query heads
        mu += phi(K)^T V,   nu += sum phi(K)

    With Y = F / BF tiles: reads s B T (Hq F + Hk F + Y Hq E + Y Hk E) + 8 Y B T Hq, the mask Y B T Hk, states
    4 N Hk (F E + F) if there is a start; writes s B T Hq F; flops 2 B T (Y Hq BT E + Hq BT F + Hq F E + Hk F E).
    """
    program = tl.program_id(0)
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = program % TILES * BF + tl.arange(0, BF)
    e = tl.arange(0, BE)
    mu, nu = state_tile(mu_start, nu_start, row.to(tl.int64) * HK + head, f, e, F, E, HAS_START)
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
        past = tl.trans(mu.to(DOT))
        for group in range(G):
            q_head = head * G + group
            to = (batch * T + t) * (HK * G) + q_head
            grad = values(grad_out + batch * o_b + q_head * o_h, t, e, rows, o_t, o_d, E, DOT)
            weights = product(grad, tl.trans(value), None, PRECISION)
            result = product(grad, past, None, PRECISION)
            if NORMALIZE:
                grad_one = tl.load(delta + to, mask=rows, other=0.0)
                weights += grad_one[:, None]
                result += grad_one[:, None] * nu[None, :]
            weights = tl.where(t[:, None] >= t[None, :], weights, 0.0).to(DOT)
            result = product(weights, phi_k, result, PRECISION)
            if NORMALIZE:
                result = result / tl.load(denominator + to, mask=rows, other=1.0)[:, None]
            x, live = raw(q + batch * q_b + q_head * q_h, t, f, rows, q_t, q_d, F)
            tl.store(grad_q + to[:, None] * F + f[None, :], phi_vjp(x, result, live, MAP), mask=live)
        mu = product(tl.trans(phi_k), value, mu, PRECISION)
        nu += key_sum


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def grad_key_kernel(
    q, k, v, grad_out, denominator, delta, key_mask, bounds, mu_end, nu_end, grad_k, mu_start, nu_start,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, o_b, o_t, o_h, o_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_END: tl.constexpr, NORMALIZE: tl.constexpr, KEEP_START: tl.constexpr,
):  # fmt: skip
    """dk: a program per (segment, key head, tile of F) sweeps from the end. For each chunk, last first

        dA = tril(hat g hat V^T)
        dk = vjp of phi at K of (hat V R^T + dA^T p summed over the G query heads)
        R += p^T hat g

    mu_end, nu_end are R at the segment's end; R at its start, the gradient of the state there, is kept on request.

    With Y = F / BF tiles: reads s B T (Hq F + Hk F + Y Hq E + Y Hk E) + 8 Y B T Hq, the mask Y B T Hk, states
    4 N Hk (F E + F) if there is an end; writes s B T Hk F, and the states if the start is kept;
    flops 2 B T (Y Hq BT E + Hq BT F + Hq F E + Hk F E).
    """
    program = tl.program_id(0)
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = program % TILES * BF + tl.arange(0, BF)
    e = tl.arange(0, BE)
    at = row.to(tl.int64) * HK + head
    mu, nu = state_tile(mu_end, nu_end, at, f, e, F, E, HAS_END)
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    chunks = tl.cdiv(tl.maximum(stop - start, 0), BT)
    for i in range(0, chunks):
        t = start + (chunks - 1 - i) * BT + tl.arange(0, BT)
        rows = t < stop
        real = real_keys(key_mask, batch, t, stop, T, HAS_MASK)
        value = values(v, t, e, real, v_t, v_d, E, DOT)
        result = product(value, tl.trans(mu.to(DOT)), None, PRECISION) + nu[None, :]
        for group in range(G):
            q_head = head * G + group
            to = (batch * T + t) * (HK * G) + q_head
            grad = values(grad_out + batch * o_b + q_head * o_h, t, e, rows, o_t, o_d, E, DOT)
            p = features(q + batch * q_b + q_head * q_h, t, f, rows, q_t, q_d, F, MAP)
            if NORMALIZE:
                grad_one = tl.load(delta + to, mask=rows, other=0.0)
                p = p / tl.load(denominator + to, mask=rows, other=1.0)[:, None]
                nu += tl.sum(p * grad_one[:, None], 0)
            p = p.to(DOT)
            weights = scores(value, grad, PRECISION, DOT == tl.float32)  # keys down, queries across
            if NORMALIZE:
                weights += grad_one[None, :]
            weights = tl.where(t[:, None] <= t[None, :], weights, 0.0).to(DOT)
            result = product(weights, p, result, PRECISION)
            mu = product(tl.trans(p), grad, mu, PRECISION)
        x, live = raw(k, t, f, real, k_t, k_d, F)
        to = ((batch * T + t) * HK + head)[:, None] * F + f[None, :]
        tl.store(grad_k + to, phi_vjp(x, result, live, MAP), mask=rows[:, None] & (f < F)[None, :])
    if KEEP_START:
        store_state(mu_start, nu_start, at, f, e, mu, nu, True, F, E)


@triton.jit(do_not_specialize=["T", "SEGMENTS", "LENGTH"])
def grad_value_kernel(
    q, k, grad_out, denominator, key_mask, bounds, mu_end, grad_v,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, o_b, o_t, o_h, o_d,
    T, SEGMENTS, LENGTH, HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_END: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """dv: a program per (segment, key head, tile of E) sweeps from the end. For each chunk, last first

        dv = phi(K) R + (tril(phi(Q) phi(K)^T) / den)^T dout summed over the G query heads
        R += p^T dout

    With X = E / BE tiles: reads s B T (X Hq F + X Hk F + Hq E) + 4 X B T Hq, the mask X B T Hk, states 4 N Hk F E if
    there is an end; writes s B T Hk E; flops 2 B T (X Hq BT F + Hq BT E + Hq F E + Hk F E).
    """
    program = tl.program_id(0)
    head = (program // TILES % HK).to(tl.int64)
    row = program // TILES // HK
    batch, start, stop = segment(bounds, row, T, SEGMENTS, LENGTH, PACKED)
    f = tl.arange(0, BF)
    e = program % TILES * BE + tl.arange(0, BE)
    mu = context_tile(mu_end, row.to(tl.int64) * HK + head, f, e, F, E, HAS_END)
    k += batch * k_b + head * k_h
    chunks = tl.cdiv(tl.maximum(stop - start, 0), BT)
    for i in range(0, chunks):
        t = start + (chunks - 1 - i) * BT + tl.arange(0, BT)
        rows = t < stop
        real = real_keys(key_mask, batch, t, stop, T, HAS_MASK)
        phi_k = features(k, t, f, real, k_t, k_d, F, MAP).to(DOT)
        result = product(phi_k, mu.to(DOT), None, PRECISION)
        for group in range(G):
            q_head = head * G + group
            grad = values(grad_out + batch * o_b + q_head * o_h, t, e, rows, o_t, o_d, E, DOT)
            phi_q = features(q + batch * q_b + q_head * q_h, t, f, rows, q_t, q_d, F, MAP)
            # keys down, queries across; divided after the product, like the forward's, which den has summed
            weights = scores(phi_k, phi_q.to(DOT), PRECISION, DOT == tl.float32 and BF >= 128)
            if NORMALIZE:
                to = (batch * T + t) * (HK * G) + q_head
                below = tl.load(denominator + to, mask=rows, other=1.0)
                weights = weights / below[None, :]
                phi_q = phi_q / below[:, None]
            p = phi_q.to(DOT)
            weights = tl.where(t[:, None] <= t[None, :], weights, 0.0).to(DOT)
            result = product(weights, grad, result, PRECISION)
            mu = product(tl.trans(p), grad, mu, PRECISION)
        to = ((batch * T + t) * HK + head)[:, None] * E + e[None, :]
        tl.store(grad_v + to, result, mask=rows[:, None] & (e < E)[None, :])
