"""The global form: every query reads the sums over all keys. O(T + S) in time and memory.

    hat mu = sum_j phi(k_j)^T hat v_j (+ the initial state),     [num, den] = phi(q) hat mu,     out = num / den

One pass over the keys, one over the queries; the backward is the same two passes, recomputing the features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Loader, add_product, as_rows, cut, grad_of_sums, write_ratio
from .feature_maps import FeatureMap
from .state import state_dtype


class NonCausal(torch.autograd.Function):
    """(q, k, v, hat state or None, ...) -> (out, hat mu)."""

    @staticmethod
    def forward(ctx, q, k, v, state, feature_map: FeatureMap | None, hidden, normalize: bool, features: int):
        dtype = state_dtype(q, k, v)
        loader = Loader(q, k, v, feature_map, hidden, dtype)
        summary = q.new_zeros((q.shape[0], loader.heads, features, v.shape[-1] + 1), dtype=dtype)
        if state is not None:
            summary.copy_(state)
        q_blocks, k_blocks = _long_blocks(q, loader), _long_blocks(k, loader)
        for block in k_blocks:
            key, value = loader.phi_k(block), loader.values(block)
            add_product(summary.unsqueeze(2), key.transpose(-1, -2), value)
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        denominator = q.new_empty((*q.shape[:-1], 1) if normalize else (0,), dtype=dtype)
        for block in q_blocks:
            query = as_rows(loader.phi_q(block))
            sums = loader.space.product("out", query, summary.unsqueeze(2)).unflatten(3, (loader.group, -1))
            target = loader.queries(out, block)
            if normalize:
                write_ratio(sums, target, loader.queries(denominator, block))
            else:
                target.copy_(sums[..., :-1])
        ctx.save_for_backward(q, k, v, hidden, out, denominator, summary)
        ctx.feature_map, ctx.normalize, ctx.has_state = feature_map, normalize, state is not None
        ctx.q_blocks, ctx.k_blocks = q_blocks, k_blocks
        return out, summary.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_summary):
        q, k, v, hidden, out, denominator, summary = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            loader = Loader(q, k, v, ctx.feature_map, hidden, summary.dtype)
            grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            back = grad_summary.to(summary.dtype, copy=True)  # gradient of hat mu
            for block in ctx.q_blocks:
                query = loader.phi_q(block)
                grad_sums = grad_of_sums(loader, block, grad_out, out, denominator if ctx.normalize else None)
                add_product(back.unsqueeze(2), as_rows(query).transpose(-1, -2), grad_sums)
                grad = loader.space.product("grad", grad_sums, summary.unsqueeze(2).transpose(-1, -2))
                source = loader.queries(q, block)
                grad = loader.pull_back(source, query, grad.unflatten(3, (loader.group, -1)))
                loader.queries(grad_q, block).copy_(grad)
            for block in ctx.k_blocks:
                key, value = loader.phi_k(block), loader.values(block)
                grad = loader.space.product("grad", value, back.unsqueeze(2).transpose(-1, -2))
                grad = loader.pull_back(loader.keys(k, block), key, grad)
                loader.keys(grad_k, block).copy_(loader.mask(grad, block))
                grad = loader.space.product("grad_v", key, back[..., :-1].unsqueeze(2))
                loader.keys(grad_v, block).copy_(loader.mask(grad, block))
        return grad_q, grad_k, grad_v, back if ctx.has_state else None, None, None, None, None


def _long_blocks(x: Tensor, loader: Loader):
    """No chunks here: each block is one long run of tokens."""
    heads = loader.q.shape[0] * loader.q.shape[2]
    size = max(64, 4096 // heads) if x.device.type == "cpu" else 8192
    return cut(x.shape[1], heads * x.shape[1], 1, size, x.device)
