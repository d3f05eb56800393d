"""The global form: every query reads the sums over all keys. O(T + S) in time and memory.

    hat mu = sum_j phi(k_j)^T hat v_j (+ the initial state),     [num, den] = phi(q) hat mu,     out = num / den

One pass over the keys, one over the queries; the backward is the same two passes, recomputing the features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Block, cut, divide_sums, first_order_only
from .feature_maps import FeatureMap
from .loader import Loader
from .state import state_dtype


class NonCausal(torch.autograd.Function):
    """(q, k, v, hat state or None, ..., parameters of the map) -> (out, hat mu)."""

    @staticmethod
    def forward(
        ctx, q, k, v, state, feature_map: FeatureMap | None, names, hidden, normalize, state_shape, *parameters
    ):
        dtype = state_dtype(q, k, v)
        loader = Loader(q, k, v, feature_map, dict(zip(names, parameters)), hidden, state_shape[2], dtype)
        summary = q.new_zeros(state_shape, dtype=dtype)
        if state is not None:
            summary.copy_(state)
        flat = summary.flatten(0, 1)
        for block in _long_blocks(k, q):
            frame = loader.frame(block)
            loader.read_key_value(frame, block)
            flat.baddbmm_(frame.k.transpose(1, 2), frame.v)
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        denominator = q.new_empty((*q.shape[:-1], 1) if normalize else (0,), dtype=dtype)
        for block in _long_blocks(q, q):
            frame = loader.frame(block)
            loader.read_query(frame, block)
            torch.bmm(frame.q, flat, out=frame.sums)
            target = loader.view_q(out, block)
            if normalize:
                loader.view_q(denominator, block).copy_(divide_sums(frame, target))
            else:
                target.copy_(frame.numerator)
        ctx.save_for_backward(q, k, v, hidden, out, denominator, summary, *parameters)
        ctx.feature_map, ctx.names, ctx.normalize, ctx.has_state = feature_map, names, normalize, state is not None
        return out, summary.clone()

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_summary):
        q, k, v, hidden, out, denominator, summary, *parameters = ctx.saved_tensors
        named = dict(zip(ctx.names, parameters))
        loader = Loader(q, k, v, ctx.feature_map, named, hidden, summary.shape[2], summary.dtype)
        loader.open_gradients()
        back = grad_summary.to(summary.dtype, copy=True)  # gradient of hat mu
        flat, flat_back = summary.flatten(0, 1), back.flatten(0, 1)
        with torch.autocast(q.device.type, enabled=False):
            for block in _long_blocks(q, q):
                frame = loader.frame(block)
                loader.read_query(frame, block)
                loader.read_grad_sums(frame, block, grad_out, out, denominator if ctx.normalize else None)
                flat_back.baddbmm_(frame.q.transpose(1, 2), frame.sums)
                torch.bmm(frame.sums, flat.transpose(1, 2), out=frame.grad_q)
                loader.grad_query(frame, block, frame.grad_q)
            for block in _long_blocks(k, q):
                frame = loader.frame(block)
                loader.read_key_value(frame, block)
                torch.bmm(frame.k, flat_back[..., :-1], out=frame.grad_v)
                loader.grad_value(frame, block, frame.grad_v)
                torch.bmm(frame.v, flat_back.transpose(1, 2), out=frame.grad_k)
                loader.grad_key(frame, block, frame.grad_k)
        grads = (loader.grad_q, loader.grad_k, loader.grad_v, back if ctx.has_state else None)
        return *grads, *(None,) * 5, *loader.grad_parameters.values()


def _long_blocks(x: Tensor, q: Tensor) -> list[Block]:
    """No chunks here: each block is one long run of tokens."""
    heads = q.shape[0] * q.shape[2]
    size = max(64, 4096 // heads) if x.device.type == "cpu" else 8192
    return cut(x.shape[1], heads * x.shape[1], 1, size, x.device)
