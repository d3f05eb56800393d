"""Linear attention as a function of q, k, v: three forms of one result, and the dispatcher that picks among them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends
from .backends import BACKENDS
from .blocks import without_autocast
from .chunk import chunk_linear_attention as _chunk
from .feature_maps import FEATURE_MAPS, FeatureMap, feature_map_class, make_feature_map, register_feature_map
from .inputs import resolve_feature_map
from .parallel import attention_weights as _attention_weights
from .parallel import parallel_linear_attention as _parallel
from .recurrent import recurrent_linear_attention as _recurrent
from .sliding import (
    SlidingAttentionState,
    chunk_sliding_attention,
    parallel_sliding_attention,
    recurrent_sliding_attention,
    sliding_attention_weights,
    sliding_linear_attention,
)
from .state import LinearAttentionState
from .step import decode_step as _decode_step
from .traced import traced_linear_attention as _traced

parallel_linear_attention = without_autocast(_parallel)
chunk_linear_attention = without_autocast(_chunk)
recurrent_linear_attention = without_autocast(_recurrent)
traced_linear_attention = without_autocast(_traced)
attention_weights = without_autocast(_attention_weights)
decode_step = without_autocast(_decode_step)


def linear_attention(
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
    backend: str = "auto",
) -> tuple[Tensor, LinearAttentionState | None]:
    """Kernelised linear attention; a single token runs the recurrence, anything longer the chunk form.

    Under `torch.compile` and `torch.export` the chunk form is one graph for every length, but for packed documents.

        mu_i = mu_{i-1} + phi(k_i)^T v_i,   nu_i = nu_{i-1} + phi(k_i)
        out_i = phi(q_i) mu_i / (phi(q_i) nu_i)          causal; else mu_S, nu_S serve every i

    Args:
        q: queries [B, T, Hq, D], any floating dtype; time comes before heads.
        k: keys [B, S, Hk, D], the dtype of q; Hq must be a multiple of Hk, and query head h reads key head
            h // (Hq / Hk). Causal attention needs S = T.
        v: values [B, S, Hk, E].
        feature_map: phi; `None` if q and k are features already; a `FeatureMap`, or the name of a parameter-free one.
        key_mask: [B, S] bool or 0 / 1, true where the key is real. A masked key enters no sum and no gradient,
            whatever it holds.
        initial_state: sums over earlier keys; never modified. Not causal: added to the sums over these keys.
        output_final_state: also return the state after the last key.
        cu_seqlens: [N + 1] offsets, from 0 to T, of N documents packed into one row (B = 1). Each is attended by
            itself; states then have N rows.
        normalize: divide by phi(q) nu. Where that is 0 (no key yet) the output and its gradient are 0.
        chunk_size: tokens per chunk; changes speed only. `None` picks by shape.
        backend: `"torch"` for pure PyTorch, `"native"` for the CPU kernels of the causal form, `"triton"` for the GPU
            kernels. `"auto"` takes the native kernels where they can run the call, and PyTorch otherwise (a warning
            says so, once, where the machine is the reason); `HF_LINATTN_BACKEND` names another first choice.

    Returns:
        `out` [B, T, Hq, E] in the dtype of v, and the final state ([B, Hk, F, E] and [B, Hk, F], float32, float64
        for float64 input) or `None`.

    Raises:
        ValueError: shapes that do not fit, T or S of 0, Hq not a multiple of Hk, a mask that is not 0 / 1, a signed
            map with `normalize=True`, an unknown map or backend. The message names the argument and the choices.
        RuntimeError: the backend asked for by name cannot run this call here; the message says why.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose one of {list(BACKENDS)}")
    feature_map = resolve_feature_map(feature_map, q)
    if not q.dim() == k.dim() == v.dim() == 4:
        backend = "torch"  # which says what is wrong
    if backend == "auto":
        backend = backends.choose(q, k, v, feature_map=feature_map, causal=causal).backend
    if backend == "torch":
        is_step = causal and q.dim() == 4 and q.shape[1] == 1
        is_traced = torch.compiler.is_compiling() and cu_seqlens is None
        whole = traced_linear_attention if is_traced else chunk_linear_attention
        form = recurrent_linear_attention if is_step else whole
    else:
        form = backends.form(backend)
    return form(
        q,
        k,
        v,
        feature_map=feature_map,
        causal=causal,
        key_mask=key_mask,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize=normalize,
        chunk_size=chunk_size,
    )


__all__ = [
    "BACKENDS",
    "FEATURE_MAPS",
    "FeatureMap",
    "LinearAttentionState",
    "SlidingAttentionState",
    "attention_weights",
    "chunk_linear_attention",
    "chunk_sliding_attention",
    "decode_step",
    "feature_map_class",
    "linear_attention",
    "make_feature_map",
    "parallel_linear_attention",
    "parallel_sliding_attention",
    "recurrent_linear_attention",
    "recurrent_sliding_attention",
    "register_feature_map",
    "sliding_attention_weights",
    "sliding_linear_attention",
    "traced_linear_attention",
]
