"""The attention layer: projections, convolution, positions, feature map, linear attention, normaliser, cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from ..cache import Recorded, prefetch_next
from ..ops import attention_weights, decode_step, linear_attention, make_feature_map
from .short_conv import ShortConvolution, is_few

NORMALIZERS = ("denominator", "rmsnorm", "none")
ROPE_POSITIONS = ("before", "none")


class Packing(NamedTuple):
    """Where the documents of a packed batch begin and end."""

    cu_seqlens: Tensor  # [N + 1], offsets into the batch flattened to one row of B T tokens
    segments: Tensor  # [B, T], the number of the document of each token


class LinearAttention(nn.Module):
    """Multi-head linear attention with Llama's parameter names.

        q, k, v = conv(W_q x), conv(W_k x), conv(W_v x)       conv, qk norm and RoPE where the config asks for them
        out = linear_attention(phi(rope(norm(q))), phi(rope(norm(k))), v)
        y = W_o normalizer(out)

    Args:
        config: reads hidden_size, num_attention_heads, num_key_value_heads, head_dim, attention_bias,
            attention_out_bias, qk_norm, rms_norm_eps, conv_kernel_size, feature_map, feature_map_kwargs, normalizer,
            rope_position.
        layer_idx: which layer of the cache is this one's.
        causal: `False` for encoders: every token reads the sums over all keys.
    """

    _attention = staticmethod(linear_attention)
    _weights = staticmethod(attention_weights)
    _writes_steps = True  # a step of one token may be written into the state

    def __init__(self, config: PreTrainedConfig, layer_idx: int, causal: bool = True):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, causal
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, q_size, kv_size = (
            config.hidden_size,
            self.num_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        self.q_proj = nn.Linear(hidden, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=config.attention_out_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        has_conv = config.conv_kernel_size > 0
        self.q_conv = ShortConvolution(q_size, config.conv_kernel_size) if has_conv else None
        self.k_conv = ShortConvolution(kv_size, config.conv_kernel_size) if has_conv else None
        self.v_conv = ShortConvolution(kv_size, config.conv_kernel_size) if has_conv else None
        self.feature_map = make_feature_map(
            config.feature_map,
            self.head_dim,
            self.num_heads,
            self.num_key_value_heads,
            **(config.feature_map_kwargs or {}),
        )
        is_rmsnorm = config.normalizer == "rmsnorm"
        self.o_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if is_rmsnorm else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        packing: Packing | None = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over `hidden_states` [B, T, hidden] and, with a `cache`, over everything it has read.

        Args:
            position_embeddings: (cos, sin) of RoPE, each [B, T, D].
            attention_mask: key mask [B, T] of these tokens, true where real.
            packing: isolates packed documents (not together with a filled cache).
            output_attentions: also return the implied weights over the keys of this call.
            position_ids: [B, T] (or [1, T]), for feature maps that depend on positions.

        Returns:
            [B, T, hidden], and the weights [B, Hq, T, T] or `None`.
        """
        batch, length, _ = hidden_states.shape
        layer = None if cache is None else cache.layers[self.layer_idx]
        show = output_attentions if output_attentions is not None else self.config.output_attentions
        records = layer is not None and layer.record_past
        if records and length > layer.max_rollback and not show:
            places = (position_embeddings, attention_mask, position_ids)
            return self._in_two(length - layer.max_rollback, hidden_states, *places, cache)
        state, tails = None, ()
        if layer is not None:
            prefetch_next(cache, self.layer_idx, hidden_states.device)
            layer.prefetch()
            convolutions = (self.q_conv, self.k_conv, self.v_conv) if self.q_conv is not None else ()
            shapes = tuple((conv.kernel_size - 1, conv.channels) for conv in convolutions)
            state = layer.read(self.num_key_value_heads, self.head_dim, shapes)
            tails = layer.conv_tails
        q, k, v, conv_inputs, old_tails, tails = self._project(hidden_states, attention_mask, tails, packing)
        q, k, v, arguments = self._operands(q, k, v, position_embeddings, position_ids)
        arguments |= {"key_mask": attention_mask, "cu_seqlens": None}
        if packing is not None:
            q, k, v = (x.reshape(1, batch * length, *x.shape[2:]) for x in (q, k, v))
            arguments["cu_seqlens"] = packing.cu_seqlens
            arguments["key_mask"] = None if attention_mask is None else attention_mask.reshape(1, batch * length)
        weights = None
        plain = not (records or show or packing is not None or torch.is_grad_enabled())
        writes = self._writes_steps and self.is_causal
        if writes and length == 1 and plain and state is not None and layer.owns_state:
            options = {name: arguments[name] for name in ("feature_map", "normalize", "key_mask")}
            out = decode_step(q, k, v, *state, **options)
            layer.advance(tails)
        else:
            out, new_state = self._attention(
                q, k, v, initial_state=state, output_final_state=layer is not None, **arguments
            )
            if show:
                weights = self._weights(q, k, initial_state=state, **arguments)
                if packing is not None:
                    weights = _diagonal_blocks(weights, batch)
            if layer is not None:
                record = None
                if records:
                    added = self._added(k, v, state, arguments)
                    record = Recorded(state, old_tails, *added[:2], conv_inputs, attention_mask, *added[2:])
                layer.store(new_state, tails, length, record)
        if self.o_norm is not None:
            out = self.o_norm(out)
        out = out.reshape(batch, length, self.num_heads * self.head_dim).to(hidden_states.dtype)
        return self.o_proj(out), weights

    def queries_and_keys(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the feature map is applied to: q [B, T, Hq, D] and k [B, T, Hk, D] of `hidden_states` [B, T, hidden]."""
        q, k, *_ = self._project(hidden_states, None, (), None)
        return self._rotate(q, position_embeddings), self._rotate(k, position_embeddings)

    def _in_two(self, head, hidden_states, position_embeddings, key_mask, position_ids, cache) -> tuple[Tensor, None]:
        """Read all but the last tokens unrecorded, so that what a rollback needs does not follow the prompt."""
        layer, outs = cache.layers[self.layer_idx], []
        try:
            for part, records in ((slice(None, head), False), (slice(head, None), True)):
                layer.record_past = records
                position = tuple(x[:, part] for x in position_embeddings)
                mask, ids = (None if each is None else each[:, part] for each in (key_mask, position_ids))
                outs.append(self.forward(hidden_states[:, part], position, mask, cache, position_ids=ids)[0])
        finally:
            layer.record_past = True
        return torch.cat(outs, 1), None

    def _operands(self, q, k, v, position_embeddings, position_ids) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, k and v for the attention function, and its arguments that the config decides."""
        feature_map = self.feature_map
        if is_few(q.shape[1]) and feature_map.is_one_function:
            # what costs here is the number of operations: rotate and map queries and keys in one go
            heads = [self.num_heads, self.num_key_value_heads]
            q, k = feature_map.key(self._rotate(torch.cat([q, k], 2), position_embeddings)).split(heads, 2)
            feature_map = None
        else:
            q, k = self._rotate(q, position_embeddings), self._rotate(k, position_embeddings)
            if feature_map.uses_positions:
                q, k = feature_map.query(q, position_ids), feature_map.key(k, position_ids)
                feature_map = None
        normalize = self.config.normalizer == "denominator"
        # without a denominator sums grow with length: they stay float32 until they are normalised
        values = v if normalize or v.dtype == torch.float64 else v.float()
        return q, k, values, {"feature_map": feature_map, "causal": self.is_causal, "normalize": normalize}

    def _added(self, k, v, state, arguments) -> tuple[Tensor, ...]:
        """phi(k) and v that this call adds to the sums, 0 where masked: what `crop` needs to undo a part of it."""
        feature_map, key_mask = arguments["feature_map"], arguments["key_mask"]
        phi_k = k if feature_map is None else feature_map.key(k)
        if key_mask is None:
            return phi_k, v
        hidden = ~key_mask[..., None, None]
        return phi_k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)

    def _rotate(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """RoPE where the config asks for it: [B, T, H, D]."""
        if self.config.rope_position != "before" or position_embeddings is None:
            return x
        cos, sin = (each.unsqueeze(2) for each in position_embeddings)
        return x * cos + rotate_half(x) * sin

    def _project(self, hidden_states, key_mask, tails, packing):
        """q [B, T, Hq, D], k and v [B, T, Hk, D]; the convolutions' inputs, their old and new tails."""
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        inputs, old = (), ()
        if self.q_conv is not None:
            segments = None if packing is None else packing.segments
            inputs = (q, k, v)
            convolutions = (self.q_conv, self.k_conv, self.v_conv)
            old = tails or tuple(conv.empty_tail(x) for conv, x in zip(convolutions, inputs))
            (q, q_tail), (k, k_tail), (v, v_tail) = (
                conv(x, tail, key_mask, segments) for conv, x, tail in zip(convolutions, inputs, old)
            )
            tails = (q_tail, k_tail, v_tail)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v, inputs, old, tails


def _diagonal_blocks(weights: Tensor, batch: int) -> Tensor:
    """Weights of a batch flattened to one row, back per row: [1, Hq, B T, B T] -> [B, Hq, T, T]."""
    grid = weights[0].unflatten(-1, (batch, -1)).unflatten(1, (batch, -1))  # [Hq, B, T, B, T]
    return grid.diagonal(dim1=1, dim2=3).permute(3, 0, 1, 2)
