"""What the configs of softmax decoders mean here: which families carry over whole, and what the others have instead.

A family is listed when its blocks are the decoder's own (pre-norm RMSNorm, gated MLP, rotation of whole heads by
halves, no scaling beyond 1/sqrt(D)), so that its weights load by name and full attention gives the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..models import LinAttnConfig

# Fields that mean the same in every family and are not named below where they are taken from.
CARRIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "dtype",
)


@dataclass(frozen=True)
class Family:
    """How one `model_type` differs from the others.

    Args:
        fields: more fields that are carried under their own name.
        fixed: fields that its code fixes, and its config does not say.
        windows: which layers attend within `sliding_window`: "none", "all", or those that "layer_types" says.
    """

    fields: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"


LLAMA = Family(fields=("attention_bias", "mlp_bias"))
FAMILIES = {
    "llama": LLAMA,
    "internlm3": LLAMA,
    "iquestcoder": LLAMA,
    "mistral": Family(windows="all"),
    "ministral": Family(windows="layer_types"),
    "qwen2": Family(fixed={"attention_bias": True, "attention_out_bias": False}, windows="layer_types"),
    "qwen3": Family(fields=("attention_bias",), fixed={"qk_norm": True}, windows="layer_types"),
}

# The part of each that the decoder has not; the first that stands in the way.
FOREIGN_PARTS = {
    part: model_type.split()
    for part, model_type in {
        "attention sinks": "gpt_oss mimo_v2_flash",
        "capped attention scores (softcap)": "gemma2 vaultgemma",
        "norms that add 1 to their weight": "gemma gemma3 gemma3_text",
        "ALiBi in place of rotations": "bloom mpt",
        "latent keys and values (MLA)": "deepseek_v2 deepseek_v3 deepseek_v32 minicpm3 youtu longcat_flash",
        "experts (MoE)": "mixtral qwen2_moe qwen3_moe olmoe phimoe granitemoe dbrx jamba minimax qwen3_next",
        "one projection for queries, keys and values": "phi3 persimmon",
        "parallel attention and MLP": "gpt_neox phi gptj codegen falcon cohere cohere2",
        "learned positions": "gpt2 gpt_bigcode opt",
        "rotations of a part of each head": "stablelm glm glm4 nemotron",
        "rotations of neighbouring pairs": "ernie4_5 helium",
        "multipliers of embeddings, residuals and scores": "granite hyperclovax",
        "layers without positions among rotated ones": "smollm3",
        "norms after attention and MLP": "olmo2 olmo3 exaone4",
        "norms without weights": "olmo nanochat",
        "layer norms with biases": "starcoder2 jais2",
        "query and key norms after the rotation": "hunyuan_v1_dense",
        "an MLP without a gate": "arcee apertus",
        "norms inside attention and MLP": "bitnet",
        "differential attention": "diffllama",
    }.items()
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert", "deberta-v2", "modernbert", "eurobert")


def check_source(config: PreTrainedConfig) -> None:
    """A ValueError of one line that names what of a model with this config does not carry, or how to make it carry."""
    model_type = config.model_type
    name = f"model_type={model_type!r}"
    if isinstance(config, LinAttnConfig):
        raise ValueError(f"{name} is linear already: load it with AutoModelForCausalLM")
    if config.is_encoder_decoder or model_type in ENCODERS:
        raise ValueError(f"{name} has an encoder, and only decoders are converted; choose one of {sorted(FAMILIES)}")
    for part, model_types in FOREIGN_PARTS.items():
        if model_type in model_types:
            raise ValueError(f"{name} has {part}, which do not carry; choose one of {sorted(FAMILIES)}")
    if model_type not in FAMILIES:
        raise ValueError(f"{name} is not known to have the same blocks; choose one of {sorted(FAMILIES)}")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        read = quantization.get if isinstance(quantization, dict) else lambda key: getattr(quantization, key, None)
        raise ValueError(
            f"the weights are quantised (quant_method={str(read('quant_method'))!r}), and only plain ones carry; "
            "dequantise the model first, or give the checkpoint it was made from"
        )
    rotated = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise ValueError(f"partial_rotary_factor={rotated} rotates a part of each head, which does not carry")


def source_class(config: PreTrainedConfig) -> str:
    """Name of the class of transformers that holds the language model of a known family."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Keys that a query of each layer of the source sees, itself included; `None` where a window never hides one."""
    kind = FAMILIES[config.model_type].windows
    window = getattr(config, "sliding_window", None)
    if kind == "none" or window is None or window >= config.max_position_embeddings:
        return [None] * config.num_hidden_layers
    if kind == "all":
        return [window] * config.num_hidden_layers
    return [window if layer_type == "sliding_attention" else None for layer_type in config.layer_types]


def shared_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What a `LinAttnConfig` must say to hold the weights of a model with this config and give its logits."""
    family = FAMILIES[config.model_type]
    fields = {name: getattr(config, name) for name in (*CARRIED, *family.fields)}
    fields["num_key_value_heads"] = config.num_key_value_heads or config.num_attention_heads
    fields["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**fields, **family.fixed}
