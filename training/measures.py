"""What predicting tokens costs a causal language model, token by token."""

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad

from data import IGNORE


@torch.no_grad()
def token_losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats that predicting each token of a batch of blocks costs, and whether it is to be predicted, both [B, T]."""
    labels = batch["labels"][:, 1:]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE)
    return pad(losses.view_as(labels), (1, 0)), batch["labels"] != IGNORE


def by_context(nats: torch.Tensor, tokens: torch.Tensor) -> list[dict[str, Any]]:
    """Bits per token by powers of two of the context, of sums by position, both [T]."""
    edges = [1, *(2**i for i in range(1, 64) if 2**i < len(tokens)), len(tokens)]
    return [
        {
            "from": low,
            "to": high - 1,
            "tokens": int(tokens[low:high].sum()),
            "bits_per_token": nats[low:high].sum().item() / math.log(2) / max(1, int(tokens[low:high].sum())),
        }
        for low, high in zip(edges, edges[1:])
        if tokens[low:high].sum() > 0
    ]
