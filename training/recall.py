"""Multi-query associative recall (MQAR): does a model find again what it has read?

A sequence begins with N pairs k1 v1 k2 v2 ... of random tokens, keys from one half of the vocabulary and values from
the other. Every key stands once more somewhere in the rest, soon after the pairs more often than late, between random
tokens, and the model has to name its value there. Source: Zoology, arXiv:2312.04927, section 3.1.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import variants
from config import RunConfig
from data import IGNORE
from hf_linattn import LinAttnForCausalLM
from variants import Variant, cache_bytes, fit

POWER = 0.1  # a query stands at distance d with probability ~ d^(POWER - 1)
VALIDATION, TEST = 1, 2  # streams of random sequences; training has stream 0 of its seed


@dataclass(frozen=True, kw_only=True)
class Scale(variants.Scale):
    """How large the study is. Of `pairs`, all are tested; the last is the hardest, and the one that is trained."""

    vocab_size: int
    length: int
    pairs: tuple[int, ...]
    test_sequences: int
    mixes: tuple[tuple[bool, bool], ...] = ((False, False), (True, False), (False, True), (True, True))
    initializer_range: float = 0.15
    narrow: bool = True

    @property
    def longest(self) -> int:
        return self.length


SCALES = {
    "quick": Scale(
        vocab_size=32, length=24, pairs=(2, 4), test_sequences=8, hidden_size=16, heads=2, layers=2, steps=3,
        batch_size=4, learning_rates=(3e-3, 1e-2), seeds=(0, 1),
    ),
    "cpu": Scale(
        vocab_size=48, length=48, pairs=(4, 8, 16), test_sequences=240, hidden_size=32, heads=2, layers=2, steps=700,
        batch_size=24, learning_rates=(5e-3, 1e-2), seeds=(0, 1, 2),
        mixes=((False, False), (True, False), (False, True)),
    ),
    "full": Scale(
        vocab_size=8192, length=512, pairs=(16, 32, 64, 128), test_sequences=1000, hidden_size=128, heads=8, layers=2,
        steps=50_000, batch_size=128, learning_rates=(3e-4, 1e-3, 3e-3, 1e-2), seeds=(0, 1, 2), initializer_range=0.02,
    ),
}  # fmt: skip


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
    fields = {"vocab_size": scale.vocab_size, "tie_word_embeddings": False}
    return variants.new_model(scale, variant, intermediate_size=scale.hidden_size, **fields)


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
    generator = torch.Generator().manual_seed(seed)
    batches = (make_batch(scale, scale.pairs[-1], scale.batch_size, generator) for _ in itertools.count())
    losses = fit(model, config, batches, lambda model, batch: cross_entropy(*answers(model, batch)))
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
