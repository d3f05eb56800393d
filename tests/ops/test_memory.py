"""Peak memory of forward and backward, measured in a fresh process."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

H, D = 8, 64
ROOT = Path(__file__).parents[2]
RUNS = {
    "32k": {"T": 32_768},
    "8k": {"T": 8192},
    "non-causal 8k": {"T": 8192, "causal": False},
    "non-causal 4k": {"causal": False},
    "masked": {"mask": True},
    "packed": {"packed": True},
    "grouped": {"Hk": 2},
    "relu": {"map": "relu"},
    "learnable": {"map": "hedgehog"},
}
DEFAULTS = {"T": 4096, "H": H, "Hk": H, "D": D, "causal": True, "mask": False, "packed": False, "map": "elu1"}

MEASURE = """
import json, resource, sys, traceback
import torch
from hf_linattn.ops import linear_attention, make_feature_map

torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_AS, (12 << 30,) * 2)  # a [T, T] tensor is an error here, not a machine out of memory


def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def step(T, H, Hk, D, causal, mask, packed, map):
    q = torch.randn(1, T, H, D, requires_grad=True)
    k = torch.randn(1, T, Hk, D, requires_grad=True)
    v = torch.randn(1, T, Hk, D, requires_grad=True)
    keywords = {}
    if mask:
        keywords["key_mask"] = torch.arange(T)[None] >= T // 3
    if packed:
        keywords["cu_seqlens"] = torch.tensor([0, T // 5, T // 2, T])
    feature_map = make_feature_map(map, D, H, Hk)
    out, state = linear_attention(
        q, k, v, feature_map=feature_map, causal=causal, output_final_state=True, **keywords
    )
    out.backward(torch.randn_like(out))
    assert q.grad.isfinite().all()


peaks = {}
for name, options in json.loads(sys.argv[1]).items():
    step(**(options | {"T": 130}))  # libraries and thread pools settle
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts over
    before = status("VmRSS")
    try:
        step(**options)
        peaks[name] = status("VmHWM") - before
    except Exception:
        traceback.print_exc()
print(json.dumps(peaks))
"""


def can_measure():
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return "VmHWM" in Path("/proc/self/status").read_text()
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not can_measure(), reason="needs Linux' /proc/self/clear_refs")


@cache
def peaks():
    """Bytes that forward and backward add at their peak: q, k, v, out and every gradient included."""
    runs = json.dumps({name: DEFAULTS | options for name, options in RUNS.items()})
    # what is freed goes back at once, so that no run hides in memory that an earlier one left behind
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-c", MEASURE, runs]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout), run.stderr


@pytest.mark.parametrize("name", RUNS)
def test_peak_is_twelve_times_q(name):
    """q, k, v, out and their gradients are 8 times q already."""
    measured, errors = peaks()
    assert name in measured, errors[-2000:]
    q = (DEFAULTS | RUNS[name])["T"] * H * D * 4
    assert measured[name] <= 12 * q, f"{measured[name] / q:.1f} times q"


@pytest.mark.parametrize("long, short", [("32k", "8k"), ("non-causal 8k", "non-causal 4k")])
def test_peak_is_linear_in_length(long, short):
    measured, errors = peaks()
    assert {long, short} <= measured.keys(), errors[-2000:]
    times = (DEFAULTS | RUNS[long])["T"] / (DEFAULTS | RUNS[short])["T"]
    assert measured[long] <= 1.1 * times * measured[short]
