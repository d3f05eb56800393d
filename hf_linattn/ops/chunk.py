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

Everything is float32 (float64 for float64 input). Feature maps are applied inside the block, and again in the
backward.
Source: arXiv:2006.16236, equation 9; the chunked evaluation as in arXiv:2202.10447, section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Block, Workspace, add_product, as_rows, cut, first_order_only, write_ratio
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
    if not causal:
        out, final = NonCausal.apply(q, k, v, state, feature_map, names, hidden, normalize, features, *tensors)
    else:
        segments = None if cu_seqlens is None else segment_ids(cu_seqlens, q.shape[1])
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, state, *tensors))
        blocks = cut(q.shape[1], q.shape[0] * q.shape[2], features * v.shape[-1], chunk_size, q.device)
        shape = (q.shape[0], k.shape[2], features, v.shape[-1] + 1)
        out, final = CausalChunk.apply(
            q, k, v, state, feature_map, names, hidden, segments, normalize, shape, blocks, keep, *tensors
        )
    return out, LinearAttentionState(final[..., :-1], final[..., -1]) if output_final_state else None


class _Gates(NamedTuple):
    """Which tokens of packed documents see each other, in one block; 0 or 1."""

    within: Tensor  # [B, 1, n, 1, C, C]  query and key belong to one document
    query: Tensor  # [B, 1, n, 1, C, 1]  the query's document began before this chunk
    key: Tensor  # [B, 1, n, C, 1]  the key's document goes on after this chunk
    carry: Tensor  # [B, n, 1, 1, 1]  the document that enters the chunk is the one that leaves it


def _gates(segments: Tensor | None, block: Block, dtype: torch.dtype) -> _Gates | None:
    if segments is None:
        return None
    ids = segments[:, block.tokens].unflatten(1, (block.chunks, block.size))  # [B, n, C]
    last = ids[..., -1]
    before = segments[:, block.start - 1 : block.start] if block.start else torch.full_like(last[:, :1], -1)
    entering = torch.cat([before, last[:, :-1]], 1)
    return _Gates(
        (ids.unsqueeze(-1) == ids.unsqueeze(-2))[:, None, :, None].to(dtype),
        (ids == entering.unsqueeze(-1))[:, None, :, None, :, None].to(dtype),
        (ids == last.unsqueeze(-1))[:, None, ..., None].to(dtype),
        (entering == last)[..., None, None, None].to(dtype),
    )


def _scan(space: Workspace, name: str, sums: Tensor, carry: Tensor, gates: _Gates | None, reverse: bool) -> Tensor:
    """Exclusive running sums of [B, Hk, n, F, E + 1] over the chunks; `carry` [B, Hk, F, E + 1] moves on in place."""
    before = space.get(name, sums.shape)
    chunks = range(sums.shape[2])
    for chunk in reversed(chunks) if reverse else chunks:
        before[:, :, chunk].copy_(carry)
        if gates is not None:
            carry.mul_(gates.carry[:, chunk])
        carry.add_(sums[:, :, chunk])
    return before


def _chunk_states(loader: Loader, key: Tensor, value: Tensor, carry: Tensor, gates: _Gates | None) -> Tensor:
    """hat mu at the start of every chunk of a block: [B, Hk, n, F, E + 1]."""
    kept = key if gates is None else key * gates.key
    sums = loader.space.product("sums", kept.transpose(-1, -2), value)
    return _scan(loader.space, "states", sums, carry, gates, reverse=False)


def _visible(matrix: Tensor, group: int, gates: _Gates | None) -> Tensor:
    """Zero what a causal query of the same document does not see, in place: [B, Hk, n, G C, C]."""
    by_head = matrix.unflatten(3, (group, -1)).tril_()
    if gates is not None:
        by_head.mul_(gates.within)
    return matrix


class CausalChunk(torch.autograd.Function):
    """(q, k, v, hat state or None, ..., parameters of the map) -> (out, final hat state)."""

    @staticmethod
    def forward(
        ctx, q, k, v, state, feature_map, names, hidden, segments, normalize, state_shape, blocks, keep, *parameters
    ):
        dtype = state_dtype(q, k, v)
        loader = Loader(q, k, v, feature_map, dict(zip(names, parameters)), hidden, dtype)
        space, group = loader.space, loader.group
        carry = q.new_zeros(state_shape, dtype=dtype) if state is None else state.clone()
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        denominator = q.new_empty((*q.shape[:-1], 1) if keep and normalize else (0,), dtype=dtype)
        starts = q.new_empty((len(blocks), *state_shape) if keep else (0,), dtype=dtype)

        for index, block in enumerate(blocks):
            if keep:
                starts[index].copy_(carry)
            gates = _gates(segments, block, dtype)
            query, key, value = loader.query(block), loader.key(block), loader.value(block)
            states = _chunk_states(loader, key, value, carry, gates)
            weights = _visible(space.product("weights", as_rows(query), key.transpose(-1, -2)), group, gates)
            sums = space.product("out", weights, value)
            add_product(sums, as_rows(query if gates is None else query * gates.query), states)
            sums, target = sums.unflatten(3, (group, -1)), loader.view_q(out, block)
            if normalize:
                write_ratio(sums, target, loader.view_q(denominator, block) if keep else None)
            else:
                target.copy_(sums[..., :-1])

        ctx.save_for_backward(q, k, v, hidden, segments, out, denominator, starts, *parameters)
        ctx.feature_map, ctx.names, ctx.normalize, ctx.has_state = feature_map, names, normalize, state is not None
        ctx.blocks = blocks
        return out, carry

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_state):
        q, k, v, hidden, segments, out, denominator, starts, *parameters = ctx.saved_tensors
        loader = Loader(q, k, v, ctx.feature_map, dict(zip(ctx.names, parameters)), hidden, starts.dtype)
        loader.open_gradients()
        space, group = loader.space, loader.group
        later = grad_state.to(starts.dtype, copy=True)  # R, the gradient of hat mu after the block

        with torch.autocast(q.device.type, enabled=False):
            for block, start in zip(reversed(ctx.blocks), reversed(starts.unbind())):
                gates = _gates(segments, block, starts.dtype)
                query, key, value = loader.query(block), loader.key(block), loader.value(block)
                states = _chunk_states(loader, key, value, start.clone(), gates)
                grad_sums = loader.grad_sums(block, grad_out, out, denominator if ctx.normalize else None)
                far = as_rows(query if gates is None else query * gates.query)
                pulled = space.product("sums", far.transpose(-1, -2), grad_sums)
                after = _scan(space, "after", pulled, later, gates, reverse=True)
                weights = _visible(space.product("weights", as_rows(query), key.transpose(-1, -2)), group, gates)
                grad_weights = space.product("grad_weights", grad_sums, value.transpose(-1, -2))
                _visible(grad_weights, group, gates)

                grad_query = space.product("grad_q", grad_sums, states.transpose(-1, -2))
                grad_key = space.product("grad_k", value, after.transpose(-1, -2))
                grad_value = space.product("grad_v", key, after[..., :-1])
                if gates is not None:
                    grad_query.unflatten(3, (group, -1)).mul_(gates.query)
                    grad_key.mul_(gates.key)
                    grad_value.mul_(gates.key)
                add_product(grad_query, grad_weights, key)
                add_product(grad_key, grad_weights.transpose(-1, -2), as_rows(query))
                add_product(grad_value, weights.transpose(-1, -2), grad_sums[..., :-1])

                loader.grad_value(block, grad_value)
                loader.grad_query(block, query, grad_query.unflatten(3, (group, -1)))
                loader.grad_key(block, key, grad_key)

        grads = (loader.grad_q, loader.grad_k, loader.grad_v, later if ctx.has_state else None)
        return *grads, *(None,) * 8, *loader.grad_parameters.values()
