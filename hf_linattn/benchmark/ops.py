"""`linear_attention` against causal softmax attention, forward and forward with backward, as the length grows.

    python -m hf_linattn.benchmark.ops --out ops.json

Both run in one process and take turns; each pair of turns gives a ratio, and the median of the ratios is reported.
Softmax attention is torch's `scaled_dot_product_attention` on tensors laid out as it likes them best ([B, H, T, D]).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm.auto import tqdm

from ..ops import linear_attention
from .compare import synchronize
from .record import record, write_json

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PASSES = ("forward", "forward+backward")


def linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, feature_map: str) -> torch.Tensor:
    return linear_attention(q, k, v, feature_map=feature_map, causal=True)[0]


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, feature_map: str) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def timed(attention: Callable, tensors: list[torch.Tensor], feature_map: str, backward: bool) -> float:
    """Milliseconds of one call, with the gradients of q, k and v if `backward`."""
    device = tensors[0].device
    q, k, v, grad = tensors
    inputs = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    synchronize(device)
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out = attention(*inputs, feature_map)
    if backward:
        out.backward(grad)
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def measure(
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    feature_map: str = "elu1",
    rounds: int = 15,
    budget_s: float = 30.0,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[..., Any] = tqdm,
) -> dict[str, Any]:
    """Times both at each length; the result is what the JSON file holds.

    Args:
        lengths: sequence lengths, in tokens.
        batch, heads, head_dim: the other sizes.
        feature_map: a name that `linear_attention` knows.
        rounds: pairs of turns at each length and pass, after one that warms up.
        budget_s: stop a length and pass early after so many seconds, but not before three rounds.
        seed: seed of the inputs.
    """
    rows = []
    for length in progress(lengths, "lengths"):
        generator = torch.Generator().manual_seed(seed)
        by_time = [torch.randn(batch, length, heads, head_dim, generator=generator).to(device, dtype) for _ in range(4)]
        by_head = [x.transpose(1, 2).contiguous() for x in by_time]
        row: dict[str, Any] = {"length": length}
        for name in PASSES:
            samples: dict[str, list[float]] = {"linear": [], "softmax": []}
            deadline = time.perf_counter() + budget_s
            for turn in range(rounds + 1):
                pair = {
                    "linear": timed(linear, by_time, feature_map, name != "forward"),
                    "softmax": timed(softmax, by_head, feature_map, name != "forward"),
                }
                if turn > 0:
                    for side, milliseconds in pair.items():
                        samples[side].append(milliseconds)
                if turn >= 3 and time.perf_counter() > deadline:
                    break
            row[name] = {
                "linear_ms": statistics.median(samples["linear"]),
                "softmax_ms": statistics.median(samples["softmax"]),
                "softmax_over_linear": statistics.median(
                    b / a for a, b in zip(samples["linear"], samples["softmax"], strict=True)
                ),
                "samples_ms": samples,
            }
        rows.append(row)
    return {
        "kind": "ops",
        "record": record(seed),
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "sizes": {"batch": batch, "heads": heads, "head_dim": head_dim},
        "feature_map": feature_map,
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--feature_map", default="elu1")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--budget_s", type=float, default=30.0, help="seconds a length and pass, though at least 3 rounds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", default="ops.json")
    arguments = vars(parser.parse_args(argv))
    out, dtype = arguments.pop("out"), getattr(torch, arguments.pop("dtype"))
    write_json(out, measure(**arguments, dtype=dtype))


if __name__ == "__main__":
    main()
