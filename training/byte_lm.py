"""Small language models of bytes on real text: the same parameters, tokens and steps for every variant of attention.

Beside the loss on held-out text: how it falls with the context, beyond the trained length too; and on what could be
copied, bytes that end a string of `REPEAT` bytes which has stood in the context before.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import variants
from config import PretrainConfig
from data import IGNORE, BlockStream, Corpus, PackedTokens, byte_tokenizer, load_corpus, tokenize
from hf_linattn import LinAttnForCausalLM
from loop import causal_loss
from measures import by_context, token_losses
from variants import Variant, cache_bytes, finite, fit

REPEAT = 12
LONGER = 4  # the loss by position is measured on blocks so many times as long as those of training


@dataclass(frozen=True, kw_only=True)
class Scale(variants.Scale):
    """How large the study is."""

    dataset: str = "python_stdlib"
    block_size: int
    eval_bytes: int
    mixes: tuple[tuple[bool, bool], ...] = ((False, False), (True, False))
    initializer_range: float = 0.02
    narrow: bool = False


SCALES = {
    "quick": Scale(
        block_size=32, eval_bytes=6000, hidden_size=16, heads=2, layers=2, steps=2, batch_size=2,
        learning_rates=(3e-3,), seeds=(0, 1),
    ),
    "cpu": Scale(
        block_size=256, eval_bytes=65_536, hidden_size=64, heads=4, layers=2, steps=600, batch_size=4,
        learning_rates=(5e-3,), seeds=(0, 1, 2),
    ),
    "full": Scale(
        block_size=2048, eval_bytes=400_000, hidden_size=512, heads=32, layers=8, steps=10_000, batch_size=32,
        learning_rates=(1e-3, 3e-3), seeds=(0, 1, 2), mixes=((False, False), (True, False), (True, True)),
    ),
}  # fmt: skip


@lru_cache(maxsize=1)
def corpus_of(scale: Scale) -> Corpus:
    """The same text for every model; read once a process."""
    config = PretrainConfig(
        dataset=scale.dataset,
        block_size=scale.block_size,
        eval_bytes=2 * scale.eval_bytes,
        model_config={"model_type": "linattn"},
    )
    return load_corpus(config, byte_tokenizer(), progress=False)


def new_model(scale: Scale, variant: Variant, vocab_size: int) -> LinAttnForCausalLM:
    longest = LONGER * scale.block_size
    return variants.new_model(
        variant,
        scale.layers,
        longest,
        vocab_size=vocab_size,
        hidden_size=scale.hidden_size,
        intermediate_size=8 * scale.hidden_size // 3,
        num_attention_heads=scale.heads,
        max_position_embeddings=longest,
        initializer_range=scale.initializer_range,
        tie_word_embeddings=True,
    )


def run(scale: Scale, variant: Variant, learning_rate: float, seed: int, device: Any = "cpu") -> dict[str, Any]:
    """Train and test one model: the first half of each held-out document is validation text, the second test text."""
    corpus, tokenizer = corpus_of(scale), byte_tokenizer()
    torch.manual_seed(seed)
    model = new_model(scale, variant, len(tokenizer)).to(device).train()
    config = PretrainConfig(
        max_steps=scale.steps,
        warmup_steps=scale.steps // 10,
        learning_rate=learning_rate,
        model_config={"model_type": "linattn"},
    )
    batches = iter(DataLoader(BlockStream(corpus.shards, seed), scale.batch_size, generator=torch.Generator()))
    losses = fit(model, config, batches, lambda m, batch: causal_loss(m, batch, (batch["labels"] != IGNORE).sum()))
    firsts = [text[: len(text) // 2] for text in corpus.held_out_texts]
    tests = [text[len(text) // 2 :] for text in corpus.held_out_texts]
    nats, _, copied = read_text(model, firsts, scale.block_size, scale.batch_size)
    validation = mean_bits(nats)
    nats, _, copied = read_text(model, tests, scale.block_size, scale.batch_size)
    long_nats, before, _ = read_text(model, tests, LONGER * scale.block_size, max(1, scale.batch_size // LONGER))
    totals, counts = torch.zeros(2, LONGER * scale.block_size, dtype=torch.float64)
    totals.index_add_(0, before, long_nats)
    counts.index_add_(0, before, torch.ones_like(long_nats))
    return {
        "parameters": model.num_parameters(),
        "cache_bytes": cache_bytes(model, torch.zeros(1, scale.block_size, dtype=torch.long, device=device)),
        "losses": losses,
        "validation": validation,
        "bits_per_byte": finite(nats.sum().item() / math.log(2) / sum(len(text.encode()) for text in tests)),
        "bits_of_repeated": mean_bits(nats[copied]),
        "bits_of_others": mean_bits(nats[~copied]),
        "part_repeated": copied.double().mean().item(),
        "by_context": by_context(totals, counts),
    }


def mean_bits(nats: Tensor) -> float | None:
    return finite(nats.mean().item() / math.log(2))


def read_text(
    model: LinAttnForCausalLM, texts: list[str], block_size: int, batch_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each byte of the text what it costs in nats, how many bytes of its document the block has before it, and
    whether it ends a string that they hold already."""
    tokenizer = byte_tokenizer()
    blocks = PackedTokens(tokenize(texts, tokenizer), block_size, tokenizer.pad_token_id)
    results = []
    for batch in DataLoader(blocks, batch_size):
        losses, there = token_losses(model.eval(), {name: tensor.to(model.device) for name, tensor in batch.items()})
        there = there.cpu()
        results.append((losses.cpu().double()[there], batch["position_ids"][there], repeated(batch)[there]))
    nats, before, copied = map(torch.cat, zip(*results))
    return nats, before, copied


def repeated(batch: dict[str, Tensor]) -> Tensor:
    """Whether the string of REPEAT tokens that ends at a token has stood in its document before, [B, T]."""
    found = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for row, (ids, positions) in enumerate(zip(batch["input_ids"].tolist(), batch["position_ids"].tolist())):
        seen: set[tuple[int, ...]] = set()
        for at, position in enumerate(positions):
            if position == 0:
                seen = set()
            if position >= REPEAT - 1:
                string = tuple(ids[at - REPEAT + 1 : at + 1])
                found[row, at] = string in seen
                seen.add(string)
    return found


def score(run: dict[str, Any]) -> float:
    """What a learning rate is chosen by; more is better."""
    return -math.inf if run["validation"] is None else -run["validation"]
