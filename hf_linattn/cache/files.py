"""States as files: a cache saved as safetensors, with what is needed to refuse it where it does not belong.

The header holds the format's version, a fingerprint of the config (the fields that decide what a state means), the
number of tokens read, and, where the model was at hand, a fingerprint of its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .layers import KernelLinearAttentionLayer
from .static import StaticKernelLinearAttentionLayer

if TYPE_CHECKING:
    from . import LinearAttentionCache

FORMAT = "hf_linattn.state"
VERSION = 1
FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "feature_map",
    "feature_map_kwargs",
    "normalizer",
    "rope_position",
    "rope_parameters",
    "conv_kernel_size",
    "qk_norm",
    "sliding_window",
)
SAMPLE = 64  # values of each parameter that enter the fingerprint of the weights

SHARDED = (
    "a state is saved from and loaded for a whole model: this one is shared among ranks, each with some heads of it"
)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether this process holds only a part of some parameter."""
    return model is not None and any(hasattr(parameter, "placements") for parameter in model.parameters())


def config_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config that decide what its states mean."""
    return json.loads(json.dumps({name: getattr(config, name, None) for name in FIELDS}, default=str))


def weights_fingerprint(model: nn.Module) -> str:
    """A hash of a few values of every parameter, rounded to bfloat16 so that the loaded dtype does not matter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        picked = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].to("cpu", torch.bfloat16)
        digest.update(name.encode() + picked.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def save_state(cache: LinearAttentionCache, path: str | os.PathLike, model: nn.Module | None) -> None:
    """Write `cache` to `path`, whole or not at all."""
    if not any(getattr(layer, "is_initialized", False) for layer in cache.layers):
        raise ValueError("the cache is empty: there is nothing to save before the first token")
    heads = {layer.mu.shape[1] for layer in cache.layers if isinstance(layer, KernelLinearAttentionLayer)}
    if is_sharded(model) or heads - {cache.config.num_key_value_heads}:
        raise ValueError(SHARDED)
    tensors: dict[str, Tensor] = {}
    padding = None
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticKernelLinearAttentionLayer):
            raise ValueError("a static cache cannot be saved; read into a LinearAttentionCache")
        if isinstance(layer, KernelLinearAttentionLayer):
            padding = layer.padding if padding is None else padding
            named = layer.state._asdict()
            named |= {f"conv_tails.{i}": tail for i, tail in enumerate(layer.conv_tails)}
        else:
            named = {"keys": layer.keys, "values": layer.values}
        tensors |= {f"layers.{index}.{name}": tensor.detach().contiguous() for name, tensor in named.items()}
    if padding is not None:
        tensors["padding"] = padding
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "tokens": str(int(cache.get_seq_length())),
        "config": json.dumps(config_fields(cache.config)),
    }
    if model is not None:
        header["weights"] = weights_fingerprint(model)
        header["model"] = str(getattr(model, "name_or_path", "") or "")
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, partial, metadata=header)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_state(cache: LinearAttentionCache, path: str | os.PathLike, model: nn.Module) -> None:
    """Fill the empty `cache`, built from `model.config`, from the file at `path`."""
    if is_sharded(model):
        raise ValueError(SHARDED)
    path = Path(path)
    header, tensors = _read(path)
    _check_header(path, header, model)
    devices = _layer_devices(model, len(cache.layers))
    tokens = int(header["tokens"])
    for index, layer in enumerate(cache.layers):
        part = {
            name.removeprefix(f"layers.{index}."): tensor.to(devices[index])
            for name, tensor in tensors.items()
            if name.startswith(f"layers.{index}.")
        }
        is_linear = isinstance(layer, KernelLinearAttentionLayer)
        fields = layer.state_class._fields if is_linear else ("keys", "values")
        missing = set(fields) - set(part)
        if missing:
            raise ValueError(f"{path}: layer {index} lacks {', '.join(sorted(missing))}")
        if not is_linear:
            layer.lazy_initialization(part["keys"], part["values"])
            layer.keys, layer.values = part["keys"], part["values"]
            continue
        if part["mu"].dtype not in (torch.float32, torch.float64) or part["mu"].shape[:3] != part["nu"].shape:
            raise ValueError(
                f"{path}: layer {index} has mu {part['mu'].dtype} {list(part['mu'].shape)} and nu "
                f"{list(part['nu'].shape)}; a state is float32 [B, Hk, F, E] and [B, Hk, F]"
            )
        state = layer.state_class(*(part[name] for name in fields))
        tails = tuple(part[f"conv_tails.{i}"] for i in range(len(part) - len(fields)))
        layer.restore(state, tails, tokens, tensors.get("padding"))


def state_header(path: str | os.PathLike) -> dict[str, str]:
    """What a state file says of itself: format, version, tokens, config, and with its model weights and model."""
    return _read(Path(path), names_only=True)[0]


def _read(path: Path, names_only: bool = False) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such state file")
    try:
        with safe_open(path, framework="pt") as file:
            names = [] if names_only else list(file.keys())
            header, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: a safetensors file, but not a saved state (format {header.get('format')!r})")
    return header, tensors


def _check_header(path: Path, header: dict[str, str], model: nn.Module) -> None:
    if int(header["version"]) > VERSION:
        raise ValueError(f"{path}: format version {header['version']}; this hf_linattn reads up to {VERSION}")
    saved, own = json.loads(header["config"]), config_fields(model.config)
    for name in FIELDS:
        if saved.get(name) != own[name]:
            raise ValueError(
                f"{path}: the state belongs to another model: {name} is {saved.get(name)!r} there, {own[name]!r} here"
            )
    if "weights" in header and header["weights"] != weights_fingerprint(model):
        raise ValueError(f"{path}: the state belongs to a model of this shape with other weights")


def _layer_devices(model: nn.Module, count: int) -> list[torch.device]:
    layers = getattr(getattr(model, "model", model), "layers", None)
    if layers is None or len(layers) != count:
        return [next(model.parameters()).device] * count
    return [next(layer.parameters()).device for layer in layers]
