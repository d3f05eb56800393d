"""Whole models: a linattn and a Llama of the same size, prefill, decoding and a training step over growing lengths.

The weights are random: what is measured does not depend on them. A decoding step is one token after a context that
was read in one forward pass; a training step is forward, backward and AdamW.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from .climb import Call, Settings, climb, drop, new_pass
from .compare import Decoder, matching_llama, random_linattn

STEPS = 8  # decoding steps that a sample averages
LABELS = {"model": "linattn", "llama": "Llama"}
SIZES = {
    "cpu": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 4096},
    "gpu": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 32000},
    "small": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64},
}


def model_level(level: dict[str, Any], settings: Settings) -> None:
    """Fill `level` with all three over the lengths."""
    set_seed(settings.seed)
    sizes = SIZES["small" if settings.small else "cpu" if settings.device.type == "cpu" else "gpu"]
    model = random_linattn(**sizes, dtype=settings.dtype)
    most = max(settings.lengths) + 2 * STEPS * (settings.rounds + 2)
    models = {"model": model, "llama": matching_llama(model.config, most)}
    models = {name: each.to(settings.device, settings.dtype) for name, each in models.items()}
    level |= {
        "kind": "benchmark model",
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "sizes": {"batch": 1, **sizes},
        "sides": {
            name: {
                "label": LABELS[name],
                "class": type(each).__name__,
                "parameters": sum(p.numel() for p in each.parameters()),
            }
            for name, each in models.items()
        },
        "absent": {},
        "passes": {name: new_pass() for name in ("prefill", "decode", "train step")},
    }
    prefill, decode, train = level["passes"].values()
    for each in models.values():
        each.eval()
    climb(prefill, list(models), lambda *at: prefills(models, settings, *at), settings, title="models, prefill")
    for name, ended in prefill["dropped"].items():  # a context that cannot be read cannot be gone on from
        drop(decode, [name], ended["length"], f"prefill: {ended['reason']}")
    decode_pass(decode, models, settings, prefill)
    for each in models.values():
        each.train()
    climb(train, list(models), lambda *at: training(models, settings, *at), settings, title="models, training step")


def text(model: PreTrainedModel, length: int, settings: Settings) -> torch.Tensor:
    g = torch.Generator().manual_seed(settings.seed)
    return torch.randint(0, model.config.vocab_size, (1, length), generator=g).to(settings.device)


def prefills(
    models: dict[str, PreTrainedModel], settings: Settings, length: int, names: list[str]
) -> dict[str, Callable[[], Call]]:
    def make(model: PreTrainedModel) -> Call:
        ids = text(model, length, settings)
        return torch.no_grad()(lambda: model(ids, use_cache=True, logits_to_keep=1))

    return {name: lambda name=name: make(models[name]) for name in names}


def decode_pass(
    measured: dict[str, Any], models: dict[str, PreTrainedModel], settings: Settings, prefill: dict[str, Any]
) -> None:
    """Steps after each context; `held_bytes` is the cache's size when the context has just been read."""
    held = {}

    @torch.no_grad()
    def make(name: str, length: int) -> Call:
        decoder = Decoder(models[name], text(models[name], length, settings))
        held[name] = decoder.context_bytes
        return torch.no_grad()(decoder.step)

    def prepare(length: int, names: list[str]) -> dict[str, Callable[[], Call]]:
        return {name: lambda name=name: make(name, length) for name in names}

    def finish(row: dict[str, Any], samples: dict[str, list[float]]) -> None:
        for name, figures in row["sides"].items():
            figures["held_bytes"] = held[name]

    def held_bytes(length: int, names: list[str]) -> int:
        """What reading the context took."""
        sides = next((row["sides"] for row in prefill["rows"] if row["length"] == length), {})
        return sum(sides[name]["peak_bytes"] or 0 for name in names if name in sides)

    climb(
        measured, list(models), prepare, settings, title="models, decoding", held_bytes=held_bytes, calls=STEPS,
        finish=finish,
    )  # fmt: skip


def training(
    models: dict[str, PreTrainedModel], settings: Settings, length: int, names: list[str]
) -> dict[str, Callable[[], Call]]:
    def make(model: PreTrainedModel) -> Call:
        ids = text(model, length, settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return {name: lambda name=name: make(models[name]) for name in names}
