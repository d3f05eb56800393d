"""The causal form as an autograd function over the kernels; memory O(T (F + E)) and one state a segment."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..blocks import first_order_only
from . import launch
from .backward import delta_kernel, grad_key_kernel, grad_query_kernel, grad_value_kernel
from .forward import forward_kernel
from .states import key_sums_kernel, query_sums_kernel, scan_kernel


class Options(NamedTuple):
    """What does not carry a gradient."""

    map_name: str
    input_dtype: torch.dtype  # of q, k before a map that torch applied: the products run in it
    normalize: bool
    chunk_size: int | None


class _Call:
    """One call's tiles, segments and constants, the same in forward and backward."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, options):
        self.batch, self.length, self.q_heads, self.features = q.shape
        self.heads, self.values = v.shape[2:]
        dtypes = options.input_dtype, v.dtype
        shape = self.features, self.values, launch.dot_dtype(*dtypes), launch.capability(q.device)
        shape += options.chunk_size, options.map_name
        self.over_values, self.over_features = launch.tiles("values", *shape), launch.tiles("features", *shape)
        self.plan = launch.plan(
            self.batch, self.length, self.batch * self.heads * self.over_values.count, cu_seqlens, q.device
        )
        self.q, self.k, self.v, self.mask, self.options = q, k, v, mask, options
        self.shared = {
            "F": self.features,
            "E": self.values,
            "MAP": options.map_name,
            "PACKED": self.plan.bounds is not None,
            **launch.products(*dtypes),
        }
        self.group = {"G": self.q_heads // self.heads}
        self.masked = {"HAS_MASK": mask is not None}
        self.normalized = {"NORMALIZE": options.normalize}

    def run(self, kernel, tiles: launch.Tiles, tensors, strided, **constants) -> None:
        """Launch over (segment, key head, tile); `tensors` and the strides of `strided` are its first arguments."""
        strides = [stride for tensor in strided for stride in tensor.stride()]
        extent = self.length, self.plan.segments, self.plan.length, self.heads, tiles.count
        with launch.on_device(self.q):
            kernel[(self.plan.rows * self.heads * tiles.count,)](
                *tensors, *strides, *extent, **self.shared, **tiles.constants(), **constants
            )

    def new_state(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = rows, self.heads, self.features
        new = self.q.new_empty
        return new(*shape, self.values, dtype=torch.float32), new(shape, dtype=torch.float32)

    def scan(self, sums, initial, keep_final: bool, reverse: bool = False) -> tuple[Tensor | None, ...]:
        """Turn the sums of segments into what each starts from, in place; the states after the last, or None."""
        finals = self.new_state(self.plan.documents) if keep_final else (None, None)
        for own, start, final in zip(sums, initial, finals):
            size = own[0].numel()
            with launch.on_device(self.q):
                scan_kernel[(self.plan.documents, triton.cdiv(size, 1024))](
                    own, start, final, self.plan.first, self.plan.segments, size,
                    BLOCK=1024, PACKED=self.plan.first is not None, REVERSE=reverse,
                    HAS_INITIAL=start is not None, KEEP_FINAL=keep_final,
                )  # fmt: skip
        return finals

    def starts(self, initial, keep_final: bool = False):
        """(the state that each segment starts from, the final states if they came with it)."""
        if not self.plan.split:
            return initial, None
        sums = self.new_state(self.plan.rows)
        self.run(
            key_sums_kernel,
            self.over_values,
            (self.k, self.v, self.mask, self.plan.bounds, *sums),
            (self.k, self.v),
            **self.masked,
        )
        return sums, self.scan(sums, initial, keep_final)


class CausalKernels(torch.autograd.Function):
    """(q, k, v, mu, nu, ...) -> (out, final mu, final nu or None)."""

    @staticmethod
    def forward(ctx, q, k, v, mu, nu, mask, cu_seqlens, keep_end, keep, options):
        call = _Call(q, k, v, mask, cu_seqlens, options)
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        keep_denominator = keep and options.normalize
        denominator = q.new_empty(q.shape[:-1] if keep_denominator else 0, dtype=torch.float32)
        starts, final = call.starts((mu, nu), keep_end)
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
        call = _Call(q, k, v, mask, cu_seqlens, ctx.options)
        plan = call.plan
        if grad_out is None:
            grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand_as(out)
        end = None, None  # R after the last token of every document
        if grad_mu is not None or grad_nu is not None:
            end = call.new_state(plan.documents)
            for target, grad in zip(end, (grad_mu, grad_nu)):
                target.zero_() if grad is None else target.copy_(grad)

        delta = denominator
        if ctx.options.normalize:
            delta = torch.empty_like(denominator)
            blocks = triton.cdiv(call.length, 32)
            with launch.on_device(q):
                delta_kernel[(call.batch * call.q_heads * blocks,)](
                    grad_out, out, delta, *grad_out.stride(), call.length, call.q_heads, blocks,
                    E=call.values, BT=32, BE=triton.next_power_of_2(call.values),
                )  # fmt: skip

        grad_q = grad_k = grad_v = None
        given = grad_out, denominator, delta
        if need_q:
            starts, _ = call.starts((mu, nu))
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
            ends = call.new_state(plan.rows)
            call.run(
                query_sums_kernel,
                call.over_values,
                (q, *given, plan.bounds, *ends),
                (q, grad_out),
                **call.group,
                **call.normalized,
            )
            grad_start = call.scan(ends, end, need_state, reverse=True)
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
