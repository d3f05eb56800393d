"""The non-causal form as an autograd function over the kernels; memory O((T + S) (F + E)) and one state a segment."""

from __future__ import annotations

import torch

from ..blocks import first_order_only
from .call import Call, dense
from .launch import Plan
from .readout import grad_read_kernel, read_kernel


def _total(call: Call, plan: Plan, sums, initial):
    """initial + the sums of all segments of each document."""
    if not plan.split and initial[0] is None:
        return sums
    return call.scan(plan, sums, initial, keep_final=True, keep_starts=False)


class NonCausalKernels(torch.autograd.Function):
    """(q, k, v, mu, nu, ...) -> (out, final mu, final nu or None)."""

    @staticmethod
    def forward(ctx, q, k, v, mu, nu, mask, cu_seqlens, keep_end, keep, options):
        call = Call(q, k, v, mask, cu_seqlens, options)
        state = _total(call, call.key_plan, call.key_sums(), (mu, nu))
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        keep_denominator = keep and options.normalize
        denominator = q.new_empty(q.shape[:-1] if keep_denominator else 0, dtype=torch.float32)
        call.run(
            read_kernel,
            call.over_values,
            (q, None, call.plan.bounds, *state, out, denominator),
            (q,),
            **call.group,
            **call.normalized,
            HAS_MASK=False,
            KEEP_DENOMINATOR=keep_denominator,
        )
        if keep:
            ctx.save_for_backward(q, k, v, mask, cu_seqlens, out, denominator, *state)
        ctx.options, ctx.has_initial = options, mu is not None
        ctx.set_materialize_grads(False)
        return out, *(state if keep_end else (None, None))

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_mu, grad_nu):
        q, k, v, mask, cu_seqlens, out, denominator, *state = ctx.saved_tensors
        need_q, need_k, need_v, need_mu, need_nu = ctx.needs_input_grad[:5]
        call = Call(q, k, v, mask, cu_seqlens, ctx.options)
        grad_out = dense(grad_out, out)
        given = grad_out, denominator, call.delta(grad_out, out, denominator)
        grad_q = grad_k = grad_v = None
        if need_q:
            grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
            call.run(
                grad_read_kernel,
                call.over_features,
                (q, *given, None, call.plan.bounds, *state, grad_q),
                (q, grad_out),
                **call.group,
                **call.normalized,
                HAS_MASK=False,
                KEYS=False,
            )
        if not (need_k or need_v or need_mu or need_nu):
            return grad_q, *(None,) * 9
        total = _total(call, call.plan, call.query_sums(*given), call.end_gradients(grad_mu, grad_nu))
        if need_k:
            grad_k = torch.empty_like(k, memory_format=torch.contiguous_format)
            call.run(
                grad_read_kernel,
                call.over_features,
                (k, v, None, None, mask, call.key_plan.bounds, *total, grad_k),
                (k, v),
                call.key_plan,
                **call.masked,
                G=1,
                NORMALIZE=False,
                KEYS=True,
            )
        if need_v:
            grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
            call.run(
                read_kernel,
                call.over_values,
                (k, mask, call.key_plan.bounds, total[0], None, grad_v, None),
                (k,),
                call.key_plan,
                **call.masked,
                G=1,
                NORMALIZE=False,
                KEEP_DENOMINATOR=False,
            )
        return grad_q, grad_k, grad_v, *(total if ctx.has_initial else (None, None)), *(None,) * 5
