"""What the machine can do at best, measured in turns with what is compared to it, and the work that is compared.

A matrix product and a copy are the ceilings of arithmetic and of memory. Linear attention is counted at chunks of
CHUNK tokens, whatever a code does: a code that does more for the same result gains nothing by it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

CHUNK = 128  # tokens, of the operations counted


class Ceiling(NamedTuple):
    """A call, and what it gets done: floating-point operations, or bytes read and written."""

    run: Callable[[], Any]
    amount: int
    unit: str


def ceilings(device: torch.device, dtype: torch.dtype, small: bool = False) -> tuple[dict[str, Ceiling], str]:
    """The ceilings by name ("copy", "matmul float32", ...), and the name of the product that `dtype` is held to.

    That is float32 on the CPU, whose linear attention computes in it for any input; on a GPU bfloat16 for half
    precision. `small` makes them quick and useless.
    """
    size, copied = (64, 2**16) if small else (2048, 2**26) if device.type == "cpu" else (8192, 2**30)
    half = device.type != "cpu"
    found = {}
    for product in (torch.float32, torch.bfloat16) if half else (torch.float32,):
        a = torch.ones(size, size, dtype=product, device=device)
        name = f"matmul {str(product).removeprefix('torch.')}"
        out = torch.empty_like(a)
        found[name] = Ceiling(lambda a=a, out=out: torch.mm(a, a, out=out), 2 * size**3, "flop")
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    found["copy"] = Ceiling(lambda: target.copy_(source), 2 * copied, "bytes")
    return found, "matmul bfloat16" if half and dtype.itemsize == 2 else "matmul float32"


def operations(name: str, tokens: int, heads: int, features: int, values: int) -> int:
    """Floating-point operations of a pass of linear attention, a multiply and an add counting as two.

        forward = tokens heads (2 C F + 2 C E + 4 F E)        C = CHUNK; 49,152 a token and head at F = E = 64

    The two C terms are phi(Q) phi(K)^T and its product with V, the last one the state's update and its read. The
    backward counts as two forwards.
    """
    forward = tokens * heads * (2 * CHUNK * features + 2 * CHUNK * values + 4 * features * values)
    return {"forward": 1, "backward": 2, "forward+backward": 3}[name] * forward


def traffic(name: str, tokens: int, heads: int, features: int, values: int, itemsize: int) -> int:
    """Bytes that a pass cannot avoid: q, k, v, out; backward q, k, v, dout, dq, dk, dv; each once."""
    forward, backward = 2 * features + 2 * values, 4 * features + 3 * values
    count = {"forward": forward, "backward": backward, "forward+backward": forward + backward}[name]
    return tokens * heads * count * itemsize
