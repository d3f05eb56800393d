"""The cache layers at fixed addresses, for compiled decoding; and which layer is for which layer type.

Importing this module registers all of them with transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from ..ops import SlidingAttentionState
from .layers import (
    LINEAR_LAYER_TYPE,
    SLIDING_LAYER_TYPE,
    KernelLinearAttentionLayer,
    SlidingKernelLinearAttentionLayer,
    State,
)
from .rollback import Recorded


class StaticKernelLinearAttentionLayer(KernelLinearAttentionLayer):
    """The same state at fixed addresses, for compiled decoding; what `StaticCache` builds.

    The state is copied into buffers that stay; `cumulative_length` counts tokens in a tensor so that a compiled
    step does not depend on a Python number. `max_cache_len` is only reported (masks of other layers follow it):
    memory does not depend on it. While a graph for backward is recorded the buffers are replaced instead.
    What is recorded for a rollback is kept in a Python list, so `generate()` does not compile while it records.
    """

    _layer_type = None  # see register_layers: the base class would take the dynamic mapping
    is_compileable = True  # also while recording: transformers leaves out the mask of other static layers otherwise

    def __init__(self, max_cache_len: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.long)

    @property
    def has_padding(self) -> bool:
        return not torch.compiler.is_compiling() and self.padding is not None and bool(self.padding.any())

    def store(
        self,
        state: State,
        conv_tails: tuple[Tensor, ...],
        num_tokens: int,
        record: Recorded | None = None,
    ) -> None:
        if record is not None and self.record_past:
            # the state before the call stands in the buffers, which are about to be written
            self._remember(record.with_start(lambda tensor: tensor.clone()))
        elif self._recorded:
            self._recorded = []
        new = (*state, *conv_tails)
        if not self.is_initialized:
            self.device = state.mu.device
            self.cumulative_length = self.cumulative_length.to(self.device)
            # what came in may be a view or part of a graph output: the buffers are the cache's own
            self._set(tuple(tensor.clone() for tensor in new))
            # there from the start, so that a first padded step finds what every later one finds
            self.padding = torch.zeros(state.mu.shape[0], dtype=torch.long, device=self.device)
            if not torch.compiler.is_compiling():
                for tensor in (*self._tensors(), self.padding, self.cumulative_length):
                    torch._dynamo.mark_static_address(tensor)
        else:
            self._write(new)
        self._count(num_tokens)

    @property
    def owns_state(self) -> bool:
        return self._is_writable()  # whoever looks at the buffers sees them change

    def advance(self, conv_tails: tuple[Tensor, ...]) -> None:
        self._recorded = []
        for buffer, tail in zip(self.conv_tails, conv_tails):
            buffer.copy_(tail)
        self._count(1)

    def add_padding(self, count: Tensor) -> None:
        self.padding.add_(count)

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
        if self.padding is not None:
            self.padding.zero_()
        self.cumulative_length.zero_()
        self._recorded = []

    def _count(self, num_tokens: int) -> None:
        self.cumulative_length.add_(num_tokens)

    def _restore(self, record: Recorded, kept: int) -> None:
        state, tails = record.after(kept)
        if state is None:  # before the first token: the empty state, at the same addresses
            state = map(torch.zeros_like, self._state())
        self._write((*state, *tails))
        if record.key_mask is not None:
            self.padding.sub_(record.key_mask[:, kept:].logical_not().sum(-1))

    def _write(self, new: tuple[Tensor, ...]) -> None:
        if any(tensor.requires_grad for tensor in (*new, *self._tensors())):
            self._set(new)  # what was there may be saved for a backward pass, even if this call records none
            return
        for buffer, tensor in zip(self._tensors(), new):
            buffer.copy_(tensor)

    def _apply(self, function) -> None:
        """Rows may be reordered where they are; another number of rows needs other buffers."""
        before = [*self._tensors(), self.padding]
        super()._apply(function)
        if not before[:-1] or before[0].shape != self._mu.shape or any(x.requires_grad for x in self._tensors()):
            return
        for buffer, tensor in zip(before, [*self._tensors(), self.padding]):
            buffer.copy_(tensor)
        self._set(tuple(before[:-1]))
        self.padding = before[-1]

    def _set(self, tensors: tuple[Tensor, ...]) -> None:
        size = len(self.state_class._fields)
        self._mu, self._nu, self._window, self.conv_tails = *tensors[:2], tensors[2:size], tensors[size:]
        self.is_initialized = True


class StaticSlidingKernelLinearAttentionLayer(StaticKernelLinearAttentionLayer):
    """The state of a sliding layer at fixed addresses."""

    kind = SLIDING_LAYER_TYPE
    state_class = SlidingAttentionState


LAYER_CLASSES = {
    LINEAR_LAYER_TYPE: (KernelLinearAttentionLayer, StaticKernelLinearAttentionLayer),
    SLIDING_LAYER_TYPE: (SlidingKernelLinearAttentionLayer, StaticSlidingKernelLinearAttentionLayer),
}


def register_layers() -> None:
    """Have transformers build the layers of this copy of the code: checkpoints may carry others into the process."""
    for kind, classes in LAYER_CLASSES.items():
        for mapping, layer in zip((DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING), classes):
            if mapping.get(kind) is not layer:
                mapping[kind] = layer


register_layers()
