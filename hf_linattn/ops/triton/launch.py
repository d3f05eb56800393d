"""How a problem is laid over a GPU: tile sizes by shape, segments by shape and number of multiprocessors.

Nothing is tuned at run time, so a new length costs nothing and the same shapes give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

STATE = 4096  # float32 entries of a state tile: 32 registers a thread with 4 warps
WARP_GROUPS = (90, 100, 103)  # compute capabilities whose products run on four warps and 64 rows at a time
SEGMENT = 256  # tokens that a segment has at least: shorter ones spend more on their states than they win


class Tiles(NamedTuple):
    """Constants of a kernel: tokens, features and values of a tile, tiles over the grid, warps, stages."""

    tokens: int
    features: int
    values: int
    count: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        return {
            "BT": self.tokens,
            "BF": self.features,
            "BE": self.values,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def tiles(
    over: str, features: int, values: int, dot: torch.dtype, capability: int, chunk_size: int | None, map_name: str
) -> Tiles:
    """Tiles over the "values" (forward, state sums, dv: F whole) or over the "features" (dq, dk: E whole).

    The largest that ptxas fits into registers for F, E <= 128; three-pass TF32 holds each operand twice, so float32
    gets less, and at 128 the forward, dk and dv still spill on some GPUs, up to 56 bytes a thread. A product of 64 rows
    keeps four warps busy on Hopper and Blackwell, whose warps multiply in groups, and one of 32 keeps two to four busy
    elsewhere; more warps would repeat its work, and only hold more registers.
    """
    whole, cut = (features, values) if over == "values" else (values, features)
    whole, half, groups = _block(whole), dot == torch.bfloat16, capability in WARP_GROUPS
    tile = min(_block(cut), max(16, STATE // whole))
    tokens = (64 if groups and whole <= 128 else 32) if half else 16
    warps = 4 if whole <= 64 or (half and capability < 100) else 8
    if not half or (over == "features" and not groups):
        tile = min(tile, 32 if half or whole <= 64 else 16)
    if over == "features" and map_name == "softmax":
        tile = _block(features)  # the map mixes the features of a token
        warps = 8 if whole * tile > STATE else warps
    if chunk_size is not None:
        tokens = max(16, min(tokens, 1 << (chunk_size.bit_length() - 1)))
    block_f, block_e = (whole, tile) if over == "values" else (tile, whole)
    stages = 2 if whole <= (128 if half else 64) else 1  # prefetching wider chunks takes more shared memory than 99 KB
    return Tiles(tokens, block_f, block_e, triton.cdiv(cut, tile), warps, stages)


def softmax_fits(features: int, values: int) -> bool:
    """Whether a state tile may hold all features, which a fused softmax needs in the backward."""
    return _block(features) * _block(values) <= 4 * STATE


def dot_dtype(q_dtype: torch.dtype, v_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the products. bf16 alone can hold a state's range in half the bits: float16 ends at 65504."""
    return torch.bfloat16 if q_dtype == v_dtype == torch.bfloat16 else torch.float32


def products(q_dtype: torch.dtype, v_dtype: torch.dtype) -> dict[str, object]:
    """DOT and PRECISION; float32 products take three passes of TF32, one of which would keep 10 bits."""
    dot = tl.bfloat16 if dot_dtype(q_dtype, v_dtype) == torch.bfloat16 else tl.float32
    return {"DOT": dot, "PRECISION": "ieee" if torch.version.hip is not None else "tf32x3"}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> int:
    """90 for a GPU of compute capability 9.0; 0 for one that is not NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Plan(NamedTuple):
    """Segments of a call: `rows` of them, cut alike from every batch row, or listed in `bounds` if packed."""

    rows: int
    documents: int
    segments: int  # of each batch row, if not packed
    length: int
    tokens: int  # of each batch row
    bounds: Tensor | None  # [rows, 3], if packed: start, stop, document
    first: Tensor | None  # [documents + 1]: the first segment of each packed document

    @property
    def split(self) -> bool:
        """Whether a document may have several segments, so that states between them are needed."""
        return self.first is not None or self.segments > 1


def plan(batch: int, length: int, programs: int, cu_seqlens: Tensor | None, device: torch.device) -> Plan:
    """Cut the sequence so that every multiprocessor has work; `programs` run side by side without that."""
    wanted = max(1, min(-(-2 * multiprocessors(device) // programs), length // SEGMENT))
    if programs >= multiprocessors(device):
        wanted = 1
    size = -(-length // wanted)
    size = -(-size // 64) * 64 if wanted > 1 else length
    if cu_seqlens is None:
        segments = -(-length // size)
        return Plan(batch * segments, batch, segments, size, length, None, None)
    ends = cu_seqlens.to(device=device, dtype=torch.int64)
    documents = ends.numel() - 1
    if wanted == 1:
        bounds = torch.stack([ends[:-1], ends[1:], torch.arange(documents, device=device)], 1).contiguous()
        return Plan(documents, documents, 1, length, length, bounds, None)
    # Without reading an offset: there are at most this many segments, and those beyond the last are empty.
    rows = -(-length // size) + documents
    counts = (ends.diff() + size - 1) // size
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    row = torch.arange(rows, device=device)
    document = torch.searchsorted(first[1:], row, right=True).clamp(max=documents - 1)
    start = ends[document] + (row - first[document]) * size
    stop = torch.minimum(start + size, ends[document + 1])
    return Plan(rows, documents, 1, size, length, torch.stack([start, stop, document], 1).contiguous(), first)


def on_device(tensor: Tensor):
    """Kernels are launched on the current device: make it that of `tensor`."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()
