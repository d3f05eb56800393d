"""Small language models of bytes on real text: the same parameters, tokens and steps for every variant of attention.

Beside the loss on held-out text: how it falls with the context, beyond the trained length too; and on what could be
copied, bytes that end a string of `REPEAT` bytes which has stood in the context before.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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

    @property
    def longest(self) -> int:
        return LONGER * self.block_size


SCALES = {
    "quick": Scale(
        block_size=32, eval_bytes=6000, hidden_size=16, heads=2, layers=2, steps=2, batch_size=2,
        learning_rates=(3e-3,), seeds=(0, 1),
    ),
    "cpu": Scale(
        block_size=256, eval_bytes=32_768, hidden_size=64, heads=4, layers=2, steps=320, batch_size=4,
        learning_rates=(3e-3, 6e-3), seeds=(0, 1, 2),
    ),
    "full": Scale(
        block_size=2048, eval_bytes=400_000, hidden_size=512, heads=32, layers=8, steps=10_000, batch_size=32,
        learning_rates=(1e-3, 3e-3), seeds=(0, 1, 2), mixes=((False, False), (True, False), (True, True)),
    ),
}  # fmt: skip


class Texts(NamedTuple):
    """The first half of each held-out document is validation text, the second test text."""

    corpus: Corpus
    validation: PackedTokens
    test: PackedTokens
    long_test: PackedTokens  # in longer blocks
    test_bytes: int
    repeats: Tensor  # of the tokens of `test`, in the order of `read_blocks`: see `repeated`


@lru_cache(maxsize=1)
def texts_of(scale: Scale) -> Texts:
    """The same text for every model; read once a process."""
    tokenizer = byte_tokenizer()
    config = PretrainConfig(
        dataset=scale.dataset,
        block_size=scale.block_size,
        eval_bytes=2 * scale.eval_bytes,
        model_config={"model_type": "linattn"},
    )
    corpus = load_corpus(config, tokenizer, progress=False)
    firsts = [text[: len(text) // 2] for text in corpus.held_out_texts]
    seconds = [text[len(text) // 2 :] for text in corpus.held_out_texts]

    def pack(texts: list[str], block_size: int) -> PackedTokens:
        return PackedTokens(tokenize(texts, tokenizer), block_size, tokenizer.pad_token_id)

    test = pack(seconds, scale.block_size)
    return Texts(
        corpus,
        pack(firsts, scale.block_size),
        test,
        pack(seconds, scale.longest),
        sum(len(text.encode()) for text in seconds),
        torch.cat([repeated(block)[block["labels"] != IGNORE] for block in test]),
    )


def new_model(scale: Scale, variant: Variant, vocab_size: int) -> LinAttnForCausalLM:
    fields = {"vocab_size": vocab_size, "tie_word_embeddings": True}
    return variants.new_model(scale, variant, intermediate_size=8 * scale.hidden_size // 3, **fields)


def run(scale: Scale, variant: Variant, learning_rate: float, seed: int, device: Any = "cpu") -> dict[str, Any]:
    """Train and test one model."""
    texts = texts_of(scale)
    torch.manual_seed(seed)
    model = new_model(scale, variant, len(byte_tokenizer())).to(device).train()
    config = PretrainConfig(
        max_steps=scale.steps,
        warmup_steps=scale.steps // 10,
        learning_rate=learning_rate,
        model_config={"model_type": "linattn"},
    )
    batches = iter(DataLoader(BlockStream(texts.corpus.shards, seed), scale.batch_size, generator=torch.Generator()))
    losses = fit(model, config, batches, lambda m, batch: causal_loss(m, batch, (batch["labels"] != IGNORE).sum()))
    nats, _ = read_blocks(model, texts.test, scale.batch_size)
    long_nats, before = read_blocks(model, texts.long_test, max(1, scale.batch_size // LONGER))
    totals, counts = torch.zeros(2, scale.longest, dtype=torch.float64)
    totals.index_add_(0, before, long_nats)
    counts.index_add_(0, before, torch.ones_like(long_nats))
    return {
        "parameters": model.num_parameters(),
        "cache_bytes": cache_bytes(model, torch.zeros(1, scale.block_size, dtype=torch.long, device=device)),
        "losses": losses,
        "validation": mean_bits(read_blocks(model, texts.validation, scale.batch_size)[0]),
        "bits_per_byte": finite(nats.sum().item() / math.log(2) / texts.test_bytes),
        "bits_of_repeated": mean_bits(nats[texts.repeats]),
        "bits_of_others": mean_bits(nats[~texts.repeats]),
        "part_repeated": texts.repeats.double().mean().item(),
        "by_context": by_context(totals, counts),
    }


def mean_bits(nats: Tensor) -> float | None:
    return finite(nats.mean().item() / math.log(2))


def read_blocks(model: LinAttnForCausalLM, blocks: PackedTokens, batch_size: int) -> tuple[Tensor, Tensor]:
    """For each byte of the text what it costs in nats, and how many bytes of its document the block has before it."""
    results = []
    for batch in DataLoader(blocks, batch_size):
        losses, there = token_losses(model.eval(), {name: tensor.to(model.device) for name, tensor in batch.items()})
        there = there.cpu()
        results.append((losses.cpu().double()[there], batch["position_ids"][there]))
    nats, before = map(torch.cat, zip(*results))
    return nats, before


def repeated(block: dict[str, Tensor]) -> Tensor:
    """Whether the string of REPEAT tokens that ends at a token has stood in its document before, [T]."""
    ids, positions = block["input_ids"].tolist(), block["position_ids"].tolist()
    found, seen = [False] * len(ids), set()
    for at, position in enumerate(positions):
        if position == 0:
            seen = set()
        if position >= REPEAT - 1:
            string = tuple(ids[at - REPEAT + 1 : at + 1])
            found[at] = string in seen
            seen.add(string)
    return torch.tensor(found)


def score(run: dict[str, Any]) -> float:
    """What a learning rate is chosen by; more is better."""
    return -math.inf if run["validation"] is None else -run["validation"]
