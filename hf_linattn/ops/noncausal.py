"""The global form: every query reads the sums over all keys. O(T + S) in time and memory.

    hat mu = sum_j phi(k_j)^T hat v_j (+ the initial state),     [num, den] = phi(q) hat mu,     out = num / den

One pass over the keys, one over the queries; the backward is the same two passes, recomputing the features.
"""

from __future__ import annotations

import torch

from .blocks import add_product, as_rows, cut, first_order_only, write_ratio
from .feature_maps import FeatureMap
from .loader import Loader
from .state import state_dtype


class NonCausal(torch.autograd.Function):
    """(q, k, v, hat state or None, ..., parameters of the map) -> (out, hat mu)."""

    @staticmethod
    def forward(ctx, q, k, v, state, feature_map: FeatureMap | None, names, hidden, normalize, features, *parameters):
        dtype = state_dtype(q, k, v)
        loader = Loader(q, k, v, feature_map, dict(zip(names, parameters)), hidden, dtype)
        summary = q.new_zeros((q.shape[0], loader.heads, features, v.shape[-1] + 1), dtype=dtype)
        if state is not None:
            summary.copy_(state)
        q_blocks, k_blocks = _long_blocks(q, loader), _long_blocks(k, loader)
        for block in k_blocks:
            add_product(summary.unsqueeze(2), loader.key(block).transpose(-1, -2), loader.value(block))
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        denominator = q.new_empty((*q.shape[:-1], 1) if normalize else (0,), dtype=dtype)
        for block in q_blocks:
            sums = loader.space.product("out", as_rows(loader.query(block)), summary.unsqueeze(2))
            sums, target = sums.unflatten(3, (loader.group, -1)), loader.view_q(out, block)
            if normalize:
                write_ratio(sums, target, loader.view_q(denominator, block))
            else:
                target.copy_(sums[..., :-1])
        ctx.save_for_backward(q, k, v, hidden, out, denominator, summary, *parameters)
        ctx.feature_map, ctx.names, ctx.normalize, ctx.has_state = feature_map, names, normalize, state is not None
        ctx.q_blocks, ctx.k_blocks = q_blocks, k_blocks
        return out, summary.clone()

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_summary):
        q, k, v, hidden, out, denominator, summary, *parameters = ctx.saved_tensors
        loader = Loader(q, k, v, ctx.feature_map, dict(zip(ctx.names, parameters)), hidden, summary.dtype)
        loader.open_gradients()
        back = grad_summary.to(summary.dtype, copy=True)  # gradient of hat mu
        with torch.autocast(q.device.type, enabled=False):
            for block in ctx.q_blocks:
                query = loader.query(block)
                grad_sums = loader.grad_sums(block, grad_out, out, denominator if ctx.normalize else None)
                add_product(back.unsqueeze(2), as_rows(query).transpose(-1, -2), grad_sums)
                grad = loader.space.product("grad", grad_sums, summary.unsqueeze(2).transpose(-1, -2))
                loader.grad_query(block, query, grad.unflatten(3, (loader.group, -1)))
            for block in ctx.k_blocks:
                key, value = loader.key(block), loader.value(block)
                loader.grad_value(block, loader.space.product("grad_v", key, back[..., :-1].unsqueeze(2)))
                grad = loader.space.product("grad", value, back.unsqueeze(2).transpose(-1, -2))
                loader.grad_key(block, key, grad)
        grads = (loader.grad_q, loader.grad_k, loader.grad_v, back if ctx.has_state else None)
        return *grads, *(None,) * 5, *loader.grad_parameters.values()


def _long_blocks(x: torch.Tensor, loader: Loader):
    """No chunks here: each block is one long run of tokens."""
    heads = loader.q.shape[0] * loader.q.shape[2]
    size = max(64, 4096 // heads) if x.device.type == "cpu" else 8192
    return cut(x.shape[1], heads * x.shape[1], 1, size, x.device)
