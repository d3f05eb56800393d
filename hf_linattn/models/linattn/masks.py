"""Masks, positions and packing of a batch: what the layers need to know about which token is what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

from ...cache import STATE_LAYER_TYPES
from ...layers import Packing


def check_attention_mask(mask: Any, batch: int, length: int, past: int | Tensor, whole: bool) -> None:
    """The mask must be [B, past + T] of 0 and 1; `whole` forbids the shorthand [B, T] on a filled cache."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor [B, T] of 0 and 1, got {type(mask).__name__}")
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {mask.dim()} dimensions {list(mask.shape)}; linear attention has no attention matrix "
            "to mask, only keys: pass [B, T] of 0 (padding) and 1, or pack documents with position_ids"
        )
    if mask.shape[0] != batch:
        raise ValueError(f"attention_mask has {mask.shape[0]} rows, the input {batch}")
    if isinstance(past, int):
        # a list, since a length may be a symbol while a graph is exported, and symbols have no hash
        allowed = [past + length] if whole or not past else [length, past + length]
        if mask.shape[1] not in allowed:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens; it must cover {' or '.join(map(str, allowed))}"
                f" ({past} already read + {length} new)"
            )
    elif mask.shape[1] < length:
        raise ValueError(f"attention_mask covers {mask.shape[1]} tokens, the input has {length}")
    if mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    if length == 1 and mask.device.type != "cpu":
        return  # reading it would wait for the device at every step
    mask = mask[:, -length:]  # the rest was checked when it was read
    wrong = (mask != 0) & (mask != 1)
    if bool(wrong.any()):
        raise ValueError(
            f"attention_mask ({mask.dtype}) holds {mask[wrong][0].item()}; it must hold only 0 (padding) and 1 (real)"
        )


def key_mask_of(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """The last `length` columns as bool, or `None` where all of them are real (checked where that costs no wait)."""
    if attention_mask is None:
        return None
    mask = attention_mask[:, -length:].bool().contiguous()
    if torch.compiler.is_compiling() or (length == 1 and mask.device.type != "cpu"):
        return mask
    return None if bool(mask.all()) else mask


def create_key_mask(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of linear layers: [B, T], true where the token is real, or `None`.

    transformers' `create_recurrent_attention_mask` returns `None` for a single token, so that a padding token fed by
    itself would enter the state, and for forms of mask that cannot be honoured; this one raises there.
    """
    batch, length = inputs_embeds.shape[:2]
    if attention_mask is None:
        return None
    past = 0 if cache is None else cache.get_seq_length()
    check_attention_mask(attention_mask, batch, length, past, whole=False)
    mask = attention_mask[:, -length:].bool().contiguous()
    return mask.to(inputs_embeds.device)


LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.update(dict.fromkeys(STATE_LAYER_TYPES, create_key_mask))


def positions_of(key_mask: Tensor | None, padding: Tensor | None, past: int | Tensor, inputs: Tensor) -> Tensor:
    """Position of each new token among the real tokens of its row: [B or 1, T]."""
    batch, length = inputs.shape[:2]
    if key_mask is None:
        positions = torch.arange(length, device=inputs.device).unsqueeze(0) + past
    else:
        positions = key_mask.long().cumsum(-1) - 1 + past
    if padding is not None:
        positions = positions - padding.to(inputs.device).unsqueeze(-1)
    return positions.clamp(min=0)


def find_packing(
    position_ids: Tensor | None,
    key_mask: Tensor | None,
    cu_seq_lens: Tensor | None,
    seq_idx: Tensor | None,
    batch: int,
    length: int,
) -> Packing | None:
    """Documents of a packed batch, from whichever way the caller says it; `None` if each row is one document.

    `position_ids` [B, T] that restart: a real token whose position is not above that of the real token before it
    starts a document. `cu_seq_lens` [N + 1]: offsets into the batch flattened to one row. `seq_idx` [B, T]: the
    number of each token's document.
    """
    if cu_seq_lens is not None:
        starts = _starts_from_offsets(cu_seq_lens, batch, length)
    elif seq_idx is not None:
        if tuple(seq_idx.shape) != (batch, length):
            raise ValueError(f"seq_idx has shape {list(seq_idx.shape)}; it must be [B, T] = [{batch}, {length}]")
        starts = torch.ones_like(seq_idx, dtype=torch.bool)
        starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    elif position_ids is not None and length > 1 and not torch.compiler.is_compiling():
        starts = _starts_from_positions(position_ids, key_mask, batch)
        if starts is None:
            return None
    else:
        return None
    starts[:, 0] = True  # rows are documents of their own
    flat = starts.flatten()
    offsets = torch.nonzero(flat).flatten()
    cu_seqlens = torch.cat([offsets, offsets.new_tensor([batch * length])])
    return Packing(cu_seqlens, (flat.cumsum(0) - 1).view(batch, length))


def restart_positions(packing: Packing, key_mask: Tensor | None = None) -> Tensor:
    """Positions that count the real tokens of every document from 0: [B, T]."""
    first = packing.cu_seqlens[packing.segments]
    if key_mask is None:
        before = torch.arange(packing.segments.numel(), device=first.device)
    else:
        real = key_mask.flatten().long()
        before = real.cumsum(0) - real
    return before.view_as(first) - before[first]


def _starts_from_offsets(cu_seq_lens: Tensor, batch: int, length: int) -> Tensor:
    offsets = cu_seq_lens.tolist()
    if offsets[0] != 0 or offsets[-1] != batch * length or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise ValueError(
            f"cu_seq_lens_q must go from 0 to B T = {batch * length} without decreasing, got {offsets[:4]} ... "
            f"{offsets[-1]}"
        )
    starts = torch.zeros(batch * length, dtype=torch.bool, device=cu_seq_lens.device)
    starts[cu_seq_lens[cu_seq_lens < batch * length].long()] = True
    return starts.view(batch, length)


def _starts_from_positions(position_ids: Tensor, key_mask: Tensor | None, batch: int) -> Tensor | None:
    if key_mask is None:
        restarts = position_ids[:, 1:] <= position_ids[:, :-1]
        if not bool(restarts.any()):
            return None
        starts = torch.zeros_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = restarts
        return starts.expand(batch, -1).clone()
    # compare each real token with the real token before it, wherever padding stands
    position_ids = position_ids.expand(batch, -1)
    order = (~key_mask).to(torch.uint8).argsort(dim=1, stable=True)
    compact, real = position_ids.gather(1, order), key_mask.gather(1, order)
    starts = torch.zeros_like(real)
    starts[:, 1:] = (compact[:, 1:] <= compact[:, :-1]) & real[:, 1:]
    if not bool(starts.any()):
        return None
    return torch.zeros_like(real).scatter(1, order, starts)


def split_masks(attention_mask: Any, layer_types: list[str]) -> tuple[Tensor | None, Tensor | None] | None:
    """A mask already prepared per layer type (by `generate` with a static cache): (key mask, full mask)."""
    if not isinstance(attention_mask, Mapping):
        return None
    unknown = set(attention_mask) - set(layer_types)
    if unknown:
        raise ValueError(f"attention_mask has masks for {sorted(unknown)}; the layers are {sorted(set(layer_types))}")
    key_mask = next((attention_mask[kind] for kind in STATE_LAYER_TYPES if kind in attention_mask), None)
    return key_mask, attention_mask.get("full_attention")
