"""What every form does first: check the arguments, and line up the window of earlier calls with the new keys.

Lined up, keys and values have W + T places: W of the window, then T new ones. The query at place W + t has the window
t + 1 ... W + t; the keys at 0 ... t are older than it. Where tokens are masked, the real ones of each row (of each
document) move together first, so that "the last W real keys" are neighbours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..feature_maps import FeatureMap
from ..inputs import check_feature_dim, check_inputs, resolve_feature_map, segment_ids
from ..state import LinearAttentionState
from .state import SlidingAttentionState

NO_KEY, NO_QUERY = -1, -2  # in place of a document number


def check_sliding_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap | str,
    window: int,
    mix: Tensor | None,
    key_mask: Tensor | None,
    initial_state: SlidingAttentionState | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> FeatureMap:
    """The feature map as an instance; or a one-line ValueError naming the argument, its value and what is allowed."""
    if feature_map is None:
        raise ValueError("feature_map=None: a window needs q and k as they are before phi; pass a map or its name")
    feature_map = resolve_feature_map(feature_map, q)
    sums = None if initial_state is None else LinearAttentionState(initial_state.mu, initial_state.nu)
    check_inputs(q, k, v, feature_map, True, key_mask, sums, cu_seqlens, True, chunk_size)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window={window!r} must be a whole number of keys, at least 1")
    if mix is not None and tuple(mix.shape) != (q.shape[2],):
        raise ValueError(f"mix has shape {list(mix.shape)}; it must be [Hq] = [{q.shape[2]}]")
    if initial_state is not None:
        rows = sums.nu.shape[0]
        for name, x, other in (("keys", initial_state.keys, k), ("values", initial_state.values, v)):
            expected = (rows, window, *other.shape[2:])
            if tuple(x.shape) != expected:
                raise ValueError(
                    f"initial_state has {name} {list(x.shape)}; they must be [rows, W, Hk, ...] = {list(expected)}"
                )
    return feature_map


def check_state_features(state: SlidingAttentionState | None, features: int) -> None:
    """The state must have been built with the same feature map."""
    if state is not None:
        check_feature_dim(LinearAttentionState(state.mu, state.nu), features)


class Aligned(NamedTuple):
    """The window and the new keys in one row; see the top of this file.

    Numbers of documents stand in `key_marks` and `query_marks`: a query sees the keys that have its own number.
    """

    q: Tensor  # [B, T, Hq, D]
    keys: Tensor  # [B, W + T, Hk, D], 0 where there is none
    values: Tensor  # [B, W + T, Hk, E]
    key_marks: Tensor  # [B, W + T], NO_KEY in places without a real key
    query_marks: Tensor  # [B, T], NO_QUERY for a masked token
    order: Tensor | None  # [B, T], the token that stands at each place; `None` if none was moved


def align(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    key_mask: Tensor | None,
    state: SlidingAttentionState | None,
    cu_seqlens: Tensor | None = None,
) -> Aligned:
    """Line up the window of `state` with q, k, v."""
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        documents = torch.zeros(batch, length, dtype=torch.long, device=q.device)
    else:
        documents = segment_ids(cu_seqlens, length)
    key_marks = query_marks = documents
    order = None
    if key_mask is not None:
        key_mask = key_mask.bool()
        # documents are in ascending order, and stay at their places: only tokens within one change theirs
        order = (2 * documents + (~key_mask)).argsort(dim=1, stable=True)
        hidden = ~key_mask[..., None, None]
        q, k, v = (_gather(x.masked_fill(hidden, 0), order) for x in (q, k, v))
        hidden = ~key_mask.gather(1, order)
        key_marks, query_marks = documents.masked_fill(hidden, NO_KEY), documents.masked_fill(hidden, NO_QUERY)
    if state is None:
        before = key_marks.new_full((batch, window), NO_KEY)
        old_keys, old_values = (x.new_zeros(batch, window, *x.shape[2:]) for x in (k, v))
    else:
        before = torch.where(held(state.count, window), 0, NO_KEY)
        old_keys, old_values = state.keys.to(k.dtype), state.values.to(v.dtype)
    keys, values = torch.cat([old_keys, k], 1), torch.cat([old_values, v], 1)
    return Aligned(q, keys, values, torch.cat([before, key_marks], 1), query_marks, order)


def leaving(
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap,
    window: int,
    key_mask: Tensor | None = None,
    initial_state: SlidingAttentionState | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """phi of the key that each of T tokens pushes out of the window, [B, T, Hk, F], 0 where it pushes none; values and
    keys [B, W + T, Hk, ...] as in `Aligned`."""
    row = align(k, k, v, window, key_mask, initial_state)
    length = k.shape[1]
    stays = row.key_marks[:, :length] != row.query_marks
    phi_k = feature_map.key(row.keys[:, :length]).masked_fill(stays[..., None, None], 0)
    return phi_k, row.values, row.keys


def held(count: Tensor, window: int) -> Tensor:
    """Which places of a window have a key: [B, W], the last `count` of each row."""
    return torch.arange(window, device=count.device) >= window - count.unsqueeze(-1)


def put_back(out: Tensor, order: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """[B, T, ...] in the order of the tokens; 0 for masked ones."""
    if order is None:
        return out
    out = _gather(out, order.argsort(dim=1))
    return out.masked_fill(~key_mask.bool()[..., None, None], 0)


def slide(
    keys: Tensor, values: Tensor, window: int, count: Tensor | None, new: Tensor | int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and count of the window after `new` more real keys of each row, from both lined up.

    Args:
        keys, values: [B, W + T, ...] as in `Aligned`.
        count: of the window before, [B]; `None` where there was none.
        new: [B], or the same number in every row.
    """
    batch = keys.shape[0]
    before = torch.zeros(batch, dtype=torch.long, device=keys.device) if count is None else count
    if isinstance(new, Tensor):
        places = new.unsqueeze(1) + torch.arange(window, device=keys.device)
        keys, values = _gather(keys, places), _gather(values, places)
    else:
        # a copy, so that what is kept does not hold on to all that was read
        keys, values = keys[:, new : new + window].clone(), values[:, new : new + window].clone()
    return keys, values, (before + new).clamp(max=window)


def scores_of(q: Tensor, keys: Tensor, equation: str) -> Tensor:
    """q k^T / sqrt(D) by an einsum."""
    return torch.einsum(equation, q, keys) / math.sqrt(q.shape[-1])


def window_weights(scores: Tensor, visible: Tensor, mix: Tensor) -> Tensor:
    """exp(score - m + w) of the keys in the window, 0 elsewhere; m is the largest score that is visible.

    m stands in no other term of the denominator, so it does not cancel, and gradients go through it too.
    """
    scores = scores.masked_fill(~visible, -math.inf)
    top = scores.amax(-1, keepdim=True)
    return (scores - top.masked_fill(top == -math.inf, 0) + mix).exp()


def _gather(x: Tensor, order: Tensor) -> Tensor:
    """x [B, T, H, D] at the places `order` [B, n]."""
    return x.gather(1, order[..., None, None].expand(-1, -1, *x.shape[2:]))
