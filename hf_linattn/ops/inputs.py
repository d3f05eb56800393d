"""What every form does before its sums: check the arguments, once, and split a packed batch into documents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .feature_maps import FeatureMap, feature_map_class
from .state import LinearAttentionState, state_dtype


def resolve_feature_map(feature_map: FeatureMap | str | None, q: Tensor) -> FeatureMap | None:
    """A map given by name becomes an instance; only maps that hold nothing can be given so."""
    if feature_map is None:
        return None
    # The instance is asked, and not its type: adapters wrap it in a module that only hands its attributes on.
    asked = feature_map_class(feature_map) if isinstance(feature_map, str) else feature_map
    if asked.uses_positions:
        name = (asked if isinstance(asked, type) else type(asked)).__name__
        raise ValueError(
            f"feature map {name} depends on positions: map first, with query(q, positions) and "
            "key(k, positions), and pass the features with feature_map=None"
        )
    if not isinstance(feature_map, str):
        return feature_map
    if asked.is_learnable or asked.is_random:
        held = "parameters" if asked.is_learnable else "a random matrix"
        raise ValueError(f"feature_map={feature_map!r} has {held}: pass an instance (make_feature_map), not its name")
    return _parameter_free(asked, q.shape[-1])


@functools.cache
def _parameter_free(cls: type[FeatureMap], head_dim: int) -> FeatureMap:
    """One instance serves every call: it holds nothing but its size."""
    return cls(head_dim)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap | None,
    causal: bool,
    key_mask: Tensor | None,
    initial_state: LinearAttentionState | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    chunk_size: int | None,
) -> None:
    """Raise a one-line ValueError naming the argument, its value and what is allowed."""
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"q, k, v must be [B, T, heads, dim], got {_shapes(q, k, v)}")
    batch, length, q_heads, dim = q.shape
    keys, k_heads = k.shape[1], k.shape[2]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"q, k, v must have one batch size, got {_shapes(q, k, v)}")
    if k.shape[-1] != dim:
        raise ValueError(f"q and k must have one head dim, got {_shapes(q, k, v)}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"k and v must agree in length and heads, got {_shapes(q, k, v)}")
    if k_heads == 0 or q_heads % k_heads != 0:
        raise ValueError(f"query heads (Hq={q_heads}) must be a multiple of key heads (Hk={k_heads})")
    if length == 0 or keys == 0 or batch == 0:
        raise ValueError(f"empty input: batch and lengths must be at least 1, got {_shapes(q, k, v)}")
    if causal and keys != length:
        raise ValueError(f"causal=True needs as many keys as queries, got T={length} and S={keys}; use causal=False")
    if q.dtype != k.dtype or not (q.is_floating_point() and v.is_floating_point()):
        raise ValueError(
            f"q and k must share a floating dtype and v must be floating, got q {q.dtype}, k {k.dtype}, v {v.dtype}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")
    if normalize and feature_map is not None and not feature_map.is_nonnegative:
        raise ValueError(
            f"feature map {type(feature_map).__name__} is signed, so its denominator can vanish: "
            "use normalize=False (normalizer 'rmsnorm' or 'none') or a nonnegative map"
        )
    if key_mask is not None:
        check_key_mask(key_mask, batch, keys)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, batch, length, keys)
    if initial_state is not None:
        rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        _check_state(initial_state, rows, k_heads, v.shape[-1])
        if feature_map is None:
            check_feature_dim(initial_state, dim)


def check_key_mask(key_mask: Tensor, batch: int, keys: int) -> None:
    """`key_mask` must be [B, S], boolean or 0 / 1."""
    if tuple(key_mask.shape) != (batch, keys):
        raise ValueError(f"key_mask has shape {list(key_mask.shape)}; it must be [B, S] = [{batch}, {keys}]")
    if key_mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    wrong = (key_mask != 0) & (key_mask != 1)
    if bool(wrong.any()):
        raise ValueError(
            f"key_mask ({key_mask.dtype}) holds {key_mask[wrong][0].item()}; it must hold only 0 (padding) and 1 "
            "(real key)"
        )


def _check_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int, keys: int) -> None:
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, so the batch size must be 1, got B={batch}")
    if length != keys:
        raise ValueError(f"cu_seqlens needs as many keys as queries, got T={length} and S={keys}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens must be an integer vector of at least 2 offsets, got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device.type != "cpu":
        return  # reading it would wait for the device at every layer; the models check theirs once
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != length or any(a > b for a, b in zip(offsets, offsets[1:])):
        shown = offsets if len(offsets) <= 8 else [*offsets[:4], "...", *offsets[-3:]]
        raise ValueError(f"cu_seqlens={shown} must not decrease, from 0 to T={length}")


def _check_state(state: LinearAttentionState, rows: int, heads: int, values: int) -> None:
    features = state.nu.shape[-1]
    if tuple(state.mu.shape) != (rows, heads, features, values) or tuple(state.nu.shape) != (rows, heads, features):
        raise ValueError(
            f"initial_state has mu {list(state.mu.shape)} and nu {list(state.nu.shape)}; they must be "
            f"[rows, Hk, F, E] = [{rows}, {heads}, {features}, {values}] and [rows, Hk, F]"
        )


def check_feature_dim(state: LinearAttentionState | None, features: int) -> None:
    """The state must have been built with the same feature map."""
    if state is not None and state.nu.shape[-1] != features:
        raise ValueError(
            f"initial_state has feature dim F={state.nu.shape[-1]}, but the feature map gives F={features}"
        )


def features(
    q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), phi(k), v in the dtype of the sums, masked keys zeroed.

    A masked key is replaced before phi, so that its content cannot reach a gradient, and its features are replaced
    after phi, because phi(0) is not 0.
    """
    if key_mask is not None:
        hidden = ~key_mask.bool()[..., None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    phi_q = q if feature_map is None else feature_map.query(q)
    phi_k = k if feature_map is None else feature_map.key(k)
    if key_mask is not None:
        phi_k = phi_k.masked_fill(hidden, 0)
    dtype = state_dtype(q, k, v)
    return phi_q.to(dtype), phi_k.to(dtype), v.to(dtype)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator[..., None]; 0, with zero gradient, where the denominator is 0."""
    empty = denominator == 0
    if not torch.is_grad_enabled():  # nothing flows back through what is replaced
        return (numerator / denominator.unsqueeze(-1)).masked_fill_(empty.unsqueeze(-1), 0)
    ratio = numerator / denominator.masked_fill(empty, 1).unsqueeze(-1)
    return ratio.masked_fill(empty.unsqueeze(-1), 0)


def per_document(
    form: Callable[..., tuple[Tensor, Any]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    key_mask: Tensor | None = None,
    initial_state: Any = None,
    **kwargs,
) -> tuple[Tensor, Any]:
    """Run `form` on each packed document by itself and join outputs (along T) and states (along the rows).

    A state is a named tuple of tensors with a row for each document.
    """
    offsets = cu_seqlens.tolist()
    outs, states = [], []
    for row, (start, stop) in enumerate(zip(offsets, offsets[1:])):
        part = slice(start, stop)
        state = None
        if initial_state is not None:
            state = type(initial_state)(*(x[row : row + 1] for x in initial_state))
        if start == stop:  # an empty document: its state is what it started with
            states.append(state)
            continue
        mask = None if key_mask is None else key_mask[:, part]
        out, final = form(q[:, part], k[:, part], v[:, part], key_mask=mask, initial_state=state, **kwargs)
        outs.append(out)
        states.append(final)
    final = next((state for state in states if state is not None), None)
    if not kwargs["output_final_state"]:
        return torch.cat(outs, 1), None
    empty = [torch.zeros_like(x) for x in final]
    parts = zip(*(empty if state is None else state for state in states))  # mu of every document, nu of every one, ...
    return torch.cat(outs, 1), type(final)(*(torch.cat([x.to(one.dtype) for x in xs]) for one, xs in zip(final, parts)))


def segment_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of the document each of `length` packed tokens belongs to: [1, T]."""
    positions = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.to(positions.dtype), positions, right=True).unsqueeze(0)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
