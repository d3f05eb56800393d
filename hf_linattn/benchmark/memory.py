"""Peak memory of a call: what the process, or the GPU's allocator, held at most beyond what it held before."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLEAR_REFS = Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD, LARGE = -3, 1 << 18


def can_measure(device: torch.device) -> bool:
    """On a GPU, and on Linux, whose kernel keeps a high-water mark that can be set back."""
    if device.type == "cuda":
        return True
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return device.type == "cpu" and sys.platform == "linux"


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call adds at its peak, its results included.

    On a CPU these are resident bytes of the process. From the first call on, large blocks of memory go back to the
    system as soon as they are freed, which slows what allocates them: measure times before.
    """
    function()  # libraries, kernels and thread pools settle
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        function()
        libc.malloc_trim(0)
    CLEAR_REFS.write_text("5")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))
