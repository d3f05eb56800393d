"""What `generate()` needs beyond transformers.

The right cache, a sampling loop of flat cost, and errors where it would go wrong silently.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.utils import logging

from ..cache import LinearAttentionCache, register_layers
from .assisted import AssistedDecodingMixin
from .batching import ContinuousBatch, Event
from .checks import check_continuation, check_token_ids
from .continuous import ContinuousBatchingMixin
from .loop import sample, why_stock_loop
from .manager import BatchManager
from .streamers import CallbackStreamer, FileStreamer

logger = logging.get_logger(__name__)


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
        register_layers()
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
            check_continuation(input_ids, generation_config, model_kwargs, past)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)


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
