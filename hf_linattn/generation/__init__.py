"""What `generate()` needs beyond transformers.

The right cache, a sampling loop of flat cost, and errors where it would go wrong silently.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.utils import logging

from ..cache import LinearAttentionCache
from .assisted import AssistedDecodingMixin
from .batching import ContinuousBatch, Event
from .continuous import ContinuousBatchingMixin
from .loop import sample, why_stock_loop
from .manager import BatchManager
from .streamers import CallbackStreamer, FileStreamer

logger = logging.get_logger(__name__)


def check_token_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Every id must be in [0, vocab_size); reads the ids, so it waits for the device they are on."""
    if input_ids.numel() == 0:
        return  # the forward names what is empty
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids holds {wrong}; ids must be in [0, vocab_size) = [0, {vocab_size})")


class LinearAttentionGenerationMixin(AssistedDecodingMixin, ContinuousBatchingMixin):
    """Mixed into causal models, left of `GenerationMixin`, which stays a direct base."""

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if generation_config.cache_implementation == "quantized" and model_kwargs.get("cache") is None:
            raise ValueError(
                "cache_implementation='quantized' is for keys and values; a state has a constant size and stays "
                "float32: drop cache_implementation"
            )
        if (
            model_kwargs.get("cache") is None
            and generation_config.use_cache is not False
            and generation_config.cache_implementation in (None, "dynamic")
            and not generation_config.is_assistant
        ):
            model_kwargs["cache"] = LinearAttentionCache(self.config.get_text_config(decoder=True))
            return
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _sample(self, input_ids: Tensor, **kwargs: Any):
        reason = why_stock_loop(self, kwargs)
        if reason is None:
            return sample(self, input_ids, **kwargs)
        if kwargs.get("use_cache") is not False:  # which is a choice, not a limit
            logger.warning_once(
                f"generate() goes through transformers' own loop, which slows down with length: {reason}"
            )
        return super()._sample(input_ids, **kwargs)

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ):
        cache = model_kwargs.get("cache")
        if model_kwargs.get("inputs_embeds") is None:
            check_token_ids(input_ids, self.config.get_text_config().vocab_size)
            past = 0 if cache is None else int(cache.get_seq_length())
            _check_continuation(input_ids, generation_config, model_kwargs, past)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)


def _check_continuation(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict, past: int) -> None:
    """transformers takes ids as long as the mask for the full history, and cuts off what the cache has read.

    It drops a mask of ones after counting positions from it, so that the forward cannot see a wrong length.
    """
    mask = model_kwargs.get("attention_mask")
    covered = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", -1)
    length = input_ids.shape[1]
    if past and covered == length and length <= past:
        raise ValueError(
            f"the cache has read {past} tokens and input_ids has {length}, so nothing new is left to read: pass the "
            "full history with at least one more token, or only the new tokens with an attention_mask over all "
            f"{past} + {length}"
        )
    if covered not in (-1, length, past + length):
        allowed = f"{length}" if past == 0 else f"{length} (the full history) or {past} already read + {length} new"
        raise ValueError(f"attention_mask covers {covered} tokens; it must cover {allowed}")


__all__ = [
    "BatchManager",
    "CallbackStreamer",
    "ContinuousBatch",
    "ContinuousBatchingMixin",
    "Event",
    "FileStreamer",
    "LinearAttentionGenerationMixin",
    "check_token_ids",
]
