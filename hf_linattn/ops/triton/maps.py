"""What every kernel starts with: where its segment lies, a tile of tokens from memory, and phi of it in float32.

Letters in the kernels, beside those of state.py: BT tokens of a chunk, BF and BE the features and values of a tile
(powers of two), `t`, `f`, `e` their indices. Offsets are int64: a tensor may hold more than 2^31 elements.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def segment(bounds, row, T, SEGMENTS, LENGTH, PACKED: tl.constexpr):
    """(batch row, first token, end) of segment `row`: from the table, or by cutting every batch row alike."""
    if PACKED:
        batch = (row * 0).to(tl.int64)
        start = tl.load(bounds + 3 * row).to(tl.int32)
        stop = tl.load(bounds + 3 * row + 1).to(tl.int32)
    else:
        batch = (row // SEGMENTS).to(tl.int64)
        start = (row % SEGMENTS) * LENGTH
        stop = tl.minimum(start + LENGTH, T)
    return batch, start, stop


@triton.jit
def document(bounds, row, SEGMENTS, PACKED: tl.constexpr):
    """Which document segment `row` belongs to, as `segment` finds it."""
    if PACKED:
        at = tl.load(bounds + 3 * row + 2)
    else:
        at = (row // SEGMENTS).to(tl.int64)
    return at


@triton.jit
def tile(base, t, d, stride_t, stride_d):
    """Pointers to rows `t` and columns `d`."""
    return base + t.to(tl.int64)[:, None] * stride_t + d.to(tl.int64)[None, :] * stride_d


@triton.jit
def real_keys(key_mask, batch, t, stop, T, HAS_MASK: tl.constexpr):
    """True where row `t` lies in the segment and its key is real."""
    real = t < stop
    if HAS_MASK:
        real = real & (tl.load(key_mask + batch * T + t, mask=real, other=0) != 0)
    return real


@triton.jit
def phi(x, live, MAP: tl.constexpr):
    """phi(x) in float32 over the last axis; 0 where not `live`, after the map, because phi(0) is not 0.

    The comparisons are written so that NaN in a real row stays NaN.
    """
    if MAP == "elu1":
        y = tl.where(x > 0, 1.0 + x, tl.exp(x))
    elif MAP == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif MAP == "squared_relu":
        y = tl.where(x < 0, 0.0, x * x)
    elif MAP == "exp":
        y = tl.exp(x)
    elif MAP == "softmax":
        # a row that is not live has no largest entry: any finite number will do
        top = tl.max(tl.where(live, x, -3.0e38), len(x.shape) - 1, keep_dims=True)
        y = tl.where(live, tl.exp(tl.where(live, x - top, 0.0)), 0.0)
        total = tl.sum(y, len(x.shape) - 1, keep_dims=True)
        y = y / tl.where(total == 0, 1.0, total)
    else:
        y = x
    return tl.where(live, y, 0.0)


@triton.jit
def phi_vjp(x, grad, live, MAP: tl.constexpr):
    """grad^T dphi/dx at x; 0 where not `live`."""
    if MAP == "elu1":
        grad = tl.where(x > 0, grad, grad * tl.exp(x))
    elif MAP == "relu":
        grad = tl.where(x > 0, grad, 0.0)
    elif MAP == "squared_relu":
        grad = tl.where(x > 0, 2.0 * x * grad, 0.0)
    elif MAP == "exp":
        grad = grad * tl.exp(x)
    elif MAP == "softmax":
        y = phi(x, live, MAP)
        grad = y * (grad - tl.sum(grad * y, len(x.shape) - 1, keep_dims=True))
    return tl.where(live, grad, 0.0)


@triton.jit
def raw(base, t, d, rows, stride_t, stride_d, DIM: tl.constexpr):
    """A tile in float32 and where it is live: the rows `rows`, the columns below DIM. Dead entries are never read."""
    live = rows[:, None] & (d < DIM)[None, :]
    return tl.load(tile(base, t, d, stride_t, stride_d), mask=live, other=0.0).to(tl.float32), live


@triton.jit
def features(base, t, f, rows, stride_t, stride_d, F: tl.constexpr, MAP: tl.constexpr):
    """phi of a tile, in float32: sums of features are never rounded, only products are."""
    x, live = raw(base, t, f, rows, stride_t, stride_d, F)
    return phi(x, live, MAP)


@triton.jit
def values(base, t, e, rows, stride_t, stride_d, E: tl.constexpr, DOT: tl.constexpr):
    """A tile of values in the dtype of the products."""
    live = rows[:, None] & (e < E)[None, :]
    return tl.load(tile(base, t, e, stride_t, stride_d), mask=live, other=0.0).to(DOT)


@triton.jit
def context_tile(mu, at, f, e, F: tl.constexpr, E: tl.constexpr, PRESENT: tl.constexpr):
    """mu of `state_tile` alone."""
    if PRESENT:
        inside = (f < F)[:, None] & (e < E)[None, :]
        mu_tile = tl.load(tile(mu + at * (F * E), f, e, E, 1), mask=inside, other=0.0)
    else:
        mu_tile = tl.zeros([f.shape[0], e.shape[0]], tl.float32)
    return mu_tile


@triton.jit
def state_tile(mu, nu, at, f, e, F: tl.constexpr, E: tl.constexpr, PRESENT: tl.constexpr):
    """State number `at` of contiguous mu [.., F, E] and nu [.., F], float32; zeros if there is none."""
    if PRESENT:
        nu_tile = tl.load(nu + at * F + f, mask=f < F, other=0.0)
    else:
        nu_tile = tl.zeros([f.shape[0]], tl.float32)
    return context_tile(mu, at, f, e, F, E, PRESENT), nu_tile


@triton.jit
def store_state(mu, nu, at, f, e, mu_tile, nu_tile, WITH_NU, F: tl.constexpr, E: tl.constexpr):
    """Write back what `state_tile` reads; nu only where WITH_NU, so that one program of a head writes it."""
    inside = (f < F)[:, None] & (e < E)[None, :]
    tl.store(tile(mu + at * (F * E), f, e, E, 1), mu_tile, mask=inside)
    if WITH_NU:
        tl.store(nu + at * F + f, nu_tile, mask=f < F)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, accumulated in float32."""
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def scores(a, b, PRECISION: tl.constexpr, TURNED: tl.constexpr):
    """a b^T, or TURNED the same as (b a^T)^T.

    The left side of a product takes more registers. Float32, which three-pass TF32 holds twice, spills or not by which
    of the two it is; each caller states what ptxas fits into registers (tests/ops/triton/compile_report.py).
    """
    if TURNED:
        return tl.trans(product(b, tl.trans(a), None, PRECISION))
    return product(a, tl.trans(b), None, PRECISION)
