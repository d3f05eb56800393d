"""The chunk form: exact, O(T) in time and memory; what training and prefill run.

The sequence is cut into chunks of C tokens. With hat v = [v, 1] and the augmented state hat mu = [mu, nu], numerator
and denominator are the columns of one product, hat n:

    within a chunk     tril(phi(Q) phi(K)^T) hat V              C x C
    from earlier ones  phi(Q) hat mu                            hat mu = sum of earlier phi(K)^T hat V

The work goes block by block (see blocks.py). The backward keeps hat mu at the start of every block, walks the blocks
in reverse and recomputes the rest:

    d hat n = [dout / den, -(dout . out) / den]
    dA      = tril(d hat n hat V^T)
    dphi(Q) = dA phi(K) + d hat n hat mu^T
    dphi(K) = dA^T phi(Q) + hat V R^T                           R = sum of later phi(Q)^T d hat n
    dV      = A^T d n + phi(K) R

A lone chunk, of which nobody wants the state, runs only the products within it.

Everything is float32 (float64 for float64 input). Feature maps are applied inside the block, and again in the
backward.
Source: arXiv:2006.16236, equation 9; the chunked evaluation as in arXiv:2202.10447, section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Block, Frame, cut, divide_sums, first_order_only
from .feature_maps import FeatureMap
from .inputs import check_feature_dim, check_inputs, per_document, resolve_feature_map, segment_ids
from .loader import Loader, map_parameters
from .noncausal import NonCausal
from .state import LinearAttentionState, state_dtype


def chunk_linear_attention(
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
    """Linear attention in chunks: the result of the recurrence at the speed of matrix products.

    Arguments, result and errors are those of `linear_attention`. `chunk_size` (tokens) changes speed, not the
    result; `None` picks one by shape. Gradients are first-order only.
    """
    feature_map = resolve_feature_map(feature_map, q)
    check_inputs(q, k, v, feature_map, causal, key_mask, initial_state, cu_seqlens, normalize, chunk_size)
    if cu_seqlens is not None and (initial_state is not None or output_final_state or not causal):
        return per_document(
            chunk_linear_attention,
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            key_mask=key_mask,
            initial_state=initial_state,
            feature_map=feature_map,
            causal=causal,
            output_final_state=output_final_state,
            normalize=normalize,
            chunk_size=chunk_size,
        )
    hidden = None if key_mask is None else ~key_mask.bool()
    dtype = state_dtype(q, k, v)
    features = k.shape[-1]
    if feature_map is not None:
        with torch.no_grad():
            features = feature_map.key(torch.zeros_like(k[:1, :1])).shape[-1]
    state = None
    if initial_state is not None:
        check_feature_dim(initial_state, features)
        state = torch.cat([initial_state.mu, initial_state.nu.unsqueeze(-1)], -1).to(dtype)  # [B, Hk, F, E + 1]
    parameters = map_parameters(feature_map)
    names, tensors = tuple(parameters), tuple(parameters.values())
    shape = (q.shape[0], k.shape[2], features, v.shape[-1] + 1)
    if not causal:
        out, final = NonCausal.apply(q, k, v, state, feature_map, names, hidden, normalize, shape, *tensors)
    else:
        segments = None if cu_seqlens is None else segment_ids(cu_seqlens, q.shape[1])
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, state, *tensors))
        blocks = cut(q.shape[1], q.shape[0] * q.shape[2], features * v.shape[-1], chunk_size, q.device)
        lone = state is None and not output_final_state and q.shape[1] == blocks[0].size
        out, final = CausalChunk.apply(
            q, k, v, state, feature_map, names, hidden, segments, normalize, shape, blocks, keep, lone, *tensors
        )
    return out, LinearAttentionState(final[..., :-1], final[..., -1]) if output_final_state else None


class _Gates(NamedTuple):
    """Which tokens of packed documents see each other, in one block; 0 or 1."""

    within: Tensor  # [n, B, 1, 1, C, C]  query and key belong to one document
    query: Tensor  # [n, B, 1, 1, C, 1]  the query's document began before this chunk
    key: Tensor  # [n, B, 1, C, 1]  the key's document goes on after this chunk
    carry: Tensor  # [n, B, 1, 1, 1]  the document that enters the chunk is the one that leaves it


def _gates(segments: Tensor | None, block: Block, dtype: torch.dtype) -> _Gates | None:
    if segments is None:
        return None
    ids = segments[:, block.tokens].unflatten(1, (block.chunks, block.size)).transpose(0, 1)  # [n, B, C]
    last = ids[..., -1]
    before = segments[:, block.start - 1] if block.start else torch.full_like(last[0], -1)
    entering = torch.cat([before.unsqueeze(0), last[:-1]])
    return _Gates(
        (ids.unsqueeze(-1) == ids.unsqueeze(-2))[:, :, None, None].to(dtype),
        (ids == entering.unsqueeze(-1))[:, :, None, None, :, None].to(dtype),
        (ids == last.unsqueeze(-1))[:, :, None, :, None].to(dtype),
        (entering == last)[..., None, None, None].to(dtype),
    )


def _read_block(loader: Loader, frame: Frame, block: Block, carry: Tensor | None, gates: _Gates | None) -> Tensor:
    """Load the block; fill frame.weights, and frame.states from `carry` on unless that is `None`. Returns the queries
    that see the past."""
    loader.read_query(frame, block)
    loader.read_key_value(frame, block)
    if carry is not None:
        keys = frame.k_columns if gates is None else (frame.phi_k * gates.key).view_as(frame.k).transpose(1, 2)
        slots = frame.slots
        torch.bmm(keys, frame.v, out=frame.leaving)
        slots[0].copy_(carry)
        for chunk in range(block.chunks):
            slots[chunk + 1].add_(slots[chunk] if gates is None else slots[chunk] * gates.carry[chunk])
    torch.bmm(frame.q, frame.k_columns, out=frame.weights)
    _hide_later(frame.weights_by_head, gates)
    return frame.q if gates is None else (frame.phi_q * gates.query).view_as(frame.q)


def _read_grad_states(frame: Frame, block: Block, past_queries: Tensor, later: Tensor, gates: _Gates | None) -> None:
    """Fill the gradients of phi(q), phi(k) and v with what comes through hat mu; `later` is moved before the block."""
    # phi(Q)^T d hat n of chunk c goes to slot c, then R runs back over the slots
    slots = frame.grad_slots
    torch.bmm(past_queries.transpose(1, 2), frame.sums, out=frame.grad_states[:-1].view_as(frame.leaving))
    slots[-1].copy_(later)
    for chunk in reversed(range(block.chunks)):
        slots[chunk].add_(slots[chunk + 1] if gates is None else slots[chunk + 1] * gates.carry[chunk])
    later.copy_(slots[0])
    after = frame.grad_states[1:].view_as(frame.leaving)

    torch.bmm(frame.sums, frame.entering.transpose(1, 2), out=frame.grad_q)
    torch.bmm(frame.v, after.transpose(1, 2), out=frame.grad_k)
    torch.bmm(frame.k, after[..., :-1], out=frame.grad_v)
    if gates is not None:
        frame.grad_q.view_as(frame.phi_q).mul_(gates.query)
        frame.grad_k.view_as(frame.phi_k).mul_(gates.key)
        frame.grad_v.view(*frame.phi_k.shape[:-1], -1).mul_(gates.key)


def _hide_later(by_head: Tensor, gates: _Gates | None) -> None:
    """Zero what a causal query of the same document does not see, in place: [n, B, Hk, G, C, C]."""
    by_head.tril_()
    if gates is not None:
        by_head.mul_(gates.within)


class CausalChunk(torch.autograd.Function):
    """(q, k, v, hat state or None, ..., parameters of the map) -> (out, final hat state)."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        state,
        feature_map,
        names,
        hidden,
        segments,
        normalize,
        state_shape,
        blocks,
        keep,
        lone,
        *parameters,
    ):
        dtype = state_dtype(q, k, v)
        loader = Loader(q, k, v, feature_map, dict(zip(names, parameters)), hidden, state_shape[2], dtype)
        carry = q.new_zeros(state_shape, dtype=dtype) if state is None else state.clone()
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        denominator = q.new_empty((*q.shape[:-1], 1) if keep and normalize else (0,), dtype=dtype)
        starts = q.new_empty((len(blocks), *state_shape) if keep else (0,), dtype=dtype)

        for index, block in enumerate(blocks):
            if keep:
                starts[index].copy_(carry)
            gates = _gates(segments, block, dtype)
            frame = loader.frame(block)
            past_queries = _read_block(loader, frame, block, None if lone else carry, gates)
            torch.bmm(frame.weights, frame.v, out=frame.sums)
            if not lone:
                carry.copy_(frame.slots[-1])
                frame.sums.baddbmm_(past_queries, frame.entering)
            target = loader.view_q(out, block)
            if normalize:
                below = divide_sums(frame, target)
                if keep:
                    loader.view_q(denominator, block).copy_(below)
            else:
                target.copy_(frame.numerator)

        ctx.save_for_backward(q, k, v, hidden, segments, out, denominator, starts, *parameters)
        ctx.feature_map, ctx.names, ctx.normalize, ctx.has_state = feature_map, names, normalize, state is not None
        ctx.blocks, ctx.lone = blocks, lone
        return out, carry

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_state):
        q, k, v, hidden, segments, out, denominator, starts, *parameters = ctx.saved_tensors
        named = dict(zip(ctx.names, parameters))
        loader = Loader(q, k, v, ctx.feature_map, named, hidden, starts.shape[3], starts.dtype)
        loader.open_gradients()
        later = grad_state.to(starts.dtype, copy=True)  # R, the gradient of hat mu after the block

        with torch.autocast(q.device.type, enabled=False):
            for block, start in zip(reversed(ctx.blocks), reversed(starts.unbind())):
                gates = _gates(segments, block, starts.dtype)
                frame = loader.frame(block)
                past_queries = _read_block(loader, frame, block, None if ctx.lone else start, gates)
                loader.read_grad_sums(frame, block, grad_out, out, denominator if ctx.normalize else None)
                torch.bmm(frame.sums, frame.v.transpose(1, 2), out=frame.grad_weights)
                _hide_later(frame.grad_weights.view_as(frame.weights_by_head), gates)

                if not ctx.lone:
                    _read_grad_states(frame, block, past_queries, later, gates)
                beta = 0 if ctx.lone else 1
                frame.grad_q.baddbmm_(frame.grad_weights, frame.k, beta=beta)
                frame.grad_k.baddbmm_(frame.grad_weights.transpose(1, 2), frame.q, beta=beta)
                frame.grad_v.baddbmm_(frame.weights.transpose(1, 2), frame.sums[..., :-1], beta=beta)

                loader.grad_value(frame, block, frame.grad_v)
                loader.grad_query(frame, block, frame.grad_q)
                loader.grad_key(frame, block, frame.grad_k)

        grads = (loader.grad_q, loader.grad_k, loader.grad_v, later if ctx.has_state else None)
        return *grads, *(None,) * 9, *loader.grad_parameters.values()
