"""The Triton kernels from outside: their tests in the interpreter, what they compile to, and who picks them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import random_problem

from hf_linattn.ops import linear_attention, triton

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "triton"
needs_triton = pytest.mark.skipif(not triton._installed(), reason="triton is not installed")


def run(*command, **environment):
    """Run Python in a process of its own: Triton must know before it is imported whether it interprets."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | environment
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@needs_triton
def test_in_the_interpreter():
    result = run("-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " skipped" not in result.stdout


# ---- who picks them


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


# ---- what they compile to


# (kernel, compute capability): bytes a thread that float32 spills at D = E = 128, with Triton 3.9. Two operands held
# twice leave few of 255 registers; what fits one kernel on one GPU (tiles, warps, stages, orders) spills in another.
SPILLS = {("forward", 80): 8, ("forward", 90): 16, ("forward", 100): 48, ("grad key", 100): 8, ("grad value", 90): 56}


@needs_triton
@pytest.mark.parametrize("dtype, dim", [("bf16", 64), ("bf16", 128), ("fp32", 64), ("fp32", 128)])
def test_compiled_kernels_fit_their_gpus(tmp_path, dtype, dim):
    """No register is spilled, but for `SPILLS`, and the shared memory exists, also on consumer GPUs."""
    kernels = "forward,key sums,query sums,delta,grad query,grad key,grad value,read,grad read,decode"
    kernels += ",scan" if dim == 64 else ""  # whatever the shape, it is one kernel
    jobs = [(capability, dim, dtype, kernels) for capability in (80, 90, 100)]
    result = run(FOLDER / "compile_report.py", "--json", json.dumps(jobs), TRITON_CACHE_DIR=str(tmp_path),
                 PYTHONPATH=str(ROOT), TRITON_INTERPRET="0")  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) == 3 * len(kernels.split(","))
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()))
    for row in rows:
        known = SPILLS.get((row["kernel"], row["sm"]), 0) if (dtype, dim) == ("fp32", 128) else 0
        assert row["spilled"] <= known, row
        assert row["shared"] <= 99 * 1024, row
