"""Tiny softmax models of every family that carries over, with nothing left at its start value."""

import torch
from helpers import VOCAB, fill
from transformers import AutoConfig, AutoModelForCausalLM

TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-3,  # large enough that a lost one shows
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
SOURCES = {
    "llama": ("llama", {}),
    "llama, biases, llama3 rope": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3, "head_dim": 6},
    ),
    "smollm": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 6}),
    "mistral, wide window": ("mistral", {"sliding_window": 64, "rope_parameters": YARN}),
    "ministral": ("ministral", {"sliding_window": 64, "head_dim": 6}),
    "qwen2": ("qwen2", {"hidden_act": "gelu"}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 6}),
    "qwen3, biases, tied": ("qwen3", {"head_dim": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "internlm3": ("internlm3", {"head_dim": 6, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 6}),
}


def source_config(name, **changes):
    model_type, fields = SOURCES[name]
    return AutoConfig.for_model(model_type, **{**TINY, **fields, **changes})


def make_source(name, **changes):
    """The model, in eval mode, the same at every call."""
    torch.manual_seed(0)
    return fill(AutoModelForCausalLM.from_config(source_config(name, **changes)))
