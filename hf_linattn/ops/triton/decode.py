"""One token of the recurrence in one launch: the state is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .maps import phi, state_tile, store_state


@triton.jit
def decode_kernel(
    q, k, v, key_mask, mu, nu, mu_next, nu_next, out, tickets,
    q_b, q_h, q_d, k_b, k_h, k_d, v_b, v_h, v_d,
    HK, TILES,
    F: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, HAS_MASK: tl.constexpr, NORMALIZE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """mu += phi(k)^T v, nu += phi(k), out = phi(q) mu / (phi(q) nu), in float32; mu_next and nu_next may be mu and nu.

    A program per (batch row, key head, tile of E). Every tile reads nu, and one must write it: in place (SHARED) that
    is the last to draw a ticket, when the others have read. The tickets are back at 0 afterwards.

    With X = E / BE tiles: reads X s B Hk F + s B Hk E + X s B Hq F, states 4 B Hk (F E + X F), the mask X B Hk;
    writes s B Hq E, states 4 B Hk (F E + F); flops 2 B F (Hk E + Hq E + X Hq).
    """
    program = tl.program_id(0)
    part = program % TILES
    at = (program // TILES).to(tl.int64)
    head = at % HK
    batch = at // HK
    f = tl.arange(0, BF)
    e = part * BE + tl.arange(0, BE)
    real_f = f < F
    real_e = e < E
    if HAS_MASK:
        keep = tl.load(key_mask + batch).to(tl.int32)
        real_f = f < F * keep
        real_e = e < E * keep
    x = tl.load(k + batch * k_b + head * k_h + f.to(tl.int64) * k_d, mask=real_f, other=0.0).to(tl.float32)
    phi_k = phi(x, real_f, MAP)
    value = tl.load(v + batch * v_b + head * v_h + e.to(tl.int64) * v_d, mask=real_e, other=0.0).to(tl.float32)
    mu_tile, nu_tile = state_tile(mu, nu, at, f, e, F, E, True)
    mu_tile += phi_k[:, None] * value[None, :]
    nu_tile += phi_k
    for group in range(G):
        q_head = head * G + group
        x = tl.load(q + batch * q_b + q_head * q_h + f.to(tl.int64) * q_d, mask=f < F, other=0.0).to(tl.float32)
        phi_q = phi(x, f < F, MAP)
        result = tl.sum(phi_q[:, None] * mu_tile, 0)
        if NORMALIZE:
            below = tl.sum(phi_q * nu_tile, 0)
            result = result / tl.where(below == 0, float("inf"), below)
        tl.store(out + (batch * (HK * G) + q_head) * E + e, result, mask=e < E)
    writes_nu = part == 0
    if SHARED:
        tl.debug_barrier()  # every warp of this program has read nu before its ticket is drawn
        writes_nu = tl.atomic_add(tickets + at, 1) == TILES - 1
        tl.store(tickets + at, 0, mask=writes_nu)
    store_state(mu_next, nu_next, at, f, e, mu_tile, nu_tile, writes_nu, F, E)


_tickets: dict[tuple[torch.device, int], Tensor] = {}


def _tickets_for(q: Tensor, count: int) -> Tensor:
    """Zeros that launches of one stream share: they run one after another, and each leaves them at zero."""
    stream = torch.cuda.current_stream(q.device).stream_id if q.device.type == "cuda" else 0
    key = q.device, stream
    if key not in _tickets or _tickets[key].numel() < count:
        _tickets[key] = torch.zeros(max(count, 1024), dtype=torch.int32, device=q.device)
    return _tickets[key]


def value_block(features: int, values: int) -> int:
    """BE. Small: a token has little work, and it takes many programs to draw the whole memory bandwidth."""
    return min(triton.next_power_of_2(values), max(16, 4096 // triton.next_power_of_2(features)))


def decode(
    q: Tensor, k: Tensor, v: Tensor, state, next_state, map_name: str, normalize: bool, key_mask: Tensor | None
) -> Tensor:
    """Read `state`, write `next_state` (the same tensors for in place), return out [B, 1, Hq, E]."""
    (batch, _, q_heads, features), (heads, values) = q.shape, v.shape[2:]
    block_e = value_block(features, values)
    tiles = triton.cdiv(values, block_e)
    out = v.new_empty(batch, 1, q_heads, values)
    shared = tiles > 1 and state[1].data_ptr() == next_state[1].data_ptr()
    strides = [x.stride(axis) for x in (q, k, v) for axis in (0, 2, 3)]
    with launch.on_device(q):
        decode_kernel[(batch * heads * tiles,)](
            q, k, v, key_mask, *state, *next_state, out, _tickets_for(q, batch * heads) if shared else None,
            *strides, heads, tiles,
            F=features, E=values, G=q_heads // heads, BF=triton.next_power_of_2(features), BE=block_e,
            MAP=map_name, HAS_MASK=key_mask is not None, NORMALIZE=normalize, SHARED=shared,
            num_warps=4,
        )  # fmt: skip
    return out
