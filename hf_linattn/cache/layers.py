"""The cache layers: the state of one linear attention layer. Those at fixed addresses are in static.py."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..ops import LinearAttentionState, SlidingAttentionState
from .rollback import Recorded

LINEAR_LAYER_TYPE = "kernel_linear_attention"
SLIDING_LAYER_TYPE = "kernel_linear_attention_sliding"
STATE_LAYER_TYPES = (LINEAR_LAYER_TYPE, SLIDING_LAYER_TYPE)  # those whose cache does not grow
State = LinearAttentionState | SlidingAttentionState


class KernelLinearAttentionLayer(CacheLayerMixin):
    """What one linear attention layer keeps between calls.

    Attributes:
        mu: context summary [B, Hk, F, E], float32; `None` before the first token.
        nu: key summary [B, Hk, F], float32; `None` before the first token.
        conv_tails: the last inputs of the short convolutions (q, k, v), each [B, kernel - 1, channels]; or empty.
        seq_length: tokens seen per row, padding included.
        padding: how many of them were padding [B], int64; `None` while there was none.
        record_past: whether calls are recorded so that `crop` can undo them; see `activate_past_recording`.
        max_rollback: tokens that can be undone; what is older is not recorded, whatever the length of a prompt.
        settles: whether `crop` settles what it leaves; otherwise the latest `max_rollback` tokens can still be undone.
        kind: the layer type of a config that this layer is for.
        state_class: the state that its attention function takes and gives.

    `keys` and `values` stay `None`. A decoding step without autograd writes into the state if the layer alone has it
    (`owns_state`); every other call replaces it. So a backward pass through an earlier call stays valid, and a state
    that came from elsewhere, or that was looked at as `mu` and `nu`, is never modified.
    """

    _layer_type = LINEAR_LAYER_TYPE
    kind: ClassVar[str] = LINEAR_LAYER_TYPE
    state_class: ClassVar[type[State]] = LinearAttentionState
    supports_early_init = False  # F depends on the feature map, which a cache does not know
    is_compileable = False
    is_croppable = True
    is_sliding = False
    max_rollback = 256
    settles = True

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._mu: Tensor | None = None
        self._nu: Tensor | None = None
        self._window: tuple[Tensor, ...] = ()  # what the state has beside mu and nu
        self._owned = False
        self.conv_tails: tuple[Tensor, ...] = ()
        self.padding: Tensor | None = None
        self.seq_length: int = 0
        self.device: torch.device | None = None
        self.record_past = False
        self._recorded: list[Recorded] = []

    @property
    def mu(self) -> Tensor | None:
        self.share()
        return self._mu

    @mu.setter
    def mu(self, value: Tensor | None) -> None:
        self.share()
        self._mu = value

    @property
    def nu(self) -> Tensor | None:
        self.share()
        return self._nu

    @nu.setter
    def nu(self, value: Tensor | None) -> None:
        self.share()
        self._nu = value

    @property
    def owns_state(self) -> bool:
        """Whether a step may write into mu and nu: made by a call of this layer that no backward pass goes through."""
        return self._owned and self._is_writable()

    def _is_writable(self) -> bool:
        """Whether autograd allows it: a tensor made in inference mode cannot be written to outside it."""
        if not self.is_initialized or any(tensor.requires_grad for tensor in self._tensors()):
            return False
        return torch.compiler.is_compiling() or self._mu.is_inference() <= torch.is_inference_mode_enabled()

    def share(self) -> None:
        """Somebody else holds the state from now on: the next step replaces it."""
        self._owned = False

    @property
    def state(self) -> State | None:
        """mu and nu (and the window where there is one), or `None` before the first token."""
        self.share()
        return self._state() if self.is_initialized else None

    @property
    def has_padding(self) -> bool:
        """Whether a call had padding; a compiled call is not asked (reading the count would wait for the device)."""
        return self.padding is not None

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("the layer is empty, so it has no batch size yet")
        return self._mu.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the state and the convolution tails."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def read(self, heads: int, value_dim: int, tails: tuple[tuple[int, int], ...] = ()) -> State | None:
        """The state to continue from, checked against what the layer of the model expects.

        Args:
            tails: (kernel - 1, channels) of each short convolution.
        """
        if not self.is_initialized:
            return None
        if self._mu.shape[1] != heads or self._mu.shape[3] != value_dim:
            raise ValueError(
                f"the cache comes from another model: its mu is {list(self._mu.shape)}, this layer needs "
                f"[B, {heads}, F, {value_dim}]"
            )
        held = tuple(tuple(tail.shape[1:]) for tail in self.conv_tails)
        if held != tails:
            raise ValueError(
                f"the cache comes from another model: its convolution tails (kernel - 1, channels) are {held}, this "
                f"layer needs {tails}"
            )
        return self._state()

    def store(
        self,
        state: State,
        conv_tails: tuple[Tensor, ...],
        num_tokens: int,
        record: Recorded | None = None,
    ) -> None:
        """Replace the state by the one after `num_tokens` more tokens; without a `record` they cannot be undone."""
        if record is None or not self.record_past:
            self._recorded = []
        else:
            self._remember(record)
        self._mu, self._nu, *window = state
        self._window, self.conv_tails = tuple(window), conv_tails
        self.device = state.mu.device
        self._count(num_tokens)
        self.is_initialized = True
        self._owned = not torch.is_grad_enabled()

    def advance(self, conv_tails: tuple[Tensor, ...]) -> None:
        """Count a token that was written into the state; it cannot be undone."""
        self._recorded = []
        self.conv_tails = conv_tails
        self._count(1)

    def restore(self, state: State, conv_tails: tuple[Tensor, ...], seq_length: int, padding: Tensor | None) -> None:
        """Become a layer that has read `seq_length` tokens, with the given state."""
        self.reset()
        self.store(state, conv_tails, seq_length)
        self.padding = padding
        self.share()

    def add_padding(self, count: Tensor) -> None:
        """Of the tokens just stored, `count` [B] were padding."""
        # a tensor of its own: that layers share one after the prompt, but not later, would compile a second graph
        self.padding = count.clone() if self.padding is None else self.padding.to(count.device) + count

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
        self._mu = self._nu = self.padding = None
        self._window = self.conv_tails = ()
        self.seq_length = 0
        self.is_initialized = False
        self._recorded = []

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
        if self.is_initialized and self._mu.device != self.device:
            self._apply(lambda tensor: tensor.to(self.device, non_blocking=True))

    @property
    def recorded_tokens(self) -> int:
        """How many tokens `crop` can undo now."""
        return sum(record.num_tokens for record in self._recorded)

    def activate_past_recording(self) -> None:
        """From now on keep what the latest calls added (at most `max_rollback` tokens), until `crop` settles them."""
        self.record_past = True

    def deactivate_past_recording(self) -> None:
        """Settle what was recorded, and record no more."""
        self.record_past, self.settles = False, True
        self._recorded = []

    def make_room(self, tokens: int) -> None:
        """While recording, be able to undo at least `tokens` tokens."""
        if tokens > self.max_rollback:
            self.max_rollback = tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last `-tokens_to_remove` tokens exactly, and settle the others: they cannot be undone any more.

        Undoing whole calls restores the very tensors from before them. Undoing part of a call adds up the rest of
        it again. `crop(0)` only settles.

        Raises:
            ValueError: for a positive number, or more tokens than were recorded; the state is untouched then.
        """
        self.check_crop(tokens_to_remove)
        left = remove = -tokens_to_remove
        while left:
            record = self._recorded.pop()
            kept = max(0, record.num_tokens - left)
            left -= record.num_tokens - kept
            self._restore(record, kept)
            if kept and not self.settles:
                self._recorded.append(record.first(kept))
        self._count(-remove)
        if self.settles:
            self._recorded = []

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise, and change nothing."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the tokens to remove from the end")
        if -tokens_to_remove > self.recorded_tokens:
            raise ValueError(
                f"crop({tokens_to_remove}): only {self.recorded_tokens} tokens are recorded (at most "
                f"{self.max_rollback}, from activate_past_recording or the last crop on); a sum cannot forget others"
            )

    def _remember(self, record: Recorded) -> None:
        self._recorded.append(record)
        while self._recorded[1:] and self.recorded_tokens - self._recorded[0].num_tokens >= self.max_rollback:
            del self._recorded[0]

    def _count(self, num_tokens: int) -> None:
        self.seq_length = self.seq_length + num_tokens

    def _restore(self, record: Recorded, kept: int) -> None:
        state, self.conv_tails = record.after(kept)
        self._mu, self._nu, *window = (None, None) if state is None else state
        self._window = tuple(window)
        self.is_initialized = state is not None
        self.share()
        if record.key_mask is not None:
            self.padding = self.padding - record.key_mask[:, kept:].logical_not().sum(-1)

    def _state(self) -> State:
        return self.state_class(self._mu, self._nu, *self._window)

    def _tensors(self) -> list[Tensor]:
        return [self._mu, self._nu, *self._window, *self.conv_tails] if self.is_initialized else []

    def _apply(self, function) -> None:
        if not self.is_initialized:
            return
        self._mu, self._nu = function(self._mu), function(self._nu)
        self._window, self.conv_tails = (tuple(map(function, each)) for each in (self._window, self.conv_tails))
        if self.padding is not None:
            self.padding = function(self.padding)
        self._recorded = [record.map(function) for record in self._recorded]


class SlidingKernelLinearAttentionLayer(KernelLinearAttentionLayer):
    """The same of a sliding layer, whose state has a window beside mu and nu: `state.keys`, `.values`, `.count`."""

    _layer_type = kind = SLIDING_LAYER_TYPE
    state_class = SlidingAttentionState
