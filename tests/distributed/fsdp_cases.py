"""What one process and FSDP2 ranks train alike."""

import torch
import torch.distributed as dist
from helpers import make_model, random_ids

STEPS, ROWS, SPLIT = 5, 4, 3  # steps in all, rows of a step over all ranks, steps before the checkpoint
CASES = {
    "linear": {"tie_word_embeddings": True},
    "hybrid": {},
    "conv": {"feature_map": "hedgehog", "tie_word_embeddings": True},
    "rmsnorm": {"qk_norm": True},
}
CHECKPOINTED = ("hybrid", "conv")  # trained with gradient checkpointing, beside one process without


def model_of(case: str):
    return make_model(case, **CASES[case]).train()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps) -> list[float]:
    """Losses of `steps`, each over all rows; a rank computes its share of them."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        ids = random_ids(ROWS, 40, seed=step).chunk(ranks)[rank]
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append((mean / ranks).item())
    return losses
