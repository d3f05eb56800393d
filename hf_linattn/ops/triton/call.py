"""One call of the kernels: its tiles, segments and constants, and the launches that both forms share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import launch
from .backward import delta_kernel
from .states import key_sums_kernel, query_sums_kernel, scan_kernel


class Options(NamedTuple):
    """What does not carry a gradient."""

    map_name: str
    input_dtype: torch.dtype  # of q, k before a map that torch applied: the products run in it
    normalize: bool
    chunk_size: int | None


class Call:
    """The same in forward and backward. `plan` cuts the queries; `key_plan` the keys, which may be fewer or more."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, options):
        self.batch, self.length, self.q_heads, self.features = q.shape
        self.heads, self.values = v.shape[2:]
        dtypes = options.input_dtype, v.dtype
        shape = self.features, self.values, launch.dot_dtype(*dtypes), launch.capability(q.device)
        shape += options.chunk_size, options.map_name
        self.over_values, self.over_features = launch.tiles("values", *shape), launch.tiles("features", *shape)
        programs = self.batch * self.heads * self.over_values.count
        self.plan = self.key_plan = launch.plan(self.batch, self.length, programs, cu_seqlens, q.device)
        if k.shape[1] != self.length:
            self.key_plan = launch.plan(self.batch, k.shape[1], programs, cu_seqlens, q.device)
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

    def run(self, kernel, tiles: launch.Tiles, tensors, strided, plan: launch.Plan | None = None, **constants) -> None:
        """Launch over (segment, key head, tile); `tensors` and the strides of `strided` are its first arguments."""
        plan = plan or self.plan
        strides = [stride for tensor in strided for stride in tensor.stride()]
        extent = plan.tokens, plan.segments, plan.length, self.heads, tiles.count
        with launch.on_device(self.q):
            kernel[(plan.rows * self.heads * tiles.count,)](
                *tensors, *strides, *extent, **self.shared, **tiles.constants(), **constants
            )

    def new_state(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = rows, self.heads, self.features
        new = self.q.new_empty
        return new(*shape, self.values, dtype=torch.float32), new(shape, dtype=torch.float32)

    def scan(
        self, plan: launch.Plan, sums, initial, keep_final: bool, reverse: bool = False, keep_starts: bool = True
    ) -> tuple[Tensor | None, ...]:
        """Turn the sums of segments into what each starts from, in place; the states after the last, or None."""
        finals = self.new_state(plan.documents) if keep_final else (None, None)
        for own, start, final in zip(sums, initial, finals):
            size = own[0].numel()
            with launch.on_device(self.q):
                scan_kernel[(plan.documents, triton.cdiv(size, 1024))](
                    own, start, final, plan.first, plan.segments, size,
                    BLOCK=1024, PACKED=plan.first is not None, REVERSE=reverse,
                    HAS_INITIAL=start is not None, KEEP_STARTS=keep_starts, KEEP_FINAL=keep_final,
                )  # fmt: skip
        return finals

    def key_sums(self) -> tuple[Tensor, Tensor]:
        """mu and nu of each segment of the keys by itself."""
        sums = self.new_state(self.key_plan.rows)
        self.run(
            key_sums_kernel,
            self.over_values,
            (self.k, self.v, self.mask, self.key_plan.bounds, *sums),
            (self.k, self.v),
            self.key_plan,
            **self.masked,
        )
        return sums

    def query_sums(self, grad_out: Tensor, denominator: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """What each segment of the queries adds to the gradients of mu and nu."""
        sums = self.new_state(self.plan.rows)
        self.run(
            query_sums_kernel,
            self.over_values,
            (self.q, grad_out, denominator, delta, self.plan.bounds, *sums),
            (self.q, grad_out),
            **self.group,
            **self.normalized,
        )
        return sums

    def delta(self, grad_out: Tensor, out: Tensor, denominator: Tensor) -> Tensor:
        """-(dout . out) [B, T, Hq]; nothing without a denominator."""
        if not self.options.normalize:
            return denominator
        delta = torch.empty_like(denominator)
        blocks = triton.cdiv(self.length, 32)
        with launch.on_device(self.q):
            delta_kernel[(self.batch * self.q_heads * blocks,)](
                grad_out, out, delta, *grad_out.stride(), self.length, self.q_heads, blocks,
                E=self.values, BT=32, BE=triton.next_power_of_2(self.values),
            )  # fmt: skip
        return delta

    def end_gradients(self, grad_mu: Tensor | None, grad_nu: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the final state as the kernels read them; None where there are none."""
        if grad_mu is None and grad_nu is None:
            return None, None
        end = self.new_state(self.plan.documents)
        for target, grad in zip(end, (grad_mu, grad_nu)):
            target.zero_() if grad is None else target.copy_(grad)
        return end


def dense(grad_out: Tensor | None, out: Tensor) -> Tensor:
    """grad_out, or zeros where only the state has a gradient."""
    return torch.zeros((), dtype=out.dtype, device=out.device).expand_as(out) if grad_out is None else grad_out
