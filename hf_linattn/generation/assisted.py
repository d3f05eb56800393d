"""Assisted decoding and prompt lookup on a state: what a draft added is undone, what was read is not read again.

`generate()` verifies a draft of several tokens in one call and crops the cache behind the last accepted one. A layer
that keeps a sum can do that while it records its latest calls (`hf_linattn.cache`). This mixin turns the recording on
and off, and lets such a call start from a filled cache, where transformers would feed the whole history once more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from ..cache import adopt_cache, linear_layers
from .checks import check_continuation, check_token_ids, covered_tokens
from .inputs import ModelInputs

# Beside its draft, a model of another tokenizer takes back tokens that were accepted, where text is divided anew.
REENCODED = 64


class AssistedDecodingMixin:
    """Mixed into causal models through `LinearAttentionGenerationMixin`."""

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ):
        """Decode with drafts, from an empty cache or on from a filled one; then the cache records no more.

        `input_ids` [1, T] is the full history, or, with prompt lookup and without padding, only its new tokens under
        an `attention_mask` over all.

        Raises:
            ValueError: before the cache is touched, for ids, a mask or a cache that do not fit, a batch of more than
                one row, and what cannot start from a filled cache.
        """
        cache, batch = kwargs.get("cache"), input_ids.shape[0]
        if cache is None:
            raise ValueError("assisted decoding undoes rejected drafts in a cache: drop use_cache=False")
        if kwargs.get("inputs_embeds") is None:
            check_token_ids(input_ids, self.config.get_text_config().vocab_size)
        if batch > 1:
            raise ValueError(f"assisted decoding takes one row at a time, got {batch}: call generate() for each")
        past = int(cache.get_seq_length())
        if kwargs.get("inputs_embeds") is None:
            check_continuation(input_ids, generation_config, kwargs, past)
        adopt_cache(cache, self.config.get_text_config(decoder=True), batch)
        if past:
            _check_start(input_ids, generation_config, kwargs, past)
        before = [(layer.record_past, layer.max_rollback) for layer in linear_layers(cache)]
        layers = self.config.num_hidden_layers
        cache._assisted = _Assisted(past if _is_whole(input_ids, generation_config, kwargs) else 0, input_ids.shape[1])
        try:
            return super()._assisted_decoding(
                input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
            )
        finally:
            del cache._assisted
            self.config.num_hidden_layers = layers  # an error inside an early exit would leave it lowered
            for layer, (recorded, room) in zip(linear_layers(cache), before):
                layer.max_rollback = room
                if not recorded:
                    layer.deactivate_past_recording()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; the first call of an assisted decoding brings only what the cache has not read.

        `inputs_embeds` stands in the signature because that is where `generate()` looks for whether it is allowed.
        """
        assisted: _Assisted | None = getattr(cache, "_assisted", None)
        if assisted is not None:
            if is_first_iteration and assisted.read:
                next_sequence_length = input_ids.shape[1] - assisted.read
            drafted = input_ids.shape[1] - assisted.prompt if is_first_iteration else next_sequence_length - 1
            for layer in linear_layers(cache):
                layer.make_room(drafted)
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        return ModelInputs(inputs)

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
        if any(layer.record_past for layer in linear_layers(model_kwargs.get("cache"))):
            return False  # drafts differ in length and what is recorded is a list: each step would compile anew
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION:  # lookup drafts past the end of the text
            max_cache_length += generation_config.prompt_lookup_num_tokens or 0
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if generation_config.is_assistant:  # the target may reject all of the draft about to be made, and more
            for layer in linear_layers(model_kwargs.get("cache")):
                layer.make_room((generation_config.max_new_tokens or 0) + REENCODED)
                layer.settles = False


class _Assisted:
    """What stands on a cache while it is the target of an assisted decoding.

    `read`: tokens of the ids that the cache had read before; `prompt`: tokens of the ids before the first draft. It
    stands there, and not on the model, because the draft may be made by the same model with a cache of its own.
    """

    def __init__(self, read: int, prompt: int):
        self.read, self.prompt = read, prompt


def _is_whole(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict) -> bool:
    """Whether the ids are the full history and not only what is new: as long as the mask, which covers all."""
    return covered_tokens(generation_config, model_kwargs) in (-1, input_ids.shape[1])


def _check_start(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict, past: int) -> None:
    """What cannot go on from a cache that has read `past` tokens says so."""
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("assisted decoding cannot go on from a filled cache with inputs_embeds: pass input_ids")
    wanted = [name for name in ("output_attentions", "output_hidden_states") if getattr(generation_config, name, False)]
    if wanted and generation_config.return_dict_in_generate:
        raise ValueError(f"{wanted[0]} needs the whole prompt in one call: pass an empty cache, or decode unassisted")
    if _is_whole(input_ids, generation_config, model_kwargs):
        return
    if generation_config.prompt_lookup_num_tokens is None:
        raise ValueError(
            f"the draft model has not read the {past} tokens in the cache: pass the full history as input_ids, not "
            "only the new tokens"
        )
    if model_kwargs.get("attention_mask") is not None:
        raise ValueError(
            f"the {past} tokens in the cache or the new ones have padding: pass the full history as input_ids for "
            "assisted decoding, not only the new tokens"
        )


__all__ = ["AssistedDecodingMixin"]
