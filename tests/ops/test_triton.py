"""The Triton kernels from outside: their tests in the interpreter, what they compile to, and who picks them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import random_problem

from hf_linattn import ops
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
@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_in_the_interpreter(path):
    result = run("-m", "pytest", "-q", "-p", "no:cacheprovider", path, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " skipped" not in result.stdout
