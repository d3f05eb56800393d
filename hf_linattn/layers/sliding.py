"""The sliding layer: softmax over the last keys and linear attention over all older ones, under one denominator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..ops import linear_attention, sliding_attention_weights, sliding_linear_attention
from ..ops.sliding.inputs import leaving
from .linear_attention import LinearAttention

ALONE = 60.0  # e^-60 of the denominator is less than float32 shows


class SlidingLinearAttention(LinearAttention):
    """`LinearAttention` with a window of `config.sliding_window` keys, which softmax attention reads.

        out = sliding_linear_attention(rope(norm(q)), rope(norm(k)), v, mix=window_mix)

    Parameters are those of `LinearAttention` and `window_mix` [Hq], the logarithm of how much the window counts in each
    query head, 0 at the start.

    Args:
        config: also reads sliding_window; its normalizer is "denominator".
        layer_idx, causal: as in `LinearAttention`.

    Raises:
        ValueError: `causal=False`: a window has a side.

    Source: arXiv:2410.10254, section 3.3.
    """

    _weights = staticmethod(sliding_attention_weights)
    _writes_steps = False  # a window moves, so the state is replaced

    def __init__(self, config: PreTrainedConfig, layer_idx: int, causal: bool = True):
        if not causal:
            raise ValueError("causal=False: sliding layers are causal; choose layer_types 'kernel_linear_attention'")
        super().__init__(config, layer_idx, causal)
        self.window_mix = nn.Parameter(torch.zeros(self.num_heads))
        self.only: str | None = None  # "window" or "linear": that part alone, without a cache

    def _attention(self, q, k, v, *, initial_state, output_final_state, **arguments):
        if self.only is None:
            options = {"initial_state": initial_state, "output_final_state": output_final_state}
            return sliding_linear_attention(q, k, v, **options, **arguments)
        if output_final_state:
            raise ValueError(f"only={self.only!r} keeps no state that both parts could go on from: use_cache=False")
        if self.only == "window":
            return sliding_linear_attention(q, k, v, **arguments | {"mix": arguments["mix"] + ALONE})
        del arguments["window"], arguments["mix"]
        return linear_attention(q, k, v, **arguments)

    def _operands(self, q, k, v, position_embeddings, position_ids) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        arguments = {"feature_map": self.feature_map, "window": self.config.sliding_window, "mix": self.window_mix}
        return self._rotate(q, position_embeddings), self._rotate(k, position_embeddings), v, arguments

    def _added(self, k, v, state, arguments) -> tuple[Tensor, ...]:
        options = {name: arguments[name] for name in ("feature_map", "window", "key_mask")}
        return leaving(k, v, initial_state=state, **options)
