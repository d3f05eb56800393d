"""The chunk form: exact, O(T W) in time and O(T) in memory; what training and prefill run.

Once a window and the new keys are lined up (see inputs.py), the keys that are older than the window of query t are
those at places 0 ... t: the same keys W tokens late. So the older part is causal linear attention over delayed keys,
whose numerator and denominator come from the chunk form of `linear_attention`, and only the window is left to do:

    numerator_t   = sum_{window} exp(s_tj - m_t + w) v_j  +  phi(q_t) mu_t
    denominator_t = sum_{window} exp(s_tj - m_t + w)      +  phi(q_t) nu_t

The window goes in chunks of C queries, each with the C + W - 1 keys that one of them sees, a block of chunks at a time
(see ../blocks.py). The backward computes the weights of a block again and has autograd differentiate it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..blocks import Block, cut, first_order_only
from ..chunk import chunk_linear_attention
from ..feature_maps import FeatureMap
from ..inputs import divide, per_document
from ..state import LinearAttentionState, state_dtype
from ..traced import traced_linear_attention
from .inputs import (
    NO_KEY,
    NO_QUERY,
    Aligned,
    align,
    check_sliding_inputs,
    put_back,
    scores_of,
    slide,
    window_weights,
)
from .state import SlidingAttentionState


def chunk_sliding_attention(
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
    """Sliding window and linear attention, chunk by chunk.

    Arguments, result and errors are those of `sliding_linear_attention`. `chunk_size` (tokens) changes speed, not the
    result; `None` picks one by the window. Gradients are first-order only.
    """
    feature_map = check_sliding_inputs(
        q, k, v, feature_map, window, mix, key_mask, initial_state, cu_seqlens, chunk_size
    )
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        return per_document(
            chunk_sliding_attention,
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            key_mask=key_mask,
            initial_state=initial_state,
            output_final_state=output_final_state,
            feature_map=feature_map,
            window=window,
            mix=mix,
            chunk_size=chunk_size,
        )
    length, dtype = q.shape[1], state_dtype(q, k, v)
    row = align(q, k, v, window, key_mask, initial_state, cu_seqlens)
    sums, state = _older(row, feature_map, dtype, initial_state, output_final_state, cu_seqlens, chunk_size)
    mix = torch.zeros(q.shape[2], dtype=dtype, device=q.device) if mix is None else mix.to(dtype)
    size = chunk_size or chunk_length(window)
    if torch.compiler.is_compiling():
        near = _traced_window_sums(row, mix, window, size)
    else:
        blocks = cut(length, q.shape[0] * q.shape[2], 1, size, q.device)
        near = WindowSums.apply(row.q, row.keys, row.values, mix, row.key_marks, row.query_marks, window, blocks, dtype)
    sums = sums + near
    out = put_back(divide(sums[..., :-1], sums[..., -1]), row.order, key_mask).to(v.dtype)
    if not output_final_state:
        return out, None
    count = None if initial_state is None else initial_state.count
    new = length if key_mask is None else key_mask.bool().sum(1)
    return out, SlidingAttentionState(*state, *slide(row.keys, row.values, window, count, new))


def chunk_length(window: int) -> int:
    """C where the caller names none. A chunk reads C + W - 1 keys: short ones read keys often, long ones in vain."""
    return min(128, max(32, window))


def _older(
    row: Aligned,
    feature_map: FeatureMap,
    dtype: torch.dtype,
    initial_state: SlidingAttentionState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, LinearAttentionState | None]:
    """[numerator, denominator] of the keys older than the window [B, T, Hq, E + 1], and their sums after the last."""
    length = row.q.shape[1]
    keys, values = row.keys[:, :length], row.values[:, :length].to(dtype)
    start = None
    if initial_state is not None:  # the denominator is the numerator of values 1
        mu, nu = initial_state.mu, initial_state.nu
        start = LinearAttentionState(torch.cat([mu, nu.unsqueeze(-1)], -1), nu)
    is_traced = torch.compiler.is_compiling() and cu_seqlens is None
    sums, state = (traced_linear_attention if is_traced else chunk_linear_attention)(
        row.q,
        keys,
        functional.pad(values, (0, 1), value=1.0),
        feature_map=feature_map,
        key_mask=row.key_marks[:, :length] == row.query_marks,
        initial_state=start,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize=False,
        chunk_size=chunk_size,
    )
    return sums, None if state is None else LinearAttentionState(
        state.mu[..., :-1].clone(memory_format=torch.contiguous_format), state.nu.clone()
    )


def _window_sums(
    q: Tensor, keys: Tensor, values: Tensor, mix: Tensor, key_marks: Tensor, query_marks: Tensor, window: int, size: int
) -> Tensor:
    """[numerator, denominator] [B, n C, Hq, E + 1] of n chunks of C queries, given the n C + W - 1 keys they see."""
    heads, span = keys.shape[2], size + window - 1
    grouped = q.to(mix.dtype).unflatten(1, (-1, size)).unflatten(3, (heads, -1))  # [B, n, C, Hk, G, D]
    near_keys, near_values = (x.to(mix.dtype).unfold(1, span, size) for x in (keys, values))  # [B, n, Hk, D or E, span]
    distance = torch.arange(span, device=q.device) - torch.arange(size, device=q.device).unsqueeze(1)
    own = key_marks.unfold(1, span, size).unsqueeze(2) == query_marks.unflatten(1, (-1, size)).unsqueeze(3)
    visible = ((distance >= 0) & (distance < window) & own)[:, :, None, None]  # [B, n, 1, 1, C, span]
    scores = scores_of(grouped, near_keys, "bnchgd,bnhds->bnhgcs")
    weights = window_weights(scores, visible, mix.view(heads, -1, 1, 1))
    numerator = torch.einsum("bnhgcs,bnhes->bnchge", weights, near_values)
    denominator = weights.sum(-1).permute(0, 1, 4, 2, 3).unsqueeze(-1)
    return torch.cat([numerator, denominator], -1).flatten(1, 2).flatten(2, 3)


def _traced_window_sums(row: Aligned, mix: Tensor, window: int, size: int) -> Tensor:
    """The same as one graph for every length: all chunks side by side, as in ../traced.py."""
    length = row.q.shape[1]
    chunks = length // size + 2
    more = chunks * size - length
    q, keys, values = (functional.pad(x, (0, 0, 0, 0, 0, more)) for x in (row.q, row.keys[:, 1:], row.values[:, 1:]))
    key_marks = functional.pad(row.key_marks[:, 1:], (0, more), value=NO_KEY)
    query_marks = functional.pad(row.query_marks, (0, more), value=NO_QUERY)
    return _window_sums(q, keys, values, mix, key_marks, query_marks, window, size)[:, :length]


class WindowSums(torch.autograd.Function):
    """(q, keys, values, mix, ...) -> [numerator, denominator] [B, T, Hq, E + 1] of the window, in `dtype`."""

    @staticmethod
    def forward(ctx, q, keys, values, mix, key_marks, query_marks, window, blocks, dtype):
        sums = q.new_empty(*q.shape[:3], values.shape[-1] + 1, dtype=dtype)
        for block in blocks:
            parts = _parts(block, window, q, keys, values, key_marks, query_marks)
            sums[:, block.tokens] = _window_sums(*parts[:3], mix, *parts[3:], window, block.size)
        ctx.save_for_backward(q, keys, values, mix, key_marks, query_marks)
        ctx.window, ctx.blocks = window, blocks
        return sums

    @staticmethod
    @first_order_only
    def backward(ctx, grad_sums):
        q, keys, values, mix, key_marks, query_marks = ctx.saved_tensors
        grad_q, grad_mix = torch.empty_like(q), torch.zeros_like(mix)
        grad_keys, grad_values = (torch.zeros_like(x, dtype=mix.dtype) for x in (keys, values))  # neighbours add up
        with torch.autocast(q.device.type, enabled=False):
            for block in ctx.blocks:
                parts = _parts(block, ctx.window, q, keys, values, key_marks, query_marks)
                with torch.enable_grad():
                    leaves = [x.detach().requires_grad_() for x in (*parts[:3], mix)]
                    sums = _window_sums(*leaves, *parts[3:], ctx.window, block.size)
                grads = torch.autograd.grad(sums, leaves, grad_sums[:, block.tokens])
                grad_q[:, block.tokens] = grads[0]
                seen = _seen(block, ctx.window)
                grad_keys[:, seen] += grads[1]
                grad_values[:, seen] += grads[2]
                grad_mix += grads[3]
        return grad_q, grad_keys.to(keys.dtype), grad_values.to(values.dtype), grad_mix, *(None,) * 5


def _seen(block: Block, window: int) -> slice:
    """The places of the keys that some query of the block sees."""
    return slice(block.start + 1, block.tokens.stop + window)


def _parts(block: Block, window: int, q, keys, values, key_marks, query_marks) -> tuple[Tensor, ...]:
    seen = _seen(block, window)
    return q[:, block.tokens], keys[:, seen], values[:, seen], key_marks[:, seen], query_marks[:, block.tokens]
