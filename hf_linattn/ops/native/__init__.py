"""The causal form in C for the CPU: chunks that stay in a core's cache, a thread for some heads of a sequence.

Same signature and result as the torch forms. The kernels (kernels.c) are compiled by the machine's own C compiler at
the first call, which takes a second or two, and kept in a cache folder; see build.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..blocks import first_order_only, without_autocast
from ..feature_maps import Elu1, Exp, FeatureMap, Identity, Relu, Softmax, SquaredRelu
from ..inputs import check_feature_dim, check_inputs, resolve_feature_map
from ..state import LinearAttentionState
from .build import library, missing

MAPS = {Identity: 0, Elu1: 1, Relu: 2, SquaredRelu: 3, Exp: 4, Softmax: 5}  # as in kernels.c
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
FORWARD, BACKWARD = 0, 1
CHUNK = 64  # tokens; `C` of kernels.c
TOKENS_A_THREAD = 256  # times heads; for less, waking another thread takes longer than it saves
STATE_BYTES = 1 << 18  # of the heads that a thread takes together: what stays in a core's second-level cache


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: FeatureMap | str | None = None, causal: bool = True
) -> str | None:
    """Why the kernels cannot run this call, in one line, or `None` if they can."""
    if q.device.type != "cpu":
        return f"q is on {q.device.type!r}, and the kernels are for the CPU"
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in (q, k, v)):
        return "q, k or v is a tensor subclass, which may have no memory to read"
    if not causal:
        return "causal=False has no kernel"
    wrong = [str(x.dtype) for x in (q, k, v) if x.dtype not in DTYPES]
    if wrong:
        return f"{wrong[0]} has no kernel; choose float32 or bfloat16"
    feature_map = resolve_feature_map(feature_map, q)
    if feature_map is not None and type(feature_map) not in MAPS:
        return f"feature map {type(feature_map).__name__} has no kernel"
    return missing()


@without_autocast
def native_linear_attention(
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
    """Causal linear attention in C kernels.

    Arguments, result and errors are those of `linear_attention`. elu1, relu, squared_relu, exp, softmax and identity
    run inside the kernels. `chunk_size` is accepted and unused: the kernels have one. Gradients are first-order only.

    Raises:
        RuntimeError: the kernels cannot run this call; the message says why.
    """
    feature_map = resolve_feature_map(feature_map, q)
    check_inputs(q, k, v, feature_map, causal, key_mask, initial_state, cu_seqlens, normalize, chunk_size)
    reason = unsupported(q, k, v, feature_map=feature_map, causal=causal)
    if reason is not None:
        raise RuntimeError(f"backend='native' cannot run this call: {reason}")
    check_feature_dim(initial_state, k.shape[-1])
    state = (None, None)
    if initial_state is not None:
        state = tuple(sums.float().contiguous() for sums in initial_state)
    mask = None if key_mask is None else key_mask.bool()
    name = 0 if feature_map is None else MAPS[type(feature_map)]
    arguments = (q, k, v, *state, mask, cu_seqlens, name, normalize, output_final_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *state)):
        out, *final = CausalKernels.apply(*arguments)
    else:
        out, *final = CausalKernels.forward(None, *arguments)
    return out, LinearAttentionState(*final) if output_final_state else None


class _Strided(ctypes.Structure):
    """`Tensor` of kernels.c."""

    _fields_ = [("data", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "token", "head", "dtype")]


_TENSORS = ("q", "k", "v", "out", "below", "grad_out", "grad_q", "grad_k", "grad_v", "mask")
_POINTERS = ("initial_mu", "initial_nu", "final_mu", "final_nu", "grad_initial_mu", "grad_initial_nu")
_POINTERS += ("segments", "between")
_NUMBERS = ("batch", "tokens", "count", "heads", "group", "features", "values", "map", "normalize", "threads")
_NUMBERS += ("side_by_side",)


class _Call(ctypes.Structure):
    """`Call` of kernels.c."""

    _fields_ = (
        [(n, _Strided) for n in _TENSORS]
        + [(n, ctypes.c_void_p) for n in _POINTERS]
        + [(n, ctypes.c_int64) for n in _NUMBERS]
    )


def _strided(x: Tensor) -> _Strided:
    return _Strided(x.data_ptr(), *x.stride()[:2], x.stride(2) if x.dim() > 3 else 0, DTYPES.get(x.dtype, 0))


def _threads(q: Tensor) -> int:
    return min(torch.get_num_threads(), max(1, q.shape[:3].numel() // TOKENS_A_THREAD))


def _segments(q: Tensor, heads: int, cu_seqlens: Tensor | None) -> Tensor:
    """[count, 4]: batch row, first token, tokens, row of the state. Where there are fewer heads than threads, a
    sequence is cut into segments of whole chunks, so that each thread has one."""
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        rows = [(row, 0, length, row) for row in range(batch)]
    else:
        starts = cu_seqlens.tolist()
        rows = [(0, start, stop - start, row) for row, (start, stop) in enumerate(zip(starts, starts[1:]))]
    parts = _threads(q) // (len(rows) * heads)
    if parts > 1 and length >= 4 * CHUNK * parts:
        rows = [segment for row in rows for segment in _cut(*row, parts)]
    return torch.tensor(rows)


def _cut(row: int, first: int, tokens: int, state: int, parts: int) -> list[tuple[int, int, int, int]]:
    size = max(1, -(-tokens // (parts * CHUNK))) * CHUNK
    return [(row, first + at, min(size, tokens - at), state) for at in range(0, max(tokens, 1), size)]


def _run(direction: int, segments: Tensor, tensors: dict, pointers: dict, numbers: dict) -> None:
    """Call the kernels; names are those of `Call`."""
    heads, features, values, count = numbers["heads"], numbers["features"], numbers["values"], len(segments)
    # heads that a thread takes together: what its cache holds, in at least two tasks for every thread
    fitting = STATE_BYTES // (2 * 4 * features * values)
    together = max(1, min(fitting, count * heads // (2 * numbers["threads"])))
    between = None
    if count > int(segments[-1, 3]) + 1:  # states pass between segments
        between = torch.zeros(2, count, heads, features * (values + 1))
    pointers = {**pointers, "segments": segments, "between": between}
    call = _Call(
        **{name: _strided(x) for name, x in tensors.items() if x is not None},
        **{name: x.data_ptr() for name, x in pointers.items() if x is not None},
        **numbers,
        count=count,
        side_by_side=together,
    )
    if library().hf_linattn_run(ctypes.byref(call), direction):
        raise MemoryError("the kernels could not allocate their scratch memory")


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class CausalKernels(torch.autograd.Function):
    """(q, k, v, initial mu and nu or None, ...) -> (out, final mu, final nu)."""

    @staticmethod
    def forward(ctx, q, k, v, mu, nu, mask, cu_seqlens, name, normalize, output_final_state):
        q, k, v = (_with_contiguous_rows(x) for x in (q, k, v))
        heads, features, values = k.shape[2], k.shape[3], v.shape[3]
        segments = _segments(q, heads, cu_seqlens)
        states = int(segments[-1, 3]) + 1
        out = v.new_empty(*q.shape[:3], values)
        below = q.new_empty(*q.shape[:3], 1, dtype=torch.float32) if ctx and normalize else None
        final_mu, final_nu = None, None
        if output_final_state:
            final_mu = q.new_empty(states, heads, features, values, dtype=torch.float32)
            final_nu = q.new_empty(states, heads, features, dtype=torch.float32)
        numbers = {
            "batch": q.shape[0],
            "tokens": q.shape[1],
            "heads": heads,
            "group": q.shape[2] // heads,
            "features": features,
            "values": values,
            "map": name,
            "normalize": int(normalize),
            "threads": _threads(q),
        }
        _run(
            FORWARD,
            segments,
            {"q": q, "k": k, "v": v, "out": out, "below": below, "mask": mask},
            {"initial_mu": mu, "initial_nu": nu, "final_mu": final_mu, "final_nu": final_nu},
            numbers,
        )
        if ctx is not None:
            ctx.save_for_backward(q, k, v, mu, nu, mask, out, below)
            ctx.segments, ctx.numbers = segments, numbers
        return out, final_mu, final_nu

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_mu, grad_nu):
        q, k, v, mu, nu, mask, out, below = ctx.saved_tensors
        grad_out = _with_contiguous_rows(grad_out)
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        grad_initial_mu, grad_initial_nu = (None if x is None else torch.empty_like(x) for x in (mu, nu))
        grad_mu, grad_nu = (None if x is None else x.contiguous() for x in (grad_mu, grad_nu))
        _run(
            BACKWARD,
            ctx.segments,
            {
                "q": q,
                "k": k,
                "v": v,
                "out": out,
                "below": below,
                "mask": mask,
                "grad_out": grad_out,
                "grad_q": grad_q,
                "grad_k": grad_k,
                "grad_v": grad_v,
            },
            {
                "initial_mu": mu,
                "initial_nu": nu,
                "final_mu": grad_mu,
                "final_nu": grad_nu,
                "grad_initial_mu": grad_initial_mu,
                "grad_initial_nu": grad_initial_nu,
            },
            ctx.numbers,
        )
        return grad_q, grad_k, grad_v, grad_initial_mu, grad_initial_nu, *(None,) * 5


__all__ = ["missing", "native_linear_attention", "unsupported"]
