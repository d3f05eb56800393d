"""The Triton kernels from outside: their tests in the interpreter, and what they refuse."""

import pytest
import torch
from processes import KERNEL_TESTS, run_python
from reference import random_problem

from hf_linattn.ops import linear_attention, triton

needs_triton = pytest.mark.skipif(not triton._installed(), reason="triton is not installed")


@needs_triton
def test_in_the_interpreter():
    result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", KERNEL_TESTS, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " skipped" not in result.stdout


# ---- what they refuse


def small(dtype=torch.float32, D=8, E=8):
    made = random_problem(1, 3, 2, 1, D, E, dtype=dtype)
    return made.q, made.k, made.v


def test_kernels_asked_for_by_name_say_why_they_cannot_run():
    with pytest.raises(RuntimeError, match="backend='triton' cannot run this call: .*(GPU|not installed)") as caught:
        linear_attention(*small(), feature_map="elu1", backend="triton")
    assert "\n" not in str(caught.value)


@needs_triton
def test_what_the_kernels_cannot_do(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.unsupported(*small(), feature_map="elu1") is None
    assert triton.unsupported(*small(), feature_map="taylor2") is None
    for options, words in (
        ({"tensors": small(torch.float64)}, "float64"),
        ({"tensors": small(E=300)}, "E=300"),
        ({"tensors": small(D=300)}, "F=300"),
        ({"tensors": small(D=16), "feature_map": "taylor2"}, "F=273"),
    ):
        tensors = options.pop("tensors", small())
        reason = triton.unsupported(*tensors, **{"feature_map": "elu1", **options})
        assert words in reason
        assert "\n" not in reason


def test_without_triton(monkeypatch):
    monkeypatch.setattr(triton, "_installed", lambda: False)
    assert "triton is not installed" in triton.unsupported(*small())
