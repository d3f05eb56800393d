"""The causal form as an autograd function over the kernels; memory O(T (F + E)) and one state a segment."""

from __future__ import annotations

import torch

from ..blocks import first_order_only
from .backward import grad_key_kernel, grad_query_kernel, grad_value_kernel
from .call import Call, dense
from .forward import forward_kernel


def _starts(call: Call, initial, keep_final: bool = False):
    """(the state that each segment starts from, the final states if they came with it)."""
    if not call.plan.split:
        return initial, None
    sums = call.key_sums()
    return sums, call.scan(call.plan, sums, initial, keep_final)


class CausalKernels(torch.autograd.Function):
    """(q, k, v, mu, nu, ...) -> (out, final mu, final nu or None)."""

    @staticmethod
    def forward(ctx, q, k, v, mu, nu, mask, cu_seqlens, keep_end, keep, options):
        call = Call(q, k, v, mask, cu_seqlens, options)
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        keep_denominator = keep and options.normalize
        denominator = q.new_empty(q.shape[:-1] if keep_denominator else 0, dtype=torch.float32)
        starts, final = _starts(call, (mu, nu), keep_end)
        if final is None:
            final = call.new_state(call.plan.documents) if keep_end else (None, None)
        store_end = keep_end and not call.plan.split
        call.run(
            forward_kernel,
            call.over_values,
            (q, k, v, mask, call.plan.bounds, *starts, out, denominator, *(final if store_end else (None, None))),
            (q, k, v),
            **call.group,
            **call.masked,
            **call.normalized,
            HAS_START=starts[0] is not None,
            KEEP_DENOMINATOR=keep_denominator,
            KEEP_END=store_end,
        )
        if keep:
            ctx.save_for_backward(q, k, v, mu, nu, mask, cu_seqlens, out, denominator)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, *final

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_mu, grad_nu):
        q, k, v, mu, nu, mask, cu_seqlens, out, denominator = ctx.saved_tensors
        need_q, need_k, need_v, need_mu, need_nu = ctx.needs_input_grad[:5]
        call = Call(q, k, v, mask, cu_seqlens, ctx.options)
        plan = call.plan
        grad_out = dense(grad_out, out)
        end = call.end_gradients(grad_mu, grad_nu)  # R after the last token of every document
        delta = call.delta(grad_out, out, denominator)

        grad_q = grad_k = grad_v = None
        given = grad_out, denominator, delta
        if need_q:
            starts, _ = _starts(call, (mu, nu))
            grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
            call.run(
                grad_query_kernel,
                call.over_features,
                (q, k, v, *given, mask, plan.bounds, *starts, grad_q),
                (q, k, v, grad_out),
                **call.group,
                **call.masked,
                **call.normalized,
                HAS_START=starts[0] is not None,
            )
        if not (need_k or need_v or need_mu or need_nu):
            return grad_q, *(None,) * 9

        need_state = need_mu or need_nu
        ends, grad_start = end, (None, None)
        if plan.split:
            ends = call.query_sums(*given)
            grad_start = call.scan(plan, ends, end, need_state, reverse=True)
        elif need_state:
            grad_start = call.new_state(plan.documents)
        has_end = {"HAS_END": ends[0] is not None}
        store_start = need_state and not plan.split
        if need_k or store_start:
            grad_k = torch.empty_like(k, memory_format=torch.contiguous_format)
            call.run(
                grad_key_kernel,
                call.over_features,
                (q, k, v, *given, mask, plan.bounds, *ends, grad_k, *(grad_start if store_start else (None, None))),
                (q, k, v, grad_out),
                **call.group,
                **call.masked,
                **call.normalized,
                **has_end,
                KEEP_START=store_start,
            )
        if need_v:
            grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
            call.run(
                grad_value_kernel,
                call.over_values,
                (q, k, grad_out, denominator, mask, plan.bounds, ends[0], grad_v),
                (q, k, grad_out),
                **call.group,
                **call.masked,
                **call.normalized,
                **has_end,
            )
        return grad_q, grad_k, grad_v, *grad_start, *(None,) * 5
