"""The generation cache: mu and nu per layer instead of keys and values, so that nothing grows with length.

Importing this package registers the layer types with transformers: `DynamicCache(config=...)` and
`StaticCache(config=...)` then build these layers wherever a config says `"kernel_linear_attention"` or
`"kernel_linear_attention_sliding"`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from .files import load_state, save_state, state_header
from .layers import (
    LINEAR_LAYER_TYPE,
    SLIDING_LAYER_TYPE,
    STATE_LAYER_TYPES,
    KernelLinearAttentionLayer,
    SlidingKernelLinearAttentionLayer,
)
from .rollback import Recorded, next_tail, real_first
from .static import StaticKernelLinearAttentionLayer, StaticSlidingKernelLinearAttentionLayer, register_layers


class LinearAttentionCache(DynamicCache):
    """A `DynamicCache` built from a config, with its size in bytes, that can be saved to a file and loaded.

    For a model whose layers are all linear, `nbytes` is independent of the number of tokens:
    `config.state_nbytes(batch_size)` before anything is run. Layers show their state as `layer.mu`, `layer.nu`.

    Args:
        config: the config of the model that will fill it.
    """

    def __init__(self, config: PreTrainedConfig, **kwargs: Any):
        register_layers()
        super().__init__(config=config, **kwargs)
        self.config = config

    def save(self, path: str | os.PathLike, model: nn.Module | None = None) -> None:
        """Write the state to a safetensors file: its size does not depend on how much was read.

        Args:
            path: the file; replaced only when the new one is complete.
            model: the model that filled the cache; with it, `load` also refuses other weights.

        Raises:
            ValueError: the cache is empty or static.
        """
        save_state(self, path, model)

    @classmethod
    def load(cls, path: str | os.PathLike, model: nn.Module) -> LinearAttentionCache:
        """A cache with the state of a file, on the devices of `model`, ready to continue from.

        Raises:
            ValueError: the file is missing, truncated, no saved state, of a later format, or of another model.
        """
        cache = cls(model.config)
        load_state(cache, path, model)
        return cache

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last `-tokens_to_remove` tokens in every layer, or refuse before any layer is touched."""
        for layer in linear_layers(self):
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor the layers keep: states, convolution tails, and keys and values where there are."""
        return sum(_layer_nbytes(layer) for layer in self.layers)


def _layer_nbytes(layer: Any) -> int:
    if isinstance(layer, KernelLinearAttentionLayer):
        return layer.nbytes
    return sum(tensor.nbytes for tensor in (layer.keys, layer.values) if tensor is not None)


def linear_layers(cache: Cache | None) -> list[KernelLinearAttentionLayer]:
    """The linear attention layers of a cache."""
    return [layer for layer in cache.layers if isinstance(layer, KernelLinearAttentionLayer)] if cache else []


def active_layer_types(config: PreTrainedConfig) -> list[str]:
    """The types of the layers that run: all, or the first few while `assistant_early_exit` drafts with them.

    transformers asks for fewer layers by lowering `config.num_hidden_layers` for the time of a draft.
    """
    return config.layer_types[: config.num_hidden_layers]


def adopt_cache(cache: Cache, config: PreTrainedConfig, batch_size: int) -> Cache:
    """Check that `cache` fits a model of `config` and an input of `batch_size` rows, before any layer is written.

    An empty `DynamicCache()` without layers gets the right ones.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"cache must be a transformers Cache (LinearAttentionCache(model.config)), got {type(cache).__name__}"
        )
    if not cache.layers and isinstance(cache, DynamicCache):
        cache.layers = LinearAttentionCache(config).layers
        cache.layer_class_to_replicate = None
    layer_types = active_layer_types(config)
    if len(cache.layers) != len(layer_types):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, the model {len(layer_types)}: it comes from another model"
        )
    for index, (layer, layer_type) in enumerate(zip(cache.layers, layer_types)):
        is_linear = isinstance(layer, KernelLinearAttentionLayer)
        if (layer.kind if is_linear else None) != (layer_type if layer_type in STATE_LAYER_TYPES else None):
            brings_keys = layer.is_initialized and not is_linear
            why = ": a state is a sum, so that prefix tuning has no keys to stand before (tune prompts or LoRA)"
            raise ValueError(
                f"cache layer {index} is a {type(layer).__name__}, but layer {index} of the model is {layer_type!r}; "
                f"build the cache with LinearAttentionCache(model.config){why if brings_keys else ''}"
            )
        if not layer.is_initialized or not (is_linear or layer.keys.numel()):
            continue
        rows = layer.batch_size if is_linear else layer.keys.shape[0]
        if rows != batch_size:
            raise ValueError(
                f"the cache holds batch size {rows}, but the input has {batch_size}; use a new cache, or "
                "cache.batch_repeat_interleave / batch_select_indices to change its rows"
            )
    return cache


def prefetch_next(cache: Cache, layer_idx: int, device: torch.device) -> None:
    """With an offloaded cache, start bringing back the next layer, as `Cache.update` does for key/value layers."""
    if getattr(cache, "offloading", False):
        stream = torch.cuda.default_stream(device)
        stream.wait_stream(cache.prefetch_stream)
        cache.prefetch_stream.wait_stream(stream)
        cache.prefetch(layer_idx + 1, cache.only_non_sliding)


__all__ = [
    "LINEAR_LAYER_TYPE",
    "SLIDING_LAYER_TYPE",
    "STATE_LAYER_TYPES",
    "KernelLinearAttentionLayer",
    "LinearAttentionCache",
    "Recorded",
    "SlidingKernelLinearAttentionLayer",
    "StaticKernelLinearAttentionLayer",
    "StaticSlidingKernelLinearAttentionLayer",
    "active_layer_types",
    "adopt_cache",
    "linear_layers",
    "next_tail",
    "prefetch_next",
    "real_first",
    "register_layers",
    "state_header",
]
