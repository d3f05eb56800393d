"""Triton kernels: forward and backward, causal or not, and decoding. The signature and result of the torch forms.

Importing this does not import Triton; the first call does. Kernels compute phi in registers in float32, keep mu and nu
in float32, and run products in bf16 for bf16 input, in float32 otherwise (float16 could not hold a state). Without a
GPU, `TRITON_INTERPRET=1` runs them in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ..blocks import without_autocast
from ..feature_maps import Elu1, Exp, FeatureMap, Identity, Relu, Softmax, SquaredRelu
from ..inputs import check_feature_dim, check_inputs, resolve_feature_map
from ..state import LinearAttentionState

FUSED = {Elu1: "elu1", Relu: "relu", SquaredRelu: "squared_relu", Exp: "exp", Softmax: "softmax", Identity: "identity"}
LARGEST = 256  # F and E that the tiles are made for


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: FeatureMap | str | None = None, causal: bool = True
) -> str | None:
    """Why the kernels cannot run this call, in one line, or `None` if they can. Causal or not, there are kernels."""
    if not _installed():
        return "triton is not installed (pip install triton)"
    if q.device.type != "cuda" and not (q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"q is on {q.device.type!r}, and the kernels need a CUDA or ROCm GPU"
    if q.device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{torch.cuda.get_device_name(q.device)} has neither bfloat16 nor TF32 products"
    wrong = [str(x.dtype) for x in (q, k, v) if x.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    if wrong:
        return f"{wrong[0]} has no kernel; choose float32, bfloat16 or float16"
    feature_map = resolve_feature_map(feature_map, q)
    features = q.shape[-1]
    if feature_map is not None and type(feature_map) not in FUSED:
        with torch.no_grad():
            features = feature_map.key(torch.zeros_like(k[:1, :1])).shape[-1]
    for name, size in (("F", features), ("E", v.shape[-1])):
        if size > LARGEST:
            return f"{name}={size} is more than the {LARGEST} that the kernels hold"
    return None


@without_autocast
def triton_linear_attention(
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
    """Linear attention in Triton kernels.

    Arguments, result and errors are those of `linear_attention`. elu1, relu, squared_relu, exp, softmax and identity
    run inside the kernels; any other map is applied first, by torch. `chunk_size` (tokens) is rounded to what the
    kernels have. Gradients are first-order only.

    Raises:
        RuntimeError: the kernels cannot run this call; the message says why.
    """
    feature_map = resolve_feature_map(feature_map, q)
    check_inputs(q, k, v, feature_map, causal, key_mask, initial_state, cu_seqlens, normalize, chunk_size)
    reason = unsupported(q, k, v, feature_map=feature_map)
    if reason is not None:
        raise RuntimeError(f"backend='triton' cannot run this call: {reason}")
    from .call import Options
    from .causal import CausalKernels
    from .decode import decode
    from .noncausal import NonCausalKernels

    input_dtype = q.dtype
    q, k, name = _fuse(q, k, v, feature_map, key_mask)
    check_feature_dim(initial_state, k.shape[-1])
    mask = _bytes(key_mask)
    state = (None, None)
    if initial_state is not None:
        state = tuple(sums.to(torch.float32).contiguous() for sums in initial_state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *state))
    if causal and q.shape[1] == 1 and cu_seqlens is None and not keep:
        if initial_state is None:
            state = LinearAttentionState.zeros(q.shape[0], k.shape[2], k.shape[3], v.shape[3], device=q.device)
        final = tuple(torch.empty_like(sums) for sums in state)
        out = decode(q, k, v, state, final, name, normalize, mask)
    else:
        options = Options(name, input_dtype, normalize, chunk_size)
        kernels = CausalKernels if causal else NonCausalKernels
        out, *final = kernels.apply(q, k, v, *state, mask, cu_seqlens, output_final_state, keep, options)
    return out, LinearAttentionState(*final) if output_final_state else None


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mu: Tensor,
    nu: Tensor,
    *,
    feature_map: FeatureMap | str | None = None,
    normalize: bool = True,
    key_mask: Tensor | None = None,
) -> Tensor:
    """One token for every row, in one launch; **mu and nu are updated in place**. For inference: no gradient flows.

        mu += phi(k)^T v,   nu += phi(k),   out = phi(q) mu / (phi(q) nu)

    Args:
        q: [B, 1, Hq, D].
        k, v: [B, 1, Hk, D], [B, 1, Hk, E].
        mu, nu: contiguous float32 [B, Hk, F, E] and [B, Hk, F].
        feature_map, normalize: as in `linear_attention`.
        key_mask: [B] (or [B, 1]); a row whose key is masked keeps its state.

    Returns:
        out [B, 1, Hq, E] in the dtype of v.
    """
    feature_map = resolve_feature_map(feature_map, q)
    mask = None if key_mask is None else key_mask.reshape(q.shape[0], 1)
    check_inputs(q, k, v, feature_map, True, mask, LinearAttentionState(mu, nu), None, normalize, None)
    if q.shape[1] != 1:
        raise ValueError(f"decode_step takes one token a row, got T={q.shape[1]}")
    for what, sums in (("mu", mu), ("nu", nu)):
        if sums.dtype != torch.float32 or not sums.is_contiguous() or (torch.is_grad_enabled() and sums.requires_grad):
            raise ValueError(f"{what} is updated in place: it must be contiguous float32 that needs no gradient")
    reason = unsupported(q, k, v, feature_map=feature_map)
    if reason is not None:
        raise RuntimeError(f"backend='triton' cannot run this call: {reason}")
    from .decode import decode

    with torch.no_grad():
        q, k, name = _fuse(q, k, v, feature_map, mask)
        check_feature_dim(LinearAttentionState(mu, nu), k.shape[-1])
        return decode(q, k, v, (mu, nu), (mu, nu), name, normalize, _bytes(mask))


def _bytes(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.bool().contiguous().view(torch.uint8)


def _fuse(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap | None, key_mask: Tensor | None):
    """(q, k, name of the map for the kernel); a map that no kernel has is applied here."""
    name = "identity" if feature_map is None else FUSED.get(type(feature_map))
    if name == "softmax":
        from .launch import softmax_fits

        name = name if softmax_fits(q.shape[-1], v.shape[-1]) else None
    if name is not None:
        return q, k, name
    if key_mask is not None:  # before the map, so that what is masked cannot reach its gradient
        k = k.masked_fill(~key_mask.bool()[..., None, None], 0)
    return feature_map.query(q), feature_map.key(k), "identity"


__all__ = ["decode_step", "triton_linear_attention", "unsupported"]
