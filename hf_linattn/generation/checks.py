"""What `generate()` is given, checked before a cache is touched."""

from __future__ import annotations

from torch import Tensor
from transformers import GenerationConfig


def check_token_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Every id must be in [0, vocab_size); reads the ids, so it waits for the device they are on."""
    if input_ids.numel() == 0:
        return  # the forward names what is empty
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids holds {wrong}; ids must be in [0, vocab_size) = [0, {vocab_size})")


def covered_tokens(generation_config: GenerationConfig, model_kwargs: dict) -> int:
    """Tokens that the attention mask covers; transformers drops a mask of ones and leaves its length. -1: unknown."""
    mask = model_kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", -1)


def check_continuation(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict, past: int) -> None:
    """transformers takes ids as long as the mask for the full history, and cuts off what the cache has read.

    It drops a mask of ones after counting positions from it, so that the forward cannot see a wrong length.
    """
    covered = covered_tokens(generation_config, model_kwargs)
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
