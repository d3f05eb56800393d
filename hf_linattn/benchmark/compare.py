"""Cache size and time per generated token, against a Llama of the same size, as the context grows.

    python -m hf_linattn.benchmark.compare --model runs/demo --out compare.json

Both models live in one process and take turns, so that whatever slows the machine slows both. Each context is read in
one forward pass; then `tokens` decoding steps are timed, one at a time, `rounds` times over. The Llama has random
weights: what is measured does not depend on them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, set_seed

from ..models import LinAttnConfig
from .record import record, write_json
from .timing import median_ratio, synchronize

CONTEXTS = (256, 1024, 4096, 16384)
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def matching_llama(config: PreTrainedConfig, max_position_embeddings: int) -> PreTrainedModel:
    """A randomly initialised Llama whose layers have the shapes that `config` names."""
    fields = {name: getattr(config, name) for name in SHARED_FIELDS if hasattr(config, name)}
    return AutoModelForCausalLM.from_config(LlamaConfig(**fields, max_position_embeddings=max_position_embeddings))


def cache_nbytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds: its own `nbytes`, or else the keys and values of its layers."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)


def random_linattn(
    hidden_size: int, num_hidden_layers: int, num_attention_heads: int, vocab_size: int, dtype: torch.dtype
) -> PreTrainedModel:
    """A Llama of the given size with linear attention as it was published; an MLP is 8/3 as wide as the rest."""
    config = LinAttnConfig.from_preset(
        "seed",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Decoder:
    """A model that has read a context and generates from it, one timed step at a time."""

    def __init__(self, model: PreTrainedModel, context: torch.Tensor):
        self.model = model
        output = model(context, use_cache=True, logits_to_keep=1)
        self.cache, self.token = output.cache, output.logits[:, -1:].argmax(-1)
        self.context_bytes = cache_nbytes(self.cache)

    def step(self) -> float:
        """Milliseconds that one more token took."""
        synchronize(self.model.device)
        start = time.perf_counter()
        output = self.model(self.token, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.token = output.logits[:, -1:].argmax(-1)
        synchronize(self.model.device)
        return (time.perf_counter() - start) * 1e3


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    contexts: Sequence[int] = CONTEXTS,
    tokens: int = 8,
    rounds: int = 5,
    seed: int = 0,
    progress: Callable[..., Any] = tqdm,
) -> dict[str, Any]:
    """Measures `model` and a matching Llama; the result is what the JSON file holds.

    Args:
        model: any causal language model of transformers, on the device to measure.
        contexts: context lengths, in tokens.
        tokens: decoding steps of a model before it is the other's turn.
        rounds: turns each model has at a context length; the first warms up and is not counted.
        seed: seed of the Llama's weights and of the contexts.
    """
    set_seed(seed)
    config = model.config
    llama = matching_llama(config, max(contexts) + tokens * (rounds + 1)).to(model.device, model.dtype)
    models = {"model": model.eval(), "llama": llama.eval()}
    rows = []
    for context in progress(contexts, "compare contexts"):
        text = torch.randint(0, config.vocab_size, (1, context), device=model.device)
        decoders = {name: Decoder(m, text) for name, m in models.items()}
        samples: dict[str, list[list[float]]] = {name: [] for name in models}
        for _ in range(rounds + 1):
            for name, decoder in decoders.items():
                samples[name].append([decoder.step() for _ in range(tokens)])
        counted = {name: turns[1:] for name, turns in samples.items()}
        medians = {name: [statistics.median(turn) for turn in turns] for name, turns in counted.items()}
        row: dict[str, Any] = {"context": context}
        for name, decoder in decoders.items():
            row[name] = {
                "cache_bytes": decoder.context_bytes,
                "ms_per_token": statistics.median(medians[name]),
                "samples_ms": counted[name],
            }
        row["llama_over_model"] = {
            "cache_bytes": decoders["llama"].context_bytes / decoders["model"].context_bytes,
            "ms_per_token": median_ratio(medians["llama"], medians["model"]),
        }
        rows.append(row)
    return {
        "kind": "compare",
        "record": record(seed),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "models": {
            name: {"class": type(m).__name__, "parameters": sum(p.numel() for p in m.parameters())}
            for name, m in models.items()
        },
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint; without it, a randomly initialised linattn of the given size")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_hidden_layers", type=int, default=8)
    parser.add_argument("--num_attention_heads", type=int, default=8)
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--tokens", type=int, default=8, help="decoding steps a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns a model and context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", default="compare.json")
    arguments = parser.parse_args(argv)

    set_seed(arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    else:
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        model = random_linattn(*(getattr(arguments, name) for name in sizes), dtype)
    model = model.to(arguments.device)
    write_json(arguments.out, compare(model, arguments.contexts, arguments.tokens, arguments.rounds, arguments.seed))


if __name__ == "__main__":
    main()
