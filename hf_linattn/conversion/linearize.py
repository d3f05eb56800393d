"""A pretrained softmax model as a linear or hybrid one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import LINEAR_LAYER_TYPE, SLIDING_LAYER_TYPE
from ..models import LinAttnConfig, LinAttnForCausalLM
from ..ops import feature_map_class
from .families import check_source, shared_fields, windows
from .keeping import kept_layers
from .loading import check_class, check_model, load_from_files, load_from_model, read_source_config


class ConversionWarning(UserWarning):
    """Something of the source does not carry, and the converted model runs without it."""


def linearize(
    model_or_path: PreTrainedModel | str | os.PathLike,
    *,
    feature_map: str = "hedgehog",
    feature_map_kwargs: dict[str, Any] | None = None,
    keep_layers: Sequence[int] | float | str = (),
    window: int | None = None,
    normalizer: str | None = None,
    dtype: torch.dtype | str | None = None,
    gguf_file: str | None = None,
    **options: Any,
) -> LinAttnForCausalLM:
    """Turn a pretrained softmax decoder into a linear or hybrid one, its weights taken over by name.

    Everything but softmax attention carries over: biases, query and key norms, grouped heads, rotations and their
    scaling, tied embeddings, token ids, generation settings. The layers that are kept give what they gave: with all
    of them kept, so do the logits. The others get a feature map in place of the softmax,

        softmax(q k^T / sqrt(D)) v   becomes   phi(q) (phi(k)^T v) / (phi(q) sum phi(k)),

    with rotations before phi. That is another function: until it is trained, the model has lost what these layers
    knew. `new_parameters(model)` names what starts fresh.

    Args:
        model_or_path: a causal language model of transformers, a folder or a hub id, of a Llama, Mistral, Ministral,
            Qwen2, Qwen3, InternLM3 or IQuestCoder. A model lends its weights: both then share their storage, none is
            copied, and training one changes the other (`copy.deepcopy` it first to keep both).
        feature_map, feature_map_kwargs: phi, as in `LinAttnConfig`.
        keep_layers: layers that stay full attention: indices from 0; a fraction f, of whose round(f L) layers (at
            least one) each stands in the middle of its share of the L layers; or `"all"`.
        window: W of layers that read the last W keys by softmax and older ones by phi
            (`"kernel_linear_attention_sliding"`); `None` makes them linear throughout.
        normalizer: `None` is `"denominator"` for a nonnegative map and `"rmsnorm"` for a signed one.
        dtype: of the result, as a torch.dtype or its name; `None` is the source's. Another one copies a loaded model's
            weights.
        gguf_file: a GGUF file in the folder or repository, which is dequantised (to `dtype`, where it is given).
        options: for a path, those of `from_pretrained` (revision, token, device_map, ...).

    Returns:
        A `LinAttnForCausalLM` in eval mode.

    Raises:
        ValueError: a family or a part of one that does not carry, by its name; layers that are to be kept though the
            source lets them see a window only; tensors that are missing, left over or of another shape, by name; what
            `LinAttnConfig` refuses.

    Warns:
        ConversionWarning: where the source attends within a window: a linear layer reads everything before it.

    Example:

        >>> model = linearize("HuggingFaceTB/SmolLM2-135M", keep_layers=0.25)  # doctest: +SKIP
    """
    is_path = isinstance(model_or_path, (str, os.PathLike))
    if not is_path:
        check_model(model_or_path)
        if gguf_file is not None or options:
            names = sorted([*options, *(["gguf_file"] if gguf_file is not None else [])])
            raise ValueError(f"{', '.join(names)}: only a folder or a hub id takes this, not a loaded model")
    source = read_source_config(model_or_path, gguf_file, options) if is_path else model_or_path.config
    check_source(source)
    config = linear_config(source, feature_map, feature_map_kwargs, keep_layers, window, normalizer)
    if not is_path:
        check_class(model_or_path)
        return load_from_model(model_or_path, config, _dtype(dtype) or model_or_path.dtype)
    if dtype is not None:
        options["dtype"] = _dtype(dtype)
    return load_from_files(model_or_path, config, gguf_file, options)


def linear_config(
    source: PreTrainedConfig,
    feature_map: str = "hedgehog",
    feature_map_kwargs: dict[str, Any] | None = None,
    keep_layers: Sequence[int] | float | str = (),
    window: int | None = None,
    normalizer: str | None = None,
) -> LinAttnConfig:
    """The config of the model that `linearize` makes of one with config `source`; its arguments and errors."""
    kept = kept_layers(keep_layers, source.num_hidden_layers)
    _check_windows(windows(source), kept, source.max_position_embeddings)
    if normalizer is None:
        normalizer = "denominator" if feature_map_class(feature_map).is_nonnegative else "rmsnorm"
    other = LINEAR_LAYER_TYPE if window is None else SLIDING_LAYER_TYPE
    fields = {
        "layer_types": ["full_attention" if i in kept else other for i in range(source.num_hidden_layers)],
        "feature_map": feature_map,
        "feature_map_kwargs": feature_map_kwargs,
        "normalizer": normalizer,
        **({} if window is None else {"sliding_window": window}),
    }
    return LinAttnConfig.from_preset("seed", **shared_fields(source) | fields)  # Llama's rotations, no convolution


def _check_windows(sizes: list[int | None], kept: list[int], positions: int) -> None:
    """Refuse to keep layers that see a window, and say that others no longer have it."""
    seen = [index for index, size in enumerate(sizes) if size is not None]
    if not seen:
        return
    size = sizes[seen[0]]
    both = sorted(set(seen) & set(kept))
    if both:
        raise ValueError(
            f"keep_layers has {both}, which see sliding_window={size} of max_position_embeddings={positions} keys in "
            "the source; full attention here sees all: leave them out"
        )
    warnings.warn(
        f"{len(seen)} layers of the source see sliding_window={size} keys, which does not carry: linear layers see all",
        ConversionWarning,
        stacklevel=4,
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype={dtype!r} is unknown; choose one of ['float32', 'bfloat16', 'float16', 'float64']")
        return found
    return dtype
