"""One decoding step of the attention function, after contexts of growing length.

Linear attention updates its state and reads it; softmax attention writes a key and a value into a cache of the
context's length, allocated beforehand, and attends to all of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..ops import LinearAttentionState, decode_step
from .climb import Call, Settings, climb, new_pass
from .sides import FEATURE_MAP, SIDES, sides_here

STEPPING = ("triton", "torch", "softmax")  # the sides that decode
SIZES = {"batch": 1, "heads": 8, "head_dim": 64}


def decode_level(level: dict[str, Any], settings: Settings) -> None:
    """Fill `level` with the time of a step over the lengths of the context."""
    sizes = SIZES | ({"heads": 2, "head_dim": 16} if settings.small else {})
    here, absent = sides_here(settings.device, settings.dtype, sizes["head_dim"], settings.sides)
    level |= {
        "kind": "benchmark decode",
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "sizes": sizes,
        "sides": {name: {"label": SIDES[name].label} for name in STEPPING if name in here},
        "absent": {SIDES[n].label: absent[SIDES[n].label] for n in STEPPING if SIDES[n].label in absent},
        "passes": {"decode": new_pass()},
    }
    decode_pass(level["passes"]["decode"], settings, **sizes)


def decode_pass(
    measured: dict[str, Any],
    settings: Settings,
    *,
    batch: int,
    heads: int,
    head_dim: int,
    lengths: list[int] | None = None,
) -> None:
    """A step of every side over the lengths; fills `measured` as `climb` does."""
    device, dtype = settings.device, settings.dtype
    here, _ = sides_here(device, dtype, head_dim, settings.sides)
    names = [name for name in STEPPING if name in here]

    def prepare(length: int, running: list[str]) -> dict[str, Callable[[], Call]]:
        torch.manual_seed(settings.seed)

        def make(name: str) -> Call:
            if name == "softmax":
                return cached_step(length, batch, heads, head_dim, device, dtype)
            return linear_step(name, batch, heads, head_dim, device, dtype)

        return {name: lambda name=name: make(name) for name in running}

    def held_bytes(length: int, running: list[str]) -> int:
        return 2 * batch * heads * length * head_dim * dtype.itemsize if "softmax" in running else 0

    def finish(row: dict[str, Any], samples: dict[str, list[float]]) -> None:
        state = 4 * batch * heads * head_dim * (head_dim + 1)
        for name, figures in row["sides"].items():
            figures["held_bytes"] = held_bytes(row["length"], [name]) or state

    climb(
        measured, names, prepare, settings, title="attention, decoding", lengths=lengths, held_bytes=held_bytes,
        finish=finish,
    )  # fmt: skip


def linear_step(backend: str, batch: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> Call:
    """A step that updates the state in place; it does not depend on the length."""
    q, k, v = (torch.randn(batch, 1, heads, dim, device=device, dtype=dtype) for _ in range(3))
    mu, nu = LinearAttentionState.zeros(batch, heads, dim, dim, device=device)
    return lambda: decode_step(q, k, v, mu, nu, feature_map=FEATURE_MAP, backend=backend)


def cached_step(length: int, batch: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> Call:
    """A step of softmax attention whose key is the last of `length`."""
    q, k, v = (torch.randn(batch, heads, 1, dim, device=device, dtype=dtype) for _ in range(3))
    keys, values = (torch.randn(batch, heads, length, dim, device=device, dtype=dtype) for _ in range(2))

    @torch.no_grad()
    def step() -> None:
        keys[:, :, -1:], values[:, :, -1:] = k, v
        scaled_dot_product_attention(q, keys, values)

    return step
