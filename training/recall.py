"""Multi-query associative recall (MQAR): does a model find again what it has read?

A sequence begins with N pairs k1 v1 k2 v2 ... of random tokens, keys from one half of the vocabulary and values from
the other. Every key stands once more somewhere in the rest, soon after the pairs more often than late, between random
tokens, and the model has to name its value there. Source: Zoology, arXiv:2312.04927, section 3.1.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import variants
from config import RunConfig
from data import IGNORE
from hf_linattn import LinAttnForCausalLM
from loop import make_optimizer, make_schedule
from variants import Variant, cache_bytes

POWER = 0.1  # a query stands at distance d with probability ~ d^(POWER - 1)
VALIDATION, TEST = 1, 2  # streams of random sequences; training has stream 0 of its seed

MIXES = ((False, False), (True, False), (False, True), (True, True))


@dataclass(frozen=True)
class Scale:
    """How large the study is. Of `pairs`, all are tested; the last is the hardest, and the one that is trained."""

    vocab_size: int
    length: int
    pairs: tuple[int, ...]
    hidden_size: int
    heads: int
    layers: int
    steps: int
    batch_size: int
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    test_sequences: int
    mixes: tuple[tuple[bool, bool], ...] = MIXES
    initializer_range: float = 0.15
    narrow: bool = True


SCALES = {
    "quick": Scale(32, 24, (2, 4), 16, 2, 2, 3, 4, (3e-3, 1e-2), (0, 1), 8),
    "cpu": Scale(48, 48, (4, 8, 16), 32, 2, 2, 700, 32, (5e-3, 1e-2), (0, 1, 2), 256),
    "full": Scale(
        8192, 512, (16, 32, 64, 128), 128, 8, 2, 50_000, 128, (3e-4, 1e-3, 3e-3, 1e-2), (0, 1, 2), 1000, MIXES, 0.02
    ),
}


def make_batch(
    scale: Scale, pairs: int, count: int, generator: torch.Generator, device: Any = "cpu"
) -> dict[str, Tensor]:
    """`input_ids` and `labels`, each [count, length]; the label of a query is its value, in place."""
    half, rest = scale.vocab_size // 2, scale.length - 2 * pairs
    if rest < pairs or pairs >= half:
        raise ValueError(f"{pairs} pairs fit neither {scale.length} tokens nor a vocabulary of {scale.vocab_size}")
    keys = 1 + torch.rand(count, half - 1, generator=generator).argsort(-1)[:, :pairs]
    values = half + torch.rand(count, scale.vocab_size - half, generator=generator).argsort(-1)[:, :pairs]
    ids = torch.randint(scale.vocab_size, (count, scale.length), generator=generator)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    weights = torch.arange(1, rest + 1, dtype=torch.float64) ** (POWER - 1)
    places = 2 * pairs + torch.multinomial(weights.expand(count, -1), pairs, generator=generator)
    labels = torch.full_like(ids, IGNORE)
    ids.scatter_(1, places, keys)
    labels.scatter_(1, places, values)
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def new_model(scale: Scale, variant: Variant) -> LinAttnForCausalLM:
    return variants.new_model(
        variant,
        scale.layers,
        scale.length,
        vocab_size=scale.vocab_size,
        hidden_size=scale.hidden_size,
        intermediate_size=scale.hidden_size,
        num_attention_heads=scale.heads,
        max_position_embeddings=scale.length,
        initializer_range=scale.initializer_range,
        tie_word_embeddings=False,
    )


def answers(model: LinAttnForCausalLM, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits at the queries [queries, vocab_size], and what they should name."""
    there = batch["labels"] != IGNORE
    hidden = model.model(batch["input_ids"], use_cache=False).last_hidden_state[there]
    return model.lm_head(hidden), batch["labels"][there]


def run(scale: Scale, variant: Variant, learning_rate: float, seed: int, device: Any = "cpu") -> dict[str, Any]:
    """Train and test one model."""
    torch.manual_seed(seed)
    model = new_model(scale, variant).to(device).train()
    config = RunConfig(
        max_steps=scale.steps,
        warmup_steps=scale.steps // 10,
        learning_rate=learning_rate,
        weight_decay=0.01,
        schedule="wsd",
        adam_beta2=0.98,
    )
    optimizer = make_optimizer(model, config, torch.device(device))
    schedule = make_schedule(optimizer, config)
    generator = torch.Generator().manual_seed(seed)
    losses, every = [], max(1, scale.steps // 20)
    for step in range(1, scale.steps + 1):
        batch = make_batch(scale, scale.pairs[-1], scale.batch_size, generator, device)
        loss = cross_entropy(*answers(model, batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == 0:
            losses.append([step, loss.item()])
            if not math.isfinite(losses[-1][1]):
                break
    return {
        "parameters": model.num_parameters(),
        "cache_bytes": cache_bytes(model, make_batch(scale, scale.pairs[-1], 1, generator, device)["input_ids"]),
        "losses": losses,
        "validation": accuracy(model, scale, VALIDATION)[str(scale.pairs[-1])],
        "accuracy": accuracy(model, scale, TEST),
    }


@torch.no_grad()
def accuracy(model: LinAttnForCausalLM, scale: Scale, stream: int) -> dict[str, float]:
    """The part of the values named right, by number of pairs; the same sequences for every model."""
    model.eval()
    found = {}
    for pairs in scale.pairs:
        generator = torch.Generator().manual_seed(2**40 + 1000 * pairs + stream)
        right = total = 0
        for _ in range(0, scale.test_sequences, scale.batch_size):
            logits, values = answers(model, make_batch(scale, pairs, scale.batch_size, generator, model.device))
            right, total = right + (logits.argmax(-1) == values).sum().item(), total + len(values)
        found[str(pairs)] = right / total
    return found


def score(run: dict[str, Any]) -> float:
    """What a learning rate is chosen by; more is better."""
    return run["validation"]
