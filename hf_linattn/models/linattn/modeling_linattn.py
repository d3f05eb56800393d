"""The decoder: Llama's blocks with linear attention in place of softmax attention, layer by layer as configured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...cache import (
    LINEAR_LAYER_TYPE,
    SLIDING_LAYER_TYPE,
    STATE_LAYER_TYPES,
    LinearAttentionCache,
    active_layer_types,
    adopt_cache,
    linear_layers,
)
from ...generation import LinearAttentionGenerationMixin, check_token_ids
from ...layers import LinearAttention, ShortConvolution, SlidingLinearAttention
from ...ops import FeatureMap
from ..saving import PortableMixin
from .configuration_linattn import LinAttnConfig
from .masks import (
    check_attention_mask,
    find_packing,
    key_mask_of,
    positions_of,
    restart_positions,
    split_masks,
)
from .parallel import check_tensor_parallel, fill, shard_attentions


class FullAttention(Qwen3Attention):
    """Softmax attention for the layers that keep it: Qwen3's, whose qk norm is the identity unless configured."""

    def __init__(self, config: LinAttnConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.o_proj = nn.Linear(self.o_proj.in_features, self.o_proj.out_features, bias=config.attention_out_bias)
        if not config.qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()


ATTENTION_CLASSES = {
    LINEAR_LAYER_TYPE: LinearAttention,
    SLIDING_LAYER_TYPE: SlidingLinearAttention,
    "full_attention": FullAttention,
}


class LinAttnDecoderLayer(LlamaDecoderLayer):
    """Llama's block around the attention that `config.layer_types` names."""

    def __init__(self, config: LinAttnConfig, layer_idx: int):
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = ATTENTION_CLASSES[config.layer_types[layer_idx]](config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class LinAttnPreTrainedModel(PortableMixin, PreTrainedModel):
    """Base of all linear attention decoders: initialisation, loading, saving, what the library may do with them."""

    config: LinAttnConfig
    config_class = LinAttnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LinAttnDecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": LinAttnDecoderLayer,
        "attentions": [LinearAttention, FullAttention],
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FeatureMap):
            for name, value in module.initial_parameters().items():
                fill(getattr(module, name), value)
        elif isinstance(module, ShortConvolution):
            fill(module.weight, module.initial_weight())
        elif isinstance(module, SlidingLinearAttention):
            fill(module.window_mix, torch.zeros(module.window_mix.shape, device=module.window_mix.device))

    @classmethod
    def maybe_distribute_model(cls, model: PreTrainedModel, distributed_config, mesh_manager) -> PreTrainedModel:
        """Shard over the ranks that `distributed_config` asks for; tensor parallel ones must share the key heads."""
        is_parallel = mesh_manager is not None and distributed_config.tp_size > 1
        if is_parallel:
            check_tensor_parallel(model, distributed_config.tp_size)
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if is_parallel:
            shard_attentions(model, mesh_manager.get_mesh("tp"))
        return model


class LinAttnModel(LinAttnPreTrainedModel):
    """The decoder without a head: token ids [B, T] to hidden states [B, T, hidden_size]."""

    def __init__(self, config: LinAttnConfig):
        config.validate_architecture()  # fields can be changed after construction, as from_pretrained does
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(LinAttnDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read T tokens, from the start or on from a cache.

        Args:
            input_ids: [B, T] token ids; or else `inputs_embeds` [B, T, hidden_size].
            attention_mask: [B, past + T] of 0 (padding) and 1; padding may stand anywhere.
            position_ids: [B, T]; by default each token's place among the real tokens of its row. Positions that
                restart mark packed documents, which do not see each other.
            cache: a `LinearAttentionCache`, `DynamicCache` or `StaticCache` built from this config.
            cu_seq_lens_q: [N + 1] offsets of packed documents, in the batch flattened to one row.
            seq_idx: [B, T], the document number of each token; a third way to say the same.

        Raises:
            ValueError: for a mask, cache or id that does not fit; the message names it and what is allowed.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs.dim() != (2 if inputs_embeds is None else 3):
            raise ValueError(
                f"input_ids must be [B, T] and inputs_embeds [B, T, hidden_size], got shape {list(inputs.shape)}"
            )
        batch, length = inputs.shape[:2]
        if batch == 0 or length == 0:
            raise ValueError(f"the input is empty: [B, T] = [{batch}, {length}]")
        if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
            raise ValueError(
                f"position_ids has shape {list(position_ids.shape)}; it must be [B, T] = [{batch}, {length}] (or B = 1)"
            )
        if inputs_embeds is None:
            if inputs.device.type == "cpu" and not torch.compiler.is_compiling():
                check_token_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)

        if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError(
                "gradient checkpointing would drop the cache and so the state: turn it off, or pass no cache"
            )
        own_cache = cache is None and bool(use_cache)
        cache = LinearAttentionCache(self.config) if own_cache else cache
        if cache is not None:
            adopt_cache(cache, self.config, batch)
        past = cache.get_seq_length() if cache is not None else 0
        layers = linear_layers(cache)
        padding = layers[0].padding if layers else None
        layer_types = active_layer_types(self.config)
        is_hybrid = "full_attention" in layer_types

        prepared = split_masks(attention_mask, layer_types)
        if prepared is not None:
            key_mask, full_mask = prepared
        else:
            if attention_mask is not None:
                check_attention_mask(attention_mask, batch, length, past, whole=is_hybrid)
                attention_mask = attention_mask.to(inputs_embeds.device)
            elif is_hybrid and layers and layers[0].has_padding:
                raise ValueError(
                    "earlier calls had padding, which full attention layers keep: pass attention_mask [B, past + T]"
                )
            key_mask = key_mask_of(attention_mask, length)
        packing = find_packing(position_ids, key_mask, cu_seq_lens_q, seq_idx, batch, length)
        if packing is not None:
            if cache is not None and not own_cache:
                raise ValueError(
                    "packed documents (position_ids that restart, cu_seq_lens_q or seq_idx) have one state each and "
                    "cannot fill a cache of one state per row: pass use_cache=False, or a batch with one per row"
                )
            cache = None
        if position_ids is None:
            position_ids = (
                positions_of(key_mask, padding, past, inputs)
                if packing is None
                else restart_positions(packing, key_mask)
            )
        if prepared is None:
            full_mask = self._full_mask(inputs_embeds, attention_mask, cache, packing, key_mask) if is_hybrid else None
        masks = {**dict.fromkeys(STATE_LAYER_TYPES, key_mask), "full_attention": full_mask}
        self._check_output_attentions(kwargs)

        hidden_states = inputs_embeds
        if key_mask is not None:  # whatever stands under the mask, NaN included, must not reach a gradient
            hidden_states = hidden_states.masked_fill(~key_mask.unsqueeze(-1), 0)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer, layer_type in zip(self.layers, layer_types):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                packing=packing,
                **kwargs,
            )
        if cache is not None and key_mask is not None:
            count = key_mask.logical_not().sum(-1)
            for layer in linear_layers(cache):
                layer.add_padding(count)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _full_mask(self, inputs_embeds, attention_mask, cache, packing, key_mask):
        """The mask of full attention layers, isolating packed documents as the linear ones do."""
        if packing is not None and key_mask is not None:
            raise ValueError("packed documents and padding do not go together in a model with full attention layers")
        return create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask if packing is None else None,
            cache=cache,
            position_ids=None if packing is None else restart_positions(packing),
            layer_idx=self.config.layer_types.index("full_attention"),
        )

    def _check_output_attentions(self, kwargs: dict[str, Any]) -> None:
        wanted = kwargs.get("output_attentions", self.config.output_attentions)
        if wanted and "full_attention" in self.config.layer_types and self.config._attn_implementation != "eager":
            raise ValueError(
                "output_attentions with full_attention layers needs attn_implementation='eager', got "
                f"{self.config._attn_implementation!r}"
            )


class LinAttnForCausalLM(LinAttnPreTrainedModel, LinearAttentionGenerationMixin, GenerationMixin):
    """The decoder with a language modelling head; generates from a cache of constant size."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LinAttnConfig):
        super().__init__(config)
        self.model = LinAttnModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits [B, T, vocab_size], and the loss where `labels` [B, T] are given (-100 is ignored).

        `logits_to_keep` computes only the last n logits (0: all). `num_items_in_batch` divides the summed loss by
        that number instead of the tokens of this batch. The other arguments are those of `LinAttnModel`.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["LinAttnForCausalLM", "LinAttnModel", "LinAttnPreTrainedModel"]
