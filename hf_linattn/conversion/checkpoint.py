"""A converted model as a whole folder: config, weights, generation settings, and the tokenizer of its source."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ..models.portable.folder import staged

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def write_checkpoint(
    model: PreTrainedModel,
    out: str | os.PathLike,
    source: str | os.PathLike | None = None,
    gguf_file: str | None = None,
    max_shard_size: str = "5GB",
) -> PreTrainedTokenizerBase | None:
    """Write `model`, and the tokenizer and chat template of `source`, into a new folder: whole, or nothing is left.

    Args:
        model: what `linearize` made.
        out: a folder that is not there yet, or empty.
        source: the folder or hub id that it was made from; `None` or one without a tokenizer writes none.
        gguf_file: the GGUF file in `source` that it was made from.
        max_shard_size: bytes of a file of weights, as `save_pretrained` takes them.

    Returns:
        The tokenizer written, or `None`.

    Raises:
        ValueError: `out` is a file or not empty, or the tokenizer of `source` cannot be read.
    """
    check_free(out)
    tokenizer = None if source is None else read_tokenizer(source, gguf_file)
    with staged(out) as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return tokenizer


def check_free(out: str | os.PathLike) -> None:
    """A ValueError of one line where something is in the way of a new folder at `out`."""
    path = Path(out)
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is there already and not empty: choose another folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: choose a folder")


def read_tokenizer(source: str | os.PathLike, gguf_file: str | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, a hub id or a GGUF file; `None` where a folder or repository has none."""
    if gguf_file is None and not any(_has(source, name) for name in TOKENIZER_FILES):
        return None
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # tokenizers of all kinds fail in ways of their own
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ValueError(f"{source}: the tokenizer cannot be read ({reason})") from error


def _has(source: str | os.PathLike, name: str) -> bool:
    return cached_file(source, name, _raise_exceptions_for_missing_entries=False) is not None
