"""Python in a process of its own, at the root of the repository."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNEL_TESTS = ROOT / "tests" / "ops" / "triton"


def run_python(*command, **environment):
    """Run Python in a process of its own: Triton must know before it is imported whether it interprets."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | environment
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
