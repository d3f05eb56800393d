"""Rows of caches: put together a batch from rows that have read different numbers of tokens, and share a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from . import LinearAttentionCache, adopt_cache
from .layers import KernelLinearAttentionLayer
from .static import StaticKernelLinearAttentionLayer


class Row(NamedTuple):
    """One row of a cache whose padding, if there is any, stands on the left."""

    cache: LinearAttentionCache
    index: int
    tokens: int  # real tokens that this row has read; the others that the cache counts are padding


def gather_rows(rows: Sequence[Row]) -> LinearAttentionCache:
    """A new cache whose row i is `rows[i]`: states as they are, keys and values padded on the left to one length.

    The result has read as many tokens as its longest row; `padding` says how many of them are padding in each row, so
    that it is what a left-padded batch of the same texts would have left, and padding that all rows had is gone. No
    source is modified; the result shares no tensor with one.

    Raises:
        ValueError: no rows, or a kind of layer that cannot be moved row by row.
    """
    if not rows:
        raise ValueError("a cache needs at least one row")
    length = max(row.tokens for row in rows)
    padding = [length - row.tokens for row in rows]
    # neighbours from one cache move together
    runs = [(run[0].cache, run) for run in (list(run) for _, run in groupby(rows, key=lambda row: id(row.cache)))]
    result = LinearAttentionCache(rows[0].cache.config)
    for index, layer in enumerate(result.layers):
        sources = [(_movable(cache.layers[index]), run) for cache, run in runs]
        if isinstance(layer, KernelLinearAttentionLayer):
            _gather_states(layer, sources, length, padding)
        else:
            keys = _gather_right_aligned([(source.keys, run) for source, run in sources], length)
            values = _gather_right_aligned([(source.values, run) for source, run in sources], length)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
    return result


def _gather_states(layer, sources, length: int, padding: list[int]) -> None:
    def pick(tensors) -> Tensor:
        return torch.cat(
            [tensor.index_select(0, torch.tensor([row.index for row in run], device=tensor.device))
             for tensor, (_, run) in zip(tensors, sources)]
        )  # fmt: skip

    state = layer.state_class(*(pick(parts) for parts in zip(*(source.state for source, _ in sources))))
    tails = tuple(
        pick([source.conv_tails[part] for source, _ in sources]) for part in range(len(sources[0][0].conv_tails))
    )
    layer.restore(state, tails, length, torch.tensor(padding, device=state.mu.device) if any(padding) else None)


def _gather_right_aligned(sources: list[tuple[Tensor, list[Row]]], length: int) -> Tensor:
    """The last `row.tokens` keys of every row, at the end of [rows, Hk, length, D]; zeros before them."""
    first = sources[0][0]
    count = sum(len(run) for _, run in sources)
    result = first.new_zeros(count, first.shape[1], length, first.shape[3])
    place = 0
    for tensor, run in sources:
        for row in run:
            result[place, :, length - row.tokens :] = tensor[row.index, :, tensor.shape[2] - row.tokens :]
            place += 1
    return result


def _movable(layer):
    linear = isinstance(layer, KernelLinearAttentionLayer) and not isinstance(layer, StaticKernelLinearAttentionLayer)
    if not linear and type(layer) is not DynamicLayer:
        raise ValueError(f"rows of a {type(layer).__name__} cannot be moved; build LinearAttentionCache(model.config)")
    return layer


def share_prefix(cache: Cache, config: PreTrainedConfig) -> LinearAttentionCache:
    """A cache of one row that continues from `cache` and leaves it as it is, without copying its state.

    Any number of caches may start from the same tensors: a layer that shares its state replaces it at its next step.

    Raises:
        ValueError: the cache is empty, static, of another model or of several rows; or it was padded and the model
            has full attention layers, whose keys do not say which of them are padding.
    """
    if not isinstance(cache, Cache) or not any(layer.is_initialized for layer in cache.layers):
        raise ValueError("cache must be a LinearAttentionCache that has read something: leave it out to start afresh")
    adopt_cache(cache, config, batch_size=1)
    shared = LinearAttentionCache(config)
    for index, (own, given) in enumerate(zip(shared.layers, cache.layers)):
        given = _movable(given)
        if not given.is_initialized:
            raise ValueError(f"cache layer {index} is empty, others are not: the cache is not whole")
        if isinstance(own, KernelLinearAttentionLayer):
            padding = 0 if given.padding is None else int(given.padding)
            if padding and "full_attention" in config.layer_types:
                raise ValueError("the cache was padded, and full attention layers keep that: read the text unpadded")
            own.restore(given.state, given.conv_tails, given.seq_length - padding, None)
        else:
            own.lazy_initialization(given.keys, given.values)
            own.keys, own.values = given.keys, given.values
    return shared
