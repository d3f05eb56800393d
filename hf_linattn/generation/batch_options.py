"""Which of transformers' options for continuous batching a batch of states honours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import ContinuousBatchingConfig, GenerationConfig

from .batching import PREFILL_CHUNK, SLOTS, ContinuousBatch

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedTokenizerBase

_PAGES = "a state has no pages; max_requests_per_batch bounds the memory"
_EAGER = "this batch runs the model as it is; compile the model itself, or use generate(cache_implementation='static')"
UNSUPPORTED = {
    "page_size": _PAGES,
    "num_blocks": _PAGES,
    "block_size": _PAGES,
    "max_blocks_per_request": _PAGES,
    "max_memory_percent": _PAGES,
    "safety_margin": _PAGES,
    "cpu_offload_space": "a state is too small to offload; max_requests_per_batch bounds the memory",
    "use_async_batching": _EAGER,
    "use_cuda_graph": _EAGER,
    "q_padding_interval_size": _EAGER,
    "kv_padding_interval_size": _EAGER,
    "varlen_compile_config": _EAGER,
    "decode_compile_config": _EAGER,
    "default_compile_level": _EAGER,
    "scheduler_type": "requests are served first come, first served",
}


def check_batching_config(config: ContinuousBatchingConfig) -> None:
    """Options that mean something only for pages of keys and values, or for captured graphs, raise in one line."""
    default = ContinuousBatchingConfig()
    for name, why in UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value and value != getattr(default, name):
            raise ValueError(f"continuous_batching_config.{name}={value!r}: {why}")


def make_batch(
    model: GenerationMixin,
    generation_config: GenerationConfig | None = None,
    config: ContinuousBatchingConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> ContinuousBatch:
    """The batch that transformers' options describe: `max_requests_per_batch` slots, `max_batch_tokens` a chunk."""
    config = config or ContinuousBatchingConfig()
    check_batching_config(config)
    slots, chunk = config.max_requests_per_batch or SLOTS, config.max_batch_tokens or PREFILL_CHUNK
    return ContinuousBatch(model, slots, chunk, generation_config, tokenizer)
