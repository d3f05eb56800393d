"""The generation cache: mu and nu per layer instead of keys and values, so that nothing grows with length.

Importing this module registers the layer types with transformers: `DynamicCache(config=...)` and
`StaticCache(config=...)` then build these layers wherever a config says `"kernel_linear_attention"`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, DynamicCache

from .ops import LinearAttentionState

LINEAR_LAYER_TYPE = "kernel_linear_attention"


class KernelLinearAttentionLayer(CacheLayerMixin):
    """What one linear attention layer keeps between calls.

    Attributes:
        mu: context summary [B, Hk, F, E], float32; `None` before the first token.
        nu: key summary [B, Hk, F], float32; `None` before the first token.
        conv_tails: the last inputs of the short convolutions (q, k, v), each [B, kernel - 1, channels]; or empty.
        seq_length: tokens seen per row, padding included.
        padding: how many of them were padding [B], int64; `None` while there was none.

    `keys` and `values` stay `None`. States are replaced, never written in place, so that a backward pass through an
    earlier call stays valid and a saved state is never modified.
    """

    _layer_type = LINEAR_LAYER_TYPE
    supports_early_init = False  # F depends on the feature map, which a cache does not know
    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.mu: Tensor | None = None
        self.nu: Tensor | None = None
        self.conv_tails: tuple[Tensor, ...] = ()
        self.padding: Tensor | None = None
        self.seq_length: int = 0
        self.device: torch.device | None = None

    @property
    def state(self) -> LinearAttentionState | None:
        """mu and nu, or `None` before the first token."""
        return LinearAttentionState(self.mu, self.nu) if self.is_initialized else None

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("the layer is empty, so it has no batch size yet")
        return self.mu.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of mu, nu and the convolution tails."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def read(self, heads: int, value_dim: int, tails: tuple[tuple[int, int], ...] = ()) -> LinearAttentionState | None:
        """The state to continue from, checked against what the layer of the model expects.

        Args:
            tails: (kernel - 1, channels) of each short convolution.
        """
        if not self.is_initialized:
            return None
        if self.mu.shape[1] != heads or self.mu.shape[3] != value_dim:
            raise ValueError(
                f"the cache comes from another model: its mu is {list(self.mu.shape)}, this layer needs "
                f"[B, {heads}, F, {value_dim}]"
            )
        held = tuple(tuple(tail.shape[1:]) for tail in self.conv_tails)
        if held != tails:
            raise ValueError(
                f"the cache comes from another model: its convolution tails (kernel - 1, channels) are {held}, this "
                f"layer needs {tails}"
            )
        return LinearAttentionState(self.mu, self.nu)

    def store(self, state: LinearAttentionState, conv_tails: tuple[Tensor, ...], num_tokens: int) -> None:
        """Replace the state by the one after `num_tokens` more tokens."""
        self.mu, self.nu, self.conv_tails = state.mu, state.nu, conv_tails
        self.device = state.mu.device
        self.seq_length = self.seq_length + num_tokens
        self.is_initialized = True

    def add_padding(self, count: Tensor) -> None:
        """Of the tokens just stored, `count` [B] were padding."""
        self.padding = count if self.padding is None else self.padding.to(count.device) + count

    def get_seq_length(self) -> int:
        """Tokens seen so far, padding included (as with a key/value cache)."""
        return self.seq_length

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask that covers everything seen and `query_length` more tokens."""
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a linear attention cache layer holds mu and nu, not keys and values: use `store`")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        raise TypeError("a linear attention cache layer holds mu and nu, not keys and values: use `store`")

    def reset(self) -> None:
        """Forget everything."""
        self.mu = self.nu = self.padding = None
        self.conv_tails = ()
        self.seq_length = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row i from what was row `beam_idx[i]` (beam search)."""
        self._apply(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        self._apply(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, side by side."""
        self._apply(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._apply(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Bring an offloaded state back to its device."""
        if self.is_initialized and self.mu.device != self.device:
            self._apply(lambda tensor: tensor.to(self.device, non_blocking=True))

    def activate_past_recording(self) -> None:
        raise NotImplementedError(
            "this cache cannot be rolled back yet, so assisted decoding and prompt lookup are not available for "
            "linear attention models; drop assistant_model / prompt_lookup_num_tokens"
        )

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(
                f"crop({tokens_to_remove}): a sum cannot forget tokens, and this cache does not record them yet"
            )

    def _tensors(self) -> list[Tensor]:
        return [self.mu, self.nu, *self.conv_tails] if self.is_initialized else []

    def _apply(self, function) -> None:
        if not self.is_initialized:
            return
        self.mu, self.nu = function(self.mu), function(self.nu)
        self.conv_tails = tuple(function(tail) for tail in self.conv_tails)
        if self.padding is not None:
            self.padding = function(self.padding)


class StaticKernelLinearAttentionLayer(KernelLinearAttentionLayer):
    """The same state at fixed addresses, for compiled decoding; what `StaticCache` builds.

    The state is copied into buffers that stay; `cumulative_length` counts tokens in a tensor so that a compiled
    step does not depend on a Python number. `max_cache_len` is only reported (masks of other layers follow it):
    memory does not depend on it. While a graph for backward is recorded the buffers are replaced instead.
    """

    _layer_type = None  # registered below: the base class would take the dynamic mapping
    is_compileable = True

    def __init__(self, max_cache_len: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.long)

    def store(self, state: LinearAttentionState, conv_tails: tuple[Tensor, ...], num_tokens: int) -> None:
        new = (state.mu, state.nu, *conv_tails)
        if not self.is_initialized:
            self.device = state.mu.device
            self.cumulative_length = self.cumulative_length.to(self.device)
            # what came in may be a view or part of a graph output: the buffers are the cache's own
            self._set(tuple(tensor.clone() for tensor in new))
            if not torch.compiler.is_compiling():
                for tensor in (*self._tensors(), self.cumulative_length):
                    torch._dynamo.mark_static_address(tensor)
        elif any(tensor.requires_grad for tensor in (*new, *self._tensors())):
            self._set(new)  # what was there may be saved for a backward pass, even if this call records none
        else:
            for buffer, tensor in zip(self._tensors(), new):
                buffer.copy_(tensor)
        self.cumulative_length.add_(num_tokens)

    def get_seq_length(self) -> int | Tensor:
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def reset(self) -> None:
        """Set the buffers to zero, which is the empty state, and keep their addresses."""
        for tensor in self._tensors():
            tensor.zero_()
        self.padding = None
        self.cumulative_length.zero_()

    def _set(self, tensors: tuple[Tensor, ...]) -> None:
        self.mu, self.nu, self.conv_tails = tensors[0], tensors[1], tensors[2:]
        self.is_initialized = True


STATIC_LAYER_TYPE_MAPPING[LINEAR_LAYER_TYPE] = StaticKernelLinearAttentionLayer


class LinearAttentionCache(DynamicCache):
    """A `DynamicCache` built from a config, with its size in bytes.

    For a model whose layers are all linear, `nbytes` is independent of the number of tokens:
    `config.state_nbytes(batch_size)` before anything is run. Layers show their state as `layer.mu`, `layer.nu`.

    Args:
        config: the config of the model that will fill it.
    """

    def __init__(self, config: PreTrainedConfig, **kwargs: Any):
        super().__init__(config=config, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor the layers keep: mu, nu, convolution tails, and keys and values where there are."""
        return sum(_layer_nbytes(layer) for layer in self.layers)


def _layer_nbytes(layer: Any) -> int:
    if isinstance(layer, KernelLinearAttentionLayer):
        return layer.nbytes
    return sum(tensor.nbytes for tensor in (layer.keys, layer.values) if tensor is not None)


def linear_layers(cache: Cache | None) -> list[KernelLinearAttentionLayer]:
    """The linear attention layers of a cache."""
    return [layer for layer in cache.layers if isinstance(layer, KernelLinearAttentionLayer)] if cache else []


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
    layer_types = config.layer_types
    if len(cache.layers) != len(layer_types):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, the model {len(layer_types)}: it comes from another model"
        )
    for index, (layer, layer_type) in enumerate(zip(cache.layers, layer_types)):
        if isinstance(layer, KernelLinearAttentionLayer) != (layer_type == LINEAR_LAYER_TYPE):
            raise ValueError(
                f"cache layer {index} is a {type(layer).__name__}, but layer {index} of the model is {layer_type!r}; "
                "build the cache with LinearAttentionCache(model.config)"
            )
        held = getattr(layer, "mu", layer.keys)
        if layer.is_initialized and held.numel() and held.shape[0] != batch_size:
            raise ValueError(
                f"the cache holds batch size {held.shape[0]}, but the input has {batch_size}; use a new cache, or "
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
