"""Peak memory of a call: what the process, or the GPU's allocator, held at most beyond what it held before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CLEAR_REFS = Path("/proc/self/clear_refs")
# glibc's options for blocks that come from the system and go back to it when they are freed, and for the heap's end
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGE, MOST = 1 << 18, 1 << 25  # bytes; glibc lets a block of up to MOST stay on the heap once one was freed


def can_measure(device: torch.device) -> bool:
    """On a GPU, and on Linux, whose kernel keeps a high-water mark that can be set back."""
    if device.type == "cuda":
        return True
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return device.type == "cpu" and sys.platform == "linux"


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that a call adds at its peak, its results included; `None` where that cannot be measured.

    On a GPU the allocator's own peak; on a CPU resident bytes of the process, in whole pages. Call it once before, so
    that libraries, kernels and thread pools have settled.
    """
    if not can_measure(device):
        return None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _freed_is_gone():
        CLEAR_REFS.write_text("5")
        before = _kibibytes("self/status", "VmRSS")
        call()
        return 1024 * (_kibibytes("self/status", "VmHWM") - before)


@contextlib.contextmanager
def _freed_is_gone() -> Iterator[None]:
    """Large blocks come from the system and go back at once, instead of lying about in the heap."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        yield
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.mallinfo.restype = _Mallinfo
    libc.mallopt(MMAP_THRESHOLD, LARGE)
    libc.malloc_trim(0)
    filled = _fill_heap(libc)
    try:
        yield
    finally:
        for block in filled:
            libc.free(block)
        # where glibc's own rule leads in a process that frees large blocks
        libc.mallopt(MMAP_THRESHOLD, MOST)
        libc.mallopt(TRIM_THRESHOLD, 2 * MOST)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks".split()]
    _fields_ += [(name, ctypes.c_int) for name in ("fordblks", "keepcost")]


def _fill_heap(libc: ctypes.CDLL) -> list[int]:
    """Take, untouched, every large gap that the heap has: malloc fills a gap before it asks the system."""
    filled, size = [], 1 << 40
    while size >= LARGE:
        mapped = libc.mallinfo().hblks
        block = libc.malloc(size)
        if block and libc.mallinfo().hblks == mapped:
            filled.append(block)
            continue
        libc.free(block)
        size //= 2
    return filled


def free_bytes(device: torch.device) -> float:
    """Bytes that can still be allocated; infinite where the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        return 1024 * _kibibytes("meminfo", "MemAvailable")
    except (OSError, StopIteration):
        return math.inf


def _kibibytes(file: str, field: str) -> int:
    lines = (Path("/proc") / file).read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))
