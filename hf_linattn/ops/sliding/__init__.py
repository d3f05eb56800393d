"""Sliding window and linear attention with one denominator, as a function of q, k, v: three forms of one result."""

from __future__ import annotations

from torch import Tensor

from ..blocks import without_autocast
from ..feature_maps import FeatureMap
from .chunk import chunk_sliding_attention as _chunk
from .parallel import parallel_sliding_attention as _parallel
from .parallel import sliding_attention_weights as _weights
from .recurrent import recurrent_sliding_attention as _recurrent
from .state import SlidingAttentionState

BACKENDS = ("auto", "torch")

parallel_sliding_attention = without_autocast(_parallel)
chunk_sliding_attention = without_autocast(_chunk)
recurrent_sliding_attention = without_autocast(_recurrent)
sliding_attention_weights = without_autocast(_weights)


def sliding_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap | str,
    window: int,
    mix: Tensor | None = None,
    key_mask: Tensor | None = None,
    initial_state: SlidingAttentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, SlidingAttentionState | None]:
    """Causal attention that is softmax over the last W keys and linear over all older ones, under one denominator.

    A single token runs the recurrence, anything longer the chunk form.

        window(i) = the last W real keys j <= i of the same document, i included
        s_ij = exp(q_i k_j / sqrt(D) - m_i + w_h)     in the window;  m_i = max_{window(i)} q_i k_j / sqrt(D)
        s_ij = phi(q_i) phi(k_j)                      before it
        out_i = sum_j s_ij v_j / sum_j s_ij

    Where W >= T this is softmax attention. m_i keeps the exponentials at most 1 and does not cancel: gradients go
    through the maximum too, and at a tie evenly to all that attain it.

    Args:
        q: queries [B, T, Hq, D], any floating dtype; time comes before heads.
        k: keys [B, T, Hk, D], the dtype of q; query head h reads key head h // (Hq / Hk).
        v: values [B, T, Hk, E].
        feature_map: phi, a nonnegative `FeatureMap`, or the name of a parameter-free one.
        window: W, keys, at least 1.
        mix: w [Hq], the logarithm of how much the window counts; `None` is 0.
        key_mask: [B, T] bool or 0 / 1, true where the token is real. A masked key takes no place in a window and
            enters no sum and no gradient, whatever it holds; a masked query gives 0.
        initial_state: window and sums of earlier keys; never modified.
        output_final_state: also return the state after the last key.
        cu_seqlens: [N + 1] offsets, from 0 to T, of N documents packed into one row (B = 1). Each is attended by
            itself; states then have N rows.
        chunk_size: tokens per chunk; changes speed only. `None` picks by shape.
        backend: `"auto"` or `"torch"`: there is only the PyTorch form.

    Returns:
        `out` [B, T, Hq, E] in the dtype of v, 0 where no key is seen, and the final state or `None`.

    Raises:
        ValueError: shapes that do not fit, a window below 1, a mask that is not 0 / 1, a signed map, `None` or one of
            positions, a backend that has no kernels for this. The message names the argument and the choices.

    Source: arXiv:2410.10254 (LoLCATs), section 3.3, whose window moves by chunks and whose window factors are e^w here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} has no sliding window attention; choose one of {list(BACKENDS)}")
    is_step = q.dim() == 4 and q.shape[1] == 1
    form = recurrent_sliding_attention if is_step else chunk_sliding_attention
    return form(
        q,
        k,
        v,
        feature_map=feature_map,
        window=window,
        mix=mix,
        key_mask=key_mask,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


__all__ = [
    "SlidingAttentionState",
    "chunk_sliding_attention",
    "parallel_sliding_attention",
    "recurrent_sliding_attention",
    "sliding_attention_weights",
    "sliding_linear_attention",
]
