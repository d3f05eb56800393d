"""Portable checkpoints: a flat folder of config, weights and the code that runs them where the package is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..registry import auto_map
from .code import code_of
from .folder import staged


def save_portable(
    model: PreTrainedModel,
    directory: str | os.PathLike,
    write: Callable[..., None],
    *,
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """Save `model` with its code into `directory`; complete, or the folder is as it was.

    Args:
        write: `PreTrainedModel.save_pretrained` of the model.
        is_main_process, options: passed to it.

    Raises:
        ValueError: what cannot be carried, before anything is written.
    """
    if options.get("distributed_checkpoint"):
        raise ValueError("portable=True writes whole weights from one rank: leave distributed_checkpoint=False")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("portable=True saves a whole model, this one has adapters: merge them, or save them alone")
    code = code_of(model)
    if not model.should_save_on_this_rank(is_main_process):
        return write(directory, is_main_process=is_main_process, **options)
    with staged(directory) as folder, _with_auto_map(model.config):
        write(folder, is_main_process=is_main_process, **options)
        for name, text in code.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def _with_auto_map(config: PreTrainedConfig) -> Iterator[None]:
    config.auto_map = auto_map(type(config))
    try:
        yield
    finally:
        del config.auto_map


__all__ = ["code_of", "save_portable"]
