"""Evaluates a causal language model on held-out text: bits per byte, perplexity, and how they depend on the context.

    accelerate launch training/evaluate.py --model_name_or_path runs/demo [--field value ...]

config.py lists the fields. The text is what pretrain.py would hold out under the same dataset and held_out_fraction
(`--whole true`: all of it). Any checkpoint of transformers can be evaluated, so that models can be compared.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from baselines import measure_baselines
from config import EvaluateConfig, read_config
from data import PackedTokens, pad_token, read_held_out, tokenize
from hf_linattn.benchmark.record import record, write_json
from loop import check_precision, held_out_batches, run_script, set_threads
from measures import by_context, token_losses
from models import load_model, load_tokenizer
from sources import is_held_out, read_documents


def main(argv: list[str]) -> None:
    # 1. What to evaluate, and where.
    config = read_config(argv, EvaluateConfig)
    check_precision(config.mixed_precision)
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    set_threads(accelerator, config.cpu_threads)
    tokenizer = load_tokenizer(config.model_name_or_path)
    model = accelerator.prepare_model(load_model(config.model_name_or_path, tokenizer), evaluation_mode=True).eval()

    # 2. On what.
    texts = read_held_out(config, whole=config.whole)
    blocks = PackedTokens(tokenize(texts, tokenizer), config.block_size, pad_token(tokenizer))
    accelerator.print(
        f"{len(texts):,} documents, {sum(len(t.encode()) for t in texts):,} bytes, {len(blocks):,} blocks"
    )

    # 3. What predicting it costs.
    nats, tokens = by_position(accelerator, model, blocks, config.eval_batch_size)
    results = {
        "kind": "evaluate",
        "record": record(config.seed, launcher="accelerate launch"),
        "model": {"class": type(accelerator.unwrap_model(model)).__name__},
        "config": asdict(config),
        **summary(nats, tokens, texts),
    }
    if config.baselines and accelerator.is_main_process:
        seen = (d.text for d in read_documents(config.dataset, config) if not is_held_out(d.name, config))
        results["baselines"] = measure_baselines(seen, texts)
    if accelerator.is_main_process:
        out = Path(config.out or Path(config.model_name_or_path) / "evaluation.json")
        write_json(out, results)
        accelerator.print(
            f"bits per byte {results['bits_per_byte']:.4f}, perplexity {results['perplexity']:.4g} a token"
        )
        for row in results["by_context"]:
            accelerator.print(
                f"  after {row['from']:,} to {row['to']:,} tokens: {row['bits_per_token']:.4f} bits a token"
            )
        accelerator.print(f"wrote {out}")


@torch.no_grad()
def by_position(
    accelerator: Accelerator, model: torch.nn.Module, blocks: PackedTokens, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats and tokens [block_size], summed by how many tokens of its document a token has before it in the block."""
    nats = torch.zeros(blocks.block_size, dtype=torch.float64, device=accelerator.device)
    tokens = torch.zeros(blocks.block_size, dtype=torch.long, device=accelerator.device)
    for batch in held_out_batches(accelerator, blocks, batch_size):
        losses, there = token_losses(model, batch)
        before = batch["position_ids"][there]
        nats.index_add_(0, before, losses[there].double())
        tokens.index_add_(0, before, torch.ones_like(before))
    return accelerator.reduce(nats, "sum").cpu(), accelerator.reduce(tokens, "sum").cpu()


def summary(nats: torch.Tensor, tokens: torch.Tensor, texts: list[str]) -> dict[str, Any]:
    """Bits per byte of the text, per token, and per token by powers of two of the context."""
    size, count, total = sum(len(text.encode()) for text in texts), tokens.sum().item(), nats.sum().item()
    return {
        "documents": len(texts),
        "bytes": size,
        "tokens": count,
        "bits_per_byte": total / math.log(2) / size,
        "bits_per_token": total / math.log(2) / count,
        "perplexity": math.exp(min(700.0, total / count)),
        "by_context": by_context(nats, tokens),
    }


if __name__ == "__main__":
    run_script("evaluate", main)
