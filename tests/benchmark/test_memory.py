import ctypes

import psutil
import pytest
import torch

from hf_linattn.benchmark import memory
from hf_linattn.benchmark.memory import free_bytes, peak_bytes

CPU = torch.device("cpu")
SIZE = 64 * 2**20
measurable = pytest.mark.skipif(not memory.can_measure(CPU), reason="needs Linux' /proc/self/clear_refs")


def ones(size: int = SIZE) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def two_of_three():
    a = ones()
    b = ones()
    del a
    return b, ones()


@measurable
def test_peak_is_what_is_held_at_once():
    assert peak_bytes(ones, CPU) == pytest.approx(SIZE, rel=0.05)
    assert peak_bytes(two_of_three, CPU) == pytest.approx(2 * SIZE, rel=0.05)


@measurable
def test_gaps_in_the_heap_do_not_count():
    """A block in a gap does not go back to the system when it is freed, and what comes next may not fit there."""
    libc = ctypes.CDLL(None)
    libc.mallopt(memory.MMAP_THRESHOLD, memory.MOST)
    libc.mallopt(memory.TRIM_THRESHOLD, 8 * SIZE)
    blocks = [ones(20 * 2**20) for _ in range(12)]
    guard = ones(2**18)
    del blocks
    assert peak_bytes(two_of_three, CPU) == pytest.approx(2 * SIZE, rel=0.05)
    assert guard.sum() == 2**18


@measurable
def test_blocks_that_were_free_before_count():
    """Blocks below the size that the system hands out stay on the heap when they are freed."""
    blocks = [ones(2**20) for _ in range(64)]
    del blocks
    assert peak_bytes(lambda: [ones(2**20) for _ in range(64)], CPU) == pytest.approx(SIZE, rel=0.05)


def test_where_nothing_can_be_measured(monkeypatch):
    monkeypatch.setattr(memory, "CLEAR_REFS", memory.Path("/nowhere/clear_refs"))
    assert peak_bytes(lambda: 1 / 0, CPU) is None


def test_free_bytes():
    """Other processes come and go meanwhile."""
    assert free_bytes(CPU) == pytest.approx(psutil.virtual_memory().available, rel=0.3)
