"""Checkpoints of model type `linear_attn` of flash-linear-attention (its layers/linear_attn.py).

Their layer has no rotations and one feature map for all heads of a layer, scales queries by 1/sqrt(F), and normalises
each head of the sums instead of dividing by a denominator:

    out_i = rmsnorm( F^-1/2 phi(q_i) sum_{j <= i} phi(k_j)^T v_j )

This is `normalizer="rmsnorm"`, `rope_position="none"` here. The scale matters beside the epsilon of the norm, so W_v is
multiplied by it (exact where F is a power of 4, else rounded once).

| theirs, in `model.layers.N` | ours |
|---|---|
| `attn_norm`, `mlp_norm` | `input_layernorm`, `post_attention_layernorm` |
| `attn.{q,k,o}_proj` | `self_attn.{q,k,o}_proj` |
| `attn.v_proj` | `self_attn.v_proj`, times F^-1/2 |
| `attn.norm` | `self_attn.o_norm` (ones where theirs has no weight) |
| `attn.feature_map_{q,k}.layer.weight` [P, D] | `self_attn.feature_map.{q,k}_weight` [Hk, D, P]: transposed |
| `attn.feature_map_{q,k}.layer.bias` | must be 0 (hedgehog), as the map here has none |
| `mlp.{gate,up,down}_proj` | the same |
| `model.embeddings`, `model.norm`, `lm_head` | `model.embed_tokens`, `model.norm`, `lm_head` |

Their maps: hedgehog is `hedgehog_joint`, elu `elu1`, t2r `t2r` without its bias, dpfp `dpfp` with nu = 4; relu and
identity keep their names; elementwise_product has no counterpart.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models import LinAttnConfig, LinAttnForCausalLM
from ..loading import load_state, some
from .files import read_tensors

MAPS = {
    "hedgehog": ("hedgehog_joint", {}),
    "t2r": ("t2r", {}),
    "elu": ("elu1", {}),
    "relu": ("relu", {}),
    "identity": ("identity", {}),
    "dpfp": ("dpfp", {"nu": 4}),
}
RENAMED = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.norm.weight": "self_attn.o_norm.weight",
    **{f"attn.{x}_proj.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"mlp.{x}_proj.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}
OUTSIDE = {"model.embeddings.weight": "model.embed_tokens.weight", "model.norm.weight": "model.norm.weight"}
# What must be off: field, the values that mean so, and what it would be.
WITHOUT = (
    ("norm_q", (False, None), "queries divided by their sum"),
    ("norm_k", (False, None), "keys divided by their sum"),
    ("norm_feature_map", (False, None), "a denominator and a norm"),
    ("attn", (None,), "layers of softmax attention"),
    ("attnres_block_size", (None,), "attention over residuals"),
    ("hidden_act", ("swish", "silu", None), "another activation"),
)


def import_fla(
    source: str | os.PathLike | Mapping[str, Any],
    tensors: Mapping[str, Tensor] | str | os.PathLike | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> LinAttnForCausalLM:
    """The model of a `linear_attn` checkpoint of flash-linear-attention: the same logits.

    The module's docstring has the formula and the mapping.

    Args:
        source: a folder with config.json and safetensors, or the fields of the config.
        tensors: its state dict, where `source` is not a folder.
        dtype: of the result; `None` is that of the weights.

    Raises:
        ValueError: another model type, a field or a map that has no counterpart, a bias that is not 0, tensors that are
            missing or left over; each by name.
    """
    if isinstance(source, Mapping):
        theirs = dict(source)
    else:
        path = Path(source) / "config.json"
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        theirs, tensors = json.loads(path.read_text(encoding="utf-8")), tensors or source
    if tensors is None:
        raise ValueError("tensors=None: with the fields of a config, give the state dict too")
    weights = read_tensors(tensors)
    config = _config(theirs, weights)
    state = _state(weights, config)
    expected = _names(config)
    lacking = sorted(expected - state.keys())
    if lacking:
        raise ValueError(f"the checkpoint lacks what becomes {some(lacking)}")
    if dtype is None:
        dtype = state["model.embed_tokens.weight"].dtype
    return load_state(config, state, "the checkpoint", dtype=dtype)


def _config(theirs: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LinAttnConfig:
    model_type, feature_map = theirs.get("model_type"), theirs.get("feature_map", "elementwise_product")
    if model_type != "linear_attn":
        raise ValueError(f"model_type={model_type!r} is not imported; choose 'linear_attn'")
    if feature_map not in MAPS:
        raise ValueError(f"feature_map={feature_map!r} has no counterpart here; choose one of {sorted(MAPS)}")
    for field, off, part in WITHOUT:
        value = theirs.get(field, off[0])
        if value not in off:
            raise ValueError(f"{field}={value!r} means {part}, which does not carry; choose {off[0]!r}")
    expansion = (theirs.get("expand_k", 1.0), theirs.get("expand_v", 1.0))
    if expansion[0] != expansion[1]:
        raise ValueError(f"expand_k={expansion[0]} and expand_v={expansion[1]} give keys and values of two sizes")
    gate = weights.get("model.layers.0.mlp.gate_proj.weight")
    if gate is None:
        raise ValueError("the checkpoint lacks model.layers.0.mlp.gate_proj.weight")
    heads = theirs["num_heads"]
    name, options = MAPS[feature_map]
    carried = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range")
    ids = {field: theirs.get(field) for field in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return LinAttnConfig.from_preset(
        "seed",
        **{field: theirs[field] for field in carried if field in theirs},
        **ids,
        intermediate_size=gate.shape[0],
        num_attention_heads=heads,
        num_key_value_heads=theirs.get("num_kv_heads") or heads,
        head_dim=round(theirs["hidden_size"] * expansion[0]) // heads,
        rms_norm_eps=theirs.get("norm_eps", 1e-6),
        tie_word_embeddings=theirs.get("tie_word_embeddings", False),
        feature_map=name,
        feature_map_kwargs=options,
        normalizer="rmsnorm",
        rope_position="none",
    )


def _state(weights: Mapping[str, Tensor], config: LinAttnConfig) -> dict[str, Tensor]:
    state, strange = {}, []
    for name, value in weights.items():
        place = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if name in OUTSIDE:
            state[OUTSIDE[name]] = value
        elif name == "lm_head.weight":
            state[name] = value
        elif place and place[2] in RENAMED:
            if place[2] == "attn.v_proj.weight":
                value = (value.double() * config.feature_dim**-0.5).to(value.dtype)
            state[f"model.layers.{place[1]}.{RENAMED[place[2]]}"] = value
        elif place and (found := re.fullmatch(r"attn\.feature_map_([qk])\.layer\.(weight|bias)", place[2])):
            _add_map(state, f"model.layers.{place[1]}.self_attn.feature_map.{found[1]}_", found[2], value, config, name)
        else:
            strange.append(name)
    if strange:
        raise ValueError(f"the checkpoint has tensors that do not carry: {some(sorted(strange))}")
    heads_norm = torch.ones(config.head_dim, dtype=next(iter(weights.values())).dtype)
    for index in range(config.num_hidden_layers):
        state.setdefault(f"model.layers.{index}.self_attn.o_norm.weight", heads_norm.clone())
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _add_map(state: dict[str, Tensor], prefix: str, kind: str, value: Tensor, config: LinAttnConfig, name: str) -> None:
    """One linear layer that all heads share, for each head."""
    heads = config.num_key_value_heads
    if kind == "bias":
        if value.any():
            raise ValueError(f"{name} is not 0, and the map here has no bias")
        return
    state[f"{prefix}weight"] = value.t().expand(heads, *value.t().shape).contiguous()
    if config.feature_map == "t2r":
        state[f"{prefix}bias"] = value.new_zeros(heads, value.shape[0])


def _names(config: LinAttnConfig) -> set[str]:
    with torch.device("meta"):
        return set(LinAttnForCausalLM(config).state_dict())
