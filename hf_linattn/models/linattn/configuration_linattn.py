"""Configuration of the decoder: Llama's fields, and what linear attention adds."""

# No `from __future__ import annotations` here: @strict checks the types of fields, and cannot check their names.
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from ...cache import LINEAR_LAYER_TYPE, SLIDING_LAYER_TYPE, STATE_LAYER_TYPES
from ...layers import NORMALIZERS, ROPE_POSITIONS
from ...ops import FEATURE_MAPS, feature_map_class, make_feature_map
from ..installed import is_carried
from .presets import preset

FORMAT_VERSION = 1
LAYER_TYPES = (*STATE_LAYER_TYPES, "full_attention")


@strict
class LinAttnConfig(LlamaConfig):
    """Configuration of a Llama-shaped decoder whose self-attention is linear attention.

    Fields not listed are Llama's and mean the same.

    Args:
        layer_types: per layer, `"kernel_linear_attention"`, `"kernel_linear_attention_sliding"` (softmax over a window
            of the latest keys, linear attention over all older ones) or `"full_attention"`; `None` makes every layer
            linear.
        sliding_window: keys in the window of sliding layers, the token itself included; `None` without such layers.
        feature_map: phi, a name in `hf_linattn.FEATURE_MAPS`.
        feature_map_kwargs: options of that map.
        normalizer: `"denominator"` divides by phi(q) nu; `"rmsnorm"` keeps the numerator and normalises each head;
            `"none"` keeps the numerator.
        rope_position: `"before"` rotates queries and keys before phi; `"none"` leaves linear layers without positions.
            Full attention layers always rotate.
        conv_kernel_size: 0, or the length of a causal depthwise convolution on q, k and v (4 is usual).
        qk_norm: RMSNorm on each query and key head (Qwen3).
        attention_bias: biases of the q, k, v projections.
        attention_out_bias: bias of the output projection; `None` follows `attention_bias` (Llama); Qwen2 has `False`.
        format_version: version of this format that the checkpoint was written in.

    Raises:
        ValueError: an unknown name, a size that is not positive, query heads that key heads do not divide, a signed
            map with a denominator, sliding layers without a window or a denominator or with a map of positions, more
            positions than a map of positions has, a later `format_version`; the message names the field, the value
            and the choices.

    Example:

        >>> from hf_linattn import LinAttnConfig, LinAttnForCausalLM
        >>> config = LinAttnConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=512)
        >>> model = LinAttnForCausalLM(config)
    """

    model_type = "linattn"

    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    layer_types: list[str] | tuple[str, ...] | None = None
    feature_map: str = "elu1"
    feature_map_kwargs: dict | None = None
    normalizer: str = "denominator"
    rope_position: str = "none"
    conv_kernel_size: int = 4
    sliding_window: int | None = None
    qk_norm: bool = False
    attention_out_bias: bool | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version} is later than this hf_linattn reads (up to {FORMAT_VERSION}); "
                "upgrade the package"
            )
        if self.layer_types is None:
            self.layer_types = [LINEAR_LAYER_TYPE] * self.num_hidden_layers
        if self.attention_out_bias is None:
            self.attention_out_bias = self.attention_bias
        self._check_sizes()
        # Where code lies beside a config.json: these classes serve in its place, and are saved without code.
        auto_map = None if is_carried() else kwargs.pop("auto_map", None)
        if auto_map and self.feature_map not in FEATURE_MAPS:
            raise ValueError(
                f"feature_map={self.feature_map!r} is unknown; choose one of {sorted(FEATURE_MAPS)}, or register the "
                f"one that the checkpoint carries: transformers.dynamic_module_utils.get_class_from_dynamic_module("
                f"{auto_map.get('AutoConfig')!r}, folder_or_repo) runs its code"
            )
        super().__post_init__(**kwargs)
        self._check()

    def _check_sizes(self) -> None:
        positive = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*positive, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads="
                f"{self.num_attention_heads} (or head_dim be given)"
            )

    def _check(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}"
            )
        _check_choice("normalizer", self.normalizer, NORMALIZERS)
        _check_choice("rope_position", self.rope_position, ROPE_POSITIONS)
        _check_choice("feature_map", self.feature_map, sorted(FEATURE_MAPS))
        if self.conv_kernel_size < 0 or self.conv_kernel_size == 1:
            raise ValueError(f"conv_kernel_size={self.conv_kernel_size} must be 0 (off) or at least 2")
        if self.head_dim % 2 and (self.rope_position == "before" or "full_attention" in self.layer_types):
            raise ValueError(f"head_dim={self.head_dim} must be even for RoPE (or rope_position='none')")
        if self.normalizer == "denominator" and not feature_map_class(self.feature_map).is_nonnegative:
            raise ValueError(
                f"feature_map={self.feature_map!r} is signed, so normalizer='denominator' can divide by 0; "
                "choose normalizer='rmsnorm' or 'none', or a nonnegative map"
            )
        with torch.device("meta"):
            feature_map = make_feature_map(
                self.feature_map,
                self.head_dim,
                self.num_attention_heads,
                self.num_key_value_heads,
                **(self.feature_map_kwargs or {}),
            )
        if feature_map.horizon is not None and self.max_position_embeddings > feature_map.horizon:
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings} is more than horizon={feature_map.horizon} of "
                f"feature_map={self.feature_map!r}; lower it, or choose feature_map_kwargs={{'horizon': ...}}"
            )
        self.validate_layer_type()
        self._check_window(feature_map.uses_positions)

    def _check_window(self, uses_positions: bool) -> None:
        if SLIDING_LAYER_TYPE not in self.layer_types:
            if self.sliding_window is not None:
                raise ValueError(
                    f"sliding_window={self.sliding_window} is for layer_types {SLIDING_LAYER_TYPE!r}, and there are "
                    "none; leave it None"
                )
            return
        if self.sliding_window is None or self.sliding_window < 1:
            raise ValueError(
                f"sliding_window={self.sliding_window} must be at least 1, the keys that layers of type "
                f"{SLIDING_LAYER_TYPE!r} attend to by softmax"
            )
        if self.normalizer != "denominator":
            raise ValueError(
                f"normalizer={self.normalizer!r} does not go with layer_types {SLIDING_LAYER_TYPE!r}, whose window and "
                "older keys share one; choose 'denominator'"
            )
        if uses_positions:
            raise ValueError(
                f"feature_map={self.feature_map!r} depends on positions, which layer_types {SLIDING_LAYER_TYPE!r} do "
                "not keep for the keys of their window; choose another map"
            )

    def validate_layer_type(self) -> None:
        """Every entry of `layer_types` is known and there is one per layer."""
        for layer_type in self.layer_types:
            _check_choice("layer_types", layer_type, LAYER_TYPES)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, num_hidden_layers={self.num_hidden_layers}; "
                "there must be one per layer"
            )

    def validate_architecture(self) -> None:
        """The checks of construction, repeated by transformers before a config is saved."""
        self._check_sizes()
        self._check()

    def validate_output_attentions(self) -> None:
        """Linear layers can always show their implied weights; full attention layers only in eager mode."""
        if "full_attention" in (self.layer_types or ()):
            super().validate_output_attentions()

    @classmethod
    def from_preset(cls, name: str, **fields: Any) -> "LinAttnConfig":
        """A config from one of three useful corners; the README says what each was measured to do.

        Args:
            name: `"recall"`, a map that recalls most for the size of its state, best with heads of 16 or less;
                `"fast"`, a map without parameters in the smallest state, the default; `"seed"`, linear attention as it
                was published: elu + 1, RoPE, no convolution.
            fields: any field of the config; these go before those of the preset.

        Raises:
            ValueError: no preset has this name, or as the class.
        """
        return cls(**preset(name) | fields)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Have `save_pretrained` copy the file of this class, where that is code read from a checkpoint.

        transformers calls this for every class that a checkpoint names, also where it is the installed one.
        """
        if is_carried() or not cls.__module__.startswith(__package__):
            super().register_for_auto_class(auto_class)

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallel ranks share the model: Llama's plan, and by head what this config adds to it.

        Norms serve every head, so each rank keeps them whole.
        """
        plan = dict(super().base_model_tp_plan)
        if self.conv_kernel_size:
            plan |= dict.fromkeys((f"layers.*.self_attn.{x}_conv" for x in "qkv"), "heads_first")
        if feature_map_class(self.feature_map).is_learnable:
            plan["layers.*.self_attn.feature_map"] = "heads_first"
        if SLIDING_LAYER_TYPE in self.layer_types:
            plan["layers.*.self_attn"] = "heads_first"
        norms = ["q_norm", "k_norm"] * self.qk_norm + ["o_norm"] * (self.normalizer == "rmsnorm")
        return plan | {f"layers.*.self_attn.{norm}": "replicate" for norm in norms}

    @property
    def feature_dim(self) -> int:
        """F of the feature map."""
        return feature_map_class(self.feature_map).feature_dim(self.head_dim, **(self.feature_map_kwargs or {}))

    def state_nbytes(self, batch_size: int = 1, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of all linear and sliding layers, at any length.

            layers * B * (4 Hk F (E + 1) + (K - 1) (Hq + 2 Hk) D * bytes of dtype)
            + sliding layers * B * (2 W Hk D * bytes of dtype + 8)

        with E = D = head_dim, the second term only with a convolution of kernel K. Its inputs, and the W keys and
        values of a window, have `dtype`; 8 bytes say how many they are.
        """
        sliding = self.layer_types.count(SLIDING_LAYER_TYPE)
        layers = self.layer_types.count(LINEAR_LAYER_TYPE) + sliding
        summaries = 4 * self.num_key_value_heads * self.feature_dim * (self.head_dim + 1)
        channels = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        tails = max(0, self.conv_kernel_size - 1) * channels * dtype.itemsize
        keys = self.num_key_value_heads * self.head_dim * dtype.itemsize
        windows = sliding * (2 * self.sliding_window * keys + 8) if sliding else 0
        return batch_size * (layers * (summaries + tails) + windows)


def _check_choice(field: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r} is unknown; choose one of {list(choices)}")


__all__ = ["LinAttnConfig"]
