"""What a decoder will cost at a context, before it is trained or run, beside its twin with the other attention.

    hf-linattn plan CONFIG --context 4096 65536

CONFIG is any decoder of transformers. A softmax model is set beside the linear model it can be converted to; a linear
or hybrid one beside the softmax model of the same shape. Nothing is measured: costs.py says what is counted.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..cache import LINEAR_LAYER_TYPE, SLIDING_LAYER_TYPE
from ..models import LinAttnConfig
from .costs import Decoder, Layer, LinearLayer, SlidingLayer, SoftmaxLayer, Weights
from .record import write_json
from .tables import render

DTYPES = ("float32", "bfloat16", "float16")
COSTS = ("cache_bytes", "decode_bytes", "decode_flops", "prefill_flops", "training_flops", "attention_bytes")
CROSSOVERS = COSTS[:4]
FARTHEST = 2**40  # tokens; a crossover beyond it is none


def plan(
    config: PreTrainedConfig,
    contexts: Sequence[int] = (4096,),
    batch_size: int = 1,
    dtype: str | None = None,
    feature_map: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Costs of the model of `config` and of its twin; the result is what the JSON file holds.

    Every layer of a softmax model that is not linear in the twin, sliding ones included, becomes linear; every linear
    layer of a linear model becomes full attention. All else is the same in both.

    Args:
        config: a decoder's config.
        contexts: tokens a row.
        batch_size: B, rows.
        dtype: of weights, activations, keys and values: float32, bfloat16 or float16; `None` is the config's. mu and
            nu are float32.
        feature_map: phi of a softmax model's twin (elu1); a linear model has its own.
        device: where the model would train, "cpu" or "cuda"; changes only `attention_bytes`.

    Returns:
        `rows`: for each context the bytes and operations of `linear` and `softmax`, the methods of `costs.Decoder`.
        `crossovers`: for each cost that a user waits or pays for, the context from which on linear is lower, or
        `None`.

    Raises:
        ValueError: a context or batch size below 1, an unknown dtype or map, a model that is no decoder with keys and
            values; the message names the field, the value and the choices.
    """
    for name, values in (("context", contexts), ("batch_size", [batch_size])):
        for value in values:
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
    if dtype is None:
        dtype = str(config.dtype or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {list(DTYPES)}")
    is_linear = isinstance(config, LinAttnConfig)
    if is_linear and feature_map is not None:
        raise ValueError(f"feature_map={feature_map!r} is for softmax models; this one has {config.feature_map!r}")
    weights, linear, softmax = (_of_linear if is_linear else _of_softmax)(config, getattr(torch, dtype), feature_map)
    sides = {
        name: Decoder(weights, Counter(layers), batch_size, getattr(torch, dtype).itemsize, torch.device(device))
        for name, layers in (("linear", linear), ("softmax", softmax))
    }
    return {
        "kind": "plan",
        "model_type": config.model_type,
        "given": "linear" if is_linear else "softmax",
        "feature_map": config.feature_map if is_linear else feature_map or LinAttnConfig.feature_map,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "layers": {name: _count_types(side) for name, side in sides.items()},
        "parameters": {name: side.parameters for name, side in sides.items()},
        "rows": [
            {"context": context}
            | {name: {cost: getattr(side, cost)(context) for cost in COSTS} for name, side in sides.items()}
            for context in contexts
        ],
        "crossovers": {
            cost: first_win(getattr(sides["linear"], cost), getattr(sides["softmax"], cost)) for cost in CROSSOVERS
        },
    }


def first_win(linear: Callable[[int], int], softmax: Callable[[int], int]) -> int | None:
    """The context from which on `linear` is below `softmax`, or `None` up to `FARTHEST`.

    At whole chunks the gain is convex in the context and starts at or below 0, so that halving finds one place where
    its sign changes; between whole chunks it is concave, so that no loss is farther than the next whole chunk.
    """
    low, high = 0, FARTHEST
    if linear(high) >= softmax(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if linear(middle) < softmax(middle) else (middle, high)
    last = max((n for n in range(high, high + 1024) if linear(n) >= softmax(n)), default=low)
    return last + 1


def _of_linear(config: LinAttnConfig, dtype: torch.dtype, _: None) -> tuple[Weights, list[Layer], list[Layer]]:
    full = SoftmaxLayer(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    kinds: dict[str, Layer] = {"full_attention": full, LINEAR_LAYER_TYPE: LinearLayer.of(config, dtype)}
    if SLIDING_LAYER_TYPE in config.layer_types:
        kinds[SLIDING_LAYER_TYPE] = SlidingLayer.of(config, dtype)
    own = [kinds[layer_type] for layer_type in config.layer_types]
    return Weights.of(_without_storage(config)), own, [full] * len(own)


def _of_softmax(
    config: PreTrainedConfig, dtype: torch.dtype, feature_map: str | None
) -> tuple[Weights, list[Layer], list[Layer]]:
    model = _without_storage(config)
    own = _softmax_layers(model)
    twins = {}
    for layer in set(own):
        shape = LinAttnConfig(
            num_attention_heads=layer.heads,
            num_key_value_heads=layer.key_heads,
            head_dim=layer.head_dim,
            feature_map=feature_map or LinAttnConfig.feature_map,
            rope_position="none",  # rotations are not counted, and heads of odd size have none
            conv_kernel_size=0,  # conversion adds a map, and nothing else
            qk_norm=False,
        )
        twins[layer] = LinearLayer.of(shape, dtype)
    return Weights.of(model), [twins[layer] for layer in own], own


def _without_storage(config: PreTrainedConfig) -> torch.nn.Module:
    """The model of `config`, of shapes only: any size fits."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval()
    except ValueError as error:
        if "AutoModelForCausalLM" not in str(error):
            raise
        raise ValueError(f"model_type={config.model_type!r} is no decoder: AutoModelForCausalLM has no model") from None


@torch.no_grad()
def _softmax_layers(model: torch.nn.Module) -> list[SoftmaxLayer]:
    """The attention of each layer, from the cache that the model itself fills with two tokens."""
    name = f"model_type={model.config.model_type!r}"
    if any(weight.dim() > 2 for weight in model.parameters()):
        raise ValueError(f"{name} has experts or convolutions, whose cost is not counted; choose a dense decoder")
    output = model(torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=True)
    layers = getattr(getattr(output, "cache", None), "layers", None)
    if layers is None:
        raise ValueError(f"{name} keeps no cache of keys and values: it is no decoder (or is_decoder is not set)")
    if len(layers) != model.config.num_hidden_layers:
        raise ValueError(
            f"{name} has a cache of {len(layers)} layers for {model.config.num_hidden_layers}: not counted"
        )
    found = []
    for index, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or keys.shape != values.shape or keys.dim() != 4:
            raise ValueError(f"{name}: layer {index} keeps no keys and values of one size [B, Hk, T, D]: not counted")
        window = layer.sliding_window if layer.is_sliding else None
        found.append(SoftmaxLayer(model.config.num_attention_heads, keys.shape[1], keys.shape[3], window))
    return found


def _count_types(side: Decoder) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for layer, count in side.layers.items():
        if isinstance(layer, LinearLayer):
            name = "linear"
        elif isinstance(layer, SlidingLayer):
            name = "linear with a window"
        else:
            name = "full attention" if layer.window is None else "sliding attention"
        counts[name] += count
    return dict(counts)


def read_config(name: str) -> PreTrainedConfig:
    """The decoder's config of a folder, a config.json or a hub id; a ValueError of one line where there is none."""
    if not Path(name).exists() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise ValueError(f"{name}: there is no such folder or config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{name}: no config that transformers can read, in a folder, a file or on the hub ({reason})"
        ) from None
    if config.is_encoder_decoder:
        raise ValueError(f"{name}: model_type={config.model_type!r} has an encoder and a decoder; give a decoder alone")
    return config.get_text_config(decoder=True)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-linattn plan`."""
    command.add_argument("config", help="a decoder: a folder, a config.json or a hub id")
    command.add_argument("--context", type=int, nargs="+", default=[4096], help="tokens a row (default: 4096)")
    command.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    command.add_argument("--dtype", help=f"{', '.join(DTYPES)}; by default the config's")
    command.add_argument("--feature_map", help="phi of the linear twin of a softmax model (default: elu1)")
    command.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--json", type=Path, help="a file to write the same to")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    result = plan(
        read_config(arguments.config),
        arguments.context,
        arguments.batch,
        arguments.dtype,
        arguments.feature_map,
        arguments.device,
    )
    print(render(result), end="")
    if arguments.json:
        write_json(arguments.json, result)
