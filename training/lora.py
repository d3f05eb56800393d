"""LoRA adapters on every projection, and models as they are written with and without them."""

from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from checkpoints import merged_weights, whole_or_absent
from config import ConfigError, LoraFields


def with_lora(model: PreTrainedModel, config: LoraFields, task_type: str) -> torch.nn.Module:
    """Adapters on every projection; all else is frozen, but for a new head."""
    if find_spec("peft") is None:
        raise ConfigError("lora_rank needs peft: pip install peft, or set lora_rank: 0")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear",
        task_type=task_type,
    )
    if config.gradient_checkpointing:
        model.enable_input_require_grads()  # the frozen embeddings give no gradient to go back to
    return get_peft_model(model, lora)


def save_model(accelerator: Accelerator, model, tokenizer: PreTrainedTokenizerBase, config: LoraFields) -> None:
    """The model and its tokenizer to `output_dir`; with LoRA merged, and the adapter alone in `output_dir/adapter`."""
    weights = merged_weights(accelerator, model)
    whole, output_dir = accelerator.unwrap_model(model), Path(config.output_dir)
    with whole_or_absent(config, "the model"):
        if not config.lora_rank:
            whole.save_pretrained(output_dir, is_main_process=accelerator.is_main_process, state_dict=weights)
        elif accelerator.is_main_process:
            whole.save_pretrained(output_dir / "adapter", state_dict=weights)
            if config.merge_lora:
                whole.merge_and_unload().save_pretrained(output_dir)
        if accelerator.is_main_process:
            tokenizer.save_pretrained(output_dir)
