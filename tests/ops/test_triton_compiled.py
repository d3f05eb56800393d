"""What the Triton kernels compile to, ahead of time: registers, spills and shared memory on three GPUs."""

import json

import pytest
from processes import KERNEL_TESTS, ROOT, run_python

from hf_linattn.ops import triton

pytestmark = pytest.mark.skipif(not triton._installed(), reason="triton is not installed")

# (kernel, compute capability): bytes a thread that float32 spills at D = E = 128, with Triton 3.9. Two operands held
# twice leave few of 255 registers; what fits one kernel on one GPU (tiles, warps, stages, orders) spills in another.
SPILLS = {("forward", 80): 8, ("forward", 90): 16, ("forward", 100): 48, ("grad key", 100): 8, ("grad value", 90): 56}


@pytest.mark.parametrize("dtype, dim", [("bf16", 64), ("bf16", 128), ("fp32", 64), ("fp32", 128)])
def test_compiled_kernels_fit_their_gpus(tmp_path, dtype, dim):
    """No register is spilled, but for `SPILLS`, and the shared memory exists, also on consumer GPUs."""
    kernels = "forward,key sums,query sums,delta,grad query,grad key,grad value,read,grad read,decode"
    kernels += ",scan" if dim == 64 else ""  # whatever the shape, it is one kernel
    jobs = [(capability, dim, dtype, kernels) for capability in (80, 90, 100)]
    result = run_python(KERNEL_TESTS / "compile_report.py", "--json", json.dumps(jobs), TRITON_CACHE_DIR=str(tmp_path),
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
