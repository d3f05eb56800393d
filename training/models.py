"""Models and tokenizers as the scripts start from them: new ones, or whole checkpoints, or an error of one line."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_linattn  # noqa: F401  registers the models
from config import ConfigError
from data import byte_tokenizer


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, or of bytes if there is none."""
    if name is None:
        return byte_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {name!r}: {first_line(error)}") from error


def new_model(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A causal language model with random float32 weights, of a configuration's fields."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    given = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in names}, **fields}
    try:
        defaults = AutoConfig.for_model(given["model_type"])
        unknown = [name for name in given if not hasattr(defaults, name)]
        if unknown:
            allowed = ", ".join(sorted(defaults.to_dict()))
            raise ConfigError(f"model_config: {given['model_type']} has no field {unknown[0]!r}. Allowed: {allowed}")
        check_vocabulary(tokenizer, given["vocab_size"])
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model_config: {' '.join(str(error).split())}") from error


def load_model(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    auto_class: type = AutoModelForCausalLM,
    may_lack: tuple[str, ...] = (),
    **options: Any,
) -> PreTrainedModel:
    """A checkpoint in float32, all of whose weights it holds, save those whose names start as in `may_lack`.

    Raises:
        ConfigError: there is no such checkpoint, it is not for `auto_class`, its weights are those of another
            architecture or shape, or the tokenizer has more tokens than it.
    """
    try:
        model, report = auto_class.from_pretrained(name, dtype=torch.float32, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model_name_or_path {name!r}: {first_line(error)}") from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(may_lack or ("\0",)))
    if missing:
        raise ConfigError(
            f"model_name_or_path {name!r} lacks {len(missing)} of the weights of {type(model).__name__} ({missing[0]}, "
            "...): it was made by another architecture"
        )
    check_vocabulary(tokenizer, model.get_input_embeddings().num_embeddings)
    return model


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    if len(tokenizer) > rows:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {rows}: raise it")


def first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
