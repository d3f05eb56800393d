"""Weights of a softmax model into a linear one, by name; what is new starts fresh, all else must be there.

Files are read tensor by tensor into their place (transformers builds the model without storage first), so that beside
the model itself no second copy of it is held.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file, is_gguf_available

from ..models import LinAttnConfig, LinAttnForCausalLM
from .families import source_class

SOFTMAX_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
PLACES = {"revision", "token", "cache_dir", "local_files_only", "subfolder"}  # options that say where files lie
MERGE_FIRST = "merge the adapters first: PeftModel.merge_and_unload()"


def new_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the parameters and buffers that softmax attention has not: they start fresh and want training.

    These are the feature maps, `o_norm`, convolutions and the mix of a window with the linear part.
    """
    return [name for name in model.state_dict() if _is_new(name)]


def _is_new(name: str) -> bool:
    _, inside, part = name.partition(".self_attn.")
    return bool(inside) and part.partition(".")[0] not in SOFTMAX_PARTS


def read_source_config(source: str | os.PathLike, gguf_file: str | None, options: dict[str, Any]) -> PreTrainedConfig:
    """The config of a folder or hub id, or that which a GGUF file in it implies."""
    places = {key: value for key, value in options.items() if key in PLACES}
    if gguf_file is not None:
        if not is_gguf_available():
            raise ValueError(f"gguf_file={gguf_file!r} needs the package gguf: pip install gguf")
        places["gguf_file"] = gguf_file
    try:
        has_adapters = gguf_file is None and find_adapter_config_file(source, **places) is not None
        if not has_adapters:
            return AutoConfig.from_pretrained(source, trust_remote_code=False, **places)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source}: no config that transformers can read, in a folder or on the hub ({reason})"
        ) from None
    raise ValueError(f"{source} holds adapters and no whole model: {MERGE_FIRST}, then save_pretrained")


def load_from_files(
    source: str | os.PathLike, config: LinAttnConfig, gguf_file: str | None, options: dict[str, Any]
) -> LinAttnForCausalLM:
    """The model of `config` with the weights of a folder, hub id or GGUF file."""
    if gguf_file is None:
        return _load(LinAttnForCausalLM, source, str(source), {"config": config, **options})
    softmax = _load(AutoModelForCausalLM, source, f"{source}/{gguf_file}", {"gguf_file": gguf_file, **options})
    return load_from_model(softmax, config, softmax.dtype)


def check_model(model: PreTrainedModel) -> None:
    """A ValueError of one line unless `model` is a whole language model whose weights lie on one device."""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{type(model).__name__} has adapters: {MERGE_FIRST}")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model_or_path is a {type(model).__name__}; give a transformers model, a folder or a hub id")


def check_class(model: PreTrainedModel) -> None:
    """The rest of `check_model`, for a model of a known family."""
    expected = source_class(model.config)
    if type(model).__name__ != expected:
        raise ValueError(f"{type(model).__name__} is no {expected}, whose head and blocks carry: load it with that")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(f"the weights lie on {sorted(devices)}; load the model onto one device")


def load_from_model(model: PreTrainedModel, config: LinAttnConfig, dtype: torch.dtype) -> LinAttnForCausalLM:
    """The model of `config` on the weights of `model`: the same storage where `dtype` is theirs."""
    return load_state(config, model.state_dict(), type(model).__name__, model, dtype)


def load_state(
    config: LinAttnConfig,
    state: dict[str, Tensor],
    name: str,
    like: PreTrainedModel | None = None,
    dtype: torch.dtype | None = None,
) -> LinAttnForCausalLM:
    """The model of `config` on the tensors of `state`, and on the device and with the settings of the model `like`."""
    options: dict[str, Any] = {"config": config, "state_dict": state, "dtype": dtype or like.dtype}
    if like is not None:
        options["attn_implementation"] = like.config._attn_implementation
        if like.device.type != "cpu":
            options["device_map"] = {"": like.device}
    model = _load(LinAttnForCausalLM, None, name, options)
    if like is not None:
        model.generation_config = copy.deepcopy(like.generation_config)
    return model


def _load(cls, source: str | os.PathLike | None, name: str, options: dict[str, Any]) -> PreTrainedModel:
    """`cls.from_pretrained`, whose result holds every tensor of `name` and nothing else but what is new here."""
    with _without_load_report():
        model, info = cls.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    mismatched = [f"{key} {list(found)} for {list(wanted)}" for key, found, wanted in info["mismatched_keys"]]
    for what, names in (
        ("has tensors that do not carry", info["unexpected_keys"]),
        ("lacks tensors", (key for key in info["missing_keys"] if not _is_new(key))),
        ("has tensors of another shape", mismatched),
    ):
        names = sorted(names)
        if names:
            raise ValueError(f"{name} {what}: {some(names)}")
    # what was made here does not lie where its weights came from
    model.config.name_or_path = model.name_or_path = ""
    return model


def some(names: list[str], shown: int = 4) -> str:
    """The first of `names`, and how many there are more."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Leave out transformers' table of parameters that no file holds: here they are checked, and expected."""

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
