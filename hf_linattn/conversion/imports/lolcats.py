"""LoLCATs (arXiv:2410.10254): a softmax model, feature maps trained to imitate it, and LoRA trained after that.

What is published is the difference from a softmax model, in two state dicts. Their layer computes, with RoPE before phi
and keys and values repeated to all Hq query heads,

    phi(x) = [softmax(W_h x), softmax(-W_h x)]  per query head h, with a W of queries and a W of keys
    out_i  = sum_j s_ij v_j / sum_j s_ij,  s_ij = phi(q_i) phi(k_j)  for j <= i                       without a window
    s_ij   = g_h exp(q_i k_j / sqrt(D) - m_i) within the window, l_h phi(q_i) phi(k_j) before it      with one

where m_i is the largest score in the window, g = sigmoid(p) and l = 1 (or 1 - g, "affine").

| theirs, in `layers.N.self_attn` | shape | ours |
|---|---|---|
| `feature_map_q.mlp.layer` | [Hq, D, P] | `feature_map.q_weight`, the same order |
| `feature_map_k.mlp.layer` | [Hq, D, P] | `feature_map.k_weight` [Hk, D, P]: one per key head, see below |
| `feature_map_{q,k}.mlp.bias` | [1, Hq, 1, 1] | softmax: cancels, and is left out; relu: `feature_map.{q,k}_bias` |
| `window_factors` | [1, Hq, 1, 1] | `window_mix` [Hq] = log sigmoid(p), or p if affine: only g/l matters |
| `{q,k,v,o}_proj.lora_{A,B}` | [r, in], [out, r] | added to the weight: W + alpha / r * B A, as peft merges it |

A key head here has one feature map, and one state that its query heads share; theirs has a key map for each query head.
Where those of a group differ, only repeated key heads can hold them (`expand_key_heads`), at Hq / Hk times the state.

What differs: their features are at least 1e-12, so that a query whose relu products all vanish reads the mean of the
values, here 0. And the window of their "tk" layers holds all of the block of W keys before the query's own block, W + 1
to 2 W keys; here it is the last W, as in their "sw" layers. A state dict does not say which it was trained with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from ...models import LinAttnConfig, LinAttnForCausalLM
from ..linearize import linearize
from ..loading import load_state
from .files import read_tensors

MAPS = {"softmax_dim": "hedgehog", "relu": "t2r"}
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
LORA = re.compile(r"((?:self_attn|mlp)\.\w+_proj)\.lora_([AB])(?:\.\w+)?\.weight")
MAP = re.compile(r"self_attn\.feature_map_([qk])\.mlp\.(layer|bias)")
State = Mapping[str, Tensor] | str | os.PathLike


def import_lolcats(
    base: PreTrainedModel | str | os.PathLike,
    attention: State,
    lora: State | None = None,
    *,
    lora_alpha: float = 16,
    feature_map: str = "softmax_dim",
    skip_connection: bool = False,
    affine: bool = False,
    window: int | None = None,
    keep_layers: Sequence[int] | float | str = (),
    expand_key_heads: bool = False,
    dtype: torch.dtype | str | None = None,
) -> LinAttnForCausalLM:
    """The model that LoLCATs weights describe, on the softmax model they were trained for.

    The module's docstring has the formula and the mapping.

    Args:
        base: the softmax model, as for `linearize`; a loaded one keeps its weights.
        attention: the first state dict (or its .pt or .safetensors file): feature maps and window factors.
        lora: the second: LoRA weights; feature maps and factors in it replace those of the first.
        lora_alpha: of the configuration of that training (16 in the published ones).
        feature_map: theirs: "softmax_dim" or "relu".
        skip_connection: phi of x + W x instead of W x: the identity is added to W.
        affine: `affine_attention_factors` of their configuration.
        window: W of their layers; needed exactly where the state dicts have window factors.
        keep_layers: layers that stayed softmax attention, as for `linearize`.
        expand_key_heads: repeat key and value heads to Hq, so that each has a feature map of its own.
        dtype: as for `linearize`.

    Raises:
        ValueError: a map, a tensor or a difference between heads that cannot be represented, by name; layers without a
            feature map, or with one though they are kept; LoRA of which one half is missing.
    """
    if feature_map not in MAPS:
        raise ValueError(f"feature_map={feature_map!r} of LoLCATs has no map here; choose one of {sorted(MAPS)}")
    maps, factors, halves = _sort({**read_tensors(attention), **read_tensors(lora or {})})
    sizes = {value.shape[-1] for (_, _, what), value in maps.items() if what == "layer"}
    if not sizes:
        raise ValueError("the state dicts have no feature_map_q.mlp.layer: these are no weights of LoLCATs")
    if len(sizes) > 1:
        raise ValueError(f"the feature maps have sizes {sorted(sizes)}, and a model has one")
    if bool(factors) != (window is not None):
        has = "window_factors: give window" if factors else "no window_factors: leave window=None"
        raise ValueError(f"window={window}, and the state dicts have {has}")
    model = linearize(
        base,
        feature_map=MAPS[feature_map],
        feature_map_kwargs={"projection_dim": sizes.pop(), "query_heads": "query"},
        keep_layers=keep_layers,
        window=window,
        dtype=dtype,
    )
    _check_layers(maps, factors, model.config)
    if expand_key_heads:
        model = _with_repeated_key_heads(model)
    _merge_lora(model, halves, lora_alpha)
    with torch.no_grad():
        for (index, side, what), value in maps.items():
            self_attn = model.model.layers[index].self_attn
            name = f"layers.{index}.self_attn.feature_map_{side}.mlp.{what}"
            _write_map(self_attn.feature_map, side, what, value, skip_connection, model.config, name)
        for index, value in factors.items():
            mix = value.float() if affine else logsigmoid(value.float())
            model.model.layers[index].self_attn.window_mix.copy_(mix.flatten())
    return model


def _sort(tensors: Mapping[str, Tensor]):
    """Feature maps by (layer, "q" or "k", "layer" or "bias"), window factors by layer, LoRA by parameter and half."""
    maps, factors, halves, strange = {}, {}, {}, []
    for name, value in tensors.items():
        place = LAYER.fullmatch(name)
        index, rest = (int(place[1]), place[2]) if place else (None, name)
        if place and (found := MAP.fullmatch(rest)):
            maps[index, found[1], found[2]] = value
        elif place and rest in ("self_attn.window_factors", "self_attn.window_factor"):
            factors[index] = value
        elif place and (found := LORA.fullmatch(rest)):
            halves.setdefault(f"model.layers.{index}.{found[1]}", {})[found[2]] = value
        elif not rest.endswith("rotary_emb.inv_freq"):
            strange.append(name)
    if strange:
        raise ValueError(f"{strange[0]} ({len(strange)} such) is neither a feature map, a window factor nor LoRA")
    return maps, factors, halves


def _check_layers(maps, factors, config: LinAttnConfig) -> None:
    linear = {index for index, layer_type in enumerate(config.layer_types) if layer_type != "full_attention"}
    for side in "qk":
        have = {index for index, which, what in maps if which == side and what == "layer"}
        if have != linear:
            raise ValueError(
                f"layers {sorted(have ^ linear)} have no feature_map_{side}, or one that keep_layers leaves unused"
            )
    if factors and set(factors) != linear:
        raise ValueError(f"layers {sorted(set(factors) ^ linear)} have no window_factors, or ones that are left unused")


def _write_map(
    phi: nn.Module, side: str, what: str, value: Tensor, skip: bool, config: LinAttnConfig, name: str
) -> None:
    """One tensor of theirs, per query head, into the parameter here."""
    target = getattr(phi, f"{side}_{'weight' if what == 'layer' else 'bias'}", None)
    heads = config.num_attention_heads
    if what == "bias":
        if value.numel() != heads:
            raise ValueError(f"{name} has shape {list(value.shape)}, and is one number per head in LoLCATs")
        if target is None:
            return  # the same number added to all logits of a softmax
        value = value.flatten().unsqueeze(-1).expand(heads, phi.projection_dim)
    elif skip:
        if value.shape[-1] != value.shape[-2]:
            raise ValueError(f"{name} has shape {list(value.shape)}: skip_connection=True needs P = D")
        value = value + torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
    if value.shape != (heads, *target.shape[1:]):
        raise ValueError(f"{name} has shape {list(value.shape)}, and the model needs {[heads, *target.shape[1:]]}")
    groups = value.unflatten(0, (target.shape[0], -1))
    if not torch.equal(groups, groups[:, :1].expand_as(groups)):
        raise ValueError(
            f"{name} differs within the {groups.shape[1]} query heads of a key head, whose map is one here: "
            "expand_key_heads=True repeats the key heads"
        )
    target.copy_(groups[:, 0])


def _with_repeated_key_heads(model: LinAttnForCausalLM) -> LinAttnForCausalLM:
    """The same function with as many key heads as query heads."""
    config = model.config
    fields = {**config.to_dict(), "num_key_value_heads": config.num_attention_heads, "dtype": model.dtype}
    state, head_dim = model.state_dict(), config.head_dim
    repeats = config.num_attention_heads // config.num_key_value_heads
    kept = {}
    for name, value in state.items():
        if re.search(r"self_attn\.[kv]_proj\.", name):
            value = value.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, 0).flatten(0, 1)
        elif "feature_map" in name:
            continue  # written below in the new size
        kept[name] = value
    return load_state(LinAttnConfig(**fields), kept, type(model).__name__, model)


def _merge_lora(model: LinAttnForCausalLM, halves: Mapping[str, Mapping[str, Tensor]], alpha: float) -> None:
    """W + alpha / r * B A in new storage, so that a base that lent its weights keeps them."""
    heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    for name, half in halves.items():
        if set(half) != {"A", "B"}:
            raise ValueError(f"{name} has lora_{next(iter(half))} alone; a weight needs both halves")
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"LoRA of {name}, which the model has not") from None
        weight, (a, b) = module.weight, (half["A"].cpu().double(), half["B"].cpu().double())
        delta = alpha / a.shape[0] * (b @ a)
        if name.endswith(("k_proj", "v_proj")) and delta.shape[0] < weight.shape[0]:
            delta = delta.unflatten(0, (-1, head_dim))
            delta = delta.repeat_interleave(heads // delta.shape[0], 0).flatten(0, 1)
        if delta.shape != weight.shape:
            raise ValueError(f"LoRA of {name} has shape {list(delta.shape)}, its weight {list(weight.shape)}")
        merged = weight.detach().cpu().double() + delta  # not every device has float64
        module.weight = nn.Parameter(merged.to(weight), requires_grad=weight.requires_grad)
